"""Prompts that differ in a seed alone, for environments that make the task when a conversation begins."""

from __future__ import annotations

from dataclasses import dataclass

from rlft.keys.bounds import PositiveInt, Seed
from rlft.ops.seeds import derive
from rlft.types import Prompt, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Each prompt is `text`, and its column `seed` what the environment draws from.

    Args:
        text: of every prompt.
        size, held_out_size: prompts in each split; no seed is in both.
        seed: what the seeds derive from.
    """

    text: str
    size: PositiveInt
    held_out_size: PositiveInt
    seed: Seed

    def load(self, split: Split) -> list[Prompt]:
        count = self.size if split is Split.train else self.held_out_size
        # 48 bits from the split's own hash, the lowest of which tells the splits apart.
        seeds = (2 * (derive(self.seed, i, split) // 2) + (split is Split.held_out) for i in range(count))
        messages = ({"role": "user", "content": self.text},)
        return [
            Prompt(id=f"{split}-{i}", messages=messages, answer="", metadata={"seed": seed})
            for i, seed in enumerate(seeds)
        ]
