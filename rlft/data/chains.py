"""Chains of small sums, each with the result of the one before: procedural, seeded, with disjoint splits by hash."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlft.data.arithmetic import HELD_OUT_SHARE, OPERATIONS
from rlft.keys.bounds import PositiveInt, Seed
from rlft.types import Prompt, Split, UserError

LARGEST_FACTOR = 9


@dataclass(frozen=True, slots=True)
class Chain:
    """A number, and what is done with it: ("+", 38) adds 38 to the result so far."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The result of each step, the last one the answer."""
        results, value = [], self.start
        for operation, number in self.steps:
            value = OPERATIONS[operation](value, number)
            results.append(value)
        return tuple(results)

    @property
    def identity(self) -> str:
        """The chain as it is written: 47+38-59*3."""
        return str(self.start) + "".join(f"{operation}{number}" for operation, number in self.steps)

    @property
    def question(self) -> str:
        """What a model is asked.

        >>> Chain(47, (("+", 38), ("-", 59), ("*", 3))).question
        'Take 47, then +38, -59, *3.'
        """
        return f"Take {self.start}, then {', '.join(f'{operation}{number}' for operation, number in self.steps)}."

    @property
    def split(self) -> Split:
        """By a hash of the chain itself, so that no seed or size can make the two splits overlap."""
        digest = hashlib.sha256(self.identity.encode()).digest()
        return Split.held_out if digest[0] < 256 * HELD_OUT_SHARE else Split.train


def draw(rng: random.Random, steps: int, largest: int) -> Chain:
    """A chain of so many steps in which every number is a whole one of 0 to `largest`.

    Each step is a sum, a difference or a product with 2 to 9, drawn evenly among those that stay in the range.
    """
    start = value = rng.randint(1, largest)
    chain: list[tuple[str, int]] = []
    for _ in range(steps):
        operation = rng.choice(_possible(value, largest))
        number = _second(rng, operation, value, largest)
        chain.append((operation, number))
        value = OPERATIONS[operation](value, number)
    return Chain(start, tuple(chain))


def _possible(value: int, largest: int) -> Sequence[str]:
    possible = {"+": value < largest, "-": value > 0, "*": 0 < 2 * value <= largest}
    return [operation for operation, can_be in possible.items() if can_be]


def _second(rng: random.Random, operation: str, value: int, largest: int) -> int:
    match operation:
        case "+":
            return rng.randint(1, largest - value)
        case "-":
            return rng.randint(1, value)
        case _:
            return rng.randint(2, min(LARGEST_FACTOR, largest // value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """Problems such as "Take 7, then +8, -9, *3.", answer "18": each step goes on from the result of the one before.

    Args:
        steps: sums, differences and products in a chain, 1 to 20. The embedded model was taught 5.
        largest: no number and no result is above it, 9 to 9999. The embedded model was taught 20.
        size, held_out_size: prompts in each split; a split that has fewer distinct chains than asked is refused.
        seed: order and choice of the chains, not their split.
    """

    steps: PositiveInt
    largest: PositiveInt
    size: PositiveInt
    held_out_size: PositiveInt
    seed: Seed

    def load(self, split: Split) -> list[Prompt]:
        self.check()
        count = self.size if split is Split.train else self.held_out_size
        prompts: dict[str, Prompt] = {}
        for draws, chain in enumerate(self._chains(split), 1):
            if chain.split is split and chain.identity not in prompts:
                messages = ({"role": "user", "content": chain.question},)
                prompts[chain.identity] = Prompt(id=chain.identity, messages=messages, answer=str(chain.results[-1]))
            if len(prompts) == count:
                return list(prompts.values())
            if draws > 200 * count + 10_000:
                break
        raise UserError(
            "data.size" if split is Split.train else "data.held_out_size",
            f"there are not that many distinct {split} chains of data.steps={self.steps} data.largest={self.largest}",
            got=count,
            remedy=f"use {f'at most {len(prompts)}, or ' if prompts else ''}more data.steps",
        )

    def _chains(self, split: Split) -> Iterator[Chain]:
        rng = random.Random(f"{self.seed}-{split}")
        while True:
            yield draw(rng, self.steps, self.largest)

    def check(self) -> None:
        """Refuses keys that no chain fits. Raises UserError."""
        if not 1 <= self.steps <= 20:
            raise UserError("data.steps", "must be 1 to 20", got=self.steps, remedy="try data.steps=5")
        if not 9 <= self.largest <= 9999:
            raise UserError("data.largest", "must be 9 to 9999", got=self.largest, remedy="try data.largest=20")
