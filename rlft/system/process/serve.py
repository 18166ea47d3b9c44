"""The process of a member: makes its object, and answers calls in order, over a connection or as an actor of Ray."""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rlft.system.process.child import end_group, function_of
from rlft.system.process.member import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A value that is pickled once, for calls to several members."""

    pickled: bytes


class Held:
    """The object of a member. An error in making it becomes the answer to every call."""

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
            args = [unpacked(value) for value in args]
            kwargs = {name: unpacked(value) for name, value in kwargs.items()}
            reply = self._failed or Answer(value=getattr(self._object, method)(*args, **kwargs))
            return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # raised by the object; it is raised again in the calling process
            return pickle.dumps(failure(error))


def serve(connection: Connection, factory: str, arguments: Mapping[str, Any]) -> None:
    """Runs in the process of a member: answers the calls that come over the connection.

    A thread reads the calls, so that a caller never waits for a member that is busy. It ends the process as soon as
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


def unpacked(value: Any) -> Any:
    """The value; one that is shared between members is unpickled."""
    return pickle.loads(value.pickled) if isinstance(value, Shared) else value


def failure(error: Exception) -> Answer:
    """The answer to a call that raised; an exception that cannot be sent becomes a RuntimeError with the same text."""
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error that cannot be pickled may raise anything
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Answer(error=error, traceback=text)


# -- Ray ---------------------------------------------------------------------------------------------------------------
class Place(NamedTuple):
    """Where a member is; `log` is the file of its output on that machine."""

    node: str
    host: str
    pid: int
    log: str


class Host:
    """The actor of a member. Its answers are bytes, so that exceptions of any class can be sent."""

    def __init__(self, name: str, log: str, node: str, paths: Sequence[str]) -> None:
        """Sends the process's output to the log, or to a file of this machine if the log is on another one."""
        import ray

        here: str = ray.get_runtime_context().get_node_id()
        folder = Path(tempfile.gettempdir()) / f"rlft-{os.getuid()}"
        file = Path(log) if here == node else folder / f"{name}-{os.getpid()}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_to(file)
        sys.path.extend(path for path in paths if path not in sys.path and Path(path).is_dir())
        self._name = name
        self._place = Place(here, socket.gethostname(), os.getpid(), str(file))
        self._held: Held | None = None

    def place(self) -> Place:
        return self._place

    def make(self, factory: str, arguments: Mapping[str, Any]) -> None:
        self._held = Held(factory, arguments)

    def call(self, method: str, *args: Any, **kwargs: Any) -> bytes:
        if self._held is None:
            return pickle.dumps(Answer(error=RuntimeError(f"{self._name} has not been made")))
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
