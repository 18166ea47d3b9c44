"""A worker: a process that does a part of a run's work, on any machine.

A worker holds one object, made by a factory in its own process. The run calls that object's methods and gets futures of
Python's `concurrent.futures`, whether the worker is a process of this machine or an actor of Ray. Here are the
interface and what runs in that process: it makes the object, and answers calls in order.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlft.system.process.child import end_group, function_of
from rlft.types import UserError

LOGS = "cluster"  # the folder of the workers' logs in the run's folder


class WorkerError(RuntimeError):
    """A worker did not answer: it died, or its time limit passed. The message names it and its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker is."""

    name: str  # a name like "engine-0", unique in the run; the log is `<run>/cluster/<name>.log`
    factory: str  # `package.module:callable` that makes the object in the worker's process, of the pickled arguments
    arguments: Mapping[str, Any] = field(default_factory=dict)
    gpus: float = 0.0  # number of GPUs that the worker has to itself
    threads: int = 1  # number of threads of torch and of its libraries
    # Environment variables that are set before Python starts.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that its process has in addition to those of this one."""
        threads_of_libraries = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        # What it prints is in its log at once, also if it is killed then.
        return {"PYTHONUNBUFFERED": "1", **threads_of_libraries, **self.environment}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call returned, or what it raised."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""  # the traceback there, which becomes a note: some exceptions lose their notes when they are pickled

    def resolve(self, future: Future[Any]) -> None:
        """Gives it to whoever waits for the call, unless the wait was cancelled."""
        with suppress(InvalidStateError):
            if self.error is None:
                future.set_result(self.value)
            else:
                if self.text:
                    self.error.add_note(self.text)
                future.set_exception(self.error)


class Worker(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def log(self) -> Path:
        """The file of what the process has written to stdout and stderr; for another machine, a copy of it."""
        ...

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls a method of the worker's object; calls of one worker are answered in order.

        The future holds the answer, the exception that the method raised, or WorkerError if the process has died. It
        has no time limit of its own: whoever waits for it sets one, and kills the worker when it passes.
        """
        ...

    def kill(self) -> None:
        """Ends the process at once; its futures get WorkerError. Safe to call twice."""
        ...


class Launcher(Protocol):
    """Starts workers, and ends those that are left when it is closed."""

    @property
    def address(self) -> str:
        """The address of this machine, as workers can reach it."""
        ...

    def start(self, spec: WorkerSpec) -> Worker:
        """Starts a worker without waiting for it: the first answered call says that its object is made."""
        ...

    def share(self, value: Any) -> Any:
        """What is given for a large value as an argument of calls to several workers: on a cluster it is sent once."""
        ...

    def close(self) -> None:
        """Ends all workers and whatever the launcher has started. Safe to call twice."""
        ...


def last_lines(log: Path, num: int = 12) -> str:
    """The last lines of a worker's log for an error message; empty if there are none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num:])


def where_it_wrote(log: Path) -> str:
    """The end of an error message about a worker: its log, and its last lines if there are any."""
    tail = last_lines(log)
    return f"its log is {log}" + (f"; its last lines:\n{tail}" if tail else "")


# -- the process of a worker -------------------------------------------------------------------------------------------
class Held:
    """The object of a worker. An error in making it becomes the answer to every call."""

    def __init__(self, factory: str, arguments: Mapping[str, Any]) -> None:
        self._object: Any = None
        self._failed: Answer | None = None
        try:
            self._object = function_of(factory)(**arguments)
        except Exception as error:  # raised by the factory
            self._failed = failure(error)

    def answer(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """The pickled answer to a call; a value that cannot be pickled becomes the failure to do so."""
        try:
            reply = self._failed or Answer(value=getattr(self._object, method)(*args, **kwargs))
            return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # raised by the object; it is raised again in the calling process
            return pickle.dumps(failure(error))


def serve(connection: Connection, factory: str, arguments: Mapping[str, Any]) -> None:
    """Runs in the process of a worker: answers the calls that come over the connection.

    A thread reads the calls, so that a caller never waits for a worker that is busy. It ends the process as soon as
    the other end is closed: the process that started it has ended, or wants it to end.
    """
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls), daemon=True).start()
    held = Held(factory, arguments)
    while True:
        try:
            method, args, kwargs = pickle.loads(calls.get())
        except Exception as error:  # unpickling runs methods of the values, which may raise anything
            connection.send_bytes(pickle.dumps(failure(error)))
        else:
            connection.send_bytes(held.answer(method, args, kwargs))


def _read(connection: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    with suppress(EOFError, OSError):
        while True:
            calls.put(connection.recv_bytes())
    end_group()


def failure(error: Exception) -> Answer:
    """The answer to a call that raised; an exception that cannot be sent becomes a RuntimeError with the same text."""
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    if isinstance(error, UserError):  # which explains itself
        text = ""
    try:
        pickle.loads(pickle.dumps(error)).add_note("")
    except Exception:  # an error that cannot be pickled, or takes no note, may raise anything
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Answer(error=error, text=text)


# -- Ray ---------------------------------------------------------------------------------------------------------------
class Place(NamedTuple):
    """Where a worker is; `log` is the file of its output on that machine."""

    node: str
    pid: int
    log: str


class Host:
    """The actor of a worker. Its answers are bytes, so that exceptions of any class can be sent."""

    def __init__(self, name: str, log: str, node: str, paths: Sequence[str]) -> None:
        """Sends the process's output to the log, or to a file of this machine if the log is on another one."""
        import ray

        here: str = ray.get_runtime_context().get_node_id()
        folder = Path(tempfile.gettempdir()) / f"rlft-{os.getuid()}"
        file = Path(log) if here == node else folder / f"{name}-{os.getpid()}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_to(file)
        sys.path.extend(path for path in paths if path not in sys.path and Path(path).is_dir())
        self._place = Place(here, os.getpid(), str(file))

    def place(self) -> Place:
        return self._place

    def make(self, factory: str, arguments: Mapping[str, Any]) -> None:
        self._held = Held(factory, arguments)

    def call(self, method: str, *args: Any, **kwargs: Any) -> bytes:
        return self._held.answer(method, args, kwargs)


class LogReader:
    """An actor that reads files of its machine for the run's own machine."""

    def read(self, file: str, start: int, most: int) -> bytes:
        """At most `most` bytes of a file after the first `start`; empty if there is no such file."""
        with suppress(OSError), Path(file).open("rb") as stream:
            stream.seek(start)
            return stream.read(most)
        return b""


def _write_to(file: Path) -> None:
    """Appends all that this process and its children print to the file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
