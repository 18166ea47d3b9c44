"""Memory cgroups for programs: a limit on all that a program holds, kernel memory and files in memory included.

Where a group can be made is found out by trials, in this order: a systemd scope (by systemd-run, of the user's manager
or the system's), a folder beside or below this process's own in cgroup v2, a folder below its own in cgroup v1.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlft.system.process import signals

MOUNTS, OWN = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
PREFIX = "rlft-"
ABANDONED_S = 60.0  # an older group without a process is abandoned
REMOVE_LIMIT_S = 2.0
TRIAL_BYTES = 64 * 2**20
TRIAL = "import sys; bytearray(int(sys.argv[1]))"
JOIN = 'echo $$ > "$0" && exec "$@"'
SYSTEMD_VARIABLES = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


@dataclass(frozen=True, slots=True)
class Folder:
    """Groups as folders below `parent`, in a cgroup file system of version 1 or 2."""

    parent: Path
    version: int

    @property
    def sentence(self) -> str:
        return f"a cgroup (version {self.version})"

    @contextlib.contextmanager
    def limited(self, memory_bytes: int) -> Iterator[list[str]]:
        """Words to put before a command that limit its memory and its children's; the group ends with the block."""
        folder = self.parent / f"{PREFIX}{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            limit = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            (folder / limit).write_text(str(memory_bytes))
            # Swap is limited separately in version 2, and together with memory in version 1; not every kernel has it.
            swap, swap_limit = (
                ("memory.swap.max", 0) if self.version == 2 else ("memory.memsw.limit_in_bytes", memory_bytes)
            )
            if (folder / swap).exists():
                (folder / swap).write_text(str(swap_limit))
            yield ["/bin/sh", "-c", JOIN, str(folder / "cgroup.procs")]
        finally:
            remove(folder)


@dataclass(frozen=True, slots=True)
class Scope:
    """Groups as systemd scopes; `manager` is --user or --system."""

    manager: str

    @property
    def sentence(self) -> str:
        return "a systemd scope"

    @contextlib.contextmanager
    def limited(self, memory_bytes: int) -> Iterator[list[str]]:
        """Like `Folder.limited`, but systemd removes the group when its last process ends."""
        options = ["--scope", "--quiet", "--collect", f"--property=MemoryMax={memory_bytes}"]
        variables = [f"{name}={os.environ[name]}" for name in SYSTEMD_VARIABLES if name in os.environ]
        yield [
            *("/usr/bin/env", *variables, shutil.which("systemd-run") or "systemd-run", self.manager, *options),
            *("--property=MemorySwapMax=0", "--", "/usr/bin/env"),
            *(part for name in (*SYSTEMD_VARIABLES, "INVOCATION_ID") for part in ("-u", name)),
        ]


Place = Folder | Scope
"""Where groups are made."""


@functools.cache
@signals.undisturbed
def available() -> Place | None:
    """The first place that limits memory in a trial; None if there is none."""
    if not sys.platform.startswith("linux"):
        return None
    for folder in folders():
        sweep(folder.parent)
    return next((parent for parent in (*scopes(), *folders()) if limits_memory(parent)), None)


def scopes() -> Iterator[Scope]:
    """Systemd managers that may be usable here: the system's for root, otherwise the user's."""
    if shutil.which("systemd-run") is None or not Path("/run/systemd/system").is_dir():
        return
    yield Scope("--system" if os.geteuid() == 0 else "--user")


def folders() -> Iterator[Folder]:
    """Folders of cgroup file systems in which this process may make groups that limit memory."""
    for line in _lines(OWN):
        number, controllers, own_path = line.split(":", 2)
        version = 2 if number == "0" else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for root, mounted in _mounts(version):
            if not own_path.startswith(mounted):
                continue
            folder = root / os.path.relpath(own_path, mounted)
            # In version 2 a group that holds processes gives its children no controllers, except for the root group.
            for candidate in [folder] if version == 1 else [folder, folder.parent]:
                if candidate.is_relative_to(root) and _may_make_groups(candidate, version):
                    yield Folder(candidate.resolve(), version)


def limits_memory(parent: Place) -> bool:
    """Whether a program that holds half the limit succeeds, and one that holds twice the limit is killed."""
    try:
        return _exit_code(parent, TRIAL_BYTES // 2) == 0 and _exit_code(parent, 2 * TRIAL_BYTES) != 0
    except (OSError, subprocess.SubprocessError):
        return False


def sweep(parent: Path) -> None:
    """Removes groups that killed runs left; the kernel keeps those that hold a process."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                folder.rmdir()


def remove(folder: Path) -> None:
    """Removes a group once its processes, which have been killed, are gone; one that lives on is left to `sweep`."""
    kill = folder / "cgroup.kill"  # version 2 since Linux 5.14
    if kill.exists():
        with contextlib.suppress(OSError):
            kill.write_text("1")
    deadline, pause = time.monotonic() + REMOVE_LIMIT_S, 0.001
    while time.monotonic() < deadline:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def _exit_code(parent: Place, held_bytes: int) -> int:
    with parent.limited(TRIAL_BYTES) as limiting_words:
        command = [*limiting_words, sys.executable, "-I", "-S", "-c", TRIAL, str(held_bytes)]
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode


def _may_make_groups(folder: Path, version: int) -> bool:
    if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
        return False
    return version == 1 or "memory" in " ".join(_lines(folder / "cgroup.subtree_control")).split()


def _mounts(version: int) -> Iterator[tuple[Path, str]]:
    """(mount point, path inside the hierarchy) of the file systems with the memory controller."""
    for line in _lines(MOUNTS):
        mount_fields, _, file_system_fields = line.partition(" - ")
        kind, _, options = file_system_fields.split(" ", 2)
        path_inside, mount_point = mount_fields.split(" ")[3:5]
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and "memory" in options.split(","):
            yield Path(mount_point), path_inside


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
