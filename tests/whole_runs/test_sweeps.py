"""Sweeps as they are run: one base, each job as if alone, a table; stopped, and repeated or resumed, nothing twice."""

import csv
import json
from pathlib import Path

import pytest
from run_folders import check_same, learned, metrics, tiny


def two_steps(prompts):
    """Evaluated before the first and after the last one on so many prompts."""
    keys = tiny("steps=2", "data.held_out_size=16", f"eval.num_prompts={prompts}", "eval.num_samples=2")
    return tuple(key for key in keys if not key.startswith("eval.every="))


# -- a grid of values --------------------------------------------------------------------------------------------------
RATES, SEEDS = ("0.001", "0.003"), ("0", "1")
JOBS = [(rate, seed) for rate in RATES for seed in SEEDS]  # in Hydra's order
SWEEP = (
    "train", "-m", *two_steps(4)[1:], "checkpoint.every=1", f"trainer.lr={','.join(RATES)}", f"seed={','.join(SEEDS)}",
    "hydra.sweep.dir=sweep",
)  # fmt: skip
UPDATE = "rlft.trainer.optimizer:Optimizer.update"
BASE = "transformers:AutoModelForCausalLM.from_pretrained"


@pytest.fixture
def alone(undisturbed_of):
    """Gives the folder of a job that was run by itself."""

    def folder(number: int) -> Path:
        rate, seed = JOBS[number]
        run = undisturbed_of(*two_steps(4), f"trainer.lr={rate}", f"seed={seed}")
        assert learned(run)
        return run

    return folder


