"""A learned reward: a model with a scalar head, a reward adapter on the run's own base or a network of its own.

This file only describes it. The trainer computes the scores, because it holds the base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlft.config.bounds import PositiveInt
from rlft.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What the trainer needs to compute `scale * (score - center)` of each completion (configs/reward/learned.yaml)."""

    runs_in_trainer: ClassVar[bool] = True

    path: str | None
    token_budget: PositiveInt
    center: float
    scale: float

    def __call__(self, group: Group) -> list[float]:
        """Raises RuntimeError, since a worker has no model to score with."""
        raise RuntimeError("a learned reward has no scores of its own: the trainer computes them (Scorer's `resident`)")
