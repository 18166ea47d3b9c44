"""The Ray cluster that a run joins, and leaves running, and workers as its actors, on any machine of it.

They share nothing with the run but bytes that Ray carries. Ray is imported late.
An actor is never restarted by Ray (`max_restarts=0`): a new one would have no adapter, and calls in between would fail
without saying why. Whoever uses a worker replaces it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlft.system import interrupt
from rlft.system.process.child import kill_group
from rlft.system.process.placement import Resources, cores_of_a_worker
from rlft.system.process.worker import LOGS, Answer, Host, LogReader, Place, WorkerError, WorkerSpec, where_it_wrote
from rlft.system.terminal import pip_install
from rlft.types import UserError, counted

# -- the cluster -------------------------------------------------------------------------------------------------------
ANSWER_S = 60.0  # seconds that a cluster which is joined may take to answer
CONNECT_S = 10.0  # seconds that its machine may take to accept a connection
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_COLOR_PREFIX": "0",
}
"""Environment variables that are set before Ray is imported, unless the user has set them."""
RESERVE_S = 60.0  # seconds that Ray may take to assign a GPU
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
SEES_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
KEY = "cluster.address"


def check_installed() -> None:
    """UserError where the extra `ray` is not installed."""
    if importlib.util.find_spec("ray") is None:
        remedy = f"{pip_install('rlft[ray]')}, or use cluster=local"
        raise UserError("cluster.kind", "Ray is not installed", got="ray", remedy=remedy)


class Holder:
    """An actor that has a GPU, and does nothing with it."""

    def gpu(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def is_of_a_job(environment: Mapping[str, str]) -> bool:
    """Whether this process is the entrypoint of a Ray job that has GPUs of its own (`--entrypoint-num-gpus 1`)."""
    return JOB in environment and SEES_ALL not in environment and bool(environment.get("CUDA_VISIBLE_DEVICES"))


def reserve(gpu: str, node: str, timeout_s: float = RESERVE_S) -> Any | None:
    """The actor that holds this GPU; None if Ray has no such GPU on this machine to give out.

    `gpu` is as CUDA_VISIBLE_DEVICES names it, `node` Ray's id of this machine.

    Raises UserError: others use the GPUs of this machine, or Ray names them in another way.
    """
    import ray

    [gpus] = [int(machine["Resources"].get("GPU", 0)) for machine in ray.nodes() if machine["NodeID"] == node]
    holders: list[Any] = []
    names: list[str] = []
    try:
        for _ in range(gpus):
            holders.append(actor_on(node, Holder, num_gpus=1))
            names.append(_gpu_of(holders[-1], gpu, names, timeout_s))
            if names[-1] == gpu:
                return holders.pop()
    finally:
        for holder in holders:
            with suppress(Exception):  # Ray may have ended
                ray.kill(holder, no_restart=True)
    if any(name.isdigit() != gpu.isdigit() for name in names):
        problem = f"Ray names the GPUs of this machine {', '.join(names)}, and this process has GPU {gpu}"
        remedy = "start Ray and the run with CUDA_VISIBLE_DEVICES of one kind, numbers or ids"
        raise UserError(KEY, problem, got=gpu, remedy=remedy)
    return None


def actor_on(node: str, kind: type, **options: Any) -> Any:
    """An actor of this class on the machine with Ray's id `node`, which takes no core of it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor: Any = ray.remote(kind)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=there, **options).remote()


def _gpu_of(holder: Any, gpu: str, others: list[str], timeout_s: float) -> str:
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return ray.get(holder.gpu.remote(), timeout=timeout_s)
    except GetTimeoutError:
        free = f"only {', '.join(others)}" if others else "no GPU"
        problem = f"GPU {gpu} of the run's own process is not free: in {timeout_s:g} s Ray has given out {free} here"
        remedy = "end what uses it, or submit the run as a Ray job with a GPU of its own (--entrypoint-num-gpus 1)"
        raise UserError(KEY, problem, got=gpu, remedy=remedy) from None


