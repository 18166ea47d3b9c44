"""Scripts and their limits, isolated and not. What tries to get out is in test_launch.py."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from in_one_test import each
from slow_cases import slow_but

from rlft.system import interrupt
from rlft.system.sandbox import bubblewrap
from rlft.system.sandbox.bubblewrap import Isolation, Limits, Reason, SandboxError, available, run, trial

MEBI = 2**20
LIMITS = Limits(
    seconds=10.0, cpu_seconds=5, memory_bytes=256 * MEBI, output_bytes=MEBI, processes=16, file_bytes=4 * MEBI
)
ACTIVE = Isolation.root if os.geteuid() == 0 else Isolation.user
# Root can isolate in both ways, but for the process limit.
ISOLATED = [Isolation.root, Isolation.user] if os.geteuid() == 0 else [Isolation.user]
POSSIBLE = [*ISOLATED, Isolation.none]
REPOSITORY = Path(__file__).parents[3]


def limits_of(isolation):
    """Where nothing isolates a script, all processes of its user count, which are more if the user is not root."""
    return replace(LIMITS, processes=4096) if isolation is Isolation.none and os.geteuid() != 0 else LIMITS


def ran(script, isolation=ACTIVE, arguments=(), stdin="", **limits):
    limits = replace(limits_of(isolation), **limits)
    return run({"script.py": script}, ["script.py", *arguments], limits, isolation, stdin)


def alive(token):
    """Processes that have the token on their command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if any(token in part for part in p.info["cmdline"] or [])]


def die_out(token, seconds=2.0):
    """Whether no process with the token is left, within some time: the kernel ends a namespace in its own time."""
    end = time.monotonic() + seconds
    while alive(token) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(token)


@pytest.fixture
def token():
    """A word for a script's command line; whatever still has it at the end is ended."""
    word = uuid.uuid4().hex
    yield word
    for process in alive(word):
        process.kill()


def test_the_isolation_that_is_active_is_found_by_trying_it():
    isolation, what = available()
    assert isolation is ACTIVE
    assert what == isolation.sentence
    assert what.startswith("isolated by bubblewrap ")


WRITABLE = """
import os
def writable(folder):
    try:
        open(os.path.join(folder, "probe"), "w").close()
        return True
    except OSError:
        return False
folders = ["/", *("/" + name for name in os.listdir("/"))]
folders += [f"{path}/{name}" for path in folders[1:] for name in os.listdir(path)]
print([path for path in folders if writable(path)])
"""
PRIVILEGES = """
import ctypes, os
print(os.getuid() == 0, os.getgroups() == [0])
print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))  # PR_GET_NO_NEW_PRIVS
print(ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", 0, None))
"""
FILES = """
import os
print(os.listdir("."))
try:
    for i in range(8):
        open(f"/tmp/{i}", "wb").write(bytes(2**20))
except OSError as error:
    print(i, error.strerror)
"""
MEMORY = "try:\n    print(len(bytearray(int(input()))))\nexcept MemoryError:\n    print('too much')"
VISIBLE = """
import os
names = {*os.listdir("/"), *os.listdir("/dev")}
print(*sorted(name for name in names if not name.startswith("lib")))
"""
LIBRARY = "import sys, json, decimal, ctypes\nprint(sys.argv[1:])\nimport psutil"
FULL = "print('x' * (2 ** 20 - 1 + int(input())))"
SCRIPTS = [
    # script, isolations, what is said to it or its limits, what it prints, exit code, reason
    ("print(int(input()) + 1)", POSSIBLE, {"stdin": "41\n"}, "42\n", 0, Reason.exited),
    # The standard library and its arguments, but not our packages.
    (LIBRARY, POSSIBLE, {"arguments": ["a b", "c"]}, "['a b', 'c']\n", 1, Reason.exited),
    ("raise SystemExit(3)", [ACTIVE], {}, "", 3, Reason.exited),
    # bubblewrap gives 128 + the signal's number, as a shell does.
    ("import os; os.abort()", [ACTIVE], {}, "", 128 + signal.SIGABRT, Reason.exited),
    (WRITABLE, ISOLATED, {}, "['/tmp']\n", 0, Reason.exited),
    (VISIBLE, ISOLATED, {}, "bin dev files null python tmp urandom usr zero\n", 0, Reason.exited),
    (PRIVILEGES, ISOLATED, {}, "False False\n1\n-1\n", 0, Reason.exited),
    (FILES, ISOLATED, {}, "[]\n4 No space left on device\n", 0, Reason.exited),
    (FILES, ISOLATED, {}, "[]\n4 No space left on device\n", 0, Reason.exited),  # which was empty again
    (MEMORY, POSSIBLE, {"stdin": str(10 * 2**30)}, "too much\n", 0, Reason.exited),
    # 300 MiB do not fit into 256 MiB, and do into 512 MiB.
    (MEMORY, POSSIBLE, {"stdin": str(300 * MEBI)}, "too much\n", 0, Reason.exited),
    (MEMORY, POSSIBLE, {"stdin": str(300 * MEBI), "memory_bytes": 512 * MEBI}, f"{300 * MEBI}\n", 0, Reason.exited),
    (FULL, [ACTIVE], {"stdin": "0"}, "x" * (MEBI - 1) + "\n", 0, Reason.exited),
    (FULL, [ACTIVE], {"stdin": "1"}, "x" * MEBI, None, Reason.output),
]  # fmt: skip


