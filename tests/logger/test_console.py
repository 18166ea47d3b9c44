"""The live view in a real pseudo-terminal, and plain lines in a pipe."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from rlft.config.schema import ConsoleConfig
from rlft.logger.console import Console, Progress, step_line
from rlft.logger.interface import RunInfo
from rlft.system.text import UNICODE
from rlft.types import Evaluation

ROOT = Path(__file__).parents[2]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
NASTY = "[bold]x[/bold] :smile: \x1b[2J\u202e 答"

RUN = """
import sys, time
from pathlib import Path
from rlft.config.schema import ConsoleConfig
from rlft.logger.console import Console, show_rows
from rlft.logger.interface import RunInfo
from rlft.runs.lines import StepRecord
from rlft.types import Evaluation
sizes = [("prompts per step", "2", "prompts sampled in a step"), ("engine", "scripted", "as asked " * 12)]
console = Console(ConsoleConfig(live=True, plain_seconds=float(sys.argv[1]) if sys.argv[1] != "slow" else 0.0))
show_rows([], "tiny in runs/x")
console.start(RunInfo(folder=Path("runs/x"), name="tiny", config={}, step=0, steps=4, sizes=sizes))
for step in range(1, 5):
    for stage in ("sample", "update"):
        console.stage(stage)
        time.sleep(0.3 if step == 1 and sys.argv[1:] == ["slow"] else 0.01)
    metrics = {"reward/mean": step / 4, "reward/exact": 0.5, "length/mean": 41.0, "length/truncated_fraction": 0.1,
               "tokens/completion": 1000.0, "time/step": 0.5, "time/sample": 0.3, "time/update": 0.2}
    console.step(StepRecord(step=step, metrics=metrics, groups=[], rewards={}, total_rewards=[], advantages=[]))
    if step == 2:
        console.note(%r)
    if step == 3:
        print("printed by someone else")
    if step %% 2 == 0:
        console.evaluation(Evaluation(step=step, accuracy=step / 8, accuracy_se=0.02, metrics={}, examples=()))
