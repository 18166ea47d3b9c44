"""Runs the checks in a process of their own, each under a time limit.

So a check that hangs, or takes its process with it, is a row like the others, and Ctrl-C ends native code, too. What a
check opens (a model, an engine) stays open for those after it. A check after one that ended the process begins in a new
one, and is told which checks have failed.
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

from rlft.doctor.row import NotReadyError, Row, Status
from rlft.generation.adapter_files import memory_folder, remove_abandoned
from rlft.system.children import detach, how_it_ended, kill_group
from rlft.system.crash import debugging, one_line
from rlft.system.running_time import TICK_S, RunningTime
from rlft.types import UserError

OUTPUT = "output.txt"
"""What the checks, and the libraries they use, print."""
MAX_SHOWN_CHARS = 300
END_S = 10.0
BOOT = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from rlft.doctor.supervise import serve
serve(connection, *connection.recv())
"""
"""The program of the process. It is no child of multiprocessing's, whose helper would print a warning about what a
process that was killed had open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check, which makes one row or several.

    Args:
        name: of its row, if it makes none itself.
        function: `module:function`, called with what the subject opens as; returns its rows.
        limit_s: seconds after which it has failed.
        fresh: whether it needs a process in which nothing has been allocated yet.
    """

    name: str
    function: str
    limit_s: float
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked, in a form that a new process can be given.

    Args:
        opens: `module:function`, called in that process with these settings, the folder and the names of the checks
            that have failed so far; what it returns is handed to each check.
        settings: plain values.
        folder: for files; removed by its owner.
    """

    opens: str
    settings: Any
    folder: Path


def run_checks(checks: Sequence[Check], subject: Subject, tell: Callable[[str], None]) -> Iterator[tuple[Check, Row]]:
    """The rows of these checks, as they are made.

    Args:
        checks: in their order.
        subject: what they look at.
        tell: is called with the name of each check that begins.
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
            rows, lives = child.rows(check)
            if not lives:
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
    """A process that runs checks until it is ended, or ends."""

    def __init__(self, subject: Subject, failed: Sequence[str]) -> None:
        self._output = subject.folder / OUTPUT
        ours, theirs = socket.socketpair()
        with theirs, self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._ours = Connection(ours.detach())
        self._ours.send(sys.path)
        self._ours.send((subject, tuple(failed), os.getpid()))

    def rows(self, check: Check) -> tuple[list[Row], bool]:
        """(the rows of this check, whether the process can run another one)."""
        try:
            self._ours.send(check)
            clock = RunningTime()
            while not self._ours.poll(TICK_S):
                if clock() >= check.limit_s:
                    return [_failed(check, f"no answer in {check.limit_s:g} s", self._last_line())], False
            return self._ours.recv(), True
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            ended = f"the process that looked at it {how_it_ended(self._process.returncode)}"
            return [_failed(check, ended, self._last_line())], False

    def end(self) -> None:
        """Ends the process with all that it has started, if need be against their will."""
        if self._process.poll() is None:
            kill_group(self._process.pid)
            self._process.kill()
            self._process.wait(END_S)
        self._ours.close()

    def _last_line(self) -> str:
        """What the process printed last; empty if nothing."""
        with suppress(OSError):
            lines = self._output.read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return ""


def _failed(check: Check, problem: str, said: str) -> Row:
    value = f"{problem}; it said last: {_short(said)}" if said else problem
    return Row(name=check.name, status=Status.wrong, value=value, remedy="look at what else runs on this machine")


def serve(connection: Connection, subject: Subject, failed: tuple[str, ...], parent: int) -> None:
    """The life of the process: answers each check with its rows until the parent closes its end, or dies."""
    detach(parent)
    opened: Any = None
    with suppress(EOFError, ConnectionError):
        while True:
            check: Check = connection.recv()
            start = time.monotonic()
            try:
                if opened is None:
                    opened = _named(subject.opens)(subject.settings, subject.folder, failed)
                rows = list(_named(check.function)(opened))
            except Exception as error:  # a check that fails is a row of the table, and the checks after it run
                if debugging():
                    traceback.print_exception(error)
                rows = [row_of(check, error)]
            print(f"{check.name}: {time.monotonic() - start:.1f} s", flush=True)
            connection.send(rows)
    # Engines and libraries have threads and exit handlers that may not come back; nothing is left to save.
    os._exit(0)


def row_of(check: Check, error: Exception) -> Row:
    """The row of a check that has raised this."""
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


def _named(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
