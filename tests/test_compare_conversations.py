"""The table and the picture of conversations: of made-up runs, and of a real one from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_conversations as compare
import pytest

pytestmark = pytest.mark.slow

TINY = [
    "steps=1", "prompts_per_step=2", "group_size=2", "data.size=16", "data.held_out_size=4", "eval.num_prompts=2",
    "eval.num_samples=1", "eval.every=1", "lora.rank=2", "scoring.workers=0", "environment.workers=1",
    "model.device=cpu", "generation=transformers",
]  # fmt: skip


def make_up(folder: Path, accuracy: str, values: list[float], **others: Any) -> None:
    """The lines of a run that was evaluated after each of its steps, each of which took 2 s."""
    folder.mkdir(parents=True)
    steps = [{"step": step, "time/step": 2.0} for step in range(1, len(values))]
    evaluations = [{"step": step, accuracy: value, **others} for step, value in enumerate(values)]
    for name, lines in (("metrics.jsonl", steps), ("eval.jsonl", evaluations)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_start_middle_and_end_are_told_with_mean_and_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = {compare.CALLS: 0.5, compare.MALFORMED: 0.25, compare.FAILED: 0.25, compare.TURNS: 1.5}
    for seed, values in enumerate(([0.1, 0.2, 0.5, 0.6, 0.9], [0.3, 0.4, 0.7, 0.8, 1.0])):
        make_up(tmp_path / "grpo_calculator" / f"seed_{seed}", "eval/exact_match", values, **turns)
        make_up(tmp_path / "grpo_without" / f"seed_{seed}", "eval/exact_match", [0.0] * 5)
        make_up(tmp_path / "grpo_whom_to_ask" / f"seed_{seed}", "eval/turns", values)
    cases = ["grpo_calculator", "grpo_without", "grpo_whom_to_ask"]
    compare.main(["--redraw", "--seeds", "0", "1", "--only", *cases, "--out", str(tmp_path)])
    told = (tmp_path / "conversations.md").read_text()
    assert told in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith("|")][2:]
    assert [row[:3] for row in rows[:3]] == [
        ["GRPO, calculator", "0", "0.200 (0.100 to 0.300)"],
        ["", "2", "0.600 (0.500 to 0.700)"],
        ["", "4", "0.950 (0.900 to 1.000)"],
    ]
    assert rows[0][3:] == ["0.500 (0.500 to 0.500)", *["0.250 (0.250 to 0.250)"] * 2, "1.500 (1.500 to 1.500)", ""]
    assert rows[2][-1] == "8, 8", "four steps of 2 s"
    assert rows[3][:4] == ["GRPO, no calculator", "0", "0.000 (0.000 to 0.000)", ""], "without turns there are no calls"
    assert rows[6][2] == rows[0][2], "a game is right where its own reward says so"
    assert (tmp_path / "conversations.png").read_bytes()[1:4] == b"PNG"


def test_a_curve_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    turns = {compare.CALLS: 0.5, compare.MALFORMED: 0.25, compare.FAILED: 0.25, compare.TURNS: 1.5}
    make_up(tmp_path / "with", "eval/exact_match", [0.1, 0.9], **turns)
    make_up(tmp_path / "without", "eval/exact_match", [0.0, 0.0])
    drawn = compare.figure(
        {"grpo_calculator": [compare.read(tmp_path / "with")], "grpo_without": [compare.read(tmp_path / "without")]}
    )
    assert [len(panel.lines) for panel in drawn.axes] == [2, 1, 1, 1]


def test_a_case_is_trained_and_a_finished_one_left_alone(tmp_path: Path) -> None:
    words = ["--only", "ppo_calculator_turn", "--seeds", "7", "--out", str(tmp_path), "--override", *TINY]
    compare.main(words)
    folder = tmp_path / "ppo_calculator_turn" / "seed_7"
    [line] = compare.read_lines(folder / "metrics.jsonl")
    assert {"reward/exact_match", "reward/calls", "loss/value", "turns/calls"} <= line.keys()
    before = (folder / "metrics.jsonl").stat()
    compare.main(words)
    assert (folder / "metrics.jsonl").stat() == before
