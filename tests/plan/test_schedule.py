"""How often a planned run evaluates and saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from in_one_test import each

from rlft.plan.run_plan import Plan, Schedule


def scheduled(steps: int, **every: int) -> Schedule:
    """The schedule of a run of so many steps, whose config has these sections with this `every`."""
    config = SimpleNamespace(**{name: SimpleNamespace(every=number) for name, number in every.items()})
    return Plan.schedule.__get__(cast(Plan, SimpleNamespace(num_steps=steps, config=config)))


@each(
    ("steps", "every", "first", "evaluations", "checkpoints"),
    [
        (10, {"eval": 4, "checkpoint": 3}, 4, 4, 4),  # evaluated at 0, 4, 8 and 10, saved at 3, 6, 9 and 10
        (8, {"eval": 4, "checkpoint": 4}, 4, 3, 2),
        (3, {"eval": 20, "checkpoint": 0}, 3, 2, 1),  # before and after; saved at the end
        (3, {"eval": 0, "checkpoint": 1}, None, 0, 3),
        (5, {}, None, 0, 0),  # a command that does neither
    ],
)
def test_the_last_step_is_evaluated_and_saved_too(
    steps: int, every: dict[str, Any], first: int | None, evaluations: int, checkpoints: int
) -> None:
    expected = {"first_evaluation": first, "evaluations": evaluations, "checkpoints": checkpoints}
    assert scheduled(steps, **every) == Schedule(steps=steps, **expected)