@each(("script", "isolations", "given", "printed", "exit_code", "reason"), SCRIPTS)
def test_what_a_script_sees_may_do_and_leaves(script, isolations, given, printed, exit_code, reason):
    for isolation in isolations:
        result = ran(script, isolation, **given)
        assert (result.stdout, result.exit_code, result.reason) == (printed, exit_code, reason), isolation


@pytest.mark.parametrize("isolation", ISOLATED)
def test_a_script_that_kills_its_parent_or_all_it_sees_hurts_only_itself(isolation):
    for target in ("os.getppid()", "1", "-1", "0"):
        ran(f"import os, signal\nos.kill({target}, signal.SIGKILL)\nprint('alive')", isolation)
    assert ran("print('fine')", isolation).stdout == "fine\n"


@pytest.mark.parametrize("isolation", ISOLATED)
def test_home_stays_invisible_where_python_lies_in_it(isolation, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "python" / "bin").mkdir(parents=True)
    real = Path(os.path.realpath(sys._base_executable))
    executable = home / "python" / "bin" / real.name
    shutil.copy2(real, executable)
    (home / "python" / "lib").symlink_to(real.parent.parent / "lib")
    (home / "secret.txt").write_text("the secret")
    (home / "python" / "secret.txt").write_text("the secret")
    monkeypatch.setattr(sys, "_base_executable", str(executable))
    script = """
import os, sys
print(sys.prefix, *(os.path.exists(path) for path in (sys.argv[1], "/python/bin", "/python/secret.txt")))
"""
    assert ran(script, isolation, [str(home)]).stdout == "/python False True False\n"