def check_table(folder, done):
    """sweep.csv has a line a job, best held-out accuracy first, with what the job reached; the terminal shows it."""
    with (folder / "sweep.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    accuracies = [float(row["accuracy"]) for row in rows]
    assert accuracies == sorted(accuracies, reverse=True)
    assert len(set(accuracies)) > 1, "the order is one by accuracy, not by number"
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


def test_a_sweep_that_is_killed_fails_and_is_interrupted_goes_on_each_time_it_is_repeated(alone, forks, tmp_path):
    sweep = tmp_path / "sweep"
    kill = {"at": "rlft.loop.session:Session.sample", "call": 4, "do": "kill"}  # in job 1, with its first step saved
    assert forks.run(*SWEEP, cwd=tmp_path, events=[kill]).code == -9
    assert steps_done(sweep) == [2, 1]
    first = (sweep / "0" / "metrics.jsonl").read_bytes()

    fail = {"at": UPDATE, "call": 2, "do": "fail"}  # job 1 lacks one, so: in job 2's first step
    ctrl_c = {"at": UPDATE, "call": 3, "do": "interrupt"}  # in job 3's first step
    done = forks.run(*SWEEP, cwd=tmp_path, events=[fail, ctrl_c], ends=130)
    failure = "job 2 failed: RuntimeError: this failure was planted; its traceback is in sweep/2/error.txt"
    assert failure in done.err
    assert "repeat it with hydra.sweep.dir=sweep" in done.err
    assert "sweep of 4 jobs" in done.out, "the table is told whatever became of the jobs"
    assert steps_done(sweep) == [2, 2, 0, 1]

    seen, loaded = tmp_path / "seen", tmp_path / "loaded"
    look = {"at": "rlft.loop.session:Session.sample", "do": "note", "to": str(seen)}
    done = forks.run(*SWEEP, cwd=tmp_path, events=[look, {"at": BASE, "do": "note", "to": str(loaded)}], ends=0)
    assert [f"job {n} is finished already: sweep/{n}" in done.out for n in range(4)] == [True, True, False, False]
    assert len(seen.read_text().splitlines()) == 2 + 1, "both steps of job 2, and the one that job 3 lacked"
    assert len(loaded.read_text().splitlines()) == 1, "the jobs share one base"
    assert (sweep / "0" / "metrics.jsonl").read_bytes() == first, "times included: nothing was done again"
    for number in range(len(JOBS)):
        check_same(sweep / str(number), alone(number))
    check_table(sweep, done)


def steps_done(sweep):
    return [len(metrics(job)) for job in sorted(folder for folder in sweep.iterdir() if folder.is_dir())]


# -- values that Optuna chooses: killed, resumed, and made longer with trials side by side -----------------------------
CHOSEN = ("sweep=optuna", "sweep.trials=3", "sweep.seeds=2", "sweep.pruner=median", "sweep.startup=1", "sweep.seed=22",
          "hydra.sweep.dir=sweep")  # fmt: skip
SPACE = ("trainer.lr=interval(1e-3,1e-1)", "algorithm=grpo,gspo")
"""With this seed trials 0 and 1 have rates of 0.0018 and 0.0011, and trial 2 one of 0.098, after whose first step the
policy says nothing that is right."""


def table(sweep):
    with (sweep / "sweep.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def first_runs_done(sweep):
    """Of the first run of each trial."""
    folders = [sweep / str(trial) / "seed_0" for trial in range(3)]
    return [len(metrics(folder)) if folder.exists() else 0 for folder in folders]


def all_steps(sweep):
    return sum(len(metrics(run)) for run in sweep.glob("[0-9]*/seed_*"))


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_same_end_and_can_be_made_longer(forks, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    words = ("train", "-m", *two_steps(16)[1:], "checkpoint.every=1", "eval.every=1", *SPACE, *CHOSEN)
    done = forks.run(*words, cwd=whole, ends=0)
    assert "sweep of 3 trials, best accuracy first" in done.out

    kill = {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"}  # in trial 0, with its first step saved
    assert forks.run(*words, cwd=killed, events=[kill]).code == -9
    assert first_runs_done(killed / "sweep") == [1, 0, 0]
    ctrl_c = {"at": "rlft.trainer.optimizer:Optimizer.update", "call": 4, "do": "interrupt"}  # in trial 1's first step
    done = forks.run("resume", "sweep", cwd=killed, events=[ctrl_c], ends=130)
    assert "sweep of 3 trials, 0 done" in done.err
    assert "resume the sweep with: rlft resume sweep" in done.err
    before = first_runs_done(killed / "sweep")
    assert before == [2, 1, 0]
    saved = all_steps(killed / "sweep")
    seen = tmp_path / "seen"
    look = {"at": "rlft.loop.session:Session.sample", "do": "note", "to": str(seen)}
    forks.run("resume", "sweep", cwd=killed, events=[look], ends=0)
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
    done = forks.run(*others, cwd=killed, ends=2)
    assert "trainer.lr: differs from that of the sweep in sweep, interval(1e-3,1e-1)" in done.err

    forks.run("resume", "sweep", "sweep.trials=5", "cluster.jobs=2", cwd=killed, ends=0)
    longer = {row["trial"]: row for row in table(killed / "sweep")}
    assert sorted(longer) == ["0", "1", "2", "3", "4"]
    assert {row["state"] for row in longer.values()} <= {"complete", "pruned"}
    assert (killed / "sweep" / "cluster" / "job-8.log").exists(), "the first run of trial 4"
    assert {trial: row for trial, row in longer.items() if trial in rows} == rows


@pytest.mark.slow
def test_a_study_of_preferences_looks_for_the_lowest_loss(forks, tmp_path):
    keys = ("preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64", "steps=2", "eval.every=2",
            "rankings_per_step=4", "eval.num_rankings=8", "lora.rank=2", "model.device=cpu")  # fmt: skip
    chosen = ("sweep=optuna", "sweep.sampler=grid", "sweep.metric=eval/loss", "hydra.sweep.dir=sweep")
    forks.run("dpo", "-m", *keys, "trainer.lr=1e-6,1e-2", *chosen, cwd=tmp_path, ends=0)
    rows = table(tmp_path / "sweep")
    for row in rows:
        lines = (tmp_path / "sweep" / row["trial"] / "seed_0" / "eval.jsonl").read_text().splitlines()
        assert float(row["eval/loss"]) == json.loads(lines[-1])["eval/loss"]
    assert float(rows[0]["eval/loss"]) < float(rows[1]["eval/loss"])
