"""Prompts that a program draws: seeded, distinct, with splits that a hash of each problem decides; and arithmetic."""

from __future__ import annotations

import hashlib
import operator
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlft.config.bounds import PositiveInt, Seed
from rlft.types import Prompt, Split, UserError, require

HELD_OUT_SHARE = 0.1


def split_of(*problem: int | str) -> Split:
    """The split of a problem, by a hash of what is written of it: no seed or size can make the two splits overlap."""
    digest = hashlib.sha256("".join(map(str, problem)).encode()).digest()
    return Split.held_out if digest[0] < 256 * HELD_OUT_SHARE else Split.train


def too_few(found: int, wanted: int, split: Split, what: str, more: str) -> UserError:
    """The error for a split that has fewer distinct problems than its key wants."""
    key = "data.size" if split is Split.train else "data.held_out_size"
    remedy = f"use {f'at most {found}, or ' if found else ''}{more}"
    return UserError(key, f"there are not that many distinct {split} {what}", got=wanted, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(ABC):
    """A source that draws its problems one after the other and keeps the first `size` distinct ones of a split."""

    size: PositiveInt
    held_out_size: PositiveInt
    seed: Seed

    def load(self, split: Split) -> list[Prompt]:
        """UserError: the keys allow no problem, or not that many distinct ones."""
        self.check()
        count = self.size if split is Split.train else self.held_out_size
        rng, prompts = random.Random(f"{self.seed}-{split}"), dict[str, Prompt]()
        for _ in range(self.most_draws(count) + 1):
            name, question, answer = self.draw(rng)
            if split_of(name) is split and name not in prompts:
                prompts[name] = self.prompt(name, question, str(answer))
            if len(prompts) == count:
                return list(prompts.values())
        what, more = self.words
        raise too_few(len(prompts), count, split, what, more)

    @abstractmethod
    def check(self) -> None:
        """Refuses keys for which there is no problem. Raises UserError."""

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, str, int]:
        """The id of a problem, which decides its split, the question and the number that answers it."""

    @property
    @abstractmethod
    def words(self) -> tuple[str, str]:
        """What the problems are called in a message, and what to change to have more of them."""

    def most_draws(self, count: int) -> int:
        """After how many draws there are not `count` distinct problems of a split."""
        return 200 * count + 10_000

    def prompt(self, name: str, question: str, answer: str) -> Prompt:
        return Prompt(id=name, messages=({"role": "user", "content": question},), answer=answer)


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
