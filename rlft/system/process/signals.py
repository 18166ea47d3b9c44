"""The signals that ask a whole job to end, and the number of them that this process has received.

Schedulers send them to every process of a job. The run's own process decides what happens (interrupt.py). Its worker
processes only count them, and repeat work whose child processes a signal may have ended.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that a run handles: Ctrl-C, what schedulers send at a limit or as a warning before it, and a dropped
connection."""
JOB_WIDE = (*ENDING, signal.SIGQUIT)
"""The signals that a worker process of a run survives. SIGQUIT ends the run, and with it its workers."""

SKEW_S = 0.1  # seconds within which a signal to a whole job reaches all of its processes, one after another

T = TypeVar("T")

_count = 0
_last_at = -math.inf


def note(number: int, frame: FrameType | None) -> None:
    """A signal handler that only counts."""
    global _count, _last_at
    _count, _last_at = _count + 1, time.monotonic()


def count() -> int:
    """The number of these signals that this process has received."""
    return _count


def may_have_disturbed(done_at: float) -> bool:
    """Whether a signal may have ended programs that finished at this time of the monotonic clock.

    Call it SKEW_S later: the signal may reach this process after those programs.
    """
    return abs(done_at - _last_at) <= SKEW_S


def undisturbed(trial: Callable[[], T]) -> Callable[[], T]:
    """A function that learns something from programs: it runs them again if a signal may have ended them."""

    @functools.wraps(trial)
    def repeated() -> T:
        while True:
            before = _count
            try:
                result = trial()
            except Exception:  # a program that was ended may make the trial raise anything
                if not _came_since(before):
                    raise
            else:
                if not _came_since(before):
                    return result

    return repeated


def _came_since(before: int) -> bool:
    time.sleep(SKEW_S)
    return _count != before


def handled(numbers: Iterable[signal.Signals] = ENDING) -> list[signal.Signals]:
    """The signals to handle: all of these except what was ignored when the process started, as SIGHUP is by nohup.

    SIGINT, which shells ignore for commands in the background, and SIGTERM are handled in any case.
    """
    always = (signal.SIGINT, signal.SIGTERM)
    return [n for n in numbers if n in always or signal.getsignal(n) is not signal.SIG_IGN]


def restore(handlers: Mapping[Any, Any]) -> None:
    """Sets these handlers {number of a signal: handler}, which `signal.signal` or `signal.getsignal` returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restores the handlers of the signals to a whole job afterwards, since a library inside replaces them."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            restore(handlers)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Blocks the signals of a whole job for processes and threads that this thread starts inside."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_WIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def outlive() -> None:
    """Makes this process count the signals to a whole job, and survive them.

    They are not ignored, because programs that it starts would ignore them, too, and SIGTERM could not end them.
    Forked processes get the default actions back.
    """
    numbers = handled(JOB_WIDE)
    for number in numbers:
        signal.signal(number, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_WIDE)  # its parent may have blocked them during the start
    masks: list[set[Any]] = []

    def block() -> None:  # a signal to the child waits until its default actions are set
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, numbers))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def set_default() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=set_default)
