"""A sweep whose values Optuna chooses, as it is run: killed, gone on with, and made longer with trials side by side."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from run_folders import check_same, metrics
from run_processes import Nursery

CHOSEN = ("sweep=optuna", "sweep.trials=3", "sweep.pruner=median", "sweep.startup=1", "hydra.sweep.dir=sweep")
SPACE = ("trainer.lr=interval(1e-3,1e-2)", "algorithm=grpo,gspo")


@pytest.fixture(scope="module")
def keys(tiny: tuple[str, ...]) -> tuple[str, ...]:
    """Two steps, each saved and evaluated on enough completions to tell trials apart."""
    changed = ("steps=", "eval.", "data.held_out_size", "checkpoint")
    return (
        *(key for key in tiny if not key.startswith(changed)),
        "steps=2",
        "checkpoint.every=1",
        "eval.every=1",
        "data.held_out_size=16",
        "eval.num_prompts=16",
        "eval.num_samples=2",
    )


def table(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def steps_done(sweep: Path) -> list[int]:
    folders = [sweep / str(trial) / "seed_0" for trial in range(3)]
    return [len(metrics(folder)) if folder.exists() else 0 for folder in folders]


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_same_end_and_can_be_made_longer(
    keys: tuple[str, ...], quiet: Nursery, rough: Nursery, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    words = ("train", "-m", *keys, *SPACE, *CHOSEN)
    done = quiet.run(*words, cwd=whole)
    assert done.code == 0, done.err
    assert "sweep of 3 trials, best accuracy first" in done.out

    kill = {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"}  # in trial 0, with its first step saved
    assert rough.run(*words, cwd=killed, events=[kill]).code == -9
    assert steps_done(killed / "sweep") == [1, 0, 0]
    ctrl_c = {"at": "rlft.trainer.optimizer:Optimizer.update", "call": 2, "do": "interrupt"}  # in trial 1's first step
    done = rough.run("resume", "sweep", cwd=killed, events=[ctrl_c])
    assert done.code == 130, done.err
    assert "sweep of 3 trials, 0 done" in done.err
    assert "the sweep goes on with: rlft resume sweep" in done.err
    before = steps_done(killed / "sweep")
    assert before == [2, 1, 0]
    seen = tmp_path / "seen"
    look = {"at": "rlft.loop.session:Session.sample", "do": "note", "to": str(seen)}
    done = rough.run("resume", "sweep", cwd=killed, events=[look])
    assert done.code == 0, done.err
    assert table(killed / "sweep") == table(whole / "sweep")
    sampled = len(seen.read_text().splitlines()) if seen.exists() else 0
    assert sampled == sum(steps_done(whole / "sweep")) - sum(before), "no step that was saved is done again"
    for row in table(whole / "sweep"):
        run = Path("sweep", row["trial"], "seed_0")
        if row["state"] == "complete":
            check_same(killed / run, whole / run)
            last = json.loads((whole / run / "eval.jsonl").read_text().splitlines()[-1])
            assert float(row["accuracy"]) == last["accuracy"]
        else:
            assert json.loads((whole / run / "status.json").read_text())["error"] == "PrunedError"

    done = rough.run("resume", "sweep", cwd=killed)
    assert (done.code, "sweep.trials: the sweep has all its trials, got 3" in done.err) == (2, True), done.err
    done = rough.run("resume", "sweep", "trainer.lr=1e-3", cwd=killed)
    assert (done.code, "trainer.lr: cannot change when a sweep goes on" in done.err) == (2, True), done.err
    others = [word.replace("1e-3,1e-2", "1e-4,1e-2") for word in words]
    done = rough.run(*others, cwd=killed)
    assert done.code == 2
    assert "trainer.lr: differs from that of the sweep in sweep, interval(1e-3,1e-2)" in done.err

    done = rough.run("resume", "sweep", "sweep.trials=5", "cluster.jobs=2", cwd=killed)
    assert done.code == 0, done.err
    rows = table(killed / "sweep")
    assert sorted(int(row["trial"]) for row in rows) == [0, 1, 2, 3, 4]
    assert {row["state"] for row in rows} <= {"complete", "pruned"}
    assert (killed / "sweep" / "cluster" / "job-4.log").exists()
    first = {row["trial"]: row for row in table(whole / "sweep")}
    assert {row["trial"]: row for row in rows if row["trial"] in first} == first
