"""How far a run has come, against how far it is to go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlft import runfolder
from rlft.trainer import checkpoint
from rlft.types import UserError
from rlft.work import resuming


def steps_done(folder: Path, plan: Any) -> int:
    """The step that the run in this folder goes on from: of its newest whole checkpoint, 0 if there is none.

    Args:
        folder: the run's folder.
        plan: the planned run, of any verb that trains.

    Raises:
        UserError: the plan has fewer steps than that.
    """
    done, num_steps = runfolder.steps_done(folder), plan.num_steps
    if num_steps < done:
        problem = f"the run has done {done} steps already, and none can be undone"
        raise UserError("steps", problem, got=num_steps, remedy=_remedy(folder, plan, done))
    return done


def _remedy(folder: Path, plan: Any, done: int) -> str:
    """What is possible instead of resuming to an earlier step."""
    ways = []
    if plan.config.trainer.schedule == "constant":
        ways.append(f"raise it ({resuming(folder)} steps={2 * done})")
    earlier = [f for f in checkpoint.finished(runfolder.checkpoints(folder)) if checkpoint.step_of(f) < plan.num_steps]
    if earlier:
        ways.append(f"start a new run from an earlier checkpoint ({resuming(earlier[-1])} steps={plan.num_steps})")
    return ", or ".join(ways) or "leave it as it was"
