"""Attempts to get out of the code sandbox, and what stops each: seen to succeed where just that is missing.

All of them run in one sandbox, which stops every one. Then each runs in a sandbox without its bars, and gets out.
"""

import json
import os
import socket
import subprocess

import pytest

from rlft.system.sandbox import bubblewrap
from rlft.system.sandbox.bubblewrap import Isolation, Limits

MEBI = 2**20
LIMITS = Limits(
    seconds=20.0, cpu_seconds=10, memory_bytes=256 * MEBI, output_bytes=MEBI, processes=16, file_bytes=4 * MEBI
)
ISOLATED = [Isolation.root, Isolation.user] if os.geteuid() == 0 else [Isolation.user]
SECRET = "a word that only the host knows"

ATTEMPTS = {
    # -- the network
    "reach a port of the host": (
        'socket.create_connection(("127.0.0.1", goal["port"]), timeout=5)', "network or filter"),
    "reach a socket of the host by its abstract name": (
        'socket.socket(socket.AF_UNIX).connect("\\0" + goal["name"])', "network or filter"),
    "send a datagram to the host": (
        'socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 9))', "network or filter"),
    "listen on a port": ("socket.create_server(('127.0.0.1', 0))", "filter"),
    "talk to the kernel by netlink": ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)", "filter"),
    # -- files
    "read the users": ('Path("/etc/passwd").read_bytes()', "etc"),
    "read a file of the home folder": ('Path(goal["secret"]).read_text()', "home"),
    "list the home folder": ('os.listdir(os.path.dirname(goal["secret"]))', "home"),
    "write to the root folder": ('Path("/new").touch()', "read-only root"),
    "write into its own script": (
        'os.chmod("/files/script.py", 0o600); open("/files/script.py", "a")', "read-only root"),
    "open a device of the host": ('open("/dev/full")', "devices"),
    "keep files in shared memory": ('Path("/dev/shm/new").touch()', "shared memory"),
    "write more than the temporary folder holds": (
        '[Path(f"big{i}").write_bytes(bytes(2**20)) for i in range(6)]', "file space"),
    "make files without end": ('[Path(f"many{i}").touch() for i in range(2000)]', "number of files"),
    # -- other processes
    "kill a process of the host": ('os.kill(goal["victim"], signal.SIGKILL)', "process namespace"),
    "read the command line of a process of the host": (
        'assert b"sleep" in Path(f"/proc/{goal[\'victim\']}/cmdline").read_bytes()', "proc"),
    "read the environment": ('os.environ["RLFT_SECRET"]', "environment"),
    "trace a process": ("call(libc.ptrace, 0, 0, 0, 0)", "filter"),
    "read another process's memory": ("call(libc.process_vm_readv, os.getpid(), 0, 0, 0, 0, 0)", "filter"),
    "attach shared memory of the host": ('call(libc.shmget, goal["key"], 0, 0)', "IPC namespace or filter"),
    # -- privileges
    "make a user namespace": ("call(libc.unshare, 0x10000000)", "filter"),
    "fork into a user namespace": (
        "pid = call(libc.syscall, CLONE, 0x10000011, 0, 0, 0, 0)\nif pid == 0: os._exit(0)", "filter"),
    "mount a file system": ('call(libc.mount, b"none", b"/tmp", b"tmpfs", 0, None)', "capabilities or filter"),
    "make a mount namespace": ("call(libc.unshare, 0x20000)", "capabilities or filter"),
    "rename the machine": ('call(libc.sethostname, b"other", 5)', "capabilities or filter"),
    "change the root folder": ('call(libc.chroot, b"/tmp")', "root privilege or filter"),
    "keep a key in the kernel": ('call(libc.syscall, ADD_KEY, b"user", b"rlft", b"x", 1, -1)', "filter or an error"),
    "load a BPF program": ("call(libc.syscall, BPF, 0, 0, 0)", "filter or an error"),
    "watch the processor's counters": ("call(libc.syscall, PERF_EVENT_OPEN, 0, 0, 0, 0, 0)", "filter or an error"),
    "handle its own page faults": ("call(libc.syscall, USERFAULTFD, 1)", "filter or an error"),
    "make system calls by io_uring": ("call(libc.syscall, 425, 1, 0)", "filter or an error"),
    "change its personality": ("call(libc.personality, 0x0040000)", "filter"),
    # -- memory that no limit counts, and limits
    "hold detached shared memory": ("call(libc.shmget, 0, 2**20, 0o1600)", "filter"),
    "hold memory in memfds": ('os.memfd_create("memory")', "filter"),
    "hold memory in descriptors in flight": (
        "here, there = socket.socketpair(); socket.send_fds(here, [b'x'], [0])", "filter"),
    "hold memory in message queues": ("call(libc.msgget, 0, 0o1600)", "filter"),
    "hold memory in semaphores": ("call(libc.semget, 0, 100, 0o1600)", "filter"),
    "hold memory in large pipes": ("fcntl.fcntl(os.pipe()[1], 1031, 2**20)", "filter"),
    "pin pages in a pipe": ("call(libc.vmsplice, os.pipe()[1], 0, 0, 0)", "filter"),
    "watch files": ("call(libc.inotify_init)", "filter"),
    "take more memory than its limit": ("bytearray(300 * 2**20)", "memory"),
    "open more files than its limit": ("files = [open('/dev/null') for _ in range(100)]", "open files"),
    "fork without end": ("for _ in range(40):\n    if os.fork() == 0: time.sleep(5); os._exit(0)", "processes"),
}  # fmt: skip
"""{attempt: (what a script does, the bars that stop it, any one of them)}

Without its bars it gets out, or with `an error` at least reaches the kernel: some systems tell it to refuse such calls,
while the filter's own answer is that there is no such call.
"""

