"""Measures the time in which this process could run, and limits calls by it.

The system's clock continues while a process is stopped (SIGSTOP, Ctrl-Z, `docker pause`, a scheduler that suspends
jobs). So a waiting process reads the clock every TICK_S seconds, and a longer time between two readings counts as
COUNTED_S. While a machine is suspended, its monotonic clock stops anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import psutil

Result = TypeVar("Result")

TICK_S = 0.1  # seconds between readings of the clock
COUNTED_S = 0.3
"""The most seconds that count between two readings; above TICK_S, so that a busy machine does not count as a pause."""
PROCESSOR_TICK_S = 0.02  # seconds between readings of a thread's processor time


class RunningTime:
    """A clock that starts at 0: `clock()` returns the seconds so far, if it is called every TICK_S."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def __call__(self) -> float:
        self.since_last()
        return self._seconds

    def since_last(self, *, at_least: float = 0.0) -> float:
        """The running seconds since the last call; at least `at_least` count, if that many have passed."""
        now = time.monotonic()
        passed = min(now - self._last, max(COUNTED_S, at_least))
        self._last = now
        self._seconds += passed
        return passed


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; False if the system does not say."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


class OutOfProcessorTime(BaseException):
    """A call has used up its processor time. Not an Exception, so that a library's `except Exception` lets it pass."""


def in_background(call: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """The future result of a call in a thread that does not keep the process from ending."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # it is raised again where the result is read
            future.set_exception(error)

    threading.Thread(target=work, name="rlft-in-background", daemon=True).start()
    return future


def within(seconds: float, call: Callable[..., Result], *arguments: Any) -> Result:
    """Returns what the call returns. It runs in a thread of its own, which is abandoned when the time is over.

    Time in which this process is stopped does not count. TimeoutError: the call has not returned in time.
    """
    future, clock = in_background(call, *arguments), RunningTime()
    while not wait([future], timeout=TICK_S).done:
        if clock() >= seconds:
            raise TimeoutError(f"no answer in {seconds:g} s")
    return future.result()


def within_processor_time(seconds: float, call: Callable[..., Result], *arguments: Any) -> Result:
    """Returns what the call returns, and ends it once this thread has used up that processor time in it.

    It works in every thread and without signals: a second thread reads the clock and makes the interpreter raise
    OutOfProcessorTime here. So only Python code is ended, not a single long operation of the interpreter, such as a
    product of huge numbers. A busy machine and a stopped process use up no time. The call should change nothing that
    must not be left half done. It starts no thread, which may get the exception in its first moment, and has no such
    limit inside.
    """
    thread_id, clock = threading.get_ident(), _clock_of_this_thread()
    end, lock, is_over, was_sent = clock() + seconds, threading.Lock(), threading.Event(), threading.Event()

    def watch() -> None:
        # Again and again, since a library may swallow it (a bare `except`, a `__del__`).
        while not is_over.wait(PROCESSOR_TICK_S):
            with lock:  # a thread whose call is over may have ended, and has no clock then
                if not is_over.is_set() and clock() >= end:
                    was_sent.set()
                    _raise_in(thread_id, OutOfProcessorTime)

    def finish() -> None:
        with lock:
            is_over.set()
        if not was_sent.is_set():
            return
        with contextlib.suppress(OutOfProcessorTime):
            # In place of one that has not arrived. To take that back with None would leave the interpreter waiting for
            # it (CPython's `PyThreadState_SetAsyncExc`): slower, and for ever in a function that is traced.
            while True:
                _raise_in(thread_id, OutOfProcessorTime)

    threading.Thread(target=watch, name=f"within {seconds:g} s of processor time", daemon=True).start()
    try:
        try:
            return call(*arguments)
        finally:
            finish()
    except OutOfProcessorTime:
        finish()  # it may have arrived in the first one
        raise


def _clock_of_this_thread() -> Callable[[], float]:
    """A clock of this thread's processor time, in seconds, for every thread; of the process's where there is none."""
    if hasattr(time, "pthread_getcpuclockid"):
        clock_id = time.pthread_getcpuclockid(threading.get_ident())
        return lambda: time.clock_gettime(clock_id)
    return time.process_time


def _raise_in(thread_id: int, error: type[BaseException]) -> None:
    """Raises the exception in a thread before one of its next instructions, in place of one that has not arrived."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(error))