@pytest.mark.parametrize("isolation", POSSIBLE)
def test_the_environment_is_empty(isolation, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "the secret")
    names = ran("import os; print(*sorted(os.environ))", isolation).stdout.split()
    assert set(names) <= {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PWD"}


FORKS = """
import os, time
num_forks = 0
try:
    while num_forks < 40:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        num_forks += 1
except BlockingIOError:
    pass
print(num_forks)
"""


def test_processes_are_limited():
    # 16 with the script itself; in a user namespace bubblewrap's own first process is counted too.
    assert int(ran(FORKS, processes=16).stdout) in (14, 15)
    assert int(ran(FORKS, processes=64).stdout) == 40


def test_sandboxes_do_not_share_their_process_limit():
    files, limits = {"script.py": FORKS + "time.sleep(60)"}, replace(LIMITS, processes=16)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with bubblewrap.running(files, ["script.py"], limits, ACTIVE, **streams):
        time.sleep(0.3)
        assert int(ran(FORKS, processes=16).stdout) in (14, 15)


def test_a_fork_bomb_ends_with_its_deadline(token):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    start = time.monotonic()
    assert ran(bomb, arguments=[token], seconds=1.0).reason is Reason.deadline
    assert time.monotonic() - start < 30
    assert die_out(token)


@pytest.mark.parametrize("isolation", POSSIBLE)
def test_endless_output_is_cut_off(isolation, token):
    result = ran("while True: print('x' * 1000)", isolation, [token])
    assert (result.reason, result.exit_code) == (Reason.output, None)
    assert len(result.stdout) <= MEBI
    assert die_out(token)


def test_endless_complaints_go_nowhere():
    assert ran("import sys\nwhile True: sys.stderr.write('x' * 1000)", seconds=0.5).reason is Reason.deadline


@pytest.mark.parametrize("isolation", slow_but(ACTIVE, POSSIBLE))
@pytest.mark.parametrize("script", ["import time; time.sleep(1e9)", "while True: pass", "import os; os.close(1)\nX"])
def test_a_script_that_never_ends_is_ended(script, isolation, token):
    script = script.replace("X", "while True: pass")
    start = time.monotonic()
    assert ran(script, isolation, [token], seconds=0.5).reason is Reason.deadline
    assert time.monotonic() - start < 30
    assert die_out(token)


@pytest.mark.parametrize("isolation", slow_but(ACTIVE, POSSIBLE))
def test_cpu_time_is_limited(isolation):
    result = ran("while True: pass", isolation, cpu_seconds=1)
    assert result.reason is Reason.exited
    assert result.exit_code != 0


DAEMON = """
import os, signal, time
for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(name, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        time.sleep(60)
    os._exit(0)
print("left one behind")
"""


@pytest.mark.parametrize("isolation", ISOLATED)
def test_no_child_outlives_a_script(isolation, token):
    assert ran(DAEMON, isolation, [token]).stdout == "left one behind\n"
    assert die_out(token)


def test_a_child_may_outlive_a_script_that_nothing_isolates(token):
    assert ran(DAEMON, Isolation.none, [token]).stdout == "left one behind\n"
    assert not die_out(token, seconds=0.2)


@contextlib.contextmanager
def killed_caller(isolation, token, temporary):
    """A process that runs a script, killed at the end of the block."""
    caller = f"""
from rlft.system.sandbox.bubblewrap import Isolation, Limits, run
limits = Limits(**{ {name: getattr(limits_of(isolation), name) for name in Limits.__slots__} | {"seconds": 60.0}!r})
script = "import os, time; os.fork(); time.sleep(60)"
run({{"script.py": script}}, ["script.py", "{token}"], limits, Isolation.{isolation.value})
"""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-c", caller], cwd=REPOSITORY, env=environment)
    # The script and its child, bubblewrap twice; the caller has the token on its command line too.
    num_processes = 3 if isolation is Isolation.none else 5
    try:
        end = time.monotonic() + 20
        while len(alive(token)) < num_processes and time.monotonic() < end:
            time.sleep(0.02)
        assert len(alive(token)) == num_processes
        yield
    finally:
        process.kill()
        process.wait()


def test_nothing_is_left_in_the_hosts_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(bubblewrap.tempfile, "tempdir", str(tmp_path))
    for isolation in POSSIBLE:
        ran("open('left', 'w').write('x')", isolation)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("isolation", POSSIBLE)
def test_a_killed_caller_leaves_nothing_that_the_next_start_does_not_remove(isolation, tmp_path, token, monkeypatch):
    with killed_caller(isolation, token, tmp_path):
        # A script's files are in its sandbox's own memory; in a folder only where nothing isolates it.
        assert len(list(tmp_path.iterdir())) == (isolation is Isolation.none)
    assert isolation is Isolation.none or die_out(token), "the script dies with its caller"
    assert len(list(tmp_path.iterdir())) == (isolation is Isolation.none)
    monkeypatch.setattr(bubblewrap.tempfile, "tempdir", str(tmp_path))
    available.cache_clear()
    available()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("left_out", "added", "told"),
    [
        (["--unshare-net"], [], "the network can be reached"),
        ([], ["--ro-bind", "/etc", "/etc"], "/etc/passwd can be read"),
        ([], ["--proc", "/proc"], "/proc can be read"),
        (["--remount-ro", "/"], [], "the root folder can be written to"),
        (["--size", str(4 * MEBI)], [], "the file space is not limited"),
    ],
)
def test_the_trial_tells_what_is_open(left_out, added, told, monkeypatch):
    closed = bubblewrap.prefix

    def weakened(*arguments):
        command = closed(*arguments)
        at = command.index("--chdir") - 2
        command[at:at] = added
        for part in left_out:
            # The last one: `/` is only the argument of what is left out.
            del command[len(command) - 1 - command[::-1].index(part)]
        return command

    monkeypatch.setattr(bubblewrap, "prefix", weakened)
    # The user's way, in which the root folder belongs to the script's own user.
    assert told in (trial(Isolation.user) or "")