PREAMBLE = """
import ctypes, errno, fcntl, json, os, platform, signal, socket, sys, time
from pathlib import Path

goal = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
at = 0 if platform.machine() == "x86_64" else 1
CLONE, ADD_KEY, BPF = (56, 220)[at], (248, 217)[at], (321, 280)[at]
PERF_EVENT_OPEN, USERFAULTFD = (298, 241)[at], (323, 282)[at]

def call(function, *arguments):
    # Whole numbers as the kernel's registers hold them: in C they would be 32 bits wide.
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    answer = function(*given)
    if answer == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer

def attempt(name, code):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # what it forks itself is ended with it
        try:
            exec(code, globals())
            answer = "out"
        except OSError as error:
            answer = errno.errorcode[error.errno]
        except (MemoryError, KeyError) as error:
            answer = type(error).__name__
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    answer = os.read(read, 100).decode()
    os.close(read)
    try:
        os.killpg(child, signal.SIGKILL)
    except OSError:
        pass
    os.waitpid(child, 0)
    print(json.dumps([name, answer]), flush=True)
"""


@pytest.fixture(scope="module")
def goal(tmp_path_factory):
    """What attempts are after: a port and a socket that listen, a process, a file, a segment of shared memory."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    secret = tmp_path_factory.mktemp("home") / "secret.txt"
    secret.write_text(SECRET)
    name, key = f"rlft-{os.getpid()}", os.getpid()
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment != -1
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
        subprocess.Popen(["sleep", "60"]) as victim,
    ):
        local.bind(f"\0{name}")
        local.listen()
        words = {"port": server.getsockname()[1], "name": name, "victim": victim.pid, "secret": str(secret), "key": key}
        yield words, victim
        victim.kill()
    libc.shmctl(segment, 0, 0)


def without(*options):
    """Leaves options of bubblewrap's out, the last of each, with as many arguments as are given in a text."""

    def left_out(command):
        for option in options:
            words = option.split(" ")
            at = next(i for i in reversed(range(len(command))) if command[i : i + len(words)] == words)
            command = command[:at] + command[at + len(words) :]
        return command

    return left_out


def with_(*options):
    def added(command):
        at = len(command) - 1 - command[::-1].index("--remount-ro")
        return [*command[:at], *options, *command[at:]]

    return added


def keep_capabilities(monkeypatch):
    launch = bubblewrap.LAUNCH.replace("        drop_capabilities()\n", "        pass\n")
    assert launch != bubblewrap.LAUNCH
    monkeypatch.setattr(bubblewrap, "LAUNCH", launch)


def keep_privilege(monkeypatch):
    keep_capabilities(monkeypatch)
    change_command(monkeypatch, with_("--cap-add", "CAP_SYS_CHROOT"))


def change_command(monkeypatch, change):
    closed = bubblewrap.prefix
    monkeypatch.setattr(bubblewrap, "prefix", lambda *arguments: change(closed(*arguments)))


