"""Ctrl-C and SIGTERM: a run that trains finishes its step and saves; every other verb ends within two seconds.

Both leave exit code 130 and a line that says what is kept. Outside a run, a signal raises KeyboardInterrupt in the main
thread; if the process still lives some seconds later, because a library has swallowed the exception or native code
does not return, a second thread prints the line and ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 1.5
"""How long cleaning up may take before the process is ended."""
SECOND_GRACE_S = 5.0
"""The same after a second signal to a run, which also closes its engine and its loggers."""


class Reported(KeyboardInterrupt):
    """An interruption of which the user has been told what is kept."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which also ends what a Ctrl-C only stops, such as an answer in a chat."""


_kept = "nothing was begun"


def keeps(what: str) -> None:
    """From now on, an interruption says this: what is kept, or that nothing was written."""
    global _kept
    _kept = what


def line() -> str:
    """What is printed when a verb is interrupted."""
    return f"rlft: interrupted: {_kept}"


@contextlib.contextmanager
def ends_promptly(what: str) -> Iterator[None]:
    """Inside, the first signal raises KeyboardInterrupt, and the process ends soon even if that is swallowed.

    Args:
        what: is kept, as in `keeps`.
    """
    keeps(what)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = {number: signal.signal(number, _raise) for number in SIGNALS}
    watched = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_end_after_a_signal, args=(receiver,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ignore_signals()
        signal.set_wakeup_fd(watched)
        sender.shutdown(socket.SHUT_RDWR)  # which ends the thread
        thread.join()
        sender.close()
        while _timers:
            _timers.pop().cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_after_a_signal(receiver: socket.socket) -> None:
    """Waits for the signals' numbers, that the interpreter writes to the socket; an end of it means there was none."""
    with receiver:
        while numbers := receiver.recv(64):
            if set(numbers) & {int(number) for number in SIGNALS}:
                _end_later(GRACE_S)


_timers: list[threading.Timer] = []


def _end_later(seconds: float) -> None:
    timer = threading.Timer(seconds, _end)
    timer.daemon = True
    _timers.append(timer)
    timer.start()


def _end() -> None:
    os.write(2, f"{line()}\n".encode())
    os._exit(EXIT_CODE)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextlib.contextmanager
def handled_inside() -> Iterator[None]:
    """Inside, a KeyboardInterrupt may be caught without the process being ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watched = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(watched)


def ignore_signals() -> None:
    """For the last moments of a verb, which has said how it ended: another signal would leave a traceback."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def end_soon(code: int) -> None:
    """Ends the process even if threads of libraries, which wait for their own work, keep Python from ending."""
    timer = threading.Timer(GRACE_S, os._exit, [code])
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def ends_the_process() -> Iterator[None]:
    """Inside, a signal ends the process at once: for slow imports, when there is nothing to save yet.

    KeyboardInterrupt in the middle of an import is not reliable: libraries catch it, and go on half imported.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, frame: _end()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt:
    """Inside the context, `requested` turns true at the first signal; the second raises KeyboardInterrupt.

    in_step: whether a step is being done, or surely will be, that the run finishes before it ends.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.requested, self.in_step = say, False, False
        self._previous: dict[int, object] = {}
        self._watched = -1

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
            self._watched = signal.set_wakeup_fd(-1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous:
            signal.set_wakeup_fd(self._watched)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            _end_later(SECOND_GRACE_S)
            raise KeyboardInterrupt
        self.requested = True
        what = "finishing this step, then saving" if self.in_step else "ending before a step is begun"
        self.say(f"interrupted: {what}; once more stops at once")
