"""The table at the end of a sweep: jobs by the keys that differ, whole at the width of a usual terminal."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlft.commands.sweep import table as sweep_table

HEADERS = ["job", "keys", "steps", "before", "accuracy", "reward", "seconds"]


def jobs_of(*keys: Sequence[str]) -> list[list[str]]:
    return [["+recipe=grpo_arithmetic", "steps=4", *found, "hydra.sweep.dir=swept"] for found in keys]


@pytest.fixture
def finished(tmp_path: Path) -> Any:
    """Writes what a job leaves in its folder: an evaluation before and after, and the last step's metrics."""

    def write(number: int, accuracy: float) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        evaluations = [{"step": step, "accuracy": accuracy * step / 4, "accuracy_se": 0.0625} for step in (0, 4)]
        (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 4, "reward/mean": 0.5, "time/step": 1234.56}) + "\n")

    return write


def printed(tmp_path: Path, jobs: list[list[str]], capsys: pytest.CaptureFixture[str]) -> list[str]:
    table = sweep_table.rows(tmp_path, jobs)
    sweep_table.print_table(table, sweep_table.names_of(jobs), sweep_table.write_csv(tmp_path, table))
    return capsys.readouterr().out.splitlines()


def test_headers_and_numbers_are_whole_at_80_columns(
    tmp_path: Path, finished: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    targets = ("[q_proj,k_proj,v_proj]", "all-linear")
    jobs = jobs_of(*([f"trainer.lr={lr}", f"lora.target_modules={t}"] for lr in ("0.0001", "0.0003") for t in targets))
    for number in range(4):
        finished(number, accuracy=0.1 * number)
    lines = printed(tmp_path, jobs, capsys)
    assert max(map(len, lines[:-1])) <= 80
    assert [cell.strip() for cell in lines[2].strip("┃").split("┃")] == HEADERS
    first = [cell.strip() for cell in lines[4].strip("│").split("│")]
    assert [first[0], *first[2:]] == ["3", "4", "0.000", "0.300 ± 0.062", "0.500", "1234.6"]
    text = "".join(line.split("│")[2].strip() for line in lines if line.startswith("│"))
    assert text.replace(" ", "").count("lr=0.0001,target_modules=[q_proj,k_proj,v_proj]") == 1, "no value is lost"


def test_jobs_are_named_by_whole_keys_where_two_end_alike() -> None:
    jobs = jobs_of(["trainer.lr=1e-3", "critic.lr=1e-3"], ["trainer.lr=1e-4", "critic.lr=1e-4"])
    assert sweep_table.names_of(jobs)[1] == "trainer.lr=1e-4, critic.lr=1e-4"
    assert sweep_table.names_of(jobs_of(["trainer.lr=1e-3"], ["trainer.lr=1e-4"])) == ["lr=1e-3", "lr=1e-4"]


def test_a_swept_key_named_as_a_result_keeps_its_values(tmp_path: Path, finished: Any) -> None:
    jobs = jobs_of(["reward=exact_match"], ["reward=math"])
    for number in range(2):
        finished(number, accuracy=0.5)
    with sweep_table.write_csv(tmp_path, sweep_table.rows(tmp_path, jobs)).open(newline="") as stream:
        found = [(row["reward="], row["reward"]) for row in csv.DictReader(stream)]
    assert found == [("exact_match", "0.5"), ("math", "0.5")]
