"""Starts a run's workers as the section `cluster` says: as processes of this machine, or on a Ray cluster.

A thread for each process sends its calls and waits for the answers, so that no caller waits for a worker that is busy,
stopped or dead. It also starts the worker: the kernel ends a worker with the thread that started it, and this thread
lives as long as the process.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rlft.system.process.child import END_S, Child, Start, start_python
from rlft.system.process.placement import check_room
from rlft.system.process.running_time import InOrder
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
        self._calls = InOrder(f"rlft-{spec.name}")
        self._calls.submit(self._start, spec, start).result()

    def _start(self, spec: WorkerSpec, start: Start) -> None:
        with self.log.open("ab") as output:
            super().__init__(
                f"rlft-{spec.name}",
                "rlft.system.process.worker:serve",
                (spec.factory, spec.arguments),
                output=output.fileno(),
                environment=spec.variables,
                start=start,
            )

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._calls.submit(self._answer, pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL))

    def _answer(self, message: bytes) -> Any:
        """What the process returns for a call, or raises, or WorkerError once it has ended."""
        try:
            self.connection.send_bytes(message)
            while not self.connection.poll(POLL_S):
                if not self.is_alive() and not self.connection.poll(0):
                    raise EOFError
            answered = self.connection.recv_bytes()
        except (EOFError, OSError):
            self.end()  # the process may still live without its connection
            raise WorkerError(f"{self.name} {self.how_it_ended()}; {where_it_wrote(self.log)}") from None
        answer: Answer = pickle.loads(answered)
        return answer.result()


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
