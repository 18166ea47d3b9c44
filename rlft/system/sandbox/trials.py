"""What isolates programs here and bounds their memory, found out by trials; and what a run requires of both."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from enum import StrEnum

from rlft.system.locks import sweep
from rlft.system.process import signals
from rlft.system.sandbox.bubblewrap import Isolation, Limits, SandboxError, run
from rlft.types import UserError, require

TRIAL_LIMITS = Limits(
    seconds=10.0, cpu_seconds=5, memory_bytes=2**29, output_bytes=2**20, processes=4, file_bytes=2**22
)

# What must fail in the sandbox, as `available` tries it: each line of the output is something that did not fail.
TRIAL = """
import ctypes, os, socket, time
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)

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

def call(function, *arguments):
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno())

def make_namespace():  # a mount namespace takes a capability, where namespaces are not forbidden at all
    call(libc.unshare, 0x20000)

def mount():
    call(libc.mount, b"none", b"/tmp", b"tmpfs", 0, None)

# Connecting a datagram socket sends nothing: it only looks for a route.
tell("the network can be reached", lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("192.0.2.1", 9)))
tell("/etc/passwd can be read", Path("/etc/passwd").read_bytes)
tell("/proc can be read", lambda: os.listdir("/proc"))
tell("the root folder can be written to", Path("/rlft-trial").touch)
tell("the file space is not limited", lambda: [Path(f"/tmp/{i}").write_bytes(bytes(2**20)) for i in range(8)])
tell("processes are not limited", fork_ten)
tell("namespaces can be made", make_namespace)
tell("file systems can be mounted", mount)
if os.getppid() != 1:
    print("it has no process namespace of its own")
if os.getuid() == 0:
    print("it is root")
"""

# Tries to hold memory that no resource limit counts, for `memory_bound`: each line of the output is a success.
MEMORY_TRIAL = """
import ctypes, os, socket
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)

def tell(what, attempt):
    try:
        if attempt() != -1:
            print(what)
    except (AttributeError, OSError):  # Python has no function of a name that its C library lacks
        pass

def send_descriptor():
    here, there = socket.socketpair()
    return socket.send_fds(here, [b"x"], [0])

def make_files():
    for i in range(int(FILES) + 1):
        Path(f"/tmp/{i}").touch()

tell("System V shared memory", lambda: libc.shmget(0, 4096, 0o1600))
tell("memfds", lambda: os.memfd_create("trial"))
tell("descriptors in flight", send_descriptor)
tell("any number of files", make_files)
"""


@functools.cache
@signals.undisturbed
def memory_bound() -> tuple[bool, str]:
    """(whether the memory of programs is bounded in the available isolation, found out by a trial; that in words)."""
    isolation, _ = available()
    if isolation is Isolation.none:
        return _bound_of("memory of every kind")
    result = run(
        {"trial.py": MEMORY_TRIAL.replace("FILES", repr(TRIAL_LIMITS.max_files))}, ["trial.py"], TRIAL_LIMITS, isolation
    )
    if result.exit_code != 0:
        raise SandboxError("the trial of what memory can be held failed")
    return _bound_of(*result.stdout.split("\n")[:-1])


def _bound_of(*unbounded: str) -> tuple[bool, str]:
    """As `memory_bound`, by the kinds of memory that programs can hold beside that of their processes."""
    if not unbounded:
        return True, "all memory is bounded by resource limits and a system-call filter"
    return False, f"memory is NOT bounded: {', '.join(unbounded)} can be held besides what processes are limited to"


@functools.cache
@signals.undisturbed
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
