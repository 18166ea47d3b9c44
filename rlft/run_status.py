"""How a run stands: status.json in its folder, and the lock that only a living process holds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rlft.trainer.checkpoint import write_atomically

FILE = "status.json"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What reading a file raises that is damaged in some way."""


class Status(StrEnum):
    running = "running"
    finished = "finished"
    interrupted = "interrupted"
    stopped = "stopped"
    killed = "killed"


@dataclass(kw_only=True)
class Ending:
    """How the run ends; whoever runs it says so if it is an interruption."""

    interrupted: bool = False


@contextlib.contextmanager
def kept(folder: Path, num_steps: int) -> Iterator[Ending]:
    """Inside, status.json says that the run is going on; afterwards how it ended. A kill leaves it as it was.

    num_steps: of the whole run, which its config may give in epochs.
    """
    _write(folder, num_steps, Status.running)
    ending = Ending()
    try:
        yield ending
    except KeyboardInterrupt:
        _write(folder, num_steps, Status.interrupted)
        raise
    except BaseException as error:
        _write(folder, num_steps, Status.stopped, str(error).partition("\n")[0] or type(error).__name__)
        raise
    _write(folder, num_steps, Status.interrupted if ending.interrupted else Status.finished)


def write_interrupted(folder: Path, num_steps: int) -> None:
    """Says of a run that no process has begun yet that it can be resumed; num_steps: of the whole run."""
    _write(folder, num_steps, Status.interrupted)


def _write(folder: Path, num_steps: int, status: Status, reason: str = "") -> None:
    told = {"status": str(status), "steps": num_steps, **({"reason": reason} if reason else {})}
    write_atomically(folder / FILE, json.dumps(told) + "\n")


def read(folder: Path) -> tuple[Status, str]:
    """(status, reason of a stop or empty). A run that says it is going on, and that no process holds, was killed.

    Without the file, as older versions left it: finished if nobody holds it.
    """
    held = is_held(folder)
    try:
        told = json.loads((folder / FILE).read_text(encoding="utf-8"))
        status, reason = Status(told["status"]), str(told.get("reason", ""))
    except UNREADABLE:
        return (Status.running if held else Status.finished), ""
    if held:
        return Status.running, ""
    return (Status.killed, "") if status is Status.running else (status, reason)


def num_steps(folder: Path) -> int | None:
    """Of the whole run; None where an older version left no word of it."""
    try:
        return int(json.loads((folder / FILE).read_text(encoding="utf-8"))["steps"])
    except UNREADABLE:
        return None


def is_held(folder: Path) -> bool:
    """Whether a process is at work in this folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