def test_the_trial_tells_of_processes_without_a_limit(monkeypatch):
    limits = Limits.by_resource
    monkeypatch.setattr(Limits, "by_resource", lambda self: limits(self) | {"RLIMIT_NPROC": 100})
    assert trial(ACTIVE) == "processes are not limited"


@pytest.fixture
def fresh_look():
    """`available` tries again, and again after the test."""
    available.cache_clear()
    yield
    available.cache_clear()


@pytest.mark.usefixtures("fresh_look")
def test_a_trial_that_a_signal_to_the_job_may_have_ended_is_repeated(monkeypatch):
    problems = ["it ended without a message", "it ended without a message", None]
    left = iter(problems * 2)

    def disturbed(isolation):
        if problem := next(left):
            interrupt.note_signal(signal.SIGTERM, None)
        return problem

    monkeypatch.setattr(bubblewrap, "trial", disturbed)
    assert available()[0] is not Isolation.none


FORBIDDEN = "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"


@pytest.mark.usefixtures("fresh_look")
def test_without_bubblewrap_or_with_one_that_may_do_nothing_nothing_isolates(monkeypatch, tmp_path):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    assert available() == (Isolation.none, "bubblewrap is not installed")
    assert Isolation.none.sentence.startswith("NOT isolated: programs run with this user's rights")
    available.cache_clear()
    forbidden = tmp_path / "bwrap"
    forbidden.write_text(FORBIDDEN)
    forbidden.chmod(0o755)
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: str(forbidden))
    isolation, why = available()
    assert isolation is Isolation.none
    assert why.endswith("(bwrap: No permissions to create new namespace)")


def test_a_sandbox_that_fails_is_not_taken_for_a_script_that_fails(monkeypatch):
    closed = bubblewrap.prefix
    monkeypatch.setattr(bubblewrap, "prefix", lambda *arguments: [*closed(*arguments)[:-1], "--nonsense", "python"])
    with pytest.raises(SandboxError, match=r"could not be started in its sandbox .*--nonsense"):
        ran("print(1)")


def test_a_setuid_bubblewrap_is_asked_for_no_capabilities(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.touch()
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(bubblewrap.os, "geteuid", lambda: 1000)
    assert "--cap-add" in bubblewrap.prefix(Isolation.user, {}, LIMITS)
    program.chmod(0o4755)
    assert "--cap-add" not in bubblewrap.prefix(Isolation.user, {}, LIMITS)