console.finish(%r)
"""


def environment(**changes):
    hidden = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM", "PYTHONIOENCODING"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PYTHONUTF8": "1"} | changes


def on_terminal(columns, seconds="0", **variables):
    """Everything a terminal of that width is sent; "slow": the first stages are slow enough to be seen."""
    command = ["-c", RUN % (NASTY, "finished"), seconds]
    child = pexpect.spawn(
        sys.executable, command, env=environment(**variables), dimensions=(40, columns), encoding="utf-8", timeout=30
    )
    sent = child.read()
    child.close()
    assert child.exitstatus == 0, sent
    return sent


def in_pipe(seconds="0", status="finished", **variables):
    command = [sys.executable, "-c", RUN % (NASTY, status), seconds]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, timeout=30, check=True)
    assert done.stderr == b""
    return done.stdout.decode("utf-8")


@pytest.fixture(scope="module")
def narrow():
    return on_terminal(60, "slow", NO_COLOR="1")


def test_the_live_view_shows_where_the_run_is(narrow):
    text = ESCAPE.sub("", narrow)
    for words in ("step 4/4", "ETA", "reward", "0.250 → 1.000", "0.250 → 0.500", "41 tokens, 10% truncated"):
        assert words in text
    assert "2,000 tokens/s, 0.50 s/step" in text  # 1000 completion tokens in half a second
    assert "sample 0.30  update 0.20" in text
    now = {line.split()[2] for line in text.splitlines() if line.startswith("│ now")}
    assert now >= {"sample", "update", "finished"}
    assert max(map(len, text.replace("\r", "\n").split("\n"))) <= 60
    assert "\x1b[?7l" not in narrow  # nothing relies on cutting by the terminal


def test_the_view_moves_only_within_its_own_lines_and_gives_the_cursor_back(narrow):
    up, erase, hide, show = "\x1b[1A", "\x1b[2K", "\x1b[?25l", "\x1b[?25h"
    # No clear, no blink, and no colour, as NO_COLOR asks.
    assert {*ESCAPE.findall(narrow)} <= {up, erase, hide, show, "\x1b[0m", "\x1b[1m", "\x1b[2m"}
    assert narrow.rindex(show) > narrow.rindex(hide)


def test_colour_is_used_and_a_dumb_terminal_gets_plain_lines():
    assert re.search(r"\x1b\[3\d", on_terminal(100))
    sent = on_terminal(80, TERM="dumb")
    assert "\x1b" not in sent
    assert "\nstep 1/4  reward 0.250" in sent


def test_notes_are_shown_as_text_once_and_stay(narrow):
    text = ESCAPE.sub("", narrow)
    assert text.count("note: [bold]x[/bold] :smile:") == 1
    assert r"\x1b[2J\u202e" in text
    assert "\x1b[2J" not in narrow
    assert text.count("printed by someone else") == 1


def test_a_pipe_gets_plain_lines_with_the_table_first():
    output = in_pipe()
    assert "\x1b" not in output
    lines = output.splitlines()
    assert lines[0] == "tiny in runs/x"
    assert lines[1].split() == ["prompts", "per", "step", "2", "prompts", "sampled", "in", "a", "step"]
    steps = [line for line in lines if re.match(r"step \d/4", line)]
    assert len(steps) == 4
    assert re.fullmatch(
        r"step 4/4  reward 1\.000  length 41  2,000 tokens/s  0\.50 s/step  elapsed 0:0\d  ETA 0:00", steps[-1]
    )
    assert "step 4: held-out accuracy 0.500 ± 0.020 (step 2: 0.250)" in lines
    assert [line for line in lines if "accuracy" in line] == [line for line in lines if ": held-out accuracy" in line]
    assert r"note: [bold]x[/bold] :smile: \x1b[2J\u202e 答" in lines
    assert lines[-1].startswith("finished 4 steps in 0:0")


def test_long_runs_do_not_flood_a_pipe_and_forced_colour_moves_nothing_in_it():
    output = in_pipe("60", FORCE_COLOR="1")
    assert "\x1b[1A" not in output
    steps = [line for line in ESCAPE.sub("", output).splitlines() if re.match(r"step \d/4", line)]
    assert [line[:8] for line in steps] == ["step 1/4", "step 4/4"]


def test_a_stream_without_unicode_gets_ascii():
    output = in_pipe(PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert output.isascii()
    assert r"\x1b[2J\u202e \u7b54" in output
    assert "0.500 +- 0.020" in output


@pytest.mark.parametrize(("status", "words"), [
    ("interrupted", "interrupted after step 4 of 4"),
    ("stopped: loss is \x1b[31mNaN", r"stopped after step 4 of 4, 0:00: loss is \x1b"),
])  # fmt: skip
def test_the_last_line_says_how_it_ended(status, words):
    assert words in in_pipe(status=status).splitlines()[-1]


def test_the_eta_follows_the_pace_of_the_last_steps(make_run, make_step, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(make_run(steps=50), UNICODE)
    assert progress.eta() == "-:--"
    for step in range(1, 31):
        now[0] += 1.0
        progress.step(make_step(step, **{"time/step": 9.0 if step <= 20 else 2.0}))
    # the last ten steps took 2 s each: 20 more take 40 s
    left = progress.left()
    assert (left.seconds, left.low < 40.0 < left.high) == (pytest.approx(40.0, abs=1e-9), True)
    now[0] += 1.5
    assert progress.left() == left.after(1.5)


def test_a_resumed_run_counts_on_from_its_step(make_run, make_step, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(make_run(step=40, steps=50), UNICODE)
    for step in range(41, 46):
        now[0] += 3.0
        assert progress.eta() == "-:--"
        progress.step(make_step(step, **{"time/step": 3.0}))
    # five steps of 3 s are left, in an interval of exp(1.2816 x 0.25) = 1.378 up and down
    end = "3.00 s/step  elapsed 0:15  ETA 0:15 (0:11 to 0:21)"
    assert step_line(progress) == f"step 45/50  {end}"


@pytest.mark.parametrize("step", [0, 4])
def test_what_a_resumed_run_prints_is_compared_with_its_first_step(tmp_path, capsys, step):
    for name, key in (("eval", "accuracy"), ("metrics", "reward/mean")):
        lines = [{"step": n, key: n / 8, "accuracy_se": 0.0} for n in (0, 2, 4, 6)]  # the last is after the checkpoint
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    console = Console(ConsoleConfig(live=False, plain_seconds=0.0))
    console.start(RunInfo(folder=tmp_path, name="tiny", config={}, step=step, steps=8, sizes=()))
    progress = console.view.progress
    assert (progress.watched, progress.accuracies) == (([0.0, 0.25, 0.5],) * 2 if step else ([], []))
    console.evaluation(Evaluation(step=6, accuracy=0.875, accuracy_se=0.02, metrics={}, examples=()))
    first = " (step 0: 0.000)" if step else ""
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"step 6: held-out accuracy 0.875 \u00b1 0.020{first}")


def test_finish_before_start_does_no_harm(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    Console(ConsoleConfig(live=True, plain_seconds=0.0)).finish("failed early")
    assert sys.stdout.getvalue() == ""
