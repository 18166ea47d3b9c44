"""Prompts that differ only in a seed, for environments that make the task when a conversation begins."""

from __future__ import annotations

from dataclasses import dataclass

from rlft.config.bounds import PositiveInt, Seed
from rlft.system.seeds import derive
from rlft.types import Prompt, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Prompts with the same text. From the metadata `seed` of each the environment derives the task; no seed is in both
    splits.
    """

    text: str
    size: PositiveInt
    held_out_size: PositiveInt
    seed: Seed

    def load(self, split: Split) -> list[Prompt]:
        count = self.size if split is Split.train else self.held_out_size
        # 48 bits that depend on the split; the lowest bit alone tells the splits apart, so that no seed is in both.
        seeds = (2 * (derive(self.seed, i, split) // 2) + (split is Split.held_out) for i in range(count))
        messages = ({"role": "user", "content": self.text},)
        return [
            Prompt(id=f"{split}-{i}", messages=messages, answer="", metadata={"seed": seed})
            for i, seed in enumerate(seeds)
        ]
