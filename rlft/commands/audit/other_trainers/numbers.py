"""Logged numbers beside the right ones, and how far float32 may be from these.

Bounds come from the format alone: u = 2**-24 is half a unit in the last place of float32, and every operation adds at
most u of its result. What was recorded is taken as exact, and rlft computes in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

UNIT = 2.0**-24
"""u, relative to a number: the error of rounding it to float32."""
LONGEST_SUM = 64
"""Sums of any length in float32 have at most the error of so many additions one after another: torch adds in up to four
levels of 16, GPUs in trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Numbers of one name, `[n]`: what was logged, what is right by the settings, and the bound of their difference."""

    name: str
    places: Sequence[str]
    logged: Tensor
    expected: Tensor
    bound: Tensor

    @property
    def apart(self) -> Tensor:
        """Which differ, bool `[n]`; a number that is none differs from every other."""
        return ~((self.logged - self.expected).abs() <= self.bound)


def roundings(terms: int) -> int:
    """In a sum of so many terms."""
    return min(terms, LONGEST_SUM)


def one(name: str, place: str, logged: float, expected: Tensor, bound: Tensor) -> Compared:
    """A single number; `expected` and `bound` are `[]`."""
    found = torch.tensor([float(logged)], dtype=torch.float64)
    return Compared(name=name, places=[place], logged=found, expected=expected.reshape(1), bound=bound.reshape(1))
