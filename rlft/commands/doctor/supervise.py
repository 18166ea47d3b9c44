"""The rows of `rlft doctor`, and the checks that make them: in a child process, each under a time limit.

A check that hangs, or that crashes the process, is therefore a row like the others, and Ctrl-C ends native code, too.
What a check opens (a model, an engine) stays open for the checks after it. If a check ended the process, the next one
runs in a new process, which receives the names of the checks that have failed.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlft.generation.sending import PREFIX, memory_folder
from rlft.system.check_rows import CheckRow, Status
from rlft.system.crash import debugging, described, one_line, shortened
from rlft.system.locks import sweep
from rlft.system.process.child import Child, Ended, function_of, wait_for
from rlft.system.process.running_time import RunningTime
from rlft.system.process.worker import last_lines
from rlft.types import UserError

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
        return CheckRow(check.name, Status.wrong, problem, one_line(error.remedy or "change that key"))
    remedy = "check what it names; the traceback is printed with RLFT_DEBUG=1"
    return CheckRow(check.name, Status.wrong, described(error), remedy)
