"""How many steps, evaluations and checkpoints a planned run has."""

from __future__ import annotations

from dataclasses import dataclass

from rlft.logger.forecast import number_due
from rlft.plan.run_plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Attributes:
    first_evaluation: the number of steps before the first evaluation that follows a step; None without evaluations.
    evaluations: how many there are, the one before the first step included.
    """

    steps: int
    first_evaluation: int | None
    evaluations: int
    checkpoints: int


def schedule_of(plan: Plan) -> Schedule:
    steps, evaluates, saves = plan.num_steps, *(getattr(plan.config, name, None) for name in ("eval", "checkpoint"))
    every = 0 if evaluates is None else evaluates.every
    return Schedule(
        steps=steps,
        first_evaluation=min(every, steps) if every else None,
        evaluations=1 + number_due(every, steps) if every else 0,
        checkpoints=0 if saves is None else number_due(saves.every, steps),
    )
