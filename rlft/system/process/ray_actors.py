"""Workers as actors of Ray, on any machine of a cluster; they share nothing with the run but bytes that Ray carries.

An actor is never restarted by Ray (`max_restarts=0`): a new one would have no adapter, and calls in between would fail
without saying why. Whoever uses a worker replaces it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlft.system.process.child import kill_group
from rlft.system.process.placement import cores_of_a_worker
from rlft.system.process.ray_session import RaySession, actor_on, python_path
from rlft.system.process.worker import LOGS, Answer, Host, LogReader, Place, WorkerError, WorkerSpec, where_it_wrote
from rlft.types import counted

LOG_S = 20.0  # seconds that another machine may take to hand over the end of a log
COPY_EVERY_S = 5.0
"""Seconds between copies of the logs of other machines' workers, so that they survive the loss of a machine."""
PART_BYTES = 2**20


class RayActors:
    """A `Launcher` of Ray's actors, whose logs are in `<folder>/cluster/`; `close` closes the session."""

    def __init__(self, folder: Path, session: RaySession) -> None:
        self._logs, self._session = folder.absolute() / LOGS, session
        self._workers: list[RayWorker] = []
        self._readers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._closing = threading.Event()
        # Making an answer may wait for another machine's log, for which Ray's own thread must not wait.
        self._answers = ThreadPoolExecutor(4, "rlft-ray-answers")
        threading.Thread(target=self._copy_logs, name="rlft-copy-logs", daemon=True).start()

    @property
    def address(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    def start(self, spec: WorkerSpec) -> RayWorker:
        if self._is_closed:
            raise WorkerError(f"{spec.name} was not started: the run is ending")
        self._logs.mkdir(parents=True, exist_ok=True)
        worker = RayWorker(spec, self._logs / f"{spec.name}.log", self, self._session)
        with self._lock:
            self._workers.append(worker)
        return worker

    def share(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def close(self) -> None:
        self._is_closed = True
        self._closing.set()
        for worker in list(self._workers):
            worker.kill()
        self._answers.shutdown(wait=False, cancel_futures=True)
        self._workers.clear()
        self._session.close()

    # -- logs ----------------------------------------------------------------------------------------------------------
    def later(self, work: Any, *args: Any) -> None:
        """Does the work in a thread that may wait, or at once after `close`."""
        try:
            self._answers.submit(work, *args)
        except RuntimeError:
            work(*args)

    def fetch_log(self, place: Place, copy: Path) -> None:
        """Adds to the copy what it lacks of a log on another machine; nothing if that machine does not answer."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        with suppress(RayError, GetTimeoutError, OSError):
            reader = self._reader_on(place.node)
            while True:
                size = copy.stat().st_size if copy.exists() else 0
                part: Any = ray.get(reader.read.remote(place.log, size, PART_BYTES), timeout=LOG_S)
                if not part:
                    return
                with copy.open("ab") as file:
                    file.write(part)

    def _reader_on(self, node: str) -> Any:
        with self._lock:
            if node not in self._readers:
                self._readers[node] = actor_on(node, LogReader, runtime_env=_runtime_environment({}))
            return self._readers[node]

    def _copy_logs(self) -> None:
        while not self._closing.wait(COPY_EVERY_S):
            with self._lock:
                workers = list(self._workers)
            for worker in workers:
                worker.copy_log()


class RayWorker:
    """A `Worker`, whose protocol says what its methods do."""

    def __init__(self, spec: WorkerSpec, log: Path, launcher: RayActors, session: RaySession) -> None:
        import ray

        self.name, self._log, self._launcher, self._session = spec.name, log, launcher, session
        self._lock, self._copying = threading.Lock(), threading.Lock()
        self._ended: str | None = None
        self._was_killed = False
        self.place: Place | None = None  # None until Ray has placed it
        variables = spec.variables
        if not spec.gpus:
            variables.setdefault("CUDA_VISIBLE_DEVICES", "")
        actor: Any = ray.remote(Host)
        cpus = cores_of_a_worker(spec.threads, on_gpus=spec.gpus > 0)
        there = {"max_restarts": 0, "scheduling_strategy": "SPREAD", "runtime_env": _runtime_environment(variables)}
        paths = [path or str(Path.cwd()) for path in sys.path]
        self._actor = actor.options(num_cpus=cpus, num_gpus=spec.gpus, **there).remote(
            spec.name, str(log), session.node, paths
        )
        with log.open("a", encoding="utf-8") as file:
            size = f"{counted(spec.gpus, 'GPU', 'g')} and {counted(cpus, 'core')}"
            file.write(f"{spec.name}: Ray is asked for a process with {size}\n")
        placed = self._actor.place.remote().future()
        placed.add_done_callback(self._placed)
        self._actor.make.remote(spec.factory, dict(spec.arguments))

    @property
    def log(self) -> Path:
        self.copy_log()
        return self._log

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._ended is not None:
            future.set_exception(WorkerError(self._ended))
            return future
        answered = self._actor.call.remote(method, *args, **kwargs).future()
        answered.add_done_callback(lambda done: self._launcher.later(self._resolve, done, future))
        return future

    def kill(self) -> None:
        import ray

        self._was_killed = True
        if self._ended is None and self.place is not None and self.place.node == self._session.node:
            # Ray gives a process that is stopped or stuck some seconds to answer first.
            kill_group(self.place.pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.place.pid, signal.SIGKILL)
        with suppress(Exception):  # Ray may have ended
            ray.kill(self._actor, no_restart=True)

    def copy_log(self) -> None:
        """Updates the copy of the log if the worker is on another machine."""
        place = None if self._ended is not None else self.place
        if place is not None and place.node != self._session.node:
            with self._copying:
                self._launcher.fetch_log(place, self._log)

    def _placed(self, done: Future[Any]) -> None:
        with suppress(Exception):
            self.place = Place(*done.result())
            if self.place.node != self._session.node:
                self._log.write_bytes(b"")  # from here on it is a copy of the file there

    def _resolve(self, done: Future[Any], future: Future[Any]) -> None:
        try:
            reply: Answer = pickle.loads(done.result())
        except Exception as error:  # an unreadable reply, or Ray's error about an actor that has died
            reply = Answer(error=WorkerError(self._reap(error)) if _says_death(error) else error)
        reply.resolve(future)

    def _reap(self, error: Exception) -> str:
        with self._lock:
            if self._ended is None:
                how = "was killed" if self._was_killed else f"has died ({_last_line(error)})"
                self._ended = f"{self.name} {how}; {where_it_wrote(self.log)}"
            return self._ended


def _last_line(error: Exception) -> str:
    """The end of Ray's error about an actor, where it says why the actor is dead."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:200]


def _says_death(error: Exception) -> bool:
    from ray.exceptions import NodeDiedError, RayActorError, RaySystemError, WorkerCrashedError

    return isinstance(error, RayActorError | NodeDiedError | RaySystemError | WorkerCrashedError)


def _runtime_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Sets variables before Python starts; this rlft is found if the machine has the same folders."""
    return {"env_vars": {"PYTHONPATH": python_path(), **variables}}
