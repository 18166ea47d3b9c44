"""Python processes that end with this one: how they are started, given work within limits, and ended.

Workers that score, play or hold an engine or a rank, and the checks of `rlft doctor`, are such processes. The
kernel ends each of them with the thread that started it: start it in one that lives as long as it is needed.
multiprocessing is not used: it would import the run's main module again, and starts a helper process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from rlft.system import interrupt
from rlft.system.process.running_time import TICK_S, RunningTime, is_stopped

BOOT = """
import ctypes, importlib, json, os, signal, sys
with open(int(sys.argv.pop(1))) as start:
    parent, path, module, function = json.load(start)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # it ends with its parent
if os.getppid() != parent:
    os._exit(1)
sys.path[:] = path
getattr(importlib.import_module(module), function)()
"""
"""The program of a process, whose first argument is the descriptor of a pipe; the others are its own."""
READY = "ready"  # the first message of a child that is one of several (`Children`)
START_LIMIT_S = 300.0
STOPPED_LIMIT_S = 300.0
"""Seconds that a child may be stopped (SIGSTOP) while this process goes on, before another one gets its work."""
MAX_FAILED_STARTS = 3  # in a row, without a successful one in between
GRACE_S = 1.0  # added to a worker's own limit, which reports more: the parent's is for code that ignores signals
END_S = 10.0  # seconds that the system may take to end a process that was killed
EXIT_S = 1.0
"""Seconds that a child which has closed its connection may take to end by itself, so that its exit code is known."""


def start_python(
    target: str,  # `module:function`
    words: Sequence[str] = (),  # its command line, sys.argv[1:]
    *,
    descriptors: Sequence[int] = (),  # open files that it inherits
    output: int | None = None,  # descriptor of the file for what it prints; None: that of this process
    environment: Mapping[str, str] | None = None,  # variables in addition to those of this process
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """A Python process that calls the function, and ends with the thread that has started it."""
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as start:
        json.dump([os.getpid(), [*map(str, sys.path)], *target.split(":")], start)
        start.flush()
        return subprocess.Popen(
            [sys.executable, "-c", BOOT, str(reading), *words],
            pass_fds=(reading, *descriptors),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
        )


Start = Callable[..., "subprocess.Popen[bytes]"]
"""Starts a process like `start_python`."""


class Child:
    """A process that serves one connection, shielded from signals to the whole job.

    It leads a process group, with which it is ended: whatever it has started ends with it.

    Args:
        name: shown in its command line.
        target: `module:function`, called in the process with its end of the connection and the arguments.
        arguments: they are pickled, and should be small, because sending them may wait for the process.
        descriptors, output, environment: as in `start_python`.
        start: starts the process; tests fork it instead.

    Attributes:
        connection: our end of the connection.
        left_s: seconds that its work, or its start, may still take, counted while both it and this process run.
        stopped_s: seconds for which only the child has been stopped.
        is_ready: whether it has sent READY.
        is_busy: whether it has work that it has not answered.
    """

    def __init__(
        self,
        name: str,
        target: str,
        arguments: Sequence[Any],
        *,
        descriptors: Sequence[int] = (),
        output: int | None = None,
        environment: Mapping[str, str] | None = None,
        start: Start = start_python,
    ) -> None:
        # Pickled first: an argument that cannot be pickled starts no process.
        message = pickle.dumps((target, tuple(arguments)), pickle.HIGHEST_PROTOCOL)
        ours, theirs = socket.socketpair()
        # A signal to the whole job while Python starts would end it: the mask is inherited until it handles them.
        with theirs, interrupt.signals_blocked():
            self._process = start(
                f"{__name__}:main",
                [name, str(theirs.fileno())],
                descriptors=(theirs.fileno(), *descriptors),
                output=output,
                environment=environment,
            )
        self.connection = Connection(ours.detach())
        self.left_s, self.stopped_s = START_LIMIT_S, 0.0
        self.is_ready = self.is_busy = False
        with contextlib.suppress(OSError):  # it has died already, which is noticed when it is waited for
            self.connection.send_bytes(message)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: bytes, limit_s: float) -> bool:
        """Sends pickled work, which may take `limit_s`; returns False if the child has died while it was idle."""
        try:
            self.connection.send_bytes(message)
        except OSError:
            return False
        self.left_s, self.stopped_s, self.is_busy = limit_s, 0.0, True
        return True

    def receive(self) -> Any:
        """What it has sent; `Ended`, after ending it, if there is nothing or it is not readable."""
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            if self.connection.poll():
                message = self.connection.recv()
                self.is_busy = False
                return message
        was_stopped = self.stopped_s > STOPPED_LIMIT_S
        is_late = self.left_s <= 0 and not was_stopped and self.is_alive()
        if not is_late and not was_stopped:
            self.wait(EXIT_S)
        self.end()
        return Ended(how=self.how_it_ended(), is_late=is_late, was_stopped=was_stopped)

    def how_it_ended(self) -> str:
        """The meaning of its exit code, as the end of a sentence."""
        return how_it_ended(self._process.poll())

    def kill(self) -> None:
        """Ends it and everything that it has started by SIGKILL, without waiting for the end."""
        if self.is_alive():
            kill_group(self._process.pid)
            self._process.kill()

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self) -> None:
        """Ends it, whatever it is doing, and the connection. Safe to call twice."""
        self.kill()
        self.wait(END_S)
        self.connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A child has ended instead of answering."""

    how: str  # the end of a sentence, such as "was killed by SIGSEGV"
    is_late: bool  # whether its time limit had passed
    was_stopped: bool  # whether somebody had stopped it and not continued it


