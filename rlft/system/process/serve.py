"""The process of a member: makes its object, and answers the calls that come over one connection, in order.

A thread reads the calls, so that a caller never waits for a member that is busy. It ends the process as soon as the
other end is closed: the process that started it has ended, or wants it to end.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rlft.system.process.children import detach


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A value that is pickled once, for calls to several members."""

    pickled: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The first message to a member: how it makes its object, and which process it must not outlive."""

    factory: str
    arguments: Mapping[str, Any]
    parent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call returned, or what it raised with the traceback as text."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


def serve(connection: Connection, begin: Begin) -> None:
    """Runs the process. Never returns: the process ends when the other end of the connection is closed."""
    detach(begin.parent)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls), daemon=True).start()
    held: Any = None
    failed: Answer | None = None
    try:
        held = named(begin.factory)(**begin.arguments)
    except Exception as error:  # raised by the factory; it becomes the answer to every call
        failed = failure(error)
    while True:
        message = calls.get()
        connection.send_bytes(packed(failed or answer(held, message)))


def answer(held: Any, message: bytes) -> Answer:
    """Calls the method that a message names."""
    try:
        method, args, kwargs = pickle.loads(message)
        args = [unpacked(value) for value in args]
        kwargs = {name: unpacked(value) for name, value in kwargs.items()}
        return Answer(value=getattr(held, method)(*args, **kwargs))
    except Exception as error:  # raised by the object; it is raised again in the calling process
        return failure(error)


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


def packed(reply: Answer) -> bytes:
    """The answer as bytes; one that cannot be pickled becomes the failure to do so."""
    try:
        return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs methods of the values, which may raise anything
        return pickle.dumps(failure(error))


def named(target: str) -> Callable[..., Any]:
    """The callable that `package.module:callable` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _read(connection: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            calls.put(connection.recv_bytes())
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
