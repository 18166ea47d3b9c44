"""`rlft train`: the functions of the verb that the launcher calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlft.config import catalog
from rlft.loop.driver import Outcome
from rlft.loop.engines import Engines
from rlft.loop.session import open_session
from rlft.plan.train_plan import TrainPlan
from rlft.system.terminal import command_line, program, resuming
from rlft.train import train

MAIN_JOB = "+recipe=grpo_gsm8k"


def run(plan: TrainPlan, folder: Path, engines: Engines, say: Callable[[str], None]) -> Outcome:
    """Trains to the last step or an interruption."""
    with open_session(plan, folder, engines, say, resuming(folder)) as session:
        return session.outcome_of(lambda: train(session).step)


def print_run_summary(plan: TrainPlan, folder: Path) -> None:
    """Prints the page at the end of a run."""
    from rlft.logger.summary import print_summary

    print_summary(folder, next_commands(folder, dataclasses.asdict(plan.config)))


def next_commands(folder: Path, config: dict[str, Any]) -> list[tuple[str, str]]:
    """(what it does, command) of commands that work as printed, for this run on this machine."""
    rlft_command, run = program(), f"run={folder}"
    lr, steps = config["trainer"]["lr"], config["steps"]
    commands = [
        ("evaluate with more samples", command_line(rlft_command, "eval", run, "eval.num_samples=8")),
        ("talk to it", command_line(rlft_command, "chat", run)),
    ]
    if config["trainer"]["schedule"] == "constant":  # other schedules end with the last step
        commands.append(("train on", command_line(rlft_command, "resume", folder, f"steps={2 * steps}")))
    if config["name"] in catalog.recipes("train"):
        words = [f"+recipe={config['name']}", f"trainer.lr={lr:g},{lr / 3:.2g}", "seed=0,1"]
        commands.append(("sweep its recipe", command_line(rlft_command, "train", "-m", *words)))
    words = ["plan", MAIN_JOB, "model.device=cuda", "device_memory=24GiB"]
    return [*commands, ("the main job: what it asks of a GPU", command_line(rlft_command, *words))]