def check_address(address: str) -> None:
    """Refuses what cannot be the address of a cluster, and an address at which nothing listens."""
    if address == "auto":
        return
    if address.startswith("ray://"):
        problem = "is one of Ray Client, whose processes are not machines of the cluster"
        remedy = "give the address of its head, <host>:6379, and start the run on a machine of the cluster"
        raise UserError(KEY, problem, got=address, remedy=remedy)
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(KEY, "is no address", got=address, remedy="use auto, or <host>:<port> as `ray start` prints it")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        problem = f"no Ray answers there ({error.strerror or error})"
        raise UserError(KEY, problem, got=address, remedy=_START_ONE) from None


def check_joinable(address: str) -> None:
    """Refuses the address of a cluster that a process of its own cannot join.

    Ray may wait for minutes or abort. It can do so in that process; here it could not be stopped.
    """
    check_address(address)
    command = [sys.executable, "-c", _TRY_IT, address]
    try:
        tried = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        problem = f"no Ray has answered there in {ANSWER_S:g} s"
        raise UserError(KEY, problem, got=address, remedy=_START_ONE) from None
    if tried.returncode:
        # Why a token is refused is only in what Ray logs.
        logged = tried.stderr.strip().splitlines()[-1:]
        raise _not_joined(
            address, "; ".join([*filter(None, [tried.stdout]), *logged]) or f"exit code {tried.returncode}"
        )


def _not_joined(address: str, said: str) -> UserError:
    problem = f"Ray cannot join a cluster there ({' '.join(said.split())[:500]})"
    return UserError(KEY, problem, got=address, remedy=_START_ONE)


_START_ONE = (
    "start one (`ray start --head`) with the Ray and Python of this process, give its address and its token "
    "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN), or use cluster=local"
)

_TRY_IT = """
import os
import sys
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=50)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
os._exit(0)  # whatever Ray does at the end of an interpreter says nothing of the cluster
"""


def _connect(address: str, log: Path) -> None:
    """Makes this process a driver of the cluster, and keeps its signal handlers, of which Ray replaces SIGTERM's."""
    import ray
    import ray._private.worker
    from ray.exceptions import RayError

    def write(message: dict[str, Any], **_: Any) -> None:
        with suppress(OSError):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in message["lines"])

    # Ray prints its messages about dead workers among the output of the run, log_to_driver=False or not.
    ray._private.worker.print_to_stdstream = write

    with interrupt.handlers_kept():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, RuntimeError, ConnectionError, ValueError) as error:
            raise _not_joined(address, str(error)) from None


# -- workers -----------------------------------------------------------------------------------------------------------
LOG_S = 20.0  # seconds that another machine may take to hand over the end of a log
COPY_EVERY_S = 5.0
"""Seconds between copies of the logs of other machines' workers, so that they survive the loss of a machine."""
PART_BYTES = 2**20


