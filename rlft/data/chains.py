"""Chains of small sums, each of which uses the previous result: procedural, seeded, with disjoint splits by hash."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rlft.config.bounds import PositiveInt
from rlft.data.arithmetic import OPERATIONS
from rlft.data.drawn import Drawn, Problem, split_of
from rlft.types import Split, require

LARGEST_FACTOR = 9


@dataclass(frozen=True, slots=True)
class Chain:
    """A number, and what is done with it: ("+", 38) adds 38 to the result so far."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The result of each step; the last one is the answer."""
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
        """What a model is asked."""
        return f"Take {self.start}, then {', '.join(f'{operation}{number}' for operation, number in self.steps)}."

    @property
    def split(self) -> Split:
        """The split of the chain, by a hash of the chain itself."""
        return split_of(self.identity)


def draw(rng: random.Random, steps: int, largest: int) -> Chain:
    """A random chain of `steps` steps in which every number and every result is an integer from 0 to `largest`.

    Each step is a sum, a difference or a product with 2 to 9, drawn uniformly from those that stay in the range.
    """
    start = value = rng.randint(1, largest)
    drawn_steps: list[tuple[str, int]] = []
    for _ in range(steps):
        possible = {"+": value < largest, "-": value > 0, "*": 0 < 2 * value <= largest}
        operation = rng.choice([operation for operation, is_possible in possible.items() if is_possible])
        number = _draw_number(rng, operation, value, largest)
        drawn_steps.append((operation, number))
        value = OPERATIONS[operation](value, number)
    return Chain(start, tuple(drawn_steps))


def _draw_number(rng: random.Random, operation: str, value: int, largest: int) -> int:
    match operation:
        case "+":
            return rng.randint(1, largest - value)
        case "-":
            return rng.randint(1, value)
        case _:
            return rng.randint(2, min(LARGEST_FACTOR, largest // value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains(Drawn):
    """Problems such as "Take 7, then +8, -9, *3.", answer "18": each step continues from the last result.

    The embedded model was taught 5 steps with numbers up to 20.
    """

    steps: PositiveInt
    largest: PositiveInt

    @property
    def words(self) -> tuple[str, str]:
        return f"chains of data.steps={self.steps} data.largest={self.largest}", "more data.steps"

    def draw(self, rng: random.Random) -> Problem:
        chain = draw(rng, self.steps, self.largest)
        return Problem(chain.identity, chain.question, chain.results[-1])

    def check(self) -> None:
        """Refuses keys for which there is no chain. Raises UserError."""
        is_possible = 1 <= self.steps <= 20
        require(is_possible, "data.steps", "must be 1 to 20", got=self.steps, remedy="try data.steps=5")
        is_possible = 9 <= self.largest <= 9999
        require(is_possible, "data.largest", "must be 9 to 9999", got=self.largest, remedy="try data.largest=20")
