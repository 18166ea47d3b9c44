"""What an untrusted Python script prints: isolated by bubblewrap, under limits, ended with all its children in time.

What a script has inside: Python's standard library, /usr and /lib read-only, /dev/null, /dev/zero and /dev/urandom, its
own files read-only, and /tmp, empty, of limited size and in memory. What it has not: the network, /etc, any home folder
(also where Python itself lies in one), /proc, other processes, the environment, privileges. Only what bubblewrap and
the kernel enforce is relied on: namespaces for files, network, processes and IPC, `no_new_privs`, and resource limits
set before the script's first instruction. There is no seccomp filter: the kernel's system calls stay reachable.

RLIMIT_NPROC, the process limit, never binds for the kernel's user 0, not even in a user namespace. So two ways are
known: a user's bubblewrap makes a user namespace, in which processes are counted apart; root's bubblewrap makes none,
and the script gets a user id that nobody else has. `available` tries them for real: it believes no version number.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from rlft.fields import PositiveFloat, PositiveInt

PYTHON_FLAGS = ("-I", "-S", "-X", "utf8")  # standard library only, whatever is installed beside it
FIRST_USER, NUM_USERS = 2**30, 2**28  # far above what systems give to people and to containers
MAX_MESSAGE_BYTES = 2000

# Runs inside: sets user id and limits, says that all is set, and becomes the script. Exits with 1 where one fails.
LAUNCH = """
import builtins, json, os, resource, signal, sys

