"""The Ray that a run uses: either started here for this run alone, or one that runs already and is joined.

Ray is imported late, here and in `ray_actors.py`: `cluster=local` does not need it.

A Ray that is started here is held by a process of its own, the keeper (`main`), which ends all of it once the run has
ended, in any way. It serves the connection whose descriptor is its only argument: it receives the arguments of
`ray.init`, starts Ray, and sends its address. The end of the connection is the end of the run. It leads a session
(setsid) of its own, to which all of Ray's processes belong: neither Ctrl-C nor a closed terminal reaches them, and none
is missed at the end. If the keeper itself is killed, the kernel ends Ray's servers with it, as Ray has requested, and
they end their workers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from rlft.system.process import signals
from rlft.system.process.child import END_S
from rlft.system.process.member import last_lines
from rlft.system.process.placement import Resources
from rlft.system.terminal import pip_install
from rlft.types import UserError

START_S = 120.0
"""Seconds that starting Ray here may take; it takes about eight on two busy cores."""
POLL_S = 1.0
"""Seconds between two looks of the keeper whether the run lives."""
ANSWER_S = 60.0
"""Seconds that a cluster which is joined may take to answer."""
CONNECT_S = 10.0
"""Seconds that its machine may take to accept a connection."""
OBJECT_STORE_BYTES = 2**30
"""Shared memory of a Ray that is started here, for adapters and completions that are sent; it is taken as needed."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_COLOR_PREFIX": "0",
}
"""Environment variables that are set before Ray is imported, unless the user has set them."""
RESERVE_S = 60.0
"""Seconds that Ray may take to assign a GPU."""
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
SEES_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
KEY = "cluster.address"


def check_installed() -> None:
    """UserError where the extra `ray` is not installed."""
    try:
        missing = importlib.util.find_spec("ray") is None
    except ValueError:  # a module without a spec has this name
        missing = True
    if missing:
        remedy = f"{pip_install('rlft[ray]')}, or use cluster=local"
        raise UserError("cluster.kind", "Ray is not installed", got="ray", remedy=remedy)


class RaySession:
    """A connection of this process to Ray, which `close` ends, together with the Ray that was started for it.

    Args:
        address: None starts Ray on this machine; else `auto` or `host:port` of a cluster, which stays up.
        log: the file for Ray's messages about its processes, which Ray would print.

    Raises UserError: there is no cluster, it does not answer, or has another version of Ray or Python.
    """

    def __init__(self, address: str | None, *, log: Path) -> None:
        check_installed()
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        self.started_here = address is None
        self._keeper = _Keeper() if address is None else None
        self._holder: Any = None
        try:
            if self._keeper is not None:
                cluster_address = self._keeper.address
            else:
                assert address is not None
                cluster_address = resolved_address(address)
            _connect(cluster_address, log)
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
        """Ends the connection, and what was started here. Safe to call twice."""
        import ray

        if ray.is_initialized():
            with _bounded(END_S):
                ray.shutdown()
        if self._keeper is not None:
            self._keeper.close()


