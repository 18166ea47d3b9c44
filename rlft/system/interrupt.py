"""The signals that ask a job to end, such as Ctrl-C, SIGTERM and SIGUSR1, and how a process ends by them.

A training run saves (checkpoint.on_signal), other commands end in two seconds. All end with exit code 130 and a line
that says what is kept. Outside a run, a signal raises KeyboardInterrupt in the main thread; if the process still lives
some seconds later, because a library has swallowed the exception or native code does not return, a second thread prints
the line and ends it. A SIGHUP, SIGUSR1 or SIGUSR2 that was ignored at the start of the process, as with nohup, stays
ignored. SIGQUIT (Ctrl-\\) is not handled: it ends the process at once, like a kill.

Schedulers send these signals to every process of a job. The run's own process decides what happens. Its worker
processes only count them, and repeat work whose child processes a signal may have ended.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal, TypeVar

# -- signals to a whole job --------------------------------------------------------------------------------------------
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that a run handles: Ctrl-C, what schedulers send at a limit or as a warning before it, and a dropped
connection."""
JOB_WIDE = (*ENDING, signal.SIGQUIT)
"""The signals that a worker process of a run survives. SIGQUIT ends the run, and with it its workers."""

SKEW_S = 0.1  # seconds within which a signal to a whole job reaches all of its processes, one after another

T = TypeVar("T")

_count = 0
_last_at = -math.inf


def note_signal(number: int, frame: FrameType | None) -> None:
    """A signal handler that only counts."""
    global _count, _last_at
    _count, _last_at = _count + 1, time.monotonic()


def signals_received() -> int:
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


def handled_signals(numbers: Iterable[signal.Signals] = ENDING) -> list[signal.Signals]:
    """The signals to handle: all of these except what was ignored when the process started, as SIGHUP is by nohup.

    SIGINT, which shells ignore for commands in the background, and SIGTERM are handled in any case.
    """
    always = (signal.SIGINT, signal.SIGTERM)
    return [n for n in numbers if n in always or signal.getsignal(n) is not signal.SIG_IGN]


def restore_handlers(handlers: Mapping[Any, Any]) -> None:
    """Sets these handlers {number of a signal: handler}, which `signal.signal` or `signal.getsignal` returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restores the handlers of the signals to a whole job afterwards, since a library inside replaces them."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            restore_handlers(handlers)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks the signals of a whole job for processes and threads that this thread starts inside."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_WIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def outlive_signals() -> None:
    """Makes this process count the signals to a whole job, and survive them.

    They are not ignored, because programs that it starts would ignore them, too, and SIGTERM could not end them.
    Forked processes get the default actions back.
    """
    numbers = handled_signals(JOB_WIDE)
    for number in numbers:
        signal.signal(number, note_signal)
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


# -- the end of a command ----------------------------------------------------------------------------------------------
EXIT_CODE = 130
GRACE_S = 1.5  # time limit for cleaning up, after which the process is ended
SECOND_GRACE_S = 5.0  # the limit after a second signal to a run, which also has to close its engine and its loggers


class Reported(KeyboardInterrupt):
    """An interruption about which a message has already said what is kept."""


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C, which ends a chat in which Ctrl-C only stops an answer."""


class StepAbandoned(KeyboardInterrupt):
    """Abandons the step in progress, because checkpoint.on_signal allows it no more time."""


class Order:
    """Tells a second signal from a first one that was sent twice, as `timeout`, systemd and shells do.

    A terminal, tmux or `uv run` may send one Ctrl-C to the process and to its group; nobody presses twice so fast.
    """

    SAME_S, SAME_CTRL_C_S = 1.0, 0.3

    def __init__(self) -> None:
        self._counted_at = -math.inf

    def is_repeated(self, number: int) -> bool:
        """Whether this signal only repeats the last one that counted."""
        now = time.monotonic()
        if now - self._counted_at < (self.SAME_CTRL_C_S if number == signal.SIGINT else self.SAME_S):
            return True
        self._counted_at = now
        return False


_message = "nothing was begun"


def set_interrupt_message(what: str) -> None:
    """Sets the text that an interruption prints: what is kept, or that nothing was written."""
    global _message
    _message = what


def line() -> str:
    """The line that is printed when a command is interrupted."""
    return f"rlft: interrupted: {_message}"


