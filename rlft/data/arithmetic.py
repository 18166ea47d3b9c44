"""Sums, differences and products of whole numbers: procedural, seeded, with disjoint splits by construction."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlft.config.bounds import PositiveInt
from rlft.data.drawn import Drawn
from rlft.types import require

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def question(a: int, operation: str, b: int) -> str:
    return f"What is {a} {operation} {b}?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic(Drawn):
    """Problems such as "What is 47 + 85?", answer "132"."""

    difficulty: PositiveInt
    operations: Sequence[str]

    def most_draws(self, count: int) -> int:
        num_problems = len(self.operations) * 10 ** (2 * self.difficulty)  # at most, in both splits together
        return min(200 * count, 20 * num_problems) + 10_000

    @property
    def words(self) -> tuple[str, str]:
        return f"problems of difficulty {self.difficulty}", "a higher data.difficulty"

    def draw(self, rng: random.Random) -> tuple[str, str, int]:
        low, high = (0 if self.difficulty == 1 else 10 ** (self.difficulty - 1)), 10**self.difficulty - 1
        a, b = rng.randint(low, high), rng.randint(low, high)
        operation = rng.choice(list(self.operations))
        if operation == "-" and a < b:
            a, b = b, a
        return f"{a}{operation}{b}", question(a, operation, b), OPERATIONS[operation](a, b)

    def check(self) -> None:
        key, remedy = "data.difficulty", "try data.difficulty=2"
        require(1 <= self.difficulty <= 9, key, "must be 1 to 9 digits", got=self.difficulty, remedy=remedy)
        is_valid = self.operations and set(self.operations) <= set(OPERATIONS)
        remedy = 'try data.operations=["+"]'
        operations = list(self.operations)
        require(is_valid, "data.operations", "must be a list of +, - and *", got=operations, remedy=remedy)
