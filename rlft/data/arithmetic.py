"""Sums, differences and products of whole numbers: procedural, seeded, with disjoint splits by construction."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rlft.config.bounds import PositiveInt, Seed
from rlft.types import Prompt, Split, UserError, require

HELD_OUT_SHARE = 0.1
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def split_of(*problem: int | str) -> Split:
    """The split of a problem, by a hash of what is written of it: no seed or size can make the two splits overlap."""
    digest = hashlib.sha256("".join(map(str, problem)).encode()).digest()
    return Split.held_out if digest[0] < 256 * HELD_OUT_SHARE else Split.train


def drawn_prompts(
    problems: Iterable[tuple[str, str, int]], split: Split, count: int, most_draws: int, *, what: str, more: str
) -> list[Prompt]:
    """The first `count` distinct problems of a split, of an endless series of (id, question, answer).

    UserError: there are not that many in `most_draws` draws; `what` names the problems in it, `more` what to raise.
    """
    prompts: dict[str, Prompt] = {}
    for identity, asked, answer in islice(problems, most_draws + 1):
        if split_of(identity) is split and identity not in prompts:
            messages = ({"role": "user", "content": asked},)
            prompts[identity] = Prompt(id=identity, messages=messages, answer=str(answer))
        if len(prompts) == count:
            return list(prompts.values())
    raise UserError(
        "data.size" if split is Split.train else "data.held_out_size",
        f"there are not that many distinct {split} {what}",
        got=count,
        remedy=f"use {f'at most {len(prompts)}, or ' if prompts else ''}{more}",
    )


def question(a: int, operation: str, b: int) -> str:
    return f"What is {a} {operation} {b}?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Problems such as "What is 47 + 85?", answer "132".

    The embedded model was taught numbers of 1 and 2 digits, and no products.
    """

    difficulty: PositiveInt
    operations: Sequence[str]
    size: PositiveInt
    held_out_size: PositiveInt
    seed: Seed

    def load(self, split: Split) -> list[Prompt]:
        self.check()
        count = self.size if split is Split.train else self.held_out_size
        num_problems = len(self.operations) * 10 ** (2 * self.difficulty)  # at most, in both splits together
        most_draws = min(200 * count, 20 * num_problems) + 10_000
        what, more = f"problems of difficulty {self.difficulty}", "a higher data.difficulty"
        return drawn_prompts(self._problems(split), split, count, most_draws, what=what, more=more)

    def _problems(self, split: Split) -> Iterator[tuple[str, str, int]]:
        rng = random.Random(f"{self.seed}-{split}")
        low, high = (0 if self.difficulty == 1 else 10 ** (self.difficulty - 1)), 10**self.difficulty - 1
        while True:
            a, b = rng.randint(low, high), rng.randint(low, high)
            operation = rng.choice(list(self.operations))
            if operation == "-" and a < b:
                a, b = b, a
            yield f"{a}{operation}{b}", question(a, operation, b), OPERATIONS[operation](a, b)

    def check(self) -> None:
        """Refuses keys for which there is no problem. Raises UserError."""
        is_valid = 1 <= self.difficulty <= 9
        remedy = "try data.difficulty=2"
        require(is_valid, "data.difficulty", "must be 1 to 9 digits", got=self.difficulty, remedy=remedy)
        is_valid = self.operations and set(self.operations) <= set(OPERATIONS)
        remedy = 'try data.operations=["+"]'
        operations = list(self.operations)
        require(is_valid, "data.operations", "must be a list of +, - and *", got=operations, remedy=remedy)
