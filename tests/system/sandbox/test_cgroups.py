"""Where memory cgroups can be made: folders as the kernel shows them, made up; and what is here, tried for real."""

import os
import stat
import subprocess
import sys
import time

import pytest

from rlft.system.sandbox import bubblewrap, cgroups, trials
from rlft.system.sandbox.cgroups import Folder, Scope, folders, limits_memory, sweep

MEBI = 2**20


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Makes a cgroup file system with a group of this process: `kernel(version, own path, {group: controllers})`."""

    def make(version, own, controllers, mounted="/"):
        root = tmp_path / f"cgroup{version}"
        for group, names in controllers.items():
            folder = root / group
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cgroup.procs").touch()
            (folder / "cgroup.subtree_control").write_text(names)
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
        mounts = ["22 1 0:5 / /proc rw - proc proc rw", f"30 24 0:26 {mounted} {root} rw,nosuid shared:9 - {kind}"]
        (tmp_path / "mountinfo").write_text("\n".join(mounts))
        (tmp_path / "own").write_text(f"0::{own}\n" if version == 2 else f"4:memory:{own}\n0::/elsewhere\n")
        monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mountinfo")
        monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
        return root

    return make


def test_a_delegated_group_beside_our_own_is_taken(kernel):
    root = kernel(
        2,
        "/user.slice/app.slice/rlft.scope",
        {"user.slice/app.slice": "cpu memory", "user.slice/app.slice/rlft.scope": ""},
    )
    assert list(folders()) == [Folder(root / "user.slice/app.slice", 2)]


def test_a_group_without_the_memory_controller_is_not_taken(kernel):
    kernel(2, "/app/rlft", {"app": "cpu pids", "app/rlft": ""})
    assert list(folders()) == []


def test_nothing_above_what_is_mounted_is_taken(kernel, tmp_path):
    root = kernel(2, "/box/rlft", {".": "memory"}, mounted="/box/rlft")
    (tmp_path / "cgroup.procs").touch()
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    assert list(folders()) == [Folder(root, 2)]


def test_version_1_groups_are_made_below_our_own(kernel):
    root = kernel(1, "/job/1", {"job/1": ""})
    assert list(folders()) == [Folder(root / "job/1", 1)]


def test_a_machine_without_cgroups_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "none")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "none")
    assert list(folders()) == []


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (2, {"memory.max": str(64 * MEBI), "memory.swap.max": "0"}),
        (1, {"memory.limit_in_bytes": str(64 * MEBI), "memory.memsw.limit_in_bytes": str(64 * MEBI)}),
    ],
)
def test_a_group_has_its_limit_before_a_command_joins_it(version, files, tmp_path, monkeypatch):
    made, really_mkdir = [], cgroups.Path.mkdir

    def mkdir(self):
        really_mkdir(self)
        for name in files:
            (self / name).touch()
        made.append(self)

    monkeypatch.setattr(cgroups.Path, "mkdir", mkdir)
    monkeypatch.setattr(cgroups, "remove", lambda folder: None)
    with Folder(tmp_path, version).limited(64 * MEBI) as before:
        (group,) = made
        assert group.parent == tmp_path
        assert {name: (group / name).read_text() for name in files} == files
        done = subprocess.run([*before, "echo", "a b", "c"], capture_output=True, text=True, check=True)
        assert done.stdout == "a b c\n"
        assert int((group / "cgroup.procs").read_text()) > 1


def test_a_command_that_cannot_join_does_not_run(tmp_path):
    command = ["/bin/sh", "-c", cgroups.JOIN, str(tmp_path / "none" / "cgroup.procs"), "echo", "ran"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode != 0) == ("", True)


def test_a_place_that_limits_nothing_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "remove", lambda folder: None)
    assert not limits_memory(Folder(tmp_path, 2))


@pytest.fixture
def fresh_look():
    cgroups.available.cache_clear()
    yield
    cgroups.available.cache_clear()


SYSTEMD_RUN = """#!{python}
import os, resource, sys
options = sys.argv[1 : sys.argv.index("--")]
(limit,) = [o.removeprefix("--property=MemoryMax=") for o in options if "MemoryMax" in o]
assert options[0] in ("--user", "--system") and {{"--scope", "--property=MemorySwapMax=0"}} <= set(options), options
if {works}:
    resource.setrlimit(resource.RLIMIT_AS, (int(limit) + 2**25, int(limit) + 2**25))
command = sys.argv[sys.argv.index("--") + 1 :]
os.environ["INVOCATION_ID"] = "1"
os.execvp(command[0], command)
"""


@pytest.mark.usefixtures("fresh_look")
@pytest.mark.parametrize("works", [True, False])
def test_systemd_is_asked_first_and_believed_only_where_its_limit_holds(works, tmp_path, monkeypatch, kernel):
    program = tmp_path / "systemd-run"
    program.write_text(SYSTEMD_RUN.format(python=sys.executable, works=works))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    kernel(2, "/", {".": ""})
    monkeypatch.setattr(cgroups.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(cgroups, "scopes", lambda: iter([Scope("--user")]))
    assert cgroups.available() == (Scope("--user") if works else None)


def test_a_scope_leaves_no_variable_of_systemds_in_the_sandbox(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    with Scope("--user").limited(MEBI) as before:
        assert before[:2] == ["/usr/bin/env", "XDG_RUNTIME_DIR=/run/user/1000"]
        assert before[-7:] == [
            *("/usr/bin/env", "-u", "XDG_RUNTIME_DIR", "-u", "DBUS_SESSION_BUS_ADDRESS", "-u", "INVOCATION_ID"),
        ]


def test_old_groups_without_processes_are_swept(tmp_path):
    old, young, busy = (tmp_path / f"rlft-{name}" for name in ("old", "young", "busy"))
    for folder in (old, young, busy):
        folder.mkdir()
    (busy / "process").touch()
    for folder in (old, busy):
        os.utime(folder, (0, time.time() - cgroups.ABANDONED_S - 1))
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == [busy, young]


def test_no_program_holds_more_shared_memory_than_all_its_limits_together(monkeypatch):
    """One that tries is killed by the cgroup, where there is one here; else it finds no such system call."""
    if cgroups.available() is not None:
        monkeypatch.setattr(bubblewrap, "system_call_filter", lambda: None)
    limits = bubblewrap.Limits(
        seconds=20.0, cpu_seconds=10, memory_bytes=96 * MEBI, output_bytes=MEBI, processes=2, file_bytes=16 * MEBI
    )
    script = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
for _ in range(int(sys.argv[1])):
    segment = libc.shmget(0, 2**20, 0o1600)
    assert segment != -1
    address = libc.shmat(segment, None, 0)
    ctypes.memset(address, 1, 2**20)
    libc.shmdt(ctypes.c_void_p(address))
print("held")
"""
    # 2 x 96 + 16 = 208 MiB are allowed.
    assert limits.total_bytes == 208 * MEBI
    result = bubblewrap.run({"script.py": script}, ["script.py", "240"], limits, trials.available()[0])
    assert result.stdout == ""
    assert result.exit_code not in (0, None)