class Holder:
    """An actor that has a GPU, and does nothing with it."""

    def gpu(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def is_of_a_job(environment: Mapping[str, str]) -> bool:
    """Whether this process is the entrypoint of a Ray job that has GPUs of its own (`--entrypoint-num-gpus 1`)."""
    return JOB in environment and SEES_ALL not in environment and bool(environment.get("CUDA_VISIBLE_DEVICES"))


def reserve(gpu: str, node: str, timeout_s: float = RESERVE_S) -> Any | None:
    """The actor that holds this GPU; None if Ray has no such GPU on this machine to give out.

    Args:
        gpu: as CUDA_VISIBLE_DEVICES names it.
        node: Ray's id of this machine.
        timeout_s: seconds that Ray may take to assign a GPU.

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


def resolved_address(address: str) -> str:
    """The address (host:port) of the cluster, which a process of its own has connected to.

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
    answer = next((line for line in reversed(tried.stdout.splitlines()) if line.startswith("{")), None)
    if answer is None:
        last_line = tried.stderr.strip().splitlines()[-1:] or [f"exit code {tried.returncode}"]
        raise UserError(KEY, f"no Ray answers there ({last_line[0][:200]})", got=address, remedy=_START_ONE)
    reply: dict[str, str] = json.loads(answer)
    if "problem" in reply:
        token_errors = [line for line in tried.stderr.splitlines() if "InvalidAuthToken" in line]
        refuse(address, (token_errors or [reply["problem"]])[-1])
    return reply["address"]


def refuse(address: str, problem: str) -> NoReturn:
    """Raises the UserError for Ray's error about an address."""
    if "ersion mismatch" in problem:
        lines = [line.strip() for line in problem.splitlines() if "Ray:" in line or "Python:" in line]
        remedy = "install the cluster's versions here, or this machine's on the cluster"
        raise UserError(KEY, f"the cluster has other versions than this process ({', '.join(lines)})", got=address,
                        remedy=remedy)  # fmt: skip
    if "AuthToken" in problem or "AuthenticationError" in problem:
        remedy = "give the cluster's token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        raise UserError(KEY, "the cluster does not let this process in", got=address, remedy=remedy)
    raise UserError(KEY, f"no Ray answers there ({problem.strip().splitlines()[0][:200]})", got=address,
                    remedy=_START_ONE)  # fmt: skip


_START_ONE = "start one (`ray start --head`), give its address, or set cluster.address=null to start Ray here"

_TRY_IT = """
import json, sys
import ray
try:
    context = ray.init(address=sys.argv[1], log_to_driver=False, logging_level=50)
    reply = {"address": context.address_info["gcs_address"]}
except Exception as error:
    reply = {"problem": f"{type(error).__name__}: {error}"}
print(json.dumps(reply), flush=True)
"""


def _connect(address: str, log: Path) -> None:
    """Makes this process a driver of the cluster, and keeps its signal handlers, of which Ray replaces SIGTERM's."""
    import ray
    import ray._private.worker

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
        except (RuntimeError, ConnectionError, ValueError) as error:
            refuse(address, str(error))


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Prints a line to stderr if ending the connection inside takes longer; then nothing can be saved any more."""
    timer = threading.Timer(seconds, os.write, [2, b"rlft: Ray does not end its connection; still waiting\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def python_path() -> str:
    """PYTHONPATH for processes that import this rlft: it includes rlft's folder, unless rlft is installed."""
    import rlft

    folder = str(Path(rlft.__file__).parents[1])
    added = [] if folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else [folder]
    return os.pathsep.join(path for path in (*added, os.environ.get("PYTHONPATH", "")) if path)


class _Keeper:
    """The process that holds the Ray which was started here (`main`), and the address of that Ray."""

    def __init__(self) -> None:
        # Others on this machine must not be able to run code as this user through Ray's ports.
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._folder = Path(tempfile.mkdtemp(prefix="rlft-ray-", dir=_short_folder()))
        options = {
            "address": "local",
            "num_cpus": os.cpu_count() or 1,
            "num_gpus": 0,  # members are told which GPUs they have
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(self._folder),
        }
        log = self._folder / "keeper.log"
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        try:
            self.address = self._address(options, log)
        except BaseException:
            self.close()
            raise

    def _address(self, options: dict[str, Any], log: Path) -> str:
        remedy = "use cluster=local, or join a cluster (cluster.address)"
        how = f"has not started in {START_S:g} s"
        with contextlib.suppress(EOFError, OSError):
            self._connection.send(options)
            if self._connection.poll(START_S):
                how = "has ended"
                reply: dict[str, str] = self._connection.recv()
                if "address" in reply:
                    return reply["address"]
                problem = f"Ray does not start on this machine: {reply['problem'][:500]}"
                raise UserError("cluster.kind", problem, got="ray", remedy=remedy)
        problem = f"Ray {how} on this machine; its last lines:\n{last_lines(log)}\n"
        raise UserError("cluster.kind", problem, got="ray", remedy=remedy)

    def close(self) -> None:
        self._connection.close()  # which tells the keeper to end
        try:
            self._process.wait(2 * END_S)
        except subprocess.TimeoutExpired:
            end_session(self._process.pid)
            self._process.kill()
            self._process.wait(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _short_folder() -> str:
    """A folder for Ray's sockets, whose paths may have no more than 107 characters, some 80 of them Ray's own."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 20 else "/tmp"


# -- the process that holds the Ray which was started here -------------------------------------------------------------
def main() -> None:
    connection, parent = Connection(int(sys.argv[1])), os.getppid()
    options: dict[str, Any] = connection.recv()
    for number in signals.ENDING:
        if number != signal.SIGTERM:  # which Ray's processes must not inherit as ignored
            signal.signal(number, signal.SIG_IGN)
    try:
        import ray

        context: Any = ray.init(**options)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has set a handler, but the run may still be saving
        connection.send({"address": context.address_info["gcs_address"]})
        while os.getppid() == parent and not connection.poll(POLL_S):  # until the run has closed its end, or has ended
            pass
    except Exception as error:  # Ray's errors have no common type; the run reports them
        with suppress(OSError):
            connection.send({"problem": f"{type(error).__name__}: {error}"})
    finally:
        end_session(os.getpid())
        shutil.rmtree(options["_temp_dir"], ignore_errors=True)
        os._exit(0)


def end_session(session: int, seconds: float = END_S) -> None:
    """Kills all processes of a session except its leader, also those that start meanwhile; waits for their end."""
    deadline = time.monotonic() + seconds
    while (pids := members_of(session)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def members_of(session: int) -> list[int]:
    """The ids of the live processes of a session, except its leader's."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, _, _, process_session = file.read_text().rpartition(") ")[2].split()[:4]
            if int(process_session) == session and state not in "ZX" and (pid := int(file.parent.name)) != session:
                pids.append(pid)
    return pids


if __name__ == "__main__":
    main()
