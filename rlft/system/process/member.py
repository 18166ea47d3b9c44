"""The interface of a member: a process that does a part of a run's work, on any machine.

A member holds one object, made by a factory in its own process. The run calls that object's methods and gets futures of
Python's `concurrent.futures`, whether the member is a process of this machine or an actor of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

LOGS = "cluster"
"""The folder of the members' logs in the run's folder."""


class MemberError(RuntimeError):
    """A member did not answer: it died, or its time limit passed. The message names it and its log."""


class RemoteTracebackError(Exception):
    """The cause of an exception that comes back from a member: the traceback there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """What a member is.

    Attributes:
        name: a name like "engine-0", unique in the run; the log is `<run>/cluster/<name>.log`.
        factory: `package.module:callable` that makes the object in the member's process.
        arguments: keyword arguments of the factory; they are pickled.
        gpus: number of GPUs that the member has to itself.
        threads: number of threads of torch and of its libraries.
        environment: environment variables that are set before Python starts.
    """

    name: str
    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    gpus: float = 0.0
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that its process has in addition to those of this one."""
        threads_of_libraries = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        # What it prints is in its log at once, also if it is killed then.
        return {"PYTHONUNBUFFERED": "1", **threads_of_libraries, **self.environment}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call returned, or what it raised with the traceback as text."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    def resolve(self, future: Future[Any]) -> None:
        """Gives it to whoever waits for the call, unless the wait was cancelled."""
        with suppress(InvalidStateError):
            if self.error is None:
                future.set_result(self.value)
            else:
                self.error.__cause__ = RemoteTracebackError(self.traceback) if self.traceback else None
                future.set_exception(self.error)


class Member(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def log(self) -> Path:
        """The file of what the process has written to stdout and stderr; for another machine, a copy of it."""
        ...

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls a method of the member's object; calls of one member are answered in order.

        The future holds the answer, the exception that the method raised, or MemberError if the process has died. It
        has no time limit of its own: whoever waits for it sets one, and kills the member when it passes.
        """
        ...

    def kill(self) -> None:
        """Ends the process at once; its futures get MemberError. Safe to call twice."""
        ...


class Launcher(Protocol):
    """Starts members, and ends those that are left when it is closed."""

    @property
    def address(self) -> str:
        """The address of this machine, as members can reach it."""
        ...

    def start(self, spec: MemberSpec) -> Member:
        """Starts a member without waiting for it: the first answered call says that its object is made."""
        ...

    def share(self, value: Any) -> Any:
        """A reference to a large value that is sent once, to be given as an argument of calls to several members."""
        ...

    def close(self) -> None:
        """Ends all members and whatever the launcher has started. Safe to call twice."""
        ...


def last_lines(log: Path, num: int = 12) -> str:
    """The last lines of a member's log for an error message; empty if there are none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num:])


def where_it_wrote(log: Path) -> str:
    """The end of an error message about a member: its log, and its last lines if there are any."""
    tail = last_lines(log)
    return f"its log is {log}" + (f"; its last lines:\n{tail}" if tail else "")
