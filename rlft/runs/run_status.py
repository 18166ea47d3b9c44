"""The status of a run: status.json in its folder, and the lock that only a living process holds.

A run that stops because the disk is full can still record that: while it runs, its status.json reserves room for it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlft.system import locks
from rlft.system.disk import DiskError
from rlft.system.files import write_atomically

KEY = "format"
FORMAT = 1  # of config.yaml, status.json, state.json and progress.json; raised when an older rlft would misread them
FILE = "status.json"
PROGRESS = "progress.json"  # the file in which a command without metrics, such as `rlft sample`, counts its steps
LOCK = ".lock"  # the file that a run's process keeps locked; it stays, and the kernel releases the lock

ROOM = 1024  # bytes of status.json during a run: padded with spaces, it has room for the reason why a run stops

NO_LOCKS = "its file system has no locks, which would tell a killed run from a running one"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)  # when a damaged file is read


class NewerError(ValueError):
    """A file was written by a newer rlft; the message continues the file's name: `was written by ..`."""


def check_format(values: Any) -> None:
    """Raises NewerError for the values of a file whose format this rlft does not know."""
    number = values.get(KEY, FORMAT) if isinstance(values, Mapping) else FORMAT
    if type(number) is int and number > FORMAT:
        raise NewerError(f"was written by a newer rlft ({KEY} {number}, this one reads up to {FORMAT})")


class Status(StrEnum):
    running = "running"
    finished = "finished"
    interrupted = "interrupted"
    stopped = "stopped"
    killed = "killed"
    unknown = "unknown"


@dataclass(kw_only=True)
class Ending:
    """How a run ended; the code inside `kept` sets `interrupted`."""

    interrupted: bool = False


@contextlib.contextmanager
def recording_status(folder: Path, num_steps: int) -> Iterator[Ending]:
    """Keeps status.json, which says that the run is running, and afterwards how it ended. A kill leaves it as it is."""
    write(folder, num_steps, Status.running)
    ending = Ending()
    try:
        yield ending
    except KeyboardInterrupt:
        write(folder, num_steps, Status.interrupted)
        raise
    except BaseException as error:
        kind = type(error).__name__
        write(folder, num_steps, Status.stopped, str(error).partition("\n")[0] or kind, kind)
        raise
    write(folder, num_steps, Status.interrupted if ending.interrupted else Status.finished)


def write(folder: Path, num_steps: int, status: Status, reason: str = "", error: str = "") -> None:
    """Writes the status of a run of so many steps; `error` is the class of the error that stopped it."""
    reasons = {name: text for name, text in (("reason", reason), ("error", error)) if text}
    fields = {"format": FORMAT, "status": str(status), "steps": num_steps, **reasons}
    content = json.dumps(fields).encode()
    room = ROOM if status is Status.running else 0
    try:
        write_atomically(folder / FILE, content.ljust(room) + b"\n")
    except DiskError:
        if not _written_in_place(folder / FILE, content):
            raise


def _written_in_place(file: Path, content: bytes) -> bool:
    """Overwrites the file in place, which takes no more disk space; False if the content does not fit."""
    with contextlib.suppress(OSError):
        handle = os.open(file, os.O_WRONLY)
        try:
            size = max(ROOM, os.fstat(handle).st_size)
            if len(content) < size:
                return os.pwrite(handle, content.ljust(size - 1) + b"\n", 0) == size
        finally:
            os.close(handle)
    return False


def read(folder: Path) -> tuple[Status, str]:
    """(status, reason): why the run stopped or its status is unknown; "" for any other status.

    A run whose file says running, but whose lock no process holds, was killed.
    """
    held = locks.is_held(folder / LOCK)
    if held:
        return Status.running, ""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        status, reason = Status(content["status"]), str(content.get("reason", ""))
    except OSError as error:
        return Status.unknown, f"{FILE} cannot be read ({error.strerror})"
    except UNREADABLE:
        return Status.unknown, f"{FILE} is damaged"
    if status is not Status.running:
        return status, reason
    return (Status.killed, "") if held is False else (Status.running, NO_LOCKS)


def error(folder: Path) -> str | None:
    return _value(folder / FILE, "error", str)


def num_steps(folder: Path) -> int | None:
    """Number of steps of the whole run; None if the file cannot be read."""
    return _value(folder / FILE, "steps", int)


def counted_steps(folder: Path) -> int:
    """The number of finished steps of a run without metrics, from its progress.json; 0 without that file."""
    return _value(folder / PROGRESS, "step", int) or 0


def _value(file: Path, name: str, kind: Callable[[Any], Any]) -> Any:
    with contextlib.suppress(*UNREADABLE):
        return kind(json.loads(file.read_text(encoding="utf-8"))[name])
    return None
