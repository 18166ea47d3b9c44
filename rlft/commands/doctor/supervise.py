"""Runs the checks in a child process, each under a time limit.

A check that hangs, or that crashes the process, is therefore a row like the others, and Ctrl-C ends native code, too.
What a check opens (a model, an engine) stays open for the checks after it. If a check ended the process, the next one
runs in a new process, which receives the names of the checks that have failed.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlft.commands.doctor.row import NotReadyError, Row, Status
from rlft.generation.adapter_files import memory_folder, remove_abandoned
from rlft.system.crash import debugging, one_line
from rlft.system.process.children import detach, how_it_ended, kill_group
from rlft.system.process.running_time import TICK_S, RunningTime
from rlft.types import UserError

OUTPUT = "output.txt"
"""The file with the output of the checks and of the libraries they use."""
MAX_SHOWN_CHARS = 300
END_S = 10.0
"""Seconds to wait for the end of the process."""
BOOT = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from rlft.commands.doctor.supervise import serve
serve(connection, *connection.recv())
"""
"""The program of the process. multiprocessing is not used, because its helper would print a warning about what a killed
process had open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check, which makes one row or several.

    Attributes:
        name: name of the check, and of its row if the check fails before it makes one.
        function: `module:function` that returns its rows, called with the result of the subject's `opens`.
        limit_s: seconds after which it counts as failed.
        fresh: whether it needs a process in which nothing has been allocated yet.
    """

    name: str
    function: str
    limit_s: float
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked, in a form that can be sent to a new process.

    Attributes:
        opens: `module:function`, called in that process with the settings, the folder and the names of the checks that
            have failed so far; its result is passed to each check.
        settings: the settings, as plain values.
        folder: folder for files, which the caller removes.
    """

    opens: str
    settings: Any
    folder: Path


def run_checks(checks: Sequence[Check], subject: Subject, tell: Callable[[str], None]) -> Iterator[tuple[Check, Row]]:
    """The rows of these checks, as they are made.

    Args:
        checks: the checks in their order.
        subject: what they check.
        tell: called with the name of each check when it begins.
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
                child = Child(subject, failed)
            rows, is_alive = child.rows(check)
            if not is_alive:
                child.end()
                child = None
            if any(row.status is Status.wrong for row in rows):
                failed.append(check.name)
            yield from ((check, row) for row in rows)
    finally:
        if child is not None:
            child.end()
        remove_abandoned(memory_folder())  # an engine that was killed could not remove its adapters


class Child:
    """A process that runs checks until it ends or is ended."""

    def __init__(self, subject: Subject, failed: Sequence[str]) -> None:
        self._output = subject.folder / OUTPUT
        parent_end, child_end = socket.socketpair()
        with child_end, self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(child_end.fileno())],
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._connection = Connection(parent_end.detach())
        self._connection.send(sys.path)
        self._connection.send((subject, tuple(failed), os.getpid()))

    def rows(self, check: Check) -> tuple[list[Row], bool]:
        """(the rows of this check, whether the process can run another one)."""
        try:
            self._connection.send(check)
            clock = RunningTime()
            while not self._connection.poll(TICK_S):
                if clock() >= check.limit_s:
                    return [_failed(check, f"no answer in {check.limit_s:g} s", self._last_line())], False
            return self._connection.recv(), True
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            problem = f"the process that looked at it {how_it_ended(self._process.returncode)}"
            return [_failed(check, problem, self._last_line())], False

    def end(self) -> None:
        """Ends the process and all processes that it has started, by force if necessary."""
        if self._process.poll() is None:
            kill_group(self._process.pid)
            self._process.kill()
            self._process.wait(END_S)
        self._connection.close()

    def _last_line(self) -> str:
        """The last line that the process printed; empty if there is none."""
        with suppress(OSError):
            lines = self._output.read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return ""


def _failed(check: Check, problem: str, last_line: str) -> Row:
    value = f"{problem}; it said last: {_short(last_line)}" if last_line else problem
    return Row(name=check.name, status=Status.wrong, value=value, remedy="look at what else runs on this machine")


def serve(connection: Connection, subject: Subject, failed: tuple[str, ...], parent: int) -> None:
    """The main function of the process: answers each check with its rows until the parent closes its end, or dies."""
    detach(parent)
    opened: Any = None
    with suppress(EOFError, ConnectionError):
        while True:
            check: Check = connection.recv()
            start = time.monotonic()
            try:
                if opened is None:
                    opened = _function_of(subject.opens)(subject.settings, subject.folder, failed)
                rows = list(_function_of(check.function)(opened))
            except Exception as error:  # a failed check is a row of the table, and the checks after it run
                if debugging():
                    traceback.print_exception(error)
                rows = [row_of(check, error)]
            print(f"{check.name}: {time.monotonic() - start:.1f} s", flush=True)
            connection.send(rows)
    # Threads and exit handlers of engines and libraries may hang; nothing is left to save.
    os._exit(0)


def row_of(check: Check, error: Exception) -> Row:
    """The row of a check that has raised this error."""
    if isinstance(error, NotReadyError):
        return Row(name=check.name, status=Status.skipped, value=str(error), remedy="repair what is wrong above")
    if isinstance(error, UserError):
        got = "" if error.got is None else f", got {error.got}"
        return Row(
            name=check.name,
            status=Status.wrong,
            value=_short(f"{error.key}: {error.problem}{got}"),
            remedy=one_line(error.remedy or "change that key"),
        )
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    remedy = "check what it names; the traceback is printed with RLFT_DEBUG=1"
    return Row(name=check.name, status=Status.wrong, value=_short(text), remedy=remedy)


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= MAX_SHOWN_CHARS else f"{line[:MAX_SHOWN_CHARS]}..."


def _function_of(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
