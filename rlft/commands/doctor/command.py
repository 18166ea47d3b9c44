"""`rlft doctor`: a table of what works on this machine, measured with the model, adapter and engine of a run.

The checks that make its rows run in a child process, each under a time limit. A check that hangs, or that crashes the
process, is therefore a row like the others, and Ctrl-C ends native code, too. What a check opens (a model, an engine)
stays open for the checks after it. If a check ended the process, the next one runs in a new process, which receives the
names of the checks that have failed."""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlft.commands.tables import print_rows
from rlft.config import catalog
from rlft.config.compose import compose, compose_run
from rlft.config.keys import keys_of
from rlft.config.model import check_whole
from rlft.config.overrides import Arguments, key_of, only_overrides, recipe_in
from rlft.config.resolved import resolve
from rlft.config.schema import RunConfig
from rlft.generation.sending import PREFIX, memory_folder
from rlft.runs.find import with_named_runs
from rlft.system import interrupt
from rlft.system.crash import debugging, described, escaped, shortened
from rlft.system.locks import owned_folder, sweep
from rlft.system.process.child import Child, Ended, function_of, wait_for
from rlft.system.process.running_time import RunningTime
from rlft.system.process.worker import last_lines
from rlft.system.terminal import CheckRow, Status, say
from rlft.types import UserError, require

OUTPUT = "output.txt"  # the file with the output of the checks and of the libraries they use


# -- rows --------------------------------------------------------------------------------------------------------------
class NotReadyError(RuntimeError):
    """Something that a check needs is missing, because an earlier check failed; the message is the reason."""


def judged(
    name: str, value: str, remedy: str, numbers: Mapping[str, float], *, wrong: bool = False, slow: bool = False
) -> CheckRow:
    """The row of a measurement: wrong, else slow, else ok; a row that is ok has no remedy."""
    status = Status.wrong if wrong else Status.slow if slow else Status.ok
    return CheckRow(name, status, value, "" if status is Status.ok else remedy, numbers)


# -- checks ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check, which makes one row or several."""

    name: str  # also of its row if the check fails before it makes one
    function: str  # `module:function` that returns its rows, called with the result of the subject's `opens`
    limit_s: float  # seconds after which it counts as failed
    fresh: bool = False  # whether it needs a process in which nothing has been allocated yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a trial."""

    plain: dict[str, Any]  # the composed config, with the user's sections in it
    typed: frozenset[str]  # the keys that the user has typed, whose values the trial keeps
    rewards: Mapping[str, Any]  # the user's `reward` section; the trial computes none of these rewards
    runs: Path  # the folder in which the user's runs would be

    @property
    def makes_model(self) -> bool:
        return "model.path" not in self.typed


def run_checks(
    checks: Sequence[Check], opens: str, settings: Any, folder: Path, tell: Callable[[str], None]
) -> Iterator[CheckRow]:
    """The rows of these checks, as they are made.

    opens: `module:function`, called in the process of the checks with the settings, the folder and the names of the
    checks that have failed so far; its result is passed to each check.
    tell: is called with the name of each check when it begins.
    """
    failed: list[str] = []
    child: Child | None = None
    try:
        for check in checks:
            tell(check.name)
            if child is not None and check.fresh:
                child.end()
                child = None
            if child is None:
                with (folder / OUTPUT).open("ab") as output:
                    arguments = (opens, settings, folder, tuple(failed))
                    child = Child("rlft-doctor", f"{__name__}:serve", arguments, output=output.fileno())
            rows = rows_of(child, check, folder / OUTPUT)
            if not child.is_alive():
                child.end()
                child = None
            if any(row.status is Status.wrong for row in rows):
                failed.append(check.name)
            yield from rows
    finally:
        if child is not None:
            child.end()
        sweep(PREFIX, memory_folder())  # an engine that was killed could not remove its adapters


def rows_of(child: Child, check: Check, output: Path) -> list[CheckRow]:
    """The rows of this check. The process has ended if it died of the check, or took too long for it."""
    child.send(pickle.dumps(check), check.limit_s)
    clock = RunningTime()
    while not wait_for([child], clock):
        pass
    answer = child.receive()
    if not isinstance(answer, Ended):
        return answer
    is_silent = answer.is_late or answer.was_stopped
    problem = f"no answer in {check.limit_s:g} s" if is_silent else f"the process that looked at it {answer.how}"
    last_line = last_lines(output, 1)
    value = f"{problem}; it said last: {shortened(last_line)}" if last_line else problem
    return [CheckRow(check.name, Status.wrong, value, "look at what else runs on this machine")]


def serve(connection: Connection, opens: str, settings: Any, folder: Path, failed: tuple[str, ...]) -> None:
    """Runs in the process: answers each check with its rows until the parent closes its end, or dies."""
    opened: Any = None
    while True:
        check: Check = connection.recv()
        start = time.monotonic()
        try:
            if opened is None:
                opened = function_of(opens)(settings, folder, failed)
            rows = list(function_of(check.function)(opened))
        except Exception as error:  # a failed check is a row of the table, and the checks after it run
            if debugging():
                traceback.print_exception(error)
            rows = [row_of(check, error)]
        print(f"{check.name}: {time.monotonic() - start:.1f} s", flush=True)
        connection.send(rows)


def row_of(check: Check, error: Exception) -> CheckRow:
    if isinstance(error, NotReadyError):
        return CheckRow(check.name, Status.skipped, str(error), "repair what is wrong above")
    if isinstance(error, UserError):
        got = "" if error.got is None else f", got {error.got}"
        problem = shortened(f"{error.key}: {error.problem}{got}")
        return CheckRow(check.name, Status.wrong, problem, escaped(error.remedy or "change that key"))
    remedy = "check what it names; the traceback is printed with RLFT_DEBUG=1"
    return CheckRow(check.name, Status.wrong, described(error), remedy)


PACKAGE = "rlft.commands.doctor"
TRIAL = f"{PACKAGE}.trial:MachineTrial"

CHECKS = (
    Check(name="versions", function=f"{PACKAGE}.machine:version_rows", limit_s=60),
    Check(name="machine", function=f"{PACKAGE}.machine:rows", limit_s=60),
    Check(name="hub", function=f"{PACKAGE}.machine:hub_rows", limit_s=20),
    Check(name="sandbox", function=f"{PACKAGE}.machine:sandbox_rows", limit_s=60),
    Check(name="model", function=f"{PACKAGE}.trial:model_rows", limit_s=120),
    Check(name="engine", function=f"{PACKAGE}.trial:engine_rows", limit_s=300),
    Check(name="step", function=f"{PACKAGE}.trial:step_rows", limit_s=180),
    Check(name="memory plan", function=f"{PACKAGE}.trial:memory_rows", limit_s=30),
    Check(name="log-prob gap", function=f"{PACKAGE}.trial:gap_rows", limit_s=60),
    Check(name="adapter swap", function=f"{PACKAGE}.trial:swap_rows", limit_s=60),
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
