"""`rlft runs`, on runs that are really there."""

import dataclasses
import io
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from audited_runs import lines_of, write
from in_one_test import each

from rlft import cli
from rlft.commands.watch import runs, watch
from rlft.commands.watch.runs import names_of
from rlft.logger.console import StandardOutput as Terminal
from rlft.runs import run_folder, run_status


def listed(capsys, *words):
    capsys.readouterr()
    assert cli.run(["runs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def names(found, root):
    return [str(Path(row["folder"]).relative_to(root)) for row in found]


def test_runs_of_a_sweep_are_named_as_in_its_report(make_run, capsys):
    folders = [make_run(f"{i}", lr=lr, seed=seed) for i, (lr, seed) in enumerate([(3e-5, 0), (3e-5, 1), (1e-3, 0)])]
    root, configs = folders[0].parent, [run_folder.read(folder) for folder in folders]
    expected = [name for name, _ in names_of(folders, configs)]
    assert expected[1] == "trainer.lr=3e-05, seed=1"
    assert {row["folder"]: row["setting"] for row in listed(capsys, str(root))} == {
        str(folder): name for folder, name in zip(folders, expected, strict=True)
    }
    for width in (120, 80, 60):
        stream = io.StringIO()
        runs.print_table(Terminal(file=stream, width=width), runs.rows(root, {}), root)
        lines = [line.rstrip() for line in stream.getvalue().splitlines() if not line.startswith("in ")]
        assert max(map(len, lines)) <= width
        assert {word for name in expected for word in name.split()} <= set(stream.getvalue().split()), "no word is cut"
    make_run("other")
    assert not any(row["setting"] for row in listed(capsys, str(root))), "runs of other names are no sweep"


def test_every_run_is_told_with_how_it_stands(made, capsys):
    found = {row["folder"]: row for row in listed(capsys, str(made))}
    assert len(found) == 3, "a config.yaml of somebody else's is no run"
    first = found[str(made / "first" / "a")]
    assert (first["status"], first["command"], first["step"], first["steps"]) == ("finished", "train", 3, 3)
    assert 0 <= first["accuracy"] <= 1
    last = lines_of(made / "first" / "a" / "metrics.jsonl")[-1]
    assert first["reward"] == last["reward/mean"]
    assert 290 < first["age"] < 900
    assert first["size"] == sum(f.lstat().st_size for f in (made / "first" / "a").rglob("*"))
    assert found[str(made / "first" / "b")]["status"] == "killed"
    third = found[str(made / "second" / "c")]
    assert (third["status"], third["accuracy"]) == ("stopped", None)
    assert (third["reward"], first["loss"]) == (None, None)
    assert third["loss"] > 0, "of a supervised run its loss, under that name"


def test_a_step_has_the_seconds_of_what_was_done_before_it(made):
    lines = lines_of(made / "first" / "a" / "metrics.jsonl")
    between = ("time/evaluate", "time/log", "time/checkpoint")
    # The evaluation before the first step, then all that comes after each step but the last.
    found = [[name for name in between if name in line] for line in lines]
    assert found == [["time/evaluate"], [*between], [*between]]
    assert all(0 < line[name] < 600 for line in lines for name in between if name in line)


def test_a_running_run_says_how_long_it_still_takes(made, tmp_path, ran, capsys):
    folder = tmp_path / "runs" / "long"
    shutil.copytree(made / "first" / "a", folder)
    with run_folder.held(folder), run_status.recording_status(folder, 50):
        for steps, expected in ((4, None), (6, 44 * 100.0)):
            lines = [{"step": step, "reward/mean": 0.5, "time/step": 100.0} for step in range(1, steps + 1)]
            write(folder / "metrics.jsonl", lines)
            os.utime(folder / "metrics.jsonl", (time.time() + 3600, time.time() + 3600))  # no time passes since then
            (row,) = listed(capsys, str(tmp_path / "runs"))
            assert (row["left"] and row["left"]["seconds"]) == expected
            assert (row["status"], row["steps"]) == ("running", 50)
        assert row["left"]["low"] < expected < row["left"]["high"]
        head, line = (text.split("\t") for text in ran(["runs", str(tmp_path / "runs")]).out.splitlines())
        assert line[head.index("left")] == "1:13:20"


@each(("words", "expected"), [
    ([], ["second/c", "first/a", "first/b"]),  # the newest last
    (["status=killed"], ["first/b"]),
    (["command=sft"], ["second/c"]),
    (["name=first"], ["first/a", "first/b"]),
    (["name=irs", "status=finished"], ["first/a"]),
    (["sort=name", "command=train"], ["first/a", "first/b"]),
    (["sort=accuracy", "status=stopped"], ["second/c"]),
])  # fmt: skip
def test_words_choose_and_sort(words, expected, made, capsys):
    assert names(listed(capsys, str(made), *words), made) == expected


def test_in_a_pipe_a_run_is_a_line_of_values_between_tabs(made, ran):
    page = ran(["runs", str(made)]).out
    head, *lines = page.splitlines()
    assert "\x1b" not in page
    for told in ("finished", "killed", "stopped", "3/3", "5 min", "2 h"):
        assert told in page, told
    titles = head.split("\t")
    assert titles == [*runs.TITLES, "reason"]
    rows = [dict(zip(titles, line.split("\t"), strict=True)) for line in lines]
    assert [row["run"] for row in rows] == [str(made / name) for name in ("second/c", "first/a", "first/b")]
    assert [bool(row["loss"]) for row in rows] == [True, False, False]
    assert [bool(row["reward"]) for row in rows] == [False, True, True]
    assert rows[0]["reason"] == "the reward\\x1b[31m raised"


def test_a_killed_or_interrupted_run_says_how_to_go_on(made, capsys):
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


@each("width", [200, 120, 80, 60, 40])
def test_on_a_terminal_a_run_is_one_line_whatever_the_width(width, made, monkeypatch):
    monkeypatch.chdir(made.parent)
    stamps = ("2026-11-22_15-16-40", "2026-11-22_18-00-00", "2026-11-23_01-02-03")
    ends = zip(runs.rows(Path("runs"), {}), stamps, ("finished", "interrupted", "killed"), strict=True)
    found = [
        dataclasses.replace(row, folder=f"runs/grpo_arithmetic/{stamp}", step=100, steps=100, reason="", status=status)
        for row, stamp, status in ends
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
def test_steps_are_the_runs_own_even_where_its_config_gives_epochs(tmp_path, capsys):
    words = ["+recipe=sft_arithmetic", "epochs=1", "examples_per_step=400", "eval.every=0", "lora.rank=2"]
    words += ["model.device=cpu", "console=null", f"hydra.run.dir={tmp_path / 'epochs'}"]
    assert cli.run(["sft", *words]) == 0
    row = listed(capsys, str(tmp_path))[0]
    assert row["step"] == row["steps"] > 0
    assert watch._info(tmp_path / "epochs", {"command": "sft", "steps": None}).steps == row["steps"]


def test_a_sampling_is_as_far_as_its_prompts(capsys):
    rows = {row["command"]: row for row in listed(capsys, str(Path(__file__).parents[2] / "runs" / "recorded"))}
    assert rows.keys() == {"train", "sft", "rm", "dpo", "sample"}
    assert rows["sample"]["step"] == rows["sample"]["steps"] == 2


def test_a_living_run_is_running(made, capsys):
    with run_folder.held(made / "first" / "b"):
        assert names(listed(capsys, str(made), "status=running"), made) == ["first/b"]