def prepare(given):
    if given["user"]:
        os.setgroups([])
        os.setresgid(*[given["user"]] * 3)
        os.setresuid(*[given["user"]] * 3)
    for name, limit in given["limits"].items():
        try:
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
        except (AttributeError, ValueError, OSError):
            if given["isolated"]:
                raise
    if not given["isolated"] and sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the parent; bubblewrap sees to it otherwise
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.write(given["started"], b"1")
    os.close(given["started"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

def become(script, names):
    sys.argv[:] = script
    builtins.exit = builtins.quit = sys.exit  # as Python has them where it loads `site`
    with open(script[0], "rb") as file:
        code = compile(file.read(), script[0], "exec")
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names["__file__"] = script[0]
    exec(code, names)

given = json.loads(sys.argv[1])
prepare(given)
become(given["script"], globals())
"""

# What must fail inside, tried by `available`: each line of the output is something that did not.
TRIAL = """
import os, socket, time
from pathlib import Path

def tell(what, attempt):
    try:
        attempt()
        print(what)
    except OSError:
        pass

def fork_ten():
    for _ in range(10):
        if os.fork() == 0:
            time.sleep(60)

# Connecting a datagram socket sends nothing: it only looks for a route.
tell("the network can be reached", lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("192.0.2.1", 9)))
tell("/etc/passwd can be read", Path("/etc/passwd").read_bytes)
tell("/proc can be read", lambda: os.listdir("/proc"))
tell("the root folder can be written to", Path("/rlft-trial").touch)
tell("the file space is not limited", lambda: [Path(f"/tmp/{i}").write_bytes(bytes(2**20)) for i in range(8)])
tell("processes are not limited", fork_ten)
if os.getppid() != 1:
    print("it has no process namespace of its own")
if os.getuid() == 0:
    print("it is root")
"""


class SandboxError(RuntimeError):
    """The sandbox itself failed, which says nothing about the script."""


class Isolation(StrEnum):
    """How scripts are kept apart from the machine."""

    user = "user"
    root = "root"
    none = "none"

    @property
    def sentence(self) -> str:
        """What is active, in plain words."""
        if self is Isolation.none:
            return (
                "NOT isolated: programs run with this user's rights, and reach its files, the network and other "
                "processes; only resource limits and an end of their process group hold"
            )
        how = {"user": "in a user namespace", "root": "under a user id of their own"}[self]
        return (
            f"isolated by bubblewrap {how}: no network, no files but Python's and a temporary folder, no other "
            "processes, an empty environment, limits on time, memory, output and processes"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one script may use.

    seconds: wall time, after which it is killed with all its children. cpu_seconds: CPU time of each of its processes.
    memory_bytes: address space of each process; all together at most so many times `processes`, plus `file_bytes`.
    output_bytes: written to stdout; one byte more and it is killed. stderr is thrown away.
    processes: processes and threads at the same time; in a user namespace bubblewrap's own first one counts too. Not
        enforced on root's scripts where nothing isolates them.
    file_bytes: all that it writes to its temporary folder (each file, where nothing isolates it).
    """

    seconds: PositiveFloat
    cpu_seconds: PositiveInt
    memory_bytes: PositiveInt
    output_bytes: PositiveInt
    processes: PositiveInt
    file_bytes: PositiveInt

    def by_resource(self) -> dict[str, int]:
        """Limits by the names that Python's `resource` module gives them."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }


class Reason(StrEnum):
    """Why a script ended: by itself (or by a limit of the kernel's, which shows in its exit code), or killed by us."""

    exited = "exited"
    deadline = "deadline"
    output = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a script left. exit_code: 0 is success; None of one that was killed here."""

    stdout: str
    exit_code: int | None
    reason: Reason


def run(
    files: Mapping[str, str], arguments: Sequence[str], limits: Limits, isolation: Isolation, stdin: str = ""
) -> Result:
    """What the script `arguments[0]`, one of `files`, prints and how it ends; nothing of it is left running.

    Raises:
        SandboxError: it could not be started.
    """
    with tempfile.NamedTemporaryFile() as given:
        given.write(stdin.encode("utf-8", "replace"))
        given.flush()
        # Opened again, so that the script cannot write to it.
        with (
            Path(given.name).open("rb") as reading,
            running(files, arguments, limits, isolation, stdin=reading, stdout=subprocess.PIPE) as process,
        ):
            return collect(process, limits)


@contextlib.contextmanager
def running(
    files: Mapping[str, str],
    arguments: Sequence[str],
    limits: Limits,
    isolation: Isolation,
    *,
    stdin: Any,
    stdout: Any,
    pass_fds: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a script, which ends with the block, children and all. SandboxError where it could not begin.

    Leave it in the thread that entered it: the kernel ties the process to the life of that thread.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rlft-sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as messages,
        _pipe() as (heard, started),
    ):
        _write(files, Path(folder))
        where = Path(folder) if isolation is Isolation.none else Path("/files")
        given = {
            "user": FIRST_USER + secrets.randbelow(NUM_USERS) if isolation is Isolation.root else 0,
            "isolated": isolation is not Isolation.none,
            "limits": limits.by_resource(),
            "started": started,
            "script": [str(where / arguments[0]), *arguments[1:]],
        }
        process = subprocess.Popen(
            [*prefix(isolation, folder, limits), *PYTHON_FLAGS, "-c", LAUNCH, json.dumps(given)],
            stdin=stdin,
            stdout=stdout,
            stderr=messages,
            env=environment(isolation, folder),
            cwd=folder,
            pass_fds=[started, *pass_fds],
            start_new_session=True,
        )
        try:
            yield process
            ended_by_itself = process.poll() is not None
        finally:
            _end(process)
        if ended_by_itself and not _has_started(heard):
            raise SandboxError(f"a program could not be started in its sandbox ({_tail(messages)})")


def collect(process: subprocess.Popen[bytes], limits: Limits) -> Result:
    """What a process just started writes to its stdout until it ends or goes over a limit."""
    assert process.stdout is not None
    deadline = time.monotonic() + limits.seconds
    pieces, size = [], 0

    def result(exit_code: int | None, reason: Reason) -> Result:
        return Result(stdout=b"".join(pieces).decode("utf-8", "replace"), exit_code=exit_code, reason=reason)

    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(process.stdout.fileno(), 65536)
        if not piece:
            break
        size += len(piece)
        if size > limits.output_bytes:
            return result(None, Reason.output)
        pieces.append(piece)
        if time.monotonic() > deadline:
            break
    try:
        return result(process.wait(max(0.0, deadline - time.monotonic())), Reason.exited)
    except subprocess.TimeoutExpired:
        return result(None, Reason.deadline)


@functools.cache
def available() -> tuple[Isolation, str]:
    """The isolation that works here, tried for real, and what it is; `none` with the reason where there is none."""
    if not sys.platform.startswith("linux"):
        return Isolation.none, f"bubblewrap is a program for Linux, and this is {sys.platform}"
    if shutil.which("bwrap") is None:
        return Isolation.none, "bubblewrap is not installed"
    problems = []
    for isolation in (Isolation.root, Isolation.user) if os.geteuid() == 0 else (Isolation.user,):
        problem = trial(isolation)
        if problem is None:
            return isolation, isolation.sentence
        problems.append(problem)
    return Isolation.none, f"bubblewrap does not isolate here: {problems[0]}"


def trial(isolation: Isolation) -> str | None:
    """What a script that tries to get out achieves, or why none runs at all; None: nothing."""
    mebi = 2**20
    limits = Limits(
        seconds=10.0, cpu_seconds=5, memory_bytes=512 * mebi, output_bytes=mebi, processes=4, file_bytes=4 * mebi
    )
    try:
        result = run({"trial.py": TRIAL}, ["trial.py"], limits, isolation)
    except SandboxError as error:
        return str(error)
    if result.exit_code != 0:
        return "the trial program failed"
    return ", ".join(result.stdout.split("\n")[:-1]) or None


def prefix(isolation: Isolation, folder: str, limits: Limits) -> list[str]:
    """The command line up to the interpreter's flags; `folder` holds the script's files."""
    executable = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    if isolation is Isolation.none:
        return [str(executable)]
    return [
        *(
            shutil.which("bwrap") or "bwrap",
            "--die-with-parent",
            "--new-session",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
        ),
        *("--unshare-uts", "--unshare-cgroup-try"),
        *(_as_user() if isolation is Isolation.user else _as_root()),
        *("--ro-bind", "/usr", "/usr", *_system_libraries()),
        *_interpreter(executable.parent.parent),
        *("--perms", "0755", "--dir", "/dev"),
        *(part for name in ("null", "zero", "urandom") for part in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        *("--ro-bind", folder, "/files"),
        *("--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", "/tmp"),
        *("--remount-ro", "/", "--chdir", "/tmp", f"/python/bin/{executable.name}"),
    ]


def environment(isolation: Isolation, folder: str) -> dict[str, str]:
    """All the environment that a script has."""
    if isolation is Isolation.none:
        return {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}
    return {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": "/python/lib"}


def _as_user() -> list[str]:
    return ["--unshare-user", "--uid", "65534", "--gid", "65534"]


def _as_root() -> list[str]:
    return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def _system_libraries() -> Iterator[str]:
    """Binds of /lib, /lib64 and so on, which are links into /usr on most systems, and of /bin."""
    for path in (*sorted(Path("/").glob("lib*")), Path("/bin")):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


def _interpreter(home: Path) -> Iterator[str]:
    """Binds of Python at /python: its programs and libraries, and nothing that lies beside them."""
    yield from ("--perms", "0755", "--dir", "/python")
    for name in ("bin", "lib", "lib64"):
        if (home / name).is_dir():
            yield from ("--ro-bind", str(home / name), f"/python/{name}")


def _write(files: Mapping[str, str], folder: Path) -> None:
    """The files, readable by the user that the script runs as."""
    folder.chmod(0o755)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
        (folder / name).chmod(0o644)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process group; where it is bubblewrap's, the kernel then kills all in its process namespace."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


def _has_started(heard: int) -> bool:
    return bool(select.select([heard], [], [], 0)[0])


def _tail(messages: IO[bytes]) -> str:
    messages.seek(0)
    text = messages.read(MAX_MESSAGE_BYTES).decode("utf-8", "replace").strip()
    return text.splitlines()[-1] if text else "it ended without a message"
