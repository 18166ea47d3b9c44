"""A new run from a checkpoint: the same steps as the run's own, whole curves, its origin, and what may change."""

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
def place(undisturbed: Path, tmp_path: Path) -> Path:
    """A working directory with the undisturbed run, of five steps and all checkpoints, in `run`."""
    shutil.copytree(undisturbed, tmp_path / "run")
    return tmp_path


def origin_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text())["origin"]


def test_a_fork_does_what_the_run_itself_did_and_leaves_the_run_alone(
    rough: Nursery, undisturbed: Path, place: Path
) -> None:
    before = files_of(place / "run")
    done = rough.run("resume", FROM, cwd=place, ends=0)
    [fork] = (place / "runs" / "grpo_arithmetic").iterdir()
    assert f"a new run from run after step 3, in {fork.relative_to(place)}" in done.err
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
    rough: Nursery, undisturbed: Path, place: Path
) -> None:
    words = ("resume", FROM, "hydra.run.dir=fork")
    for event in (
        {"at": "rlft.runs.checkpoint:find_damage", "call": 2, "do": "kill"},  # the checkpoint has been copied
        {"at": "rlft.runs.run_folder:write_config", "call": 1, "do": "kill"},
    ):
        assert rough.run(*words, cwd=place, events=[event]).code == -9
        assert not (place / "fork" / "config.yaml").exists(), "not a run yet"
    for event in (
        {"at": "rlft.runs.run_status:recording_status", "call": 1, "do": "kill"},
        {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"},  # in step 5
    ):
        rough.run(*words, cwd=place, events=[event], ends=-9)
        words = ("resume", "fork")
    again = rough.run("resume", FROM, "hydra.run.dir=fork", cwd=place)
    assert (again.code, "continue it with `rlft resume fork`" in again.err) == (2, True)
    rough.run("resume", "fork", cwd=place, ends=0)
    check_same(place / "fork", undisturbed)


@pytest.mark.slow
def test_a_fork_with_another_rate_goes_another_way_from_the_same_beginning(
    rough: Nursery, undisturbed: Path, place: Path
) -> None:
    changed = ("trainer.lr=0.0005", "algorithm.kl_coef=0.1", "snapshot.reference=base", "group_size=2", "steps=6")
    rough.run("resume", FROM, *changed, "hydra.run.dir=fork", cwd=place, ends=0)
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


def test_what_the_checkpoint_does_not_fit_is_refused_by_key_and_nothing_is_written(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    for words, problem in (
        ("lora.rank=4 lora.alpha=8", "(lora.alpha: 16 -> 8; lora.rank: 2 -> 4)"),
        ("lora.target_modules=[q_proj]", "(lora.target_modules: all-linear -> ['q_proj'])"),
        ("snapshot.reference=copy", "(snapshot.reference: none -> copy)"),
        ("snapshot.old=copy", "(snapshot.old: auto -> copy)"),
        ("algorithm=ppo critic.kind=adapter", "(critic.kind: none -> adapter)"),
        ("model.dtype=bfloat16", "(model.dtype: auto -> bfloat16)"),
        ("steps=3", "steps: the new run begins after step 3, got 3; raise it, for instance steps=6"),
        ("stepz=9", "stepz: there is no such key, got 9; did you mean steps?"),
        ("resume=auto", "resume: has no meaning here: a new run starts from the checkpoint"),
        ("hydra.run.dir=run steps=9", "hydra.run.dir: there is a run in that folder"),
        ("model.path=embedded:tiny-student", "model.path: the base changed since the run began"),
    ):
        folder = [] if "hydra.run.dir" in words else ["hydra.run.dir=fork"]
        assert cli.run(["resume", FROM, *words.split(), *folder]) == 2, words
        assert problem in capsys.readouterr().err, words
    assert sorted(place.rglob("*")) == before


def test_a_damaged_checkpoint_is_not_forked(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    (place / FROM / "optimizer.safetensors").unlink()
    assert cli.run(["resume", FROM]) == 2
    assert "resume: the checkpoint is damaged (optimizer.safetensors is missing)" in capsys.readouterr().err
    assert cli.run(["train", f"resume={FROM}"]) == 2
    assert f"start a new run from it: rlft resume {FROM}" in capsys.readouterr().err
    assert cli.run(["resume", "run", "hydra.run.dir=elsewhere"]) == 2
    assert "start a new run from a checkpoint: rlft resume run/checkpoints/step_000005 " in capsys.readouterr().err
