"""A sweep whose values Optuna chooses, as it is run: killed, resumed, and made longer with trials side by side."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from run_folders import SWEPT, check_same, metrics
from run_processes import Nursery

CHOSEN = ("sweep=optuna", "sweep.trials=3", "sweep.seeds=2", "sweep.pruner=median", "sweep.startup=1", "sweep.seed=22",
          "hydra.sweep.dir=sweep")  # fmt: skip
SPACE = ("trainer.lr=interval(1e-3,1e-1)", "algorithm=grpo,gspo")
"""With this seed trials 0 and 1 have rates of 0.0018 and 0.0011, and trial 2 one of 0.098, after whose first step the
policy says nothing that is right."""


def table(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def steps_done(sweep: Path) -> list[int]:
    """Of the first run of each trial."""
    folders = [sweep / str(trial) / "seed_0" for trial in range(3)]
    return [len(metrics(folder)) if folder.exists() else 0 for folder in folders]


def all_steps(sweep: Path) -> int:
    return sum(len(metrics(run)) for run in sweep.glob("[0-9]*/seed_*"))


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_same_end_and_can_be_made_longer(forks: Nursery, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    words = ("train", "-m", *SWEPT[1:], "checkpoint.every=1", "eval.every=1", *SPACE, *CHOSEN)
    done = forks.run(*words, cwd=whole)
    assert done.code == 0, done.err
    assert "sweep of 3 trials, best accuracy first" in done.out

    kill = {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"}  # in trial 0, with its first step saved
    assert forks.run(*words, cwd=killed, events=[kill]).code == -9
    assert steps_done(killed / "sweep") == [1, 0, 0]
    ctrl_c = {"at": "rlft.trainer.optimizer:Optimizer.update", "call": 4, "do": "interrupt"}  # in trial 1's first step
    done = forks.run("resume", "sweep", cwd=killed, events=[ctrl_c])
    assert done.code == 130, done.err
    assert "sweep of 3 trials, 0 done" in done.err
    assert "resume the sweep with: rlft resume sweep" in done.err
    before = steps_done(killed / "sweep")
    assert before == [2, 1, 0]
    saved = all_steps(killed / "sweep")
    seen = tmp_path / "seen"
    look = {"at": "rlft.loop.session:Session.sample", "do": "note", "to": str(seen)}
    done = forks.run("resume", "sweep", cwd=killed, events=[look])
    assert done.code == 0, done.err
    assert table(killed / "sweep") == table(whole / "sweep")
    sampled = len(seen.read_text().splitlines()) if seen.exists() else 0
    assert sampled == all_steps(whole / "sweep") - saved, "no step that was saved is done again"
    rows = {row["trial"]: row for row in table(whole / "sweep")}
    assert {trial: rows[trial]["state"] for trial in "02"} == {"0": "complete", "2": "pruned"}
    assert rows["2"]["why"] == "median at step 1"
    for trial, row in rows.items():
        runs = [Path("sweep", trial, f"seed_{seed}") for seed in (0, 1)]
        if row["state"] == "complete":
            for run in runs:
                check_same(killed / run, whole / run)
            last = [json.loads((whole / run / "eval.jsonl").read_text().splitlines()[-1]) for run in runs]
            assert float(row["accuracy"]) == (last[0]["accuracy"] + last[1]["accuracy"]) / 2
        else:
            assert json.loads((whole / runs[0] / "status.json").read_text())["error"] == "PrunedError"

    done = forks.run("resume", "sweep", cwd=killed)
    assert (done.code, "sweep.trials: the sweep has all its trials, got 3" in done.err) == (2, True), done.err
    done = forks.run("resume", "sweep", "trainer.lr=1e-3", cwd=killed)
    assert (done.code, "trainer.lr: cannot change when a sweep is resumed" in done.err) == (2, True), done.err
    others = [word.replace("1e-3,1e-1", "1e-4,1e-1") for word in words]
    done = forks.run(*others, cwd=killed)
    assert done.code == 2
    assert "trainer.lr: differs from that of the sweep in sweep, interval(1e-3,1e-1)" in done.err

    done = forks.run("resume", "sweep", "sweep.trials=5", "cluster.jobs=2", cwd=killed)
    assert done.code == 0, done.err
    longer = {row["trial"]: row for row in table(killed / "sweep")}
    assert sorted(longer) == ["0", "1", "2", "3", "4"]
    assert {row["state"] for row in longer.values()} <= {"complete", "pruned"}
    assert (killed / "sweep" / "cluster" / "job-8.log").exists(), "the first run of trial 4"
    assert {trial: row for trial, row in longer.items() if trial in rows} == rows


@pytest.mark.slow
def test_a_study_of_preferences_looks_for_the_lowest_loss(forks: Nursery, tmp_path: Path) -> None:
    keys = ("preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64", "steps=2", "eval.every=2",
            "rankings_per_step=4", "eval.num_rankings=8", "lora.rank=2", "model.device=cpu")  # fmt: skip
    chosen = ("sweep=optuna", "sweep.sampler=grid", "sweep.metric=eval/loss", "hydra.sweep.dir=sweep")
    done = forks.run("dpo", "-m", *keys, "trainer.lr=1e-6,1e-2", *chosen, cwd=tmp_path)
    assert done.code == 0, done.err
    rows = table(tmp_path / "sweep")
    for row in rows:
        lines = (tmp_path / "sweep" / row["trial"] / "seed_0" / "eval.jsonl").read_text().splitlines()
        assert float(row["eval/loss"]) == json.loads(lines[-1])["eval/loss"]
    assert float(rows[0]["eval/loss"]) < float(rows[1]["eval/loss"])
