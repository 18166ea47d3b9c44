"""A new run from a checkpoint: the same steps as the run's own, whole curves, its origin, and what may change.

What it may not change is in test_resume_refusals.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_folders import check_same, files_of, metrics, rollouts, whole_lines
from run_processes import Nursery

from rlft import cli
from rlft.system.files import digest_of_file

FROM = "run/checkpoints/step_000003"


@pytest.fixture
def place(undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the undisturbed run, of five steps and all checkpoints, in `run`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(undisturbed, tmp_path / "run")
    return tmp_path


def origin_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text())["origin"]


def test_a_fork_does_what_the_run_itself_did_and_leaves_the_run_alone(
    undisturbed: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(place / "run")
    assert cli.run(["resume", FROM]) == 0
    [fork] = (place / "runs" / "grpo_arithmetic").iterdir()
    assert f"a new run from run after step 3, in {fork.relative_to(place)}" in capsys.readouterr().err
    check_same(fork, undisturbed)
    for step in (4, 5):
        name = f"step_{step:06d}"
        assert files_of(fork / "checkpoints" / name) == files_of(place / "run" / "checkpoints" / name)
    assert files_of(place / "run") == before
    manifest = place / FROM / "MANIFEST"
    assert origin_of(fork)["forked_from"] == {
        "run": "../../../run",
        "step": 3,
        "checkpoint": digest_of_file(manifest),
        "changed": {},
    }
    assert yaml.safe_load((fork / "config.yaml").read_text())["resume"] is None


@pytest.mark.slow
def test_a_fork_that_is_killed_at_any_moment_of_its_start_can_be_begun_or_resumed(
    forks: Nursery, undisturbed: Path, place: Path
) -> None:
    words = ("resume", FROM, "hydra.run.dir=fork")
    for event in (
        {"at": "rlft.runs.checkpoint:find_damage", "call": 2, "do": "kill"},  # the checkpoint has been copied
        {"at": "rlft.runs.run_folder:write_config", "call": 1, "do": "kill"},
    ):
        assert forks.run(*words, cwd=place, events=[event]).code == -9
        assert not (place / "fork" / "config.yaml").exists(), "not a run yet"
    for event in (
        {"at": "rlft.runs.run_status:recording_status", "call": 1, "do": "kill"},
        {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"},  # in step 5
    ):
        forks.run(*words, cwd=place, events=[event], ends=-9)
        words = ("resume", "fork")
    again = forks.run("resume", FROM, "hydra.run.dir=fork", cwd=place)
    assert (again.code, "continue it with `rlft resume fork`" in again.err) == (2, True)
    forks.run("resume", "fork", cwd=place, ends=0)
    check_same(place / "fork", undisturbed)


@pytest.mark.slow
def test_a_fork_with_another_rate_goes_another_way_from_the_same_beginning(undisturbed: Path, place: Path) -> None:
    changed = ("trainer.lr=0.0005", "algorithm.kl_coef=0.1", "snapshot.reference=base", "group_size=2", "steps=6")
    assert cli.run(["resume", FROM, *changed, "hydra.run.dir=fork"]) == 0
    fork = place / "fork"
    assert metrics(fork)[:3] == metrics(undisturbed)[:3]
    assert [line["step"] for line in metrics(fork)] == [1, 2, 3, 4, 5, 6]
    assert [line["policy/lr"] for line in metrics(fork)] == [0.001] * 3 + [0.0005] * 3
    assert ["kl/reference" in line for line in metrics(fork)] == [False] * 3 + [True] * 3
    assert [json.loads(line)["step"] for line in whole_lines(fork / "eval.jsonl")] == [0, 2, 4, 6]
    first = {name: content for name, content in rollouts(undisturbed).items() if name <= "step_000003.jsonl"}
    assert {name: rollouts(fork)[name] for name in first} == first
    assert origin_of(fork)["forked_from"]["changed"] == {
        "algorithm.kl_coef": "0.0 -> 0.1",
        "group_size": "4 -> 2",
        "snapshot.reference": "none -> base",
        "steps": "5 -> 6",
        "trainer.lr": "0.001 -> 0.0005",
    }
