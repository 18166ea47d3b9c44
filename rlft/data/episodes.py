"""Prompts that differ only in a seed, for environments that make the task when a conversation begins."""

from __future__ import annotations

from dataclasses import dataclass

from rlft.config.bounds import PositiveInt, Seed
from rlft.system.seeds import derive
from rlft.types import Prompt, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Prompts with one text and a `seed` each in the metadata, from which the environment derives the task."""

    text: str
    size: PositiveInt
    held_out_size: PositiveInt
    seed: Seed

    def load(self, split: Split) -> list[Prompt]:
        prompts, messages = [], ({"role": "user", "content": self.text},)
        for i in range(self.size if split is Split.train else self.held_out_size):
            # 48 bits that depend on the split; the lowest bit alone tells the splits apart, so that no seed is in both.
            seed = 2 * (derive(self.seed, i, split) // 2) + (split is Split.held_out)
            prompts.append(Prompt(id=f"{split}-{i}", messages=messages, answer="", metadata={"seed": seed}))
        return prompts
