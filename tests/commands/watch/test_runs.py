"""`rlft runs`, `rlft diff` and `rlft watch`, on runs that are really there."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from in_one_test import each

from rlft import cli
from rlft.commands.watch import runs, watch
from rlft.commands.watch.runs import names_of
from rlft.logger.console import StandardOutput as Terminal
from rlft.runs import run_folder, run_status
from rlft.runs.forecast import Price
from rlft.runs.run_status import Status

TINY = (
    "steps=3", "prompts_per_step=2", "group_size=2", "generation=transformers", "generation.max_tokens=24",
    "lora.rank=2", "lora.alpha=4", "data.size=16", "data.held_out_size=8", "eval.every=3", "eval.num_prompts=4",
    "model.device=cpu", "scoring.workers=0", "console=null",
)  # fmt: skip
TEACH = (
    "demonstrations.path=embedded:arithmetic-demonstrations", "max_completion_tokens=64", "steps=1", "eval.every=0",
    "examples_per_step=2", "lora.rank=2", "model.device=cpu", "console=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/first/a (finished), runs/first/b (another learning rate, killed), runs/second/c (sft, stopped)."""
    root = tmp_path_factory.mktemp("made") / "runs"
    assert cli.run(["train", *TINY, "name=first", f"hydra.run.dir={root}/first/a"]) == 0
    assert cli.run(["train", *TINY, "name=first", "trainer.lr=0.01", f"hydra.run.dir={root}/first/b"]) == 0
    assert cli.run(["sft", *TEACH, "name=second", f"hydra.run.dir={root}/second/c"]) == 0
    (root / "first" / "b" / run_status.FILE).write_text(json.dumps({"status": "running"}))
    told = {"status": "stopped", "reason": "the reward\x1b[31m raised"}
    (root / "second" / "c" / run_status.FILE).write_text(json.dumps(told))
    for age, name in ((300, "first/a"), (200, "first/b"), (7200, "second/c")):
        for file in [root / name, *(root / name).rglob("*")]:
            os.utime(file, (time.time() - age, time.time() - age))
    (root / "notes").mkdir()
    (root / "notes" / "config.yaml").write_text("mine: 1\n")
    return root


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli.run(["runs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def names(found: list[dict[str, Any]], root: Path) -> list[str]:
    return [str(Path(row["folder"]).relative_to(root)) for row in found]


# -- runs --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [120, 80, 60])
def test_runs_of_a_sweep_are_named_as_in_its_report(
    width: int, tmp_path: Path, make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [make_run(f"{i}", lr=lr, seed=seed) for i, (lr, seed) in enumerate([(3e-5, 0), (3e-5, 1), (1e-3, 0)])]
    root, configs = folders[0].parent, [run_folder.read(folder) for folder in folders]
    expected = [name for name, _ in names_of(folders, configs)]
    assert expected[1] == "trainer.lr=3e-05, seed=1"
    assert {row["folder"]: row["setting"] for row in listed(capsys, str(root))} == {
        str(folder): name for folder, name in zip(folders, expected, strict=True)
    }
    stream = io.StringIO()
    runs.print_table(Terminal(file=stream, width=width), runs.rows(root, {}), root)
    lines = [line.rstrip() for line in stream.getvalue().splitlines() if not line.startswith("in ")]
    assert max(map(len, lines)) <= width
    assert {word for name in expected for word in name.split()} <= set(stream.getvalue().split()), "no word is cut"
    make_run("other")
    assert not any(row["setting"] for row in listed(capsys, str(root))), "runs of other names are no sweep"


def test_every_run_is_told_with_how_it_stands(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["folder"]: row for row in listed(capsys, str(made))}
    assert len(found) == 3, "a config.yaml of somebody else's is no run"
    first = found[str(made / "first" / "a")]
    assert (first["status"], first["command"], first["step"], first["steps"]) == ("finished", "train", 3, 3)
    assert 0 <= first["accuracy"] <= 1
    last = json.loads((made / "first" / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    assert first["reward"] == last["reward/mean"]
    assert 290 < first["age"] < 900
    assert first["size"] == sum(f.lstat().st_size for f in (made / "first" / "a").rglob("*"))
    assert found[str(made / "first" / "b")]["status"] == "killed"
    third = found[str(made / "second" / "c")]
    assert (third["status"], third["accuracy"]) == ("stopped", None)
    assert (third["reward"], first["loss"]) == (None, None)
    assert third["loss"] > 0, "of a supervised run its loss, under that name"


def test_a_step_has_the_seconds_of_what_was_done_before_it(made: Path) -> None:
    lines = [json.loads(line) for line in (made / "first" / "a" / "metrics.jsonl").read_text().splitlines()]
    between = ("time/evaluate", "time/log", "time/checkpoint")
    # The evaluation before the first step, then the logging of each step but the last; the run saves only at its end.
    assert [[name for name in between if name in line] for line in lines] == [
        ["time/evaluate"],
        ["time/log"],
        ["time/log"],
    ]
    assert all(0 < line[name] < 600 for line in lines for name in between if name in line)


def test_a_running_run_says_how_long_it_still_takes(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "long"
    shutil.copytree(made / "first" / "a", folder)
    with run_folder.held(folder), run_status.recording_status(folder, 50):
        for steps, expected in ((4, None), (6, 44 * 100.0)):
            lines = [{"step": step, "reward/mean": 0.5, "time/step": 100.0} for step in range(1, steps + 1)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            os.utime(folder / "metrics.jsonl", (time.time() + 3600, time.time() + 3600))  # no time passes since then
            (row,) = listed(capsys, str(tmp_path / "runs"))
            assert (row["left"] and row["left"]["seconds"]) == expected
            assert (row["status"], row["steps"]) == ("running", 50)
        assert row["left"]["low"] < expected < row["left"]["high"]
        assert cli.run(["runs", str(tmp_path / "runs")]) == 0
        head, line = (text.split("\t") for text in capsys.readouterr().out.splitlines())
        assert line[head.index("left")] == "1:13:20"


@each(
    ("words", "expected"),
    [
        ([], ["second/c", "first/a", "first/b"]),  # the newest last
        (["status=killed"], ["first/b"]),
        (["command=sft"], ["second/c"]),
        (["name=first"], ["first/a", "first/b"]),
        (["name=irs", "status=finished"], ["first/a"]),
        (["sort=name", "command=train"], ["first/a", "first/b"]),
        (["sort=accuracy", "status=stopped"], ["second/c"]),
    ],
)
def test_words_choose_and_sort(
    words: list[str], expected: list[str], made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(listed(capsys, str(made), *words), made) == expected


def test_the_table_is_safe_to_print(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["runs", str(made)]) == 0
    page = capsys.readouterr().out
    assert "\x1b" not in page
    assert "the reward\\x1b[31m raised" in page
    for told in ("finished", "killed", "stopped", "3/3", "5 min", "2 h"):
        assert told in page, told


def test_in_a_pipe_a_run_is_a_line_of_values_between_tabs(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["runs", str(made)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    titles = head.split("\t")
    assert titles == [*runs.TITLES, "reason"]
    rows = [dict(zip(titles, line.split("\t"), strict=True)) for line in lines]
    assert [row["run"] for row in rows] == [str(made / name) for name in ("second/c", "first/a", "first/b")]
    assert [bool(row["loss"]) for row in rows] == [True, False, False]
    assert [bool(row["reward"]) for row in rows] == [False, True, True]
    assert rows[0]["reason"] == "the reward\\x1b[31m raised"


def test_a_killed_or_interrupted_run_says_how_to_go_on(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [row] = [row for row in runs.rows(made, {}) if row.status == "killed"]
    waiting = dataclasses.replace(row, folder="runs/first try/b", step=1)
    for status in ("killed", "interrupted"):
        told = runs.explained(dataclasses.replace(waiting, status=status))
        assert told == "resume with: rlft resume 'runs/first try/b'"
    assert runs.explained(row) == "", "it has all its steps"
    for status in ("running", "finished", "stopped", "unknown", "damaged"):
        assert runs.explained(dataclasses.replace(waiting, status=status, reason="why")) == "why"
    stream = io.StringIO()
    runs.print_table(Terminal(file=stream, width=80), [waiting], Path("runs"))
    assert stream.getvalue().splitlines()[-1].endswith("killed: resume with: rlft resume 'runs/first try/b'")
    runs.print_table(Terminal(file=stream, width=60), [waiting], Path("runs"))
    assert stream.getvalue().splitlines()[-1] == "  rlft resume 'runs/first try/b'", "no command is wrapped"
    runs.print_lines([waiting])
    assert capsys.readouterr().out.splitlines()[1].endswith("\tresume with: rlft resume 'runs/first try/b'")


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40])
def test_on_a_terminal_a_run_is_one_line_whatever_the_width(
    width: int, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.parent)
    stamps = ("2026-11-22_15-16-40", "2026-11-22_18-00-00", "2026-11-23_01-02-03")
    found = [
        dataclasses.replace(row, folder=f"runs/grpo_arithmetic/{stamp}", step=100, steps=100, reason="", status=status)
        for row, stamp, status in zip(
            runs.rows(Path("runs"), {}), stamps, ("finished", "interrupted", "killed"), strict=True
        )
    ]
    stream = io.StringIO()
    runs.print_table(Terminal(file=stream, width=width), found, Path("runs"))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    if width <= 80:
        assert lines.pop(0) == "in runs:", "they are named from there"
    assert len(lines) == 4
    assert max(map(len, lines)) <= width
    for line, row, stamp in zip(lines[1:], found, stamps, strict=True):
        assert stamp[-9:] in line
        assert row.status in line
        assert f"{row.loss if row.reward is None else row.reward:.3f}" in line
        if width > 80:
            assert f"grpo_arithmetic/{stamp}" in line, "a folder is whole where there is room"
        if width >= 80:
            assert f" {stamp} " in f" {line.replace('/', ' ')} ", "no name is cut"
            assert "accuracy" in lines[0]
    assert "loss" in lines[0]


@pytest.mark.slow
def test_steps_are_the_runs_own_even_where_its_config_gives_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in TEACH if word not in ("steps=1", "examples_per_step=2")]
    words += ["epochs=1", "examples_per_step=400", f"hydra.run.dir={tmp_path / 'epochs'}"]
    assert cli.run(["sft", *words]) == 0
    row = listed(capsys, str(tmp_path))[0]
    assert row["step"] == row["steps"] > 0
    assert watch._info(tmp_path / "epochs", {"command": "sft", "steps": None}).steps == row["steps"]


def test_a_sampling_is_as_far_as_its_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["n=2", "prompts_per_step=4", "num_prompts=8", "generation=transformers", "generation.max_tokens=8"]
    words += ["data.size=16", "data.held_out_size=8", "model.device=cpu", "scoring.workers=0"]
    assert cli.run(["sample", *words, "name=drawn", f"hydra.run.dir={tmp_path / 'drawn'}"]) == 0
    row = listed(capsys, str(tmp_path))[0]
    assert (row["command"], row["step"], row["steps"]) == ("sample", 2, 2)


def test_a_living_run_is_running(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_folder.held(made / "first" / "b"):
        assert names(listed(capsys, str(made), "status=running"), made) == ["first/b"]


# -- diff --------------------------------------------------------------------------------------------------------------
def test_what_differs_is_the_key_that_was_changed(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    pair = [str(made / "first" / name) for name in "ab"]
    assert cli.run(["diff", *pair, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["second"]) for row in told["config"]] == [("trainer.lr", 0.01)]
    metrics = {row["name"]: row for row in told["metrics"]}
    assert (metrics["steps"]["first"], metrics["steps"]["second"]) == (3, 3)
    last = json.loads((made / "first" / "b" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["reward/mean"]["second"] == last["reward/mean"], "a tenth of three steps is the last one"
    assert metrics["policy/lr"]["second"] == 0.01
    assert cli.run(["diff", *pair]) == 0
    page = capsys.readouterr().out
    assert "trainer.lr" in page
    assert "accuracy at last (step 3)" in page
    assert "metrics up to the last step that both have done: means of step 3\n" in page


def test_runs_of_unlike_length_are_compared_over_the_steps_of_both(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "first" / "a", tmp_path / "shorter")
    file = tmp_path / "shorter" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]))
    capsys.readouterr()
    assert cli.run(["diff", str(made / "first" / "a"), str(tmp_path / "shorter"), "--json"]) == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)["metrics"]}
    assert (told["steps"]["first"], told["steps"]["second"]) == (3, 2)
    assert told["reward/mean"]["first"] == told["reward/mean"]["second"] == json.loads(lines[1])["reward/mean"]


@pytest.mark.parametrize(
    ("at", "spans", "evaluated", "sentence"),
    [
        ("common", [[37, 40], [37, 40]], [20, 20], "the last step that both have done: means of steps 37 to 40\n"),
        ("last", [[91, 100], [37, 40]], [100, 40], "own last step: means of steps 91 to 100 and steps 37 to 40\n"),
    ],
)
def test_it_is_said_at_which_steps_runs_are_compared(
    at: str,
    spans: list[list[int]],
    evaluated: list[int],
    sentence: str,
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs of 100 and 40 steps, whose reward is the step and whose accuracy is the step / 200."""
    pair = []
    for name, steps in (("long", 100), ("short", 40)):
        shutil.copytree(made / "first" / "a", tmp_path / name)
        pair.append(str(tmp_path / name))
        lines = [{"step": step, "reward/mean": float(step)} for step in range(1, steps + 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        measured = [{"step": step, "accuracy": step / 200} for step in (0, 20, steps)]
        (tmp_path / name / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in measured))
    capsys.readouterr()
    assert cli.run(["diff", *pair, f"at={at}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["at"], told["steps_of_means"]) == (at, spans), "a tenth of 100 and of 40 steps"
    rows = {row["name"]: row for row in told["metrics"]}
    assert (rows["accuracy at last"]["steps"], rows["accuracy at first"]["steps"]) == (evaluated, [0, 0])
    assert [rows["accuracy at last"][name] for name in ("first", "second")] == [step / 200 for step in evaluated]
    assert rows["reward/mean"]["first"] == sum(spans[0]) / 2
    assert cli.run(["diff", *pair, f"at={at}"]) == 0
    assert sentence in capsys.readouterr().out


# -- watch -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def going_on(made: Path, tmp_path: Path) -> Any:
    """A run that begins anew: its folder, its lines, and how to end it."""
    folder = tmp_path / "run"
    shutil.copytree(made / "first" / "a", folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("")
    with ExitStack() as stack:
        stack.enter_context(run_folder.held(folder))
        stack.enter_context(run_status.recording_status(folder, 3))
        yield folder, lines, stack.close


def acts(*actions: Callable[[], object]) -> Callable[[float], None]:
    """A sleep in which the next thing happens."""
    todo = list(actions)
    return lambda seconds: todo.pop(0)() and None


def test_it_follows_until_the_run_ends(going_on: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, lines, end = going_on
    file = folder / "metrics.jsonl"

    def write(text: str) -> Callable[[], object]:
        def act() -> None:
            with file.open("a") as out:
                out.write(text)

        return act

    capsys.readouterr()
    priced = [json.dumps(json.loads(line) | {"time/step": 1800.0}) + "\n" for line in lines]
    steps = acts(write(priced[0]), write(priced[1][:20]), write(priced[1][20:] + priced[2]), end)
    watch.watch(folder, Price(2.5, "EUR"), steps)
    page = capsys.readouterr().out
    assert "step 1/3  reward" in page
    assert "step 3/3  reward" in page
    assert "finished 3 steps in" in page
    # The evaluation before them took seconds: less than 0.005 of 2.5 an hour are 7 s, so the first decimal is certain.
    assert re.search(r"step 1/3 .* cost 1\.2\d EUR", page), "half an hour"
    assert re.search(r"cost of its steps, evaluations and checkpoints: 3\.7\d EUR", page)
    assert f"{folder} finished" in page.replace("\n", "")


def test_it_begins_anew_when_the_run_went_back(going_on: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, lines, end = going_on
    file = folder / "metrics.jsonl"
    capsys.readouterr()
    steps = (lambda: file.write_text("".join(lines[:2])), lambda: file.write_text(lines[0]), lambda: None, end)
    watch.watch(folder, sleep=acts(*steps))
    assert capsys.readouterr().out.count("step 1/3  reward") == 2


def test_one_that_has_ended_shows_its_closing_page(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.run(["watch", str(made / "second" / "c")]) == 0
    page = capsys.readouterr().out
    assert "\x1b" not in page
    assert "stopped: " in page
    assert run_status.read(made / "second" / "c")[0] is Status.stopped