Meanwhile = tuple[int, Callable[[], None]]
"""What else a thread does while it waits for children: a file descriptor that can be read when there is something to
do, and what does it, while the time of the children goes on."""

AnyChild = TypeVar("AnyChild", bound=Child)
Task = TypeVar("Task")


def wait_for(children: Sequence[AnyChild], clock: RunningTime, meanwhile: Meanwhile | None = None) -> list[AnyChild]:
    """Waits a moment; returns the children that have sent something, have died or are out of time."""
    left_s = min((child.left_s for child in children), default=0.0)
    waited: list[Any] = [*(child.connection for child in children), *([] if meanwhile is None else meanwhile[:1])]
    readable = wait(waited, timeout=max(0.0, min(left_s, TICK_S)))
    passed = clock.since_last()
    for child in children:
        if is_stopped(child.pid):
            child.stopped_s += passed
        else:
            child.left_s -= passed
            child.stopped_s = 0.0
    if meanwhile is not None and meanwhile[0] in readable:
        meanwhile[1]()
    return [
        child
        for child in children
        if child.connection in readable
        or child.left_s <= 0
        or child.stopped_s > STOPPED_LIMIT_S
        or not child.is_alive()
    ]


Work = Generator[tuple[bytes, float], Any, None]
"""What one of several children does for a task: it yields a pickled message and the seconds that the answer may take,
and is sent the answer, or `Ended`; or None where nobody is to blame that there is none, as with a child that was
stopped, or had died before the message. After either another child has its place."""


