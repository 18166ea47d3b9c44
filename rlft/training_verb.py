"""`rlft train`: what the launcher needs to know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlft import catalog
from rlft.config import build
from rlft.engine import Engines
from rlft.plan import Plan, check_components, make_plan
from rlft.run.extent import steps_done
from rlft.session import open_session
from rlft.train import train
from rlft.work import Outcome, Work, program, resuming


def do(plan: Plan, folder: Path, engines: Engines, say: Callable[[str], None]) -> Outcome:
    """Trains to the last step or an interruption."""
    with open_session(plan, folder, engines, say, resuming(folder)) as session:
        state = train(session)
        return Outcome(step=state.step, interrupted=session.interrupted and state.step < plan.config.steps)


def closing(plan: Plan, folder: Path) -> None:
    """The page at the end of a run."""
    from rlft.logger.summary import print_summary

    print_summary(folder, next_commands(folder, dataclasses.asdict(plan.config)))


def next_commands(folder: Path, config: dict[str, Any]) -> list[tuple[str, str]]:
    rlft_command = program()
    recipe = f"+recipe={config['name']} " if (catalog.recipe_folder() / f"{config['name']}.yaml").exists() else ""
    lr, steps = config["trainer"]["lr"], config["steps"]
    return [
        ("evaluate with more samples", f"{rlft_command} eval run={folder} eval.num_samples=8"),
        ("talk to it", f"{rlft_command} chat run={folder}"),
        ("train on", f"{rlft_command} resume {folder} steps={2 * steps}"),
        ("sweep", f"{rlft_command} train -m {recipe}trainer.lr={lr:g},{lr / 3:.2g} seed=0,1"),
        ("the main job, on a GPU", f"{rlft_command} train +recipe=grpo_gsm8k"),
    ]


WORK = Work(
    make_plan=make_plan,
    check=lambda plain: check_components(build(plain)),
    do=do,
    steps_done=steps_done,
    closing=closing,
)
