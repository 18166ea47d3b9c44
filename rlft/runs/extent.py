"""Compares the steps that a run has finished with the steps that it is to have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlft.runs import checkpoint, run_folder
from rlft.system.terminal import resuming
from rlft.types import UserError


def steps_done(folder: Path, plan: Any) -> int:
    """The step of the newest undamaged checkpoint, from which a resume continues; 0 if there is none.

    Args:
        folder: the run's folder.
        plan: the planned run, of any verb that trains.

    Raises:
        UserError: the plan has fewer steps than the run has finished.
    """
    return check_steps(folder, plan.num_steps, plan.config.trainer.schedule)


def check_steps(folder: Path, num_steps: int, schedule: str) -> int:
    """As `steps_done`, for a run that is to have this many steps.

    Args:
        folder: the run's folder.
        num_steps: number of steps of the whole run.
        schedule: the schedule of the learning rate; only with `constant` may a resume have more steps.
    """
    done = run_folder.steps_done(folder)
    if num_steps < done:
        problem = f"the run has done {done} steps already, and none can be undone"
        raise UserError("steps", problem, got=num_steps, remedy=_remedy(folder, num_steps, schedule, done))
    return done


def _remedy(folder: Path, num_steps: int, schedule: str, done: int) -> str:
    """What to do instead of resuming to an earlier step."""
    remedies = []
    if schedule == "constant":
        remedies.append(f"raise it ({resuming(folder)} steps={2 * done})")
    earlier = [f for f in checkpoint.finished(run_folder.checkpoints(folder)) if checkpoint.step_of(f) < num_steps]
    if earlier:
        remedies.append(f"start a new run from an earlier checkpoint ({resuming(earlier[-1])} steps={num_steps})")
    return ", or ".join(remedies) or "leave it as it was"