class Children(Generic[AnyChild]):
    """Several children, each of which answers one message at a time; their first message is READY.

    There are no threads: the calling thread sends messages and waits with deadlines. So it is known at once which work
    a dead child had, and a killed one cannot leave a lock taken. Make it where the children are used.

    what: what they are, such as "reward workers".
    error: makes the exception for children that cannot start, of its text.
    """

    def __init__(
        self, start: Callable[[], AnyChild], number: int, what: str, error: Callable[[str], Exception]
    ) -> None:
        self._start, self._what, self._error = start, what, error
        self._failed_starts = 0
        self._clock = RunningTime()
        self._work: dict[int, Work] = {}  # by the number of the child
        self._unsent: dict[int, tuple[bytes, float]] = {}  # what it has yielded and its child has not got
        self.all = [start() for _ in range(number)]
        atexit.register(self.close)

    def run(
        self,
        tasks: deque[Task],
        work: Callable[[Task, int], Work],
        meanwhile: Meanwhile | None = None,
        fits: Callable[[Task, int], bool] = lambda task, number: True,
    ) -> Iterator[None]:
        """Takes tasks until there are none, each for the first child that is ready and that it fits.

        `work` is what the child of a number does for a task. Yields after each wait for answers. If children cannot
        start, `error` is raised.
        """
        for number, child in enumerate(self.all):
            if number in self._work or child.connection.closed:  # left by an interrupted call
                self._replace(number)
        self._work, self._unsent = {}, {}
        self._clock.since_last()  # the time before is not counted
        while tasks or self._work:
            for number, child in enumerate(self.all):
                while child.is_ready and number not in self._work:
                    task = next((task for task in tasks if fits(task, number)), None)
                    if task is None:
                        break
                    tasks.remove(task)
                    self._work[number] = work(task, number)
                    self._go_on(number, None)
                if number in self._unsent and child.is_ready and not child.send(*self._unsent.pop(number)):
                    self._replace(number)
                    self._go_on(number, None)
            self._receive(meanwhile)
            yield

    def _go_on(self, number: int, answer: Any) -> None:
        try:
            self._unsent[number] = self._work[number].send(answer)
        except StopIteration:
            del self._work[number]

    def _receive(self, meanwhile: Meanwhile | None) -> None:
        """Waits a moment for children that are busy or start, and gives their answers to their work."""
        waited = [number for number, child in enumerate(self.all) if child.is_busy or not child.is_ready]
        done = wait_for([self.all[number] for number in waited], self._clock, meanwhile)
        for number in [number for number in waited if self.all[number] in done]:
            child = self.all[number]
            answer = child.receive()
            if child.is_ready:
                has_ended = isinstance(answer, Ended)
                self._go_on(number, None if has_ended and answer.was_stopped else answer)
                if has_ended:
                    self._replace(number)
            elif isinstance(answer, Ended):
                self._failed_starts += not answer.was_stopped
                if self._failed_starts == MAX_FAILED_STARTS:
                    how = "took too long to start" if answer.is_late else f"{answer.how} before their first task"
                    raise self._error(f"{MAX_FAILED_STARTS} {self._what} in a row {how}; see their output above")
                self._replace(number)
            elif answer != READY:
                raise self._error(f"cannot be started in its {self._what} ({answer}); repair it")
            else:
                child.is_ready, self._failed_starts = True, 0

    def _replace(self, number: int) -> None:
        """Ends a child, and starts another one in its place."""
        self.all[number].end()
        self.all[number] = self._start()

    def close(self) -> None:
        """Ends the children, whatever they are doing. Safe to call twice."""
        atexit.unregister(self.close)
        for child in self.all:
            child.end()
        self.all = []


def main() -> None:
    """The process of a child, whose command line is its name and the descriptor of its end of the connection."""
    serve(Connection(int(sys.argv[2])))


def serve(connection: Connection) -> None:
    """Calls the child's function, until the parent closes its end of the connection or dies; then ends the process.

    What it prints goes to its standard error: the parent's standard output is for the parent's own results.
    """
    with contextlib.suppress(OSError):  # the parent has no standard error
        os.dup2(2, 1)
    interrupt.outlive_signals()
    os.setpgid(0, 0)
    with contextlib.suppress(EOFError, ConnectionError):
        target, arguments = pickle.loads(connection.recv_bytes())
        function_of(target)(connection, *arguments)
    end_group()


def end_group() -> None:
    """Ends this process and all that it has started; threads and exit handlers of libraries may hang."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def kill_group(pid: int) -> None:
    """Ends all processes of the group that this process leads, those that it has started included, if it leads one."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)


def function_of(target: str) -> Callable[..., Any]:
    """The callable that `package.module:callable` names."""
    return pkgutil.resolve_name(target)


def how_it_ended(exitcode: int | None) -> str:
    """The meaning of an exit code, as the end of a sentence.

    >>> how_it_ended(3), how_it_ended(-11)
    ('ended with exit code 3', 'was killed by SIGSEGV')
    """
    if exitcode is not None and exitcode < 0:
        cause = ", perhaps by the system for want of memory" if exitcode == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-exitcode).name}{cause}"
    return f"ended with exit code {exitcode}"
