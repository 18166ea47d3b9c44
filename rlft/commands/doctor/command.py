"""`rlft doctor`: a table of what works on this machine, measured with the model, adapter and engine of a run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlft.commands.doctor.supervise import OUTPUT, Check, Settings, run_checks
from rlft.commands.tables import print_rows
from rlft.config import catalog
from rlft.config.compose import compose, compose_run
from rlft.config.keys import keys_of
from rlft.config.model import check_whole
from rlft.config.overrides import Arguments, key_of, only_overrides, recipe_in
from rlft.config.resolved import resolve
from rlft.config.schema import RunConfig
from rlft.runs.find import with_named_runs
from rlft.system import interrupt
from rlft.system.check_rows import Status
from rlft.system.crash import debugging
from rlft.system.locks import owned_folder
from rlft.system.terminal import say
from rlft.types import require

PACKAGE = "rlft.commands.doctor"
TRIAL = f"{PACKAGE}.trial:MachineTrial"

CHECKS = (
    Check(name="versions", function=f"{PACKAGE}.machine:version_rows", limit_s=60),
    Check(name="machine", function=f"{PACKAGE}.machine:rows", limit_s=60),
    Check(name="hub", function=f"{PACKAGE}.machine:hub_rows", limit_s=20),
    Check(name="sandbox", function=f"{PACKAGE}.machine:sandbox_rows", limit_s=60),
    Check(name="model", function=f"{PACKAGE}.steps:model_rows", limit_s=120),
    Check(name="engine", function=f"{PACKAGE}.steps:engine_rows", limit_s=300),
    Check(name="step", function=f"{PACKAGE}.steps:step_rows", limit_s=180),
    Check(name="memory plan", function=f"{PACKAGE}.steps:memory_rows", limit_s=30),
    Check(name="log-prob gap", function=f"{PACKAGE}.steps:gap_rows", limit_s=60),
    Check(name="adapter swap", function=f"{PACKAGE}.steps:swap_rows", limit_s=60),
    # The engine's GPU memory is certain to be free only once its process has ended.
    Check(name="kernels", function=f"{PACKAGE}.kernels:kernel_rows", limit_s=120, fresh=True),
)
"""The time limits of `versions` and `kernels` include the start of a process, which imports torch."""

COMMAND = "train"
OWN = (
    "data=jsonl",
    "data.path=letters.jsonl",
    "data.held_out_fraction=0.01",
    "prompts.style=raw",
    "steps=3",
    "reward=null",
    f"+reward.alternating={{_target_: {PACKAGE}.trial.alternating, weight: 1.0}}",
    "console=null",
    "eval.every=0",
    "checkpoint.every=0",
    "rollouts.every=0",
    "scoring.workers=0",
)
"""The overrides of a trial's config."""


def command(arguments: list[str]) -> int:
    """Prints the table, or the JSON; returns 1 if something is wrong, else 0."""
    words = [word for word in arguments if word != "--json"]
    check_recipe(words, "rlft doctor model.path=<model>")
    parsed = only_overrides(words, COMMAND)
    run = compose_run(parsed.overrides, parsed.config_dir, COMMAND)
    plain = with_named_runs(run.plain)
    with contextlib.redirect_stdout(sys.stderr):  # rewards may print while they are built
        config = resolve(plain, COMMAND).config
    check_whole(config.model.path)
    problem, remedy = "the engine is tried with adapters, and null has none", "leave it out"
    require(config.lora is not None, "lora", problem, got="null", remedy=remedy)
    return report(settings_of(plain, parsed, run.folder), as_json="--json" in arguments)


def report(settings: Any, *, as_json: bool, checks: Sequence[Check] = CHECKS, opens: str = TRIAL) -> int:
    """Runs the checks on the trial that `opens` makes from these settings, prints their rows; returns the exit code."""

    def tell(name: str) -> None:
        if sys.stderr.isatty():
            say(f"looking at {name} ..")

    say("rlft doctor: a small run in other processes, and what it shows; minutes ..")
    interrupt.set_interrupt_message("no results were saved")
    with owned_folder() as folder:
        rows = list(run_checks(checks, opens, settings, folder, tell))
        if debugging():
            say((folder / OUTPUT).read_text(errors="replace"))
    works = all(row.status is not Status.wrong for row in rows)
    if as_json:
        print(json.dumps({"works": works, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print_rows(rows)
    return 0 if works else 1


def check_recipe(words: Sequence[str], example: str) -> None:
    """Refuses a recipe of another command, whose runs have other parts than those that the checks try."""
    name = recipe_in(words)
    command = catalog.command_of(name) or COMMAND
    remedy = f"give the keys that matter, as in {example}, or a recipe of rlft {COMMAND}"
    problem = f"is for rlft {command}, and a run of rlft {COMMAND} is tried"
    require(command == COMMAND, "+recipe", problem, got=name, remedy=remedy)


def settings_of(plain: dict[str, Any], parsed: Arguments, folder: Path) -> Settings:
    """The settings for a trial of the run with this config, whose folder would be `folder`."""
    typed = frozenset(map(key_of, parsed.overrides))
    trial_config = compose(OWN, None, COMMAND)
    in_trial = {name: keys_of(RunConfig)[name].in_trial for name in trial_config}
    trial_config |= {n: plain[n] for n, when in in_trial.items() if when == "always" or (when and n in typed)}
    trial_config["prompts"] = {**trial_config["prompts"], "max_tokens": plain["prompts"]["max_tokens"]}
    return Settings(plain=trial_config, typed=typed, rewards=plain["reward"], runs=folder.parent)
