"""Runs an untrusted Python script, isolated by bubblewrap and with limits, and ends it in time with all its children.

A script has access to Python's standard library, /usr and /lib read-only, /dev/null, /dev/zero and /dev/urandom, its
own files read-only, and an empty /tmp in memory, whose size and number of files are limited. It has no access to the
network, /etc, any home folder (even if Python itself is in one), /proc, other processes, the environment, privileges,
or system calls that Python programs do not need. This relies only on what bubblewrap and the kernel enforce: namespaces
for files, network, processes and IPC, `no_new_privs`, resource limits and the system-call filter, which are all set
before the script's first instruction (launch.py).

Memory has one bound: resource limits bound the address space of each process and the number of processes, and the
filter leaves no way to hold memory outside of them (System V shared memory, memfds, descriptors in flight). A trial
says whether that holds on this machine (`memory_bound`). The kernel's own memory comes on top: for each process 14 MiB
in the buffers of 64 pipes and socket pairs, and page tables of at most twice its address space, if each of its pages is
as far from the others as can be.

RLIMIT_NPROC, the process limit, never binds for the kernel's user 0, not even in a user namespace. So there are two
ways: a user's bubblewrap makes a user namespace, in which processes are counted separately; root's bubblewrap makes
none, and the script gets a user id that nobody else has. `available` tries them and trusts no version number.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import secrets
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from rlft.system import interrupt
from rlft.system.locks import owned_folder, sweep
from rlft.system.process.running_time import TICK_S, RunningTime, is_stopped
from rlft.system.sandbox import launch
from rlft.types import UserError, require

PYTHON_FLAGS = ("-I", "-S", "-X", "utf8")  # standard library only, whatever else is installed
FIRST_USER, NUM_USERS = 2**30, 2**28  # far above what systems give to people and to containers
MAX_MESSAGE_BYTES = 2000
OF_ROOT = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID")
"""The capabilities that launch.py needs where root has started bubblewrap."""

LAUNCH = Path(launch.__file__).read_text(encoding="utf-8")
FILE_BYTES = 4096  # /tmp may hold one file for this many bytes of its size
MIN_FILES = 256


class SandboxError(RuntimeError):
    """The sandbox itself failed, for which the script is not to blame."""


class Isolation(StrEnum):
    """How scripts are isolated from the machine."""

    user = "user"
    root = "root"
    none = "none"

    @property
    def sentence(self) -> str:
        """What isolates scripts, in plain words."""
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
    """What one script may use."""

    # Time, after which it is killed with all its children; it counts while both the script and the process that waits
    # for it may run, and not while they are stopped (SIGSTOP).
    seconds: float
    cpu_seconds: int  # CPU time of each of its processes
    memory_bytes: int  # address space of each process
    # Bytes that it may write to stdout; it is killed if it writes more. stderr is thrown away.
    output_bytes: int
    # Processes and threads at the same time; in a user namespace bubblewrap's first process counts, too. It is not
    # enforced on root's scripts that are not isolated.
    processes: int
    # Size of its temporary folder (of each file, if it is not isolated), which may hold one file for each 4096 bytes.
    file_bytes: int

    @classmethod
    def of(cls, keys: Any, seconds: float) -> Limits:
        """The limits in a section's keys of the same names, but for this time."""
        return cls(seconds=seconds, **{f.name: getattr(keys, f.name) for f in fields(cls) if f.name != "seconds"})

    @property
    def max_files(self) -> int:
        return max(MIN_FILES, self.file_bytes // FILE_BYTES)

    def by_resource(self) -> dict[str, int]:
        """{name in Python's `resource` module: limit}."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_SIGPENDING": 256,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_CORE": 0,
        }


class Reason(StrEnum):
    """Why a script ended: by itself, perhaps by a limit of the kernel, which its exit code shows; or it was killed."""

    exited = "exited"
    deadline = "deadline"
    output = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a script; its `exit_code` is 0 for success, and None if it was killed here."""

    stdout: str
    exit_code: int | None
    reason: Reason


def run(
    files: Mapping[str, str],  # {name: content} of the script's files
    arguments: Sequence[str],  # the script, which is one of the files, and its arguments
    limits: Limits,
    isolation: Isolation,
    stdin: str = "",
    *,
    filtered: bool = True,  # False leaves out the system-call filter
    clock: RunningTime | None = None,  # the clock of `collect`
) -> Result:
    """Runs a script to its end; returns what it prints and how it ends. SandboxError: it could not be started."""
    with _read_only(stdin) as reading:
        streams = {"stdin": reading, "stdout": subprocess.PIPE}
        with running(files, arguments, limits, isolation, **streams, filtered=filtered) as process:
            return collect(process, limits, clock)


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
    filtered: bool = True,
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a script, which ends with the block, as do its children. SandboxError if it could not start.

    Leave the block in the thread that entered it: the kernel ends the process together with that thread.
    """
    isolated = isolation is not Isolation.none
    with contextlib.ExitStack() as stack, tempfile.TemporaryFile() as messages:
        start_reader, start_writer = os.pipe()
        for descriptor in (start_reader, start_writer):
            stack.callback(os.close, descriptor)
        folder = "/files" if isolated else str(stack.enter_context(owned_folder()))
        sources = [stack.enter_context(_read_only(text)).fileno() for text in files.values()] if isolated else []
        if not isolated:
            _write(files, Path(folder))
        settings = {
            "user": FIRST_USER + secrets.randbelow(NUM_USERS) if isolation is Isolation.root else 0,
            "isolated": isolated,
            "limits": limits.by_resource(),
            "max_files": limits.max_files if isolated else 0,
            "seccomp": (system_call_filter() or b"").hex() if isolated and filtered else "",
            "started": start_writer,
            "script": [f"{folder}/{arguments[0]}", *arguments[1:]],
        }
        process = subprocess.Popen(
            [
                *(*prefix(isolation, dict(zip(files, sources, strict=False)), limits), *PYTHON_FLAGS),
                *("-c", LAUNCH, json.dumps(settings)),
            ],
            stdin=stdin,
            stdout=stdout,
            stderr=messages,
            env=environment(isolation, folder),
            cwd="/" if isolated else folder,
            pass_fds=[start_writer, *sources, *pass_fds],
            start_new_session=True,
        )
        try:
            yield process
            ended_by_itself = process.poll() is not None
        finally:
            _end(process)
        if ended_by_itself and not select.select([start_reader], [], [], 0)[0]:
            raise SandboxError(f"a program could not be started in its sandbox ({_tail(messages)})")


def collect(process: subprocess.Popen[bytes], limits: Limits, clock: RunningTime | None = None) -> Result:
    """What a process that was just started writes to stdout, until it ends or exceeds a limit; clock: the caller's."""
    assert process.stdout is not None
    clock, left_s = clock or RunningTime(), limits.seconds
    pieces, size, is_open = [], 0, True

    def result(exit_code: int | None, reason: Reason) -> Result:
        return Result(stdout=b"".join(pieces).decode("utf-8", "replace"), exit_code=exit_code, reason=reason)

    clock.since_last()
    while left_s > 0:
        wait_s = min(left_s, TICK_S)
        if not is_open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return result(process.wait(wait_s), Reason.exited)
        elif select.select([process.stdout], [], [], wait_s)[0]:
            piece = os.read(process.stdout.fileno(), 65536)
            is_open = bool(piece)
            size += len(piece)
            if size > limits.output_bytes:
                return result(None, Reason.output)
            pieces.append(piece)
        passed_s = clock.since_last()
        left_s -= 0.0 if is_stopped(process.pid) else passed_s
    return result(None, Reason.deadline)


def prefix(isolation: Isolation, sources: Mapping[str, int], limits: Limits) -> list[str]:
    """The command line up to the interpreter's flags; `sources` are {name: descriptor with the content} of files.

    They are copied into the sandbox's own memory, so that a killed run leaves nothing on the disk.
    """
    executable = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    if isolation is Isolation.none:
        return [str(executable)]
    return [
        *(shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session"),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *(_as_user() if isolation is Isolation.user else _with_capabilities(*OF_ROOT)),
        *("--ro-bind", "/usr", "/usr", *_system_libraries()),
        *_interpreter(executable.parent.parent),
        *("--perms", "0755", "--dir", "/dev"),
        *(part for name in ("null", "zero", "urandom") for part in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        *("--perms", "0755", "--dir", "/files"),
        *(part for name, fd in sources.items() for part in ("--perms", "0444", "--file", str(fd), f"/files/{name}")),
        *("--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", "/tmp"),
        *("--remount-ro", "/", "--chdir", "/tmp", f"/python/bin/{executable.name}"),
    ]


def environment(isolation: Isolation, folder: str) -> dict[str, str]:
    if isolation is Isolation.none:
        return {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}
    return {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": "/python/lib"}


def _as_user() -> list[str]:
    # A setuid bubblewrap gives a user no capabilities: files in /tmp are then not limited, as `memory_bound` reports.
    program = shutil.which("bwrap")
    setuid = program is not None and os.geteuid() != 0 and Path(program).stat().st_mode & stat.S_ISUID
    capabilities = [] if setuid else _with_capabilities("CAP_SYS_ADMIN")
    return ["--unshare-user", "--uid", "65534", "--gid", "65534", *capabilities]


def _with_capabilities(*names: str) -> list[str]:
    """Options for capabilities that launch.py needs and gives up: to limit files in /tmp, and to change the user id."""
    return ["--cap-drop", "ALL", *(part for name in names for part in ("--cap-add", name))]


def _system_libraries() -> Iterator[str]:
    """Binds of /lib, /lib64 and so on, which are links into /usr on most systems, and of /bin."""
    for path in (*sorted(Path("/").glob("lib*")), Path("/bin")):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


def _interpreter(home: Path) -> Iterator[str]:
    """Binds of Python's programs and libraries at /python, and of nothing else in its folder."""
    yield from ("--perms", "0755", "--dir", "/python")
    for name in ("bin", "lib", "lib64"):
        if (home / name).is_dir():
            yield from ("--ro-bind", str(home / name), f"/python/{name}")


def _write(files: Mapping[str, str], folder: Path) -> None:
    """Writes the files so that the script's user can read them."""
    folder.chmod(0o755)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
        (folder / name).chmod(0o644)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process group; if it is bubblewrap's, the kernel then kills everything in its process namespace."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def _read_only(text: str) -> Iterator[IO[bytes]]:
    """A file without a name that holds the text; it is reopened read-only, so that a script cannot write to it."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "replace"))
        file.flush()
        with Path(f"/dev/fd/{file.fileno()}").open("rb") as reading:
            reading.seek(0)
            yield reading


def _tail(messages: IO[bytes]) -> str:
    messages.seek(0)
    text = messages.read(MAX_MESSAGE_BYTES).decode("utf-8", "replace").strip()
    return text.splitlines()[-1] if text else "it ended without a message"


# -- system calls ------------------------------------------------------------------------------------------------------
FILTERS = Path(__file__).parents[2] / "assets" / "seccomp"
NAMES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")


@functools.cache
def system_call_filter() -> bytes | None:
    """This machine's system-call filter, a BPF program for the kernel; None if there is none (`missing_filter`).

    It is made with libseccomp (scripts/write_seccomp_filters.py), and has 8 bytes for each instruction.
    """
    return None if missing_filter() else (FILTERS / f"{NAMES[platform.machine().lower()]}.bpf").read_bytes()


def missing_filter() -> str | None:
    """Why system calls cannot be filtered here; None if they can."""
    if sys.maxsize < 2**32:
        return "there is no system-call filter for 32-bit Pythons"
    machine = platform.machine().lower()
    if machine not in NAMES:
        return f"there is no system-call filter for {machine}, only for x86_64 and aarch64"
    if not ACTIONS.is_file():
        return "this kernel filters no system calls"
    return None


# -- what works here, found out by trials ------------------------------------------------------------------------------
TRIAL_LIMITS = Limits(
    seconds=10.0, cpu_seconds=5, memory_bytes=2**29, output_bytes=2**20, processes=4, file_bytes=2**22
)

# Both trials print a line for each attempt that did not fail.
ATTEMPTS = """
import ctypes, os, socket, time
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)

def tell(what, attempt):
    try:
        if attempt() != -1:
            print(what)
    except OSError:
        pass
"""

# What must fail in the sandbox, as `available` tries it.
TRIAL = f"""{ATTEMPTS}
def fork_ten():
    for _ in range(10):
        if os.fork() == 0:
            time.sleep(60)

# Connecting a datagram socket sends nothing: it only looks for a route.
tell("the network can be reached", lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("192.0.2.1", 9)))
tell("/etc/passwd can be read", Path("/etc/passwd").read_bytes)
tell("/proc can be read", lambda: os.listdir("/proc"))
tell("the root folder can be written to", Path("/rlft-trial").touch)
tell("the file space is not limited", lambda: [Path(f"/tmp/{{i}}").write_bytes(bytes(2**20)) for i in range(8)])
tell("processes are not limited", fork_ten)
# A mount namespace takes a capability, where namespaces are not forbidden at all.
tell("namespaces can be made", lambda: libc.unshare(0x20000))
tell("file systems can be mounted", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
if os.getppid() != 1:
    print("it has no process namespace of its own")
if os.getuid() == 0:
    print("it is root")
"""

# Tries to hold memory that no resource limit counts, for `memory_bound`.
MEMORY_TRIAL = f"""{ATTEMPTS}
def send_descriptor():
    here, there = socket.socketpair()
    return socket.send_fds(here, [b"x"], [0])

def make_files():
    for i in range(int(FILES) + 1):
        Path(f"/tmp/{{i}}").touch()

tell("System V shared memory", lambda: libc.shmget(0, 4096, 0o1600))
tell("memfds", lambda: getattr(os, "memfd_create", lambda _: -1)("trial"))  # not every C library has it
tell("descriptors in flight", send_descriptor)
tell("any number of files", make_files)
"""


@functools.cache
@interrupt.undisturbed
def memory_bound() -> tuple[bool, str]:
    """(whether the memory of programs is bounded in the available isolation, found out by a trial; that in words)."""
    isolation, _ = available()
    unbounded = ["memory of every kind"]
    if isolation is not Isolation.none:
        files = {"trial.py": MEMORY_TRIAL.replace("FILES", repr(TRIAL_LIMITS.max_files))}
        result = run(files, ["trial.py"], TRIAL_LIMITS, isolation)
        if result.exit_code != 0:
            raise SandboxError("the trial of what memory can be held failed")
        unbounded = result.stdout.splitlines()
    if not unbounded:
        return True, "all memory is bounded by resource limits and a system-call filter"
    return False, f"memory is NOT bounded: {', '.join(unbounded)} can be held besides what processes are limited to"


@functools.cache
@interrupt.undisturbed
def available() -> tuple[Isolation, str]:
    """(the isolation that works here, found out by a trial; its description, or for `none` why none works)."""
    sweep()
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
    """What a script that tries to escape achieves, or why no script runs at all; None if it achieves nothing.

    It runs without the system-call filter: bubblewrap has to be sufficient by itself.
    """
    try:
        result = run({"trial.py": TRIAL}, ["trial.py"], TRIAL_LIMITS, isolation, filtered=False)
        run({"trial.py": ""}, ["trial.py"], TRIAL_LIMITS, isolation)  # fails if the kernel does not take the filter
    except SandboxError as error:
        return str(error)
    if result.exit_code != 0:
        return "the trial program failed"
    return ", ".join(result.stdout.split("\n")[:-1]) or None


class Required(StrEnum):
    """What is required to run programs: isolation, or isolation with all memory bounded."""

    standard = "standard"
    strict = "strict"


INSTALL = (
    "install bubblewrap 0.7 or newer (apt install bubblewrap, dnf install bubblewrap; a container "
    "must allow user namespaces)"
)


def check_isolation(required: Required, *, allow_unsafe: bool) -> None:
    """Refuses to run programs here without the required isolation, by the key `isolation` or `allow_unsafe`.

    `strict` also refuses if memory is not bounded, and has priority over `allow_unsafe`, which lets programs run with
    this user's rights if no isolation works.
    """
    isolation, what = available()
    strict = required is Required.strict
    if isolation is Isolation.none and (strict or not allow_unsafe):
        raise UserError(
            "isolation" if strict else "allow_unsafe",
            f"programs that a model wrote would run unisolated here ({what})",
            got=required.value if strict else "false",
            remedy=f"{INSTALL}, or set "
            + ("isolation=standard and allow_unsafe=true" if strict else "it to true")
            + " where nothing can be lost",
        )
    if strict:
        is_bounded, what = memory_bound()
        remedy = (
            "run on x86_64 or aarch64, with a kernel that filters system calls and a bubblewrap that is not setuid, "
            "or set it to standard"
        )
        require(is_bounded, "isolation", what, got=required.value, remedy=remedy)