def lift(monkeypatch, resource):
    limits = Limits.by_resource
    monkeypatch.setattr(Limits, "by_resource", lambda self: {k: v for k, v in limits(self).items() if k != resource})


def change_environment(monkeypatch):
    empty = bubblewrap.environment
    monkeypatch.setattr(bubblewrap, "environment", lambda *arguments: empty(*arguments) | {"RLFT_SECRET": SECRET})


def commands(change):
    return lambda monkeypatch, goal: change_command(monkeypatch, change)


REMOVE = {
    "network": commands(without("--unshare-net")),
    "process namespace": commands(without("--unshare-pid")),
    "IPC namespace": commands(without("--unshare-ipc")),
    "etc": commands(with_("--ro-bind", "/etc", "/etc")),
    "home": lambda monkeypatch, goal: change_command(monkeypatch, with_("--ro-bind", goal["secret"], goal["secret"])),
    "proc": commands(with_("--ro-bind", "/proc", "/proc")),
    "read-only root": commands(without("--remount-ro /")),
    "devices": commands(with_("--dev-bind", "/dev/full", "/dev/full")),
    "shared memory": commands(with_("--tmpfs", "/dev/shm")),
    "file space": commands(without(f"--size {LIMITS.file_bytes}")),
    "number of files": lambda monkeypatch, goal: monkeypatch.setattr(Limits, "max_files", 0),
    "environment": lambda monkeypatch, goal: change_environment(monkeypatch),
    "capabilities": lambda monkeypatch, goal: keep_capabilities(monkeypatch),
    "root privilege": lambda monkeypatch, goal: keep_privilege(monkeypatch),
    "filter": lambda monkeypatch, goal: monkeypatch.setattr(bubblewrap, "system_call_filter", lambda: None),
    "memory": lambda monkeypatch, goal: lift(monkeypatch, "RLIMIT_AS"),
    "open files": lambda monkeypatch, goal: lift(monkeypatch, "RLIMIT_NOFILE"),
    "processes": lambda monkeypatch, goal: lift(monkeypatch, "RLIMIT_NPROC"),
}
"""How each bar is taken away; all others stay."""


def answers(names, goal, isolation, limits=LIMITS):
    """What became of the attempts, in one sandbox: `out`, or the error that stopped them."""
    script = PREAMBLE + "".join(f"attempt({name!r}, {ATTEMPTS[name][0]!r})\n" for name in names)
    result = bubblewrap.run({"script.py": script}, ["script.py", json.dumps(goal)], limits, isolation)
    return dict(json.loads(line) for line in result.stdout.splitlines())


def test_there_are_thirty_attempts_and_more():
    assert len(ATTEMPTS) >= 30


@pytest.mark.parametrize("isolation", ISOLATED)
def test_no_attempt_gets_out(isolation, goal, monkeypatch):
    monkeypatch.setenv("RLFT_SECRET", SECRET)
    words, victim = goal
    # Root's bubblewrap in a user namespace cannot limit processes, and `available` does not take it.
    names = [name for name in ATTEMPTS if not (name == "fork without end" and isolation is not ISOLATED[0])]
    found = answers(names, words, isolation)
    assert list(found) == names
    assert [name for name, answer in found.items() if answer == "out"] == []
    assert victim.poll() is None


def test_namespaces_and_limits_hold_without_the_filter(goal, monkeypatch):
    monkeypatch.setattr(bubblewrap, "system_call_filter", lambda: None)
    names = [name for name, (_, bars) in ATTEMPTS.items() if bars not in ("filter", "filter or an error")]
    found = answers(names, goal[0], ISOLATED[0])
    assert list(found) == names
    assert [name for name, answer in found.items() if answer == "out"] == []


@pytest.mark.parametrize("name", ATTEMPTS)
def test_each_attempt_gets_out_where_its_bars_are_missing(name, goal, monkeypatch):
    words, victim = goal
    code, bars = ATTEMPTS[name]
    *_, last = all_bars = bars.split(" or ")
    for bar in all_bars:
        if bar != "an error":
            REMOVE[bar](monkeypatch, words)
    if "victim" in code:  # its own, for it may be killed
        with subprocess.Popen(["sleep", "60"]) as own:
            found = answers([name], words | {"victim": own.pid}, Isolation.user)
            own.kill()
    else:
        found = answers([name], words, Isolation.user if name != "fork without end" else ISOLATED[0])
    assert found[name] == "out" or (last == "an error" and found[name] != "ENOSYS")
    assert victim.poll() is None
