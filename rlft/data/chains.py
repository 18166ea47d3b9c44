"""Chains of small sums, each of which uses the previous result: procedural, seeded, with disjoint splits by hash."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from rlft.config.bounds import PositiveInt
from rlft.data.arithmetic import OPERATIONS, Drawn
from rlft.types import require

LARGEST_FACTOR = 9


@dataclass(frozen=True, slots=True)
class Chain:
    """A number, and what is done with it: ("+", 38) adds 38 to the result so far."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The result of each step; the last one is the answer."""
        values = accumulate(self.steps, lambda value, step: OPERATIONS[step[0]](value, step[1]), initial=self.start)
        return tuple(values)[1:]

    @property
    def identity(self) -> str:
        """The chain as it is written: 47+38-59*3."""
        return str(self.start) + "".join(f"{operation}{number}" for operation, number in self.steps)

    @property
    def question(self) -> str:
        return f"Take {self.start}, then {', '.join(f'{operation}{number}' for operation, number in self.steps)}."


def draw(rng: random.Random, steps: int, largest: int) -> Chain:
    """A random chain of steps: sum, difference or product with 2 to 9, uniform among those in 0 .. `largest`."""
    start = value = rng.randint(1, largest)
    drawn_steps: list[tuple[str, int]] = []
    for _ in range(steps):
        factors = (2, min(LARGEST_FACTOR, largest // value)) if value else (2, 0)
        numbers = {"+": (1, largest - value), "-": (1, value), "*": factors}
        operation = rng.choice([operation for operation, (least, most) in numbers.items() if least <= most])
        number = rng.randint(*numbers[operation])
        drawn_steps.append((operation, number))
        value = OPERATIONS[operation](value, number)
    return Chain(start, tuple(drawn_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains(Drawn):
    """Problems such as "Take 7, then +8, -9, *3.", answer "18": each step continues from the last result."""

    steps: PositiveInt
    largest: PositiveInt

    @property
    def words(self) -> tuple[str, str]:
        return f"chains of data.steps={self.steps} data.largest={self.largest}", "more data.steps"

    def draw(self, rng: random.Random) -> tuple[str, str, int]:
        chain = draw(rng, self.steps, self.largest)
        return chain.identity, chain.question, chain.results[-1]

    def check(self) -> None:
        require(1 <= self.steps <= 20, "data.steps", "must be 1 to 20", got=self.steps, remedy="try data.steps=5")
        is_possible = 9 <= self.largest <= 9999
        require(is_possible, "data.largest", "must be 9 to 9999", got=self.largest, remedy="try data.largest=20")
