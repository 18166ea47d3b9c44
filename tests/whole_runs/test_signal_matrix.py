"""A part of the table that signal_matrix.py fills: the stages and signals that most is done for, in few processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_processes import Nursery
from signal_matrix import VERBS, Cell, cells, run_verb

PARTS = {
    "train": [
        ("scoring", "TERM", "everybody"),
        ("scoring", "STOP", "everybody"),
        ("publish", "QUIT", "everybody"),
        ("checkpoint", "HUP", "everybody"),
    ],
    "rm": [("update", "TERM", "main"), ("checkpoint", "QUIT", "main")],
    "sample": [("scoring", "STOP", "everybody"), ("scoring", "HUP", "everybody")],
}


@pytest.mark.parametrize("name", PARTS)
def test_a_signal_in_a_stage_changes_nothing(name: str, rough: Nursery, tmp_path: Path) -> None:
    chosen = [Cell(stage=stage, signal=number, scope=scope) for stage, number, scope in PARTS[name]]
    assert [(cell, problem) for cell, problem in run_verb(name, rough, tmp_path, chosen) if problem] == []


def test_the_table_has_every_stage_signal_and_scope() -> None:
    # 6 signals, to the main process or all, in 8, 6, 4 and 3 stages.
    assert {name: len(set(cells(verb))) for name, verb in VERBS.items()} == {
        "train": 96, "sft": 72, "rm": 48, "sample": 36,
    }  # fmt: skip
