"""A penalty for saying the same over and over: the share of n-grams that have occurred before.

It is that of "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373) and open-r1, but always for the
completion as a whole and for right and wrong answers alike: the paper also applies it to single tokens, with a separate
discount.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlft.config.bounds import NonNegativeFloat, PositiveInt
from rlft.types import Completion, Group


class Unit(StrEnum):
    words = "words"
    tokens = "tokens"


def repeated_share(items: Sequence[Hashable], n: int) -> float:
    """1 - different n-grams / all n-grams; 0 if there are fewer than n items. Time and memory: n x items."""
    total = len(items) - n + 1
    if total <= 0:
        return 0.0
    different = len(set(zip(*(items[start:] for start in range(n)), strict=False)))
    return (total - different) / total


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """-max_penalty times the share of repeated n-grams of each completion: 0 if nothing is repeated."""

    unit: Unit
    ngram: PositiveInt
    max_penalty: NonNegativeFloat

    def __call__(self, group: Group) -> list[float]:
        shares = [repeated_share(self._items(rollout.completion), self.ngram) for rollout in group.rollouts]
        return [-self.max_penalty * share if share else 0.0 for share in shares]

    def _items(self, completion: Completion) -> Sequence[Hashable]:
        return completion.token_ids if self.unit == Unit.tokens else completion.text.casefold().split()
