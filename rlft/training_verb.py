"""`rlft train`: what the launcher needs to know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlft import catalog, check
from rlft.checks.train import check_config
from rlft.engine import Engines
from rlft.plan import Plan, make_plan
from rlft.roots import Verb
from rlft.run.extent import steps_done
from rlft.session import open_session
from rlft.train import train
from rlft.work import Outcome, Work, command_line, program, resuming

MAIN_JOB = "+recipe=grpo_gsm8k"


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
    """(what it does, command): commands that do it as they are printed, for this run and on this machine."""
    rlft_command, run = program(), f"run={folder}"
    lr, steps = config["trainer"]["lr"], config["steps"]
    found = [
        ("evaluate with more samples", command_line(rlft_command, "eval", run, "eval.num_samples=8")),
        ("talk to it", command_line(rlft_command, "chat", run)),
    ]
    if config["trainer"]["schedule"] == "constant":  # others end with the last step
        found.append(("train on", command_line(rlft_command, "resume", folder, f"steps={2 * steps}")))
    if config["name"] in catalog.choices("recipe", Verb.train):
        words = [f"+recipe={config['name']}", f"trainer.lr={lr:g},{lr / 3:.2g}", "seed=0,1"]
        found.append(("sweep its recipe", command_line(rlft_command, "train", "-m", *words)))
    words = ["plan", MAIN_JOB, "model.device=cuda", "device_memory=24GiB"]
    return [*found, ("the main job: what it asks of a GPU", command_line(rlft_command, *words))]


WORK = Work(
    make_plan=make_plan,
    check=lambda plain: check.check_machine(check_config(plain)[0].model),
    do=do,
    steps_done=steps_done,
    closing=closing,
)