@contextlib.contextmanager
def ends_promptly(what: str) -> Iterator[None]:
    """Makes the first signal raise KeyboardInterrupt, and ends the process soon even if that is swallowed.

    `what` says what is kept, as in `set_interrupt_message`.
    """
    set_interrupt_message(what)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    order = Order()

    def interrupt(number: int, frame: FrameType | None) -> None:
        note_signal(number, frame)
        if not order.is_repeated(number):
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    previous_handlers = {number: signal.signal(number, interrupt) for number in handled_signals()}
    previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_end_after_a_signal, args=(receiver,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ignore_signals()
        signal.set_wakeup_fd(previous_fd)
        sender.shutdown(socket.SHUT_RDWR)  # which ends the thread
        thread.join()
        sender.close()
        while _timers:
            _timers.pop().cancel()
        restore_handlers(previous_handlers)


def _end_after_a_signal(receiver: socket.socket) -> None:
    """Waits for numbers of signals, which the interpreter writes to the socket; returns when the socket is closed."""
    with receiver:
        while numbers := receiver.recv(64):
            if set(numbers) & {int(number) for number in ENDING}:
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


@contextlib.contextmanager
def handled_inside() -> Iterator[None]:
    """Allows the code inside to catch a KeyboardInterrupt: the process is not ended after a signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_fd = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)


def ignore_signals() -> None:
    """Ignores signals in the last moments of a command: another signal would print a traceback."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)


_ends_soon = False


def end_soon_at_the_end() -> None:
    """Makes the process end soon after its command, even if threads of libraries hang."""
    global _ends_soon
    _ends_soon = True


def end_soon(code: int) -> None:
    """Ends the process soon after an interruption or `end_soon_at_the_end`, whatever threads of libraries still do."""
    if code != EXIT_CODE and not _ends_soon:
        return
    timer = threading.Timer(GRACE_S, os._exit, [code])
    timer.daemon = True
    timer.start()


def end_the_process_on_signals() -> dict[int, Any]:
    """Makes a signal print the line and end the process at once. Returns the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, lambda number, frame: _end()) for number in handled_signals()}


@contextlib.contextmanager
def ends_the_process() -> Iterator[None]:
    """Makes a signal inside end the process at once: for slow imports, when there is nothing to save yet.

    KeyboardInterrupt in the middle of an import is not reliable: libraries catch it and stay half imported.
    """
    previous_handlers = end_the_process_on_signals()
    try:
        yield
    finally:
        restore_handlers(previous_handlers)


class Deferred:
    """A context that holds signals back; `deliver` and the context's end pass them to the previous handlers.

    It is for library code whose state an exception in the middle would break.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._waiting: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Deferred:
        if threading.current_thread() is threading.main_thread():
            for number in handled_signals():
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, lambda number, frame: self._waiting.append((number, frame)))
        return self

    def deliver(self) -> None:
        """Calls the handlers of the signals received so far; if one raises, later signals stay held back."""
        while self._waiting:
            number, frame = self._waiting.pop(0)
            self._handlers[number](number, frame)

    def __exit__(self, *error: object) -> None:
        restore_handlers(self._handlers)
        self.deliver()


OnSignal = float | Literal["step", "now"]
"""What a signal does to the step in progress: finish it, abandon it, or finish it within this number of seconds."""


class Interrupt:
    """A context in which the first signal sets `requested`, and the second raises KeyboardInterrupt.

    The step in progress is finished; if `on_signal` allows it no time, or its seconds have passed, it is abandoned by
    raising StepAbandoned. `in_step` says whether a step is in progress or will surely follow.
    """

    def __init__(self, say: Callable[[str], None], on_signal: OnSignal = "step") -> None:
        self.say = say
        self.on_signal: OnSignal = on_signal
        self.requested = self.in_step = False
        self._is_abandoning = self._is_saving = self._time_is_up = self._is_closed = False
        self._closing = threading.Lock()
        self._order = Order()
        self._timer: threading.Timer | None = None
        self._previous: dict[int, Any] = {}
        self._watched = -1

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in handled_signals():
                self._previous[number] = signal.signal(number, self._handle)
            self._watched = signal.set_wakeup_fd(-1)
        return self

    def check(self) -> None:
        """Raises StepAbandoned again if a library has swallowed it."""
        if self._is_abandoning and self.in_step and not self._is_saving:
            raise StepAbandoned

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Marks that the step is done and is being saved, so that it can no longer be abandoned."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def __exit__(self, *error: object) -> None:
        self.in_step = False
        with self._closing:
            self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._previous:
            signal.set_wakeup_fd(self._watched)
        restore_handlers(self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        note_signal(number, frame)
        if self._time_is_up:
            self._time_is_up = False
            self._abandon_step()
            return
        if self._order.is_repeated(number):
            return
        if self.requested:
            _end_later(SECOND_GRACE_S)
            raise KeyboardInterrupt
        self.requested = True
        self.say(f"interrupted: {self._what_follows()}; once more stops at once")
        if not self.in_step or self.on_signal == "step":
            return
        if self.on_signal == "now":
            self._abandon_step()
            return
        self._timer = threading.Timer(self.on_signal, self._end_of_time, [threading.get_ident()])
        self._timer.daemon = True
        self._timer.start()

    def _what_follows(self) -> str:
        if not self.in_step:
            return "saving the last step" if self._is_saving else "ending before a step is begun"
        if self.on_signal == "now" and not self._is_saving:
            return "saving the last finished step"
        if self.on_signal in ("step", "now"):
            return "finishing this step, then saving"
        return f"finishing this step, if it takes at most {self.on_signal:g} s, then saving"

    def _end_of_time(self, main_thread: int) -> None:
        """Runs in the timer's thread: makes the main thread abandon the step, even inside a system call."""
        with self._closing:
            if not self._is_closed:
                self._time_is_up = True
                signal.pthread_kill(main_thread, signal.SIGTERM)

    def _abandon_step(self) -> None:
        if self.in_step and not self._is_saving:
            self._is_abandoning = True
            raise StepAbandoned
