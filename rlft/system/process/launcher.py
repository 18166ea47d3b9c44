"""Starts a run's workers as the section `cluster` says: as processes of this machine, or on a Ray cluster.

Two threads for each process send its calls and read its answers, so that no call waits for a worker that is busy,
stopped or dead. The one that reads also starts the worker: the kernel ends a worker with the thread that started it,
and this thread lives as long as the process.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from rlft.system.process.child import END_S, Child, Start, start_python
from rlft.system.process.placement import check_room
from rlft.system.process.worker import LOGS, Answer, Launcher, WorkerError, WorkerSpec, where_it_wrote

POLL_S = 0.5
"""Seconds between checks whether a silent worker lives: a child of it may hold the connection open after its death."""


class LocalProcesses:
    """A `Launcher` of processes on this machine; their logs are in `<folder>/cluster/`."""

    def __init__(self, folder: Path, start: Start = start_python) -> None:
        self._logs, self._start_process = folder / LOGS, start
        self._workers: list[ProcessWorker] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def address(self) -> str:
        return "127.0.0.1"

    def start(self, spec: WorkerSpec) -> ProcessWorker:
        with self._lock:
            if self._is_closed:
                raise WorkerError(f"{spec.name} was not started: the run is ending")
            self._logs.mkdir(parents=True, exist_ok=True)
            worker = ProcessWorker(spec, self._logs / f"{spec.name}.log", self._start_process)
            self._workers = [other for other in self._workers if other.is_alive()] + [worker]
        return worker

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait(END_S)
        self._workers.clear()


class ProcessWorker(Child):
    """A `Worker`, whose protocol says what its methods do."""

    def __init__(self, spec: WorkerSpec, log: Path, start: Start) -> None:
        self.name, self.log = spec.name, log
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._waiting: deque[Future[Any]] = deque()
        self._calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        started: Future[None] = Future()
        name = f"rlft-{spec.name}"
        self._sender = threading.Thread(target=self._send, name=name, daemon=True)
        threading.Thread(target=self._start, args=(spec, start, started), name=name, daemon=True).start()
        started.result()

    def _start(self, spec: WorkerSpec, start: Start, started: Future[None]) -> None:
        try:
            with self.log.open("ab") as output:
                super().__init__(
                    f"rlft-{spec.name}",
                    "rlft.system.process.worker:serve",
                    (spec.factory, spec.arguments),
                    output=output.fileno(),
                    environment=spec.variables,
                    start=start,
                )
        except BaseException as error:  # it is raised again where the worker is asked for
            started.set_exception(error)
            return
        self._sender.start()
        started.set_result(None)
        self._read()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        message = pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL)
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is None:
                self._waiting.append(future)
                self._calls.put(message)
                return future
        future.set_exception(WorkerError(self._ended))
        return future

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._calls.get()) is not None:
                self.connection.send_bytes(message)

    def _read(self) -> None:
        try:
            while True:
                while not self.connection.poll(POLL_S):
                    if not self.is_alive() and not self.connection.poll(0):
                        raise EOFError
                self._resolve(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._reap()

    def _resolve(self, message: bytes) -> None:
        with self._lock:
            future = self._waiting.popleft()
        try:
            reply: Answer = pickle.loads(message)
        except Exception as error:  # an unreadable reply must fail its call only, not this thread
            reply = Answer(error=error)
        reply.resolve(future)

    def _reap(self) -> None:
        """Gives every open future the error that says how the process ended."""
        self.kill()  # the process may still live without its connection
        self.wait(END_S)
        text = f"{self.name} {self.how_it_ended()}; {where_it_wrote(self.log)}"
        with self._lock:
            self._ended = text
            waiting, self._waiting = list(self._waiting), deque()
        self._calls.put(None)
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)  # closing alone would not wake a thread that is sending
        self._sender.join()
        self.connection.close()
        for future in waiting:
            Answer(error=WorkerError(text)).resolve(future)


@contextmanager
def open_launcher(
    config: Any, folder: Path, *, on_gpus: bool = False, own_gpu: str | None = None, threads: int = 1, scorers: int = 0
) -> Iterator[Launcher]:
    """Yields the launcher, and afterwards ends all that it has started. Ray is imported only to join a cluster.

    On a cluster that is joined, the GPU of this process, as CUDA_VISIBLE_DEVICES names it (None if it has none), is
    reserved; the other arguments are those of `check_room`.

    Raises UserError: the cluster that is joined does not answer, is too small, or others use this process's GPU.
    """
    if not config.is_joined:
        with closing(LocalProcesses(folder)) as here:
            yield here
        return
    from rlft.system.process.ray_actors import RayActors

    with closing(RayActors(folder, config.joined_address)) as cluster:
        counts_own = own_gpu is None or cluster.reserve(own_gpu)
        needs = {"on_gpus": on_gpus, "threads": threads, "scorers": scorers}
        check_room(config, cluster.resources, **needs, counts_own=counts_own)
        yield cluster
