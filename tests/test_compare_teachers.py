"""The table and the picture of ways to teach: of made-up runs, and of real ones from end to end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import compare_teachers as compare
import pytest
import yaml

from rlft import cli

pytestmark = pytest.mark.slow

TINY = [
    "steps=1", "data.size=16", "data.held_out_size=4", "eval.num_prompts=2", "eval.num_samples=1", "lora.rank=2",
    "lora.alpha=2", "scoring.workers=0", "model.device=cpu", "generation=transformers", "generation.max_tokens=12",
]  # fmt: skip


def make_up(folder: Path, accuracies: list[float], every: int, examples: int | None = None) -> None:
    """The lines of a run of 10 completions a step that was evaluated after so many steps each time."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"examples_per_step": examples} if examples else {}))
    steps = [{"step": step, "sampled/completions": 10} for step in range(1, every * (len(accuracies) - 1) + 1)]
    evaluations = [{"step": every * i, "accuracy": value} for i, value in enumerate(accuracies)]
    for name, lines in (("metrics.jsonl", steps), ("eval.jsonl", evaluations)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_ways_are_compared_by_the_completions_that_were_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, last in enumerate((0.9, 1.0)):
        make_up(tmp_path / f"seed_{seed}" / "teacher", [0.4, last], every=1)
        make_up(tmp_path / f"seed_{seed}" / "opd", [0.25, 0.5, last], every=5)
        make_up(tmp_path / f"seed_{seed}" / "traces", [0.25, 0.4, 0.6], every=2, examples=32)
    assert compare.run(["--redraw", "--seeds", "0", "1", "--only", "traces", "opd", "--out", str(tmp_path)]) == 0
    told = (tmp_path / "teachers.md").read_text()
    assert told in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith("|")][2:]
    # 4 updates of 32 examples; 10 steps of 10 completions, half of which are sampled when 0.5 is reached.
    assert rows == [
        ["traces (SFT)", "0.250 (0.250 to 0.250)", "0.600 (0.600 to 0.600)", "128", "128; 128", "-; -"],
        ["on-policy distillation", "0.250 (0.250 to 0.250)", "0.950 (0.900 to 1.000)", "100", "50; 50", "100; 100"],
    ]
    assert "The teachers' accuracy: 0.950 (0.900 to 1.000)" in told
    assert (tmp_path / "teachers.png").read_bytes()[1:4] == b"PNG"


def test_what_is_not_there_a_run_that_fails_and_ctrl_c_are_a_line_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seeds", "0", "1", "--only", "opd", "--out", str(tmp_path)]
    assert compare.run([*words, "--redraw"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"compare_teachers: --out: no run in that folder has been evaluated, got {tmp_path}/seed_0/opd;"
    )
    for seed, accuracies in enumerate(([0.25, 0.5], [0.25, 0.5, 0.75])):  # the first was stopped
        make_up(tmp_path / f"seed_{seed}" / "opd", accuracies, every=5)
    assert compare.run([*words, "--redraw"]) == 2
    assert "--seeds: runs of opd with different seeds have been evaluated at different steps" in capsys.readouterr().err
    for code, exit_code, message in ((7, 1, "rlft train +recipe=grpo_arithmetic "), (130, 130, "goes on from here")):
        monkeypatch.setattr(compare.subprocess, "run", lambda *a, code=code, **k: subprocess.CompletedProcess(a, code))
        assert compare.run(words) == exit_code
        assert message in capsys.readouterr().err


def test_the_teacher_its_traces_and_its_students_are_made_and_left_alone_when_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(*words: str) -> None:
        fewer = {"sample": "num_prompts=16", "sft": "demonstrations.held_out_fraction=0.3"}.get(words[0])
        if fewer is not None:
            key = fewer.partition("=")[0] + "="
            words = (*(word for word in words if not word.startswith(key)), fewer)
        assert cli.run(list(words)) == 0, words

    monkeypatch.setattr(compare, "rlft", here)
    words = ["--only", "traces", "both", "--seeds", "7", "--out", str(tmp_path), "--override", *TINY]
    assert compare.run(words) == 0
    folder = tmp_path / "seed_7"
    [line] = compare.read_lines(folder / "both" / "metrics.jsonl")
    assert {"reward/exact_match", "kl/teacher", "teacher/agreement"} <= line.keys()
    assert len((folder / "lessons" / "samples.jsonl").read_text().splitlines()) == 64
    assert yaml.safe_load((folder / "both" / "config.yaml").read_text())["snapshot"]["teacher"].endswith(
        "teacher_model"
    )
    before = (folder / "both" / "metrics.jsonl").stat()
    assert compare.run(words) == 0
    assert (folder / "both" / "metrics.jsonl").stat() == before
