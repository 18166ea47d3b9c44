"""Ctrl-C, SIGTERM and SIGHUP in commands that train nothing: they end soon, with 130 and a line of what is kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folders import files_of
from run_processes import Nursery, environment, happens, marked
from slow_cases import slow

# What is typed after `rlft`, where the signal comes, which one, and what the line says.
CASES = [
    ("eval run=run scoring.workers=1", "rlft.loop.parts:load_for_training", "interrupt", "nothing was written"),
    ("eval run=run scoring.workers=1", "rlft.loop.session:Session.evaluate", "terminate", "nothing was written"),
    ("eval run=run", "rlft.system.files:flush", "interrupt", "nothing was written"),
    ("export run=run out=out", "rlft.commands.export.weights:merge", "interrupt", "nothing was exported"),
    ("export run=run out=out", "rlft.system.files:flush", "warn", "nothing was exported"),
    ("report run", "rlft.commands.watch.report:page", "interrupt", "no report was written"),
    ("report run", "rlft.system.files:flush", "warn again", "no report was written"),
    ("chat run=run", "rlft.commands.chat:open_roles", "hang up", "the conversation has ended"),
    ("plan +recipe=grpo_arithmetic", "rlft.plan.prediction:predict", "interrupt", "nothing was begun"),
    ("runs .", "rlft.commands.watch.runs:rows", "hang up", "nothing was changed"),
    ("diff run run", "rlft.commands.watch.diff:compare_metrics", "terminate", "nothing was changed"),
    (
        "watch run", "rlft.commands.watch.watch:print_summary", "interrupt",
        "the view has ended, the run is left as it is",
    ),
    ("resume run steps=9", "rlft.runs.run_folder:check_same_inputs", "interrupt", "the run is as it was"),
]  # fmt: skip


@pytest.mark.parametrize("cases", [CASES[1:9:3], slow(CASES)], ids=["three", "all"])
def test_a_command_that_trains_nothing_ends_with_130_a_line_and_nothing_half_written(
    cases: list[tuple[str, ...]], rough: Nursery, undisturbed: Path, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    before = files_of(tmp_path / "run")
    for words, at, signal, line in cases:
        started = rough.start(*words.split(), cwd=tmp_path, events=[{"at": at, "call": 1, "do": signal}])
        done = started.wait()
        assert (done.code, done.err.splitlines()) == (130, [f"rlft: interrupted: {line}"]), (words, at, done.err)
        assert happens(lambda mark=started.mark: not marked(mark), within_s=60), "whoever it started ends with it"
        assert files_of(tmp_path / "run") == before, words
        left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("process_")]
        assert left == ["run"], (words, at)


def ended(code: str, *before: str) -> subprocess.CompletedProcess[str]:
    """A Python program that has ended; before: words in front of its command."""
    command = [*before, sys.executable, "-c", code]
    return subprocess.run(command, env=environment({}), capture_output=True, text=True, timeout=300, check=False)


SWALLOWED = """
import os, signal, time
from rlft.system import interrupt
def press():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
    except KeyboardInterrupt:
        pass  # as a library might, and a destructor does
"""
ENDS = {
    "a command": "with interrupt.ends_promptly('nothing was written'):\n    press(); time.sleep(600)",
    "a run, twice": """
with interrupt.ends_promptly('nothing was written'), interrupt.Interrupt(lambda text: None) as pressed:
    os.kill(os.getpid(), signal.SIGINT)
    assert pressed.requested
    press(); time.sleep(600)""",
}


@pytest.mark.parametrize("code", [ENDS["a command"], slow(ENDS["a run, twice"])], ids=ENDS)
def test_a_signal_that_a_library_swallows_ends_the_process_all_the_same(code: str) -> None:
    start = time.monotonic()
    done = ended(SWALLOWED + code)
    assert (done.returncode, done.stderr) == (130, "rlft: interrupted: nothing was written\n")
    assert time.monotonic() - start < 300, "neither of the pauses was slept"


def test_what_is_in_its_own_hands_is_not_ended() -> None:
    code = """
with interrupt.ends_promptly(''), interrupt.handled_inside():
    press(); time.sleep(interrupt.GRACE_S + 0.5)
print('alive')"""
    done = ended(SWALLOWED + code)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


# A signal comes when the command line is about to be imported: the first thing that takes any time.
STARTING = """
import os, signal, sys
class Arrives:
    def find_spec(self, name, path=None, target=None):
        if name == "rlft.cli":
            os.kill(os.getpid(), signal.SIGNAL)
sys.meta_path.insert(0, Arrives())
sys.argv = ["rlft", "--version"]
from rlft import main
main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_at_the_very_start_leaves_130_and_a_line(name: str) -> None:
    heard = f"import signal\nsignal.signal(signal.{name}, signal.SIG_DFL)\n"  # whatever the suite was started by: nohup
    done = ended(heard + STARTING.replace("SIGNAL", name))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rlft: interrupted: nothing was begun\n")


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("SIGHUP", ["nohup"]),
        *((name, ["sh", "-c", f"trap '' {name[3:]}; exec \"$@\"", "sh"]) for name in ("SIGUSR1", "SIGUSR2")),
    ],
)
def test_what_was_ignored_at_the_start_stays_ignored(name: str, by: list[str]) -> None:
    done = ended(STARTING.replace("SIGNAL", name), *by)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["rlft"]), done.stderr


def test_one_order_that_is_sent_twice_is_not_a_second_one() -> None:
    # As `timeout` sends SIGTERM, systemd SIGTERM and SIGHUP, and a shell whose connection drops SIGHUP.
    code = """
import os, signal, time
from rlft.system import interrupt
with interrupt.Interrupt(print) as pressed:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
    time.sleep(0.5)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("a second one")
try:
    with interrupt.ends_promptly("kept"):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            print("cleaned up")
except interrupt.Terminated:
    pass
"""
    done = ended(code)
    heard = "interrupted: ending before a step is begun; once more stops at once"
    assert (done.returncode, done.stdout.splitlines()) == (0, [heard, "a second one", "cleaned up"]), done.stderr
