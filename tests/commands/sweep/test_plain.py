"""A plain sweep: the table at its end has jobs by the keys that differ, whole at the width of a usual terminal."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlft.commands.sweep.checks import Checked
from rlft.commands.sweep.page import write_csv
from rlft.commands.sweep.plain import Grid, rows
from rlft.commands.sweep.space import Space, read_grid
from rlft.config.overrides import parse

HEADERS = ["job", "keys", "steps", "before", "accuracy", "reward", "seconds"]


def space_of(*words: str) -> Space:
    return read_grid(["+recipe=grpo_arithmetic", "steps=4", *words, "hydra.sweep.dir=swept"], "train")


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


def printed(tmp_path: Path, space: Space, capsys: pytest.CaptureFixture[str]) -> list[str]:
    configs: list[Any] = [SimpleNamespace(plain={}) for _ in space.combinations()]
    checked = Checked(
        verb="train", parsed=parse(["-m"]), space=space, configs=configs, cluster=None, on_gpus=False, plans={}
    )
    Grid(checked, tmp_path).show()
    return capsys.readouterr().out.splitlines()


def test_headers_and_numbers_are_whole_at_80_columns(
    tmp_path: Path, finished: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    space = space_of("trainer.lr=0.0001,0.0003", "lora.target_modules=[q_proj,k_proj,v_proj],all-linear")
    for number in range(4):
        finished(number, accuracy=0.1 * number)
    lines = printed(tmp_path, space, capsys)
    assert max(map(len, lines[:-1])) <= 80
    assert [cell.strip() for cell in lines[2].strip("┃").split("┃")] == HEADERS
    first = [cell.strip() for cell in lines[4].strip("│").split("│")]
    assert [first[0], *first[2:]] == ["3", "4", "0.000", "0.300 ± 0.062", "0.500", "1234.6"]
    text = "".join(line.split("│")[2].strip() for line in lines if line.startswith("│"))
    assert text.replace(" ", "").count("lr=0.0001,target_modules=[q_proj,k_proj,v_proj]") == 1, "no value is lost"


def test_jobs_are_named_by_whole_keys_where_two_end_alike() -> None:
    names = [space.name(params) for space in [space_of("trainer.lr=1e-3,1e-4", "critic.lr=1e-3,1e-4")]
             for params in space.combinations()]  # fmt: skip
    assert names[3] == "trainer.lr=0.0001, critic.lr=0.0001"
    space = space_of("trainer.lr=1e-3,1e-4")
    assert [space.name(params) for params in space.combinations()] == ["lr=0.001", "lr=0.0001"]
    assert space_of().name({}) == "recipe=grpo_arithmetic, steps=4"


def test_a_swept_key_named_as_a_result_keeps_its_values(tmp_path: Path, finished: Any) -> None:
    for number in range(2):
        finished(number, accuracy=0.5)
    table = rows(tmp_path, space_of("reward=exact_match,math"))
    with write_csv(tmp_path, list(table[0]), [list(row.values()) for row in table]).open(newline="") as stream:
        found = [(row["reward="], row["reward"]) for row in csv.DictReader(stream)]
    assert found == [("exact_match", "0.5"), ("math", "0.5")]
