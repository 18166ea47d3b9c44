"""The table that signal_matrix.py fills, and a part of it in few processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_processes import Nursery
from signal_matrix import COMMANDS, Cell, cells, run_command

PART = [Cell(stage="scoring", signal=name, scope="everybody") for name in ("TERM", "USR1")]


def problems(command: str, nursery: Nursery, place: Path, chosen: list[Cell] | None) -> list[tuple[Cell, str]]:
    return [(cell, problem) for cell, problem in run_command(command, nursery, place, chosen) if problem]


@pytest.mark.slow
def test_a_signal_in_a_stage_changes_nothing(rough: Nursery, tmp_path: Path) -> None:
    assert problems("train", rough, tmp_path, PART) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_signal_in_every_stage_changes_nothing(command: str, rough: Nursery, tmp_path: Path) -> None:
    assert problems(command, rough, tmp_path, None) == []


def test_the_table_has_every_stage_signal_and_scope() -> None:
    # 8 signals, to the main process or all, in 8, 6, 4 and 3 stages.
    assert {name: len(set(cells(command))) for name, command in COMMANDS.items()} == {
        "train": 128, "sft": 96, "rm": 64, "sample": 48,
    }  # fmt: skip
