"""Sweeps as they are run: one process, one base, each job as if alone, a table; stopped and repeated, nothing twice."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import SWEPT, check_same, learned, metrics
from run_processes import Ended, Nursery

RATES, SEEDS = ("0.001", "0.003"), ("0", "1")
JOBS = [(rate, seed) for rate in RATES for seed in SEEDS]  # in Hydra's order
SWEEP = (
    "train", "-m", *SWEPT[1:], "checkpoint.every=1", f"trainer.lr={','.join(RATES)}", f"seed={','.join(SEEDS)}",
    "hydra.sweep.dir=sweep",
)  # fmt: skip
UPDATE = "rlft.trainer.optimizer:Optimizer.update"
BASE = "transformers:AutoModelForCausalLM.from_pretrained"


@pytest.fixture
def alone(undisturbed_of: Callable[..., Path]) -> Callable[[int], Path]:
    """Gives the folder of a job that was run by itself."""

    def folder(number: int) -> Path:
        rate, seed = JOBS[number]
        run = undisturbed_of(*SWEPT, f"trainer.lr={rate}", f"seed={seed}")
        assert learned(run)
        return run

    return folder


def check_table(folder: Path, done: Ended) -> None:
    """sweep.csv has a line a job, best held-out accuracy first, with what the job reached; the terminal shows it."""
    with (folder / "sweep.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    accuracies = [float(row["accuracy"]) for row in rows]
    assert accuracies == sorted(accuracies, reverse=True)
    assert sorted(int(row["job"]) for row in rows) == list(range(len(JOBS)))
    for row in rows:
        number = int(row["job"])
        evaluations = [json.loads(line) for line in (folder / str(number) / "eval.jsonl").read_text().splitlines()]
        assert (row["trainer.lr"], row["seed"]) == JOBS[number]
        assert float(row["accuracy_before"]) == evaluations[0]["accuracy"]
        assert float(row["accuracy"]) == evaluations[-1]["accuracy"]
        assert float(row["reward"]) == metrics(folder / str(number))[-1]["reward/mean"]
        assert (row["steps"], row["folder"]) == ("2", f"sweep/{number}")
    assert "sweep of 4 jobs, best held-out accuracy first" in done.out
    assert "written to sweep/sweep.csv" in done.out


def test_a_sweep_that_is_killed_fails_and_is_interrupted_goes_on_each_time_it_is_repeated(
    alone: Callable[[int], Path], forks: Nursery, tmp_path: Path
) -> None:
    sweep = tmp_path / "sweep"
    kill = {"at": "rlft.loop.session:Session.sample", "call": 4, "do": "kill"}  # in job 1, with its first step saved
    assert forks.run(*SWEEP, cwd=tmp_path, events=[kill]).code == -9
    assert steps_done(sweep) == [2, 1]
    first = (sweep / "0" / "metrics.jsonl").read_bytes()

    fail = {"at": UPDATE, "call": 2, "do": "fail"}  # job 1 lacks one, so: in job 2's first step
    ctrl_c = {"at": UPDATE, "call": 3, "do": "interrupt"}  # in job 3's first step
    done = forks.run(*SWEEP, cwd=tmp_path, events=[fail, ctrl_c])
    assert done.code == 130, done.err
    failure = "job 2 failed: RuntimeError: this failure was planted; its traceback is in sweep/2/error.txt"
    assert failure in done.err
    assert "repeat it with hydra.sweep.dir=sweep" in done.err
    assert "sweep of 4 jobs" in done.out, "the table is told whatever became of the jobs"
    assert steps_done(sweep) == [2, 2, 0, 1]

    seen, loaded = tmp_path / "seen", tmp_path / "loaded"
    look = {"at": "rlft.loop.session:Session.sample", "do": "note", "to": str(seen)}
    done = forks.run(*SWEEP, cwd=tmp_path, events=[look, {"at": BASE, "do": "note", "to": str(loaded)}])
    assert done.code == 0, done.err
    assert [f"job {n} is finished already: sweep/{n}" in done.out for n in range(4)] == [True, True, False, False]
    assert len(seen.read_text().splitlines()) == 2 + 1, "both steps of job 2, and the one that job 3 lacked"
    assert len(loaded.read_text().splitlines()) == 1, "the jobs share one base"
    assert (sweep / "0" / "metrics.jsonl").read_bytes() == first, "times included: nothing was done again"
    for number in range(len(JOBS)):
        check_same(sweep / str(number), alone(number))
    check_table(sweep, done)


def steps_done(sweep: Path) -> list[int]:
    return [len(metrics(job)) for job in sorted(folder for folder in sweep.iterdir() if folder.is_dir())]
