"""The Ray cluster that a run joins, and leaves running. Ray is imported late, here and in `ray_actors.py`."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlft.system.process import signals
from rlft.system.process.placement import Resources
from rlft.system.terminal import pip_install
from rlft.types import UserError

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


class RaySession:
    """A connection of this process to a Ray cluster (`auto` or `host:port`), which `close` ends.

    `log` is the file for Ray's messages about its processes, which Ray would print.

    Raises UserError: there is no cluster, it does not answer, or does not let this process join it.
    """

    def __init__(self, address: str, *, log: Path) -> None:
        check_installed()
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        self._holder: Any = None
        try:
            check_joinable(address)
            _connect(address, log)
            import ray

            self.node: str = ray.get_runtime_context().get_node_id()
        except BaseException:
            self.close()
            raise

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

    def close(self) -> None:
        """Ends the connection. Safe to call twice."""
        import ray

        if ray.is_initialized():
            ray.shutdown()


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
            with contextlib.suppress(Exception):  # Ray may have ended
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
        with contextlib.suppress(OSError):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in message["lines"])

    # Ray prints its messages about dead workers among the output of the run, log_to_driver=False or not.
    ray._private.worker.print_to_stdstream = write

    with signals.kept():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, RuntimeError, ConnectionError, ValueError) as error:
            raise _not_joined(address, str(error)) from None


def python_path() -> str:
    """PYTHONPATH for processes that import this rlft: it includes rlft's folder, unless rlft is installed."""
    import rlft

    folder = str(Path(rlft.__file__).parents[1])
    added = [] if folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else [folder]
    return os.pathsep.join(path for path in (*added, os.environ.get("PYTHONPATH", "")) if path)