class RayActors:
    """A `Launcher` of actors of the Ray cluster at this address (`auto` or `host:port`), which this process joins.

    The actors' logs are in `<folder>/cluster/`, and in `ray.log` there Ray's messages about its processes.

    Raises UserError: there is no cluster, it does not answer, or does not let this process join it.
    """

    def __init__(self, folder: Path, address: str) -> None:
        check_installed()
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        self._logs = folder.absolute() / LOGS
        self._workers: list[RayWorker] = []
        self._readers: dict[str, Any] = {}
        self._holder: Any = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # Making an answer may wait for another machine's log, for which Ray's own thread must not wait.
        self._answers = ThreadPoolExecutor(4, "rlft-ray-answers")
        try:
            check_joinable(address)
            _connect(address, self._logs / "ray.log")
            import ray

            self.node: str = ray.get_runtime_context().get_node_id()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._copy_logs, name="rlft-copy-logs", daemon=True).start()

    @property
    def resources(self) -> Resources:
        import ray

        nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus, gpus = sum(node.get("CPU", 0.0) for node in nodes), [int(node.get("GPU", 0)) for node in nodes]
        return Resources(cpus=cpus, gpus=gpus)

    def reserve(self, gpu: str) -> bool:
        """Keeps this process's GPU from being given to others, until `close`; whether it is one of the cluster's.

        Raises UserError: others may use it.
        """
        if is_of_a_job(os.environ):
            return True  # Ray has given it to this process
        self._holder = reserve(gpu, self.node)
        return self._holder is not None

    @property
    def address(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    def start(self, spec: WorkerSpec) -> RayWorker:
        if self._closing.is_set():
            raise WorkerError(f"{spec.name} was not started: the run is ending")
        self._logs.mkdir(parents=True, exist_ok=True)
        worker = RayWorker(spec, self._logs / f"{spec.name}.log", self)
        self._workers.append(worker)
        return worker

    def share(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def close(self) -> None:
        import ray

        self._closing.set()
        for worker in list(self._workers):
            worker.kill()
        self._answers.shutdown(wait=False)
        self._workers.clear()
        if ray.is_initialized():
            ray.shutdown()

    # -- logs ----------------------------------------------------------------------------------------------------------
    def later(self, work: Any, *args: Any) -> None:
        """Does the work in a thread that may wait, or at once after `close`."""
        try:
            self._answers.submit(work, *args)
        except RuntimeError:
            work(*args)

    def log_reader_on(self, node: str) -> Any:
        """The actor that reads logs of this machine."""
        with self._lock:
            if node not in self._readers:
                self._readers[node] = actor_on(node, LogReader, runtime_env=_runtime_environment({}))
            return self._readers[node]

    def _copy_logs(self) -> None:
        while not self._closing.wait(COPY_EVERY_S):
            for worker in list(self._workers):
                worker.copy_log()


class RayWorker:
    """A `Worker`, whose protocol says what its methods do."""

    def __init__(self, spec: WorkerSpec, log: Path, launcher: RayActors) -> None:
        import ray

        self.name, self._log, self._launcher = spec.name, log, launcher
        self._lock, self._copying = threading.Lock(), threading.Lock()
        self._ended: str | None = None  # how it ended, as the message of a WorkerError
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
            spec.name, str(log), launcher.node, paths
        )
        with log.open("a", encoding="utf-8") as file:
            size = f"{counted(spec.gpus, 'GPU', 'g')} and {counted(cpus, 'core')}"
            file.write(f"{spec.name}: Ray is asked for a process with {size}\n")
        self._actor.place.remote().future().add_done_callback(self._placed)
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
        if self._ended is None and self.place is not None and self.place.node == self._launcher.node:
            # Ray gives a process that is stopped or stuck some seconds to answer first.
            kill_group(self.place.pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.place.pid, signal.SIGKILL)
        with suppress(Exception):  # Ray may have ended
            ray.kill(self._actor, no_restart=True)

    def copy_log(self) -> None:
        """Adds to the copy what it lacks of a log on another machine; nothing if that machine does not answer."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        if self._ended or self.place is None or self.place.node == self._launcher.node:
            return
        if self._launcher._closing.is_set() or not ray.is_initialized():
            return  # asking Ray would wait for it, or after `close` join a cluster again
        with self._copying, suppress(RayError, GetTimeoutError, OSError):
            reader = self._launcher.log_reader_on(self.place.node)
            part: Any
            while part := ray.get(
                reader.read.remote(self.place.log, self._log.stat().st_size, PART_BYTES), timeout=LOG_S
            ):
                with self._log.open("ab") as file:
                    file.write(part)

    def _placed(self, done: Future[Any]) -> None:
        with suppress(Exception):
            self.place = Place(*done.result())
            if self.place.node != self._launcher.node:
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
    """Sets variables before Python starts; rlft, unless it is installed, is found if machines have the same folders."""
    import rlft

    folder = str(Path(rlft.__file__).parents[1])
    added = [] if folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else [folder]
    path = os.pathsep.join(path for path in (*added, os.environ.get("PYTHONPATH", "")) if path)
    return {"env_vars": {"PYTHONPATH": path, **variables}}
