"""Members as processes of this machine.

Each is a Python process that serves one connection (`serve.py`). For each member, two threads send its calls and read
its answers, so that no call waits for a member that is busy, stopped or dead. One thread of the launcher starts all
members: the kernel ends a member with the thread that started it, and this thread lives as long as the process.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from rlft.system.process import signals
from rlft.system.process.children import how_it_ended, kill_group
from rlft.system.process.member import MemberError, MemberSpec, last_lines
from rlft.system.process.serve import Answer, Begin, Shared

BOOT = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from rlft.system.process.serve import serve
serve(connection, connection.recv())
"""
"""The program of a member. It is not started by multiprocessing, which would import the run's main module again."""
LOGS = "cluster"
END_S = 10.0
"""Seconds that the system may take to end a process that was killed."""
POLL_S = 0.5
"""Seconds between checks whether a silent member lives: a child of it may hold the connection open after its death."""


class Process(Protocol):
    """The part of `subprocess.Popen` that a member needs."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Spawn = Callable[[MemberSpec, int, int], Process]
"""Starts the process of a member, whose connection and log have these descriptors."""


class RemoteTracebackError(Exception):
    """The cause of an exception that comes back from a member: the traceback there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class LocalProcesses:
    """A `Launcher` of processes on this machine.

    Args:
        folder: the run's folder; logs are in `<folder>/cluster/`.
        spawn: starts a process; None: a new Python.
    """

    def __init__(self, folder: Path, spawn: Spawn | None = None) -> None:
        self._logs, self._spawn = folder / LOGS, spawn or start_python
        self._starter = ThreadPoolExecutor(1, "rlft-start-members")
        self._members: list[ProcessMember] = []
        self._is_closed = False

    @property
    def address(self) -> str:
        return "127.0.0.1"

    def start(self, spec: MemberSpec) -> ProcessMember:
        return self._starter.submit(self._start, spec).result()

    def share(self, value: Any) -> Shared:
        return Shared(pickled=pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        self._is_closed = True
        for member in list(self._members):
            member.kill()
        self._starter.shutdown(wait=True, cancel_futures=True)
        for member in self._members:  # those that were being started
            member.kill()
        for member in self._members:
            member.wait(END_S)
        self._members.clear()

    def _start(self, spec: MemberSpec) -> ProcessMember:
        if self._is_closed:
            raise MemberError(f"{spec.name} was not started: the run is ending")
        self._logs.mkdir(parents=True, exist_ok=True)
        member = ProcessMember(spec, self._logs / f"{spec.name}.log", self._spawn)
        self._members[:] = [other for other in self._members if other.is_alive()] + [member]
        return member


class ProcessMember:
    """A `Member`, whose protocol says what its methods do."""

    def __init__(self, spec: MemberSpec, log: Path, spawn: Spawn) -> None:
        self._name, self._log = spec.name, log
        begin = Begin(factory=spec.factory, arguments=spec.arguments, parent=os.getpid())
        # Pickled first: an argument that cannot be pickled starts no process.
        packed_begin = pickle.dumps(begin, pickle.HIGHEST_PROTOCOL)
        own_end, member_end = socket.socketpair()
        # A signal to the whole job while Python starts would end it: the mask is inherited until it handles them.
        with member_end, log.open("ab") as output, signals.blocked():
            self._process = spawn(spec, member_end.fileno(), output.fileno())
        self._connection = Connection(own_end.detach())
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._waiting: deque[Future[Any]] = deque()
        self._calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._calls.put(pickle.dumps(sys.path))
        self._calls.put(packed_begin)
        for work in (self._send, self._read):
            threading.Thread(target=work, name=f"rlft-{spec.name}", daemon=True).start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def log(self) -> Path:
        return self._log

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        message = pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL)
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is None:
                self._waiting.append(future)
                self._calls.put(message)
                return future
        future.set_exception(MemberError(self._ended))
        return future

    def kill(self) -> None:
        if self.is_alive():
            kill_group(self._process.pid)
            self._process.kill()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> None:
        """Waits until a process that was killed has ended, at most `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._calls.get()) is not None:
                self._connection.send_bytes(message)

    def _read(self) -> None:
        try:
            while True:
                while not self._connection.poll(POLL_S):
                    if not self.is_alive() and not self._connection.poll(0):
                        raise EOFError
                self._resolve(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._bury()

    def _resolve(self, message: bytes) -> None:
        with self._lock:
            future = self._waiting.popleft()
        try:
            reply: Answer = pickle.loads(message)
        except Exception as error:  # an unreadable reply must fail its call only, not this thread
            reply = Answer(error=error)
        with suppress(InvalidStateError):  # whoever waited has cancelled it
            if reply.error is None:
                future.set_result(reply.value)
            else:
                reply.error.__cause__ = RemoteTracebackError(reply.traceback) if reply.traceback else None
                future.set_exception(reply.error)

    def _bury(self) -> None:
        """Gives every open future the error that says how the process ended."""
        self.kill()  # the process may still live without its connection
        self.wait(END_S)
        tail = last_lines(self._log)
        lines = f"; its last lines:\n{tail}" if tail else ""
        text = f"{self._name} {how_it_ended(self._process.poll())}; its log is {self._log}{lines}"
        with self._lock:
            self._ended = text
            waiting, self._waiting = list(self._waiting), deque()
        self._calls.put(None)
        self._connection.close()
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(MemberError(text))


def start_python(spec: MemberSpec, connection: int, output: int) -> subprocess.Popen[bytes]:
    """A Python process that serves a connection and writes its output to a file, both given by descriptors."""
    return subprocess.Popen(
        [sys.executable, "-c", BOOT, str(connection)],
        pass_fds=(connection,),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **environment(spec)},
    )


def environment(spec: MemberSpec) -> dict[str, str]:
    """The environment variables that a member has in addition to those of this process."""
    threads_of_libraries = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(spec.threads))
    # What it prints is in its log at once, also if it is killed then.
    return {"PYTHONUNBUFFERED": "1", **threads_of_libraries, **spec.environment}
