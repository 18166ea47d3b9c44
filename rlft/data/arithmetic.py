"""Sums, differences and products of whole numbers: procedural, seeded, with disjoint splits by construction."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlft.config.bounds import PositiveInt, Seed
from rlft.types import Prompt, Split, UserError

HELD_OUT_SHARE = 0.1
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def split_of(a: int, operation: str, b: int) -> Split:
    """The split a problem belongs to, by a hash of the problem itself: no seed or size can make the two overlap."""
    digest = hashlib.sha256(f"{a}{operation}{b}".encode()).digest()
    return Split.held_out if digest[0] < 256 * HELD_OUT_SHARE else Split.train


def question(a: int, operation: str, b: int) -> str:
    return f"What is {a} {operation} {b}?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Problems such as "What is 47 + 85?", answer "132".

    Attributes:
        difficulty: number of digits of each number, 1 to 9. The embedded model was taught 1 and 2.
        operations: any of "+", "-" (a difference is never negative) and "*", which the embedded model was not taught.
        size: number of training prompts. A split with fewer distinct problems than requested is refused.
        held_out_size: number of held-out prompts.
        seed: decides which problems are drawn and in which order, but not which split a problem belongs to.
    """

    difficulty: PositiveInt
    operations: Sequence[str]
    size: PositiveInt
    held_out_size: PositiveInt
    seed: Seed

    def load(self, split: Split) -> list[Prompt]:
        self.check()
        count = self.size if split is Split.train else self.held_out_size
        prompts: dict[str, Prompt] = {}
        for draws, (a, operation, b) in enumerate(self._problems(split), 1):
            identity = f"{a}{operation}{b}"
            if split_of(a, operation, b) is split and identity not in prompts:
                answer = OPERATIONS[operation](a, b)
                messages = ({"role": "user", "content": question(a, operation, b)},)
                prompts[identity] = Prompt(id=identity, messages=messages, answer=str(answer))
            if len(prompts) == count:
                return list(prompts.values())
            if draws > min(200 * count, 20 * self._num_problems) + 10_000:
                break
        key = "data.size" if split is Split.train else "data.held_out_size"
        raise UserError(
            key,
            f"there are not that many distinct {split} problems of difficulty {self.difficulty}",
            got=count,
            remedy=f"use {f'at most {len(prompts)}, or ' if prompts else ''}a higher data.difficulty",
        )

    @property
    def _num_problems(self) -> int:
        """Upper bound on the number of distinct problems in both splits together."""
        return len(self.operations) * 10 ** (2 * self.difficulty)

    def _problems(self, split: Split) -> Iterator[tuple[int, str, int]]:
        rng = random.Random(f"{self.seed}-{split}")
        low, high = (0 if self.difficulty == 1 else 10 ** (self.difficulty - 1)), 10**self.difficulty - 1
        while True:
            a, b = rng.randint(low, high), rng.randint(low, high)
            operation = rng.choice(list(self.operations))
            if operation == "-" and a < b:
                a, b = b, a
            yield a, operation, b

    def check(self) -> None:
        """Refuses keys for which there is no problem. Raises UserError."""
        if not 1 <= self.difficulty <= 9:
            raise UserError(
                "data.difficulty", "must be 1 to 9 digits", got=self.difficulty, remedy="try data.difficulty=2"
            )
        unknown = sorted(set(self.operations) - set(OPERATIONS))
        if unknown or not self.operations:
            raise UserError(
                "data.operations",
                "must be a list of +, - and *",
                got=list(self.operations),
                remedy='try data.operations=["+"]',
            )
