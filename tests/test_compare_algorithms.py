"""The comparison of the algorithms: table, checks and picture from made-up runs; it goes on where it was stopped."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import compare_algorithms as compare
import pytest
import yaml

from rlft.types import UserError

pytestmark = pytest.mark.slow

SCRIPT = Path(compare.__file__)
Asked = Callable[..., argparse.Namespace]
Trained = Callable[..., list[tuple[str, list[str], str]]]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    """Options of a command line that trains into tmp_path."""
    return lambda *words: compare.parse(["--out", str(tmp_path), *words])


def write_lines(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_up(
    job: Any,
    accuracy: Sequence[float],
    *,
    sampled: Sequence[int] | None = None,
    seconds: float = 2.0,
    processor: float | None = 7.0,
    peak: int = 10**9,
    kl: float | None = 0.25,
    key: str = "eval/exact_match",
    trl: str | None = None,
) -> None:
    """The folder of a finished run of `job`: an evaluation before and after every step."""
    job.folder.mkdir(parents=True)
    origin = {"origin": {"torch": "2.13.0", "commit": "abc123"} | ({"trl": trl} if trl else {})}
    origin["origin"]["whole"] = True  # as the last key of a file that was written to its end
    (job.folder / "config.yaml").write_text(yaml.safe_dump({**job.config, **origin}))
    metrics = [
        {"step": step, "reward/mean": 0.5, "time/step": seconds, "memory/peak_bytes": peak}
        | ({"sampled/completions": sampled[step - 1]} if sampled else {})
        for step in range(1, len(accuracy))
    ]
    write_lines(job.folder / "metrics.jsonl", metrics)
    evaluations = [
        {"step": step, key: value, "eval/kl_base": kl, "eval/reward/format": 0.5 + step / 8}
        for step, value in enumerate(accuracy)
    ]
    write_lines(job.folder / "eval.jsonl", evaluations)
    record: dict[str, Any] = {"machine": "2 CPU cores (made up)", "date": "2026-01-02", "wall_seconds": 10.0}
    record["processor_seconds"] = processor
    (job.folder / "comparison.json").write_text(json.dumps(record))


class Ended:
    """A run's process that has ended."""

    processor_seconds = 3.5

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code

    def send_signal(self, sig: int) -> None:
        raise AssertionError(f"signal {sig} to a process that has ended")


def jobs_of(asked: Asked, *words: str) -> list[Any]:
    """Jobs of two steps that are evaluated after each."""
    return compare.make_jobs(asked(*words, "--override", "steps=2", "eval.every=1"))


# -- what is trained ---------------------------------------------------------------------------------------------------
def test_a_recipe_that_is_not_there_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert compare.run(["--only", "grpo", "grop", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("compare_algorithms: --only: there is no such recipe, got grop; choose of ")
    assert "grpo, " in told
    assert not (tmp_path / "out").exists()


def test_every_arithmetic_recipe_is_compared_and_no_other() -> None:
    names = compare.known_names(None)
    recipes = {file.stem for file in (SCRIPT.parents[1] / "recipes").glob("*.yaml")}
    assert {f"{name}_arithmetic" for name in names} == {recipe for recipe in recipes if recipe.endswith("_arithmetic")}
    assert "grpo_gsm8k" in recipes - {f"{name}_arithmetic" for name in names}


def test_by_default_every_algorithm_without_a_teacher_is_compared_and_no_other_command_or_stage(asked: Asked) -> None:
    names = {job.name for job in compare.make_jobs(asked("--seeds", "0"))}
    algorithms = {file.stem for file in (SCRIPT.parents[1] / "configs" / "algorithm").glob("*.yaml")}
    assert names == algorithms - {"opd"} | {"iterative_grpo"}
    assert compare.chosen_names(["opd"], compare.known_names(None)) == ["opd"], "if it is named, it is"


def test_recipes_of_the_users_own_folder_are_compared_too(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "own_arithmetic.yaml").write_text("# @package _global_\n# Mine\nsteps: 3\n")
    (job,) = compare.make_jobs(asked("--config-dir", str(tmp_path / "mine"), "--only", "own", "--seeds", "4"))
    assert (job.config["steps"], job.config["seed"], job.folder) == (3, 4, tmp_path / "own" / "seed_4")
    assert compare.command(job, tmp_path / "mine")[-2:] == ["--config-dir", str(tmp_path / "mine")]


def test_completions_become_steps(asked: Asked) -> None:
    # The recipe has 32 prompts x group of 8 = 256 a step: 5120 / 256 = 20 steps.
    jobs = compare.make_jobs(asked("--only", "grpo_arithmetic", "--seeds", "0", "7", "--completions", "5120"))
    assert [(job.config["steps"], job.config["seed"]) for job in jobs] == [(20, 0), (20, 7)]
    assert "steps=20" in jobs[0].overrides


def test_without_completions_a_recipe_says_its_steps(asked: Asked) -> None:
    (job,) = compare.make_jobs(asked("--only", "grpo", "--seeds", "0"))
    assert (job.config["steps"], job.completions_per_step) == (40, 256)
    assert job.config["eval"]["kl_base"] is True


def test_completions_that_no_whole_step_gives_are_refused(asked: Asked) -> None:
    # 5000 / 256 = 19.5: 19 steps have 4864, 20 have 5120.
    with pytest.raises(UserError, match=r"grpo has 256 a step.*got 5000; use 4864 or 5120"):
        compare.make_jobs(asked("--only", "grpo", "--completions", "5000"))


def test_a_seed_given_twice_and_a_recipe_never_evaluated_are_refused(asked: Asked) -> None:
    with pytest.raises(UserError, match="a seed is given twice"):
        compare.make_jobs(asked("--seeds", "1", "1"))
    with pytest.raises(UserError, match="grpo is never evaluated"):
        compare.make_jobs(asked("--only", "grpo", "--override", "eval.every=0"))


def test_another_task_is_what_its_recipe_changes_of_grpos(asked: Asked) -> None:
    of_grpo = yaml.safe_load((SCRIPT.parents[1] / "recipes" / "grpo_chains.yaml").read_text())
    assert compare.task_overrides("chains")["data"] == "chains"
    assert compare.task_overrides("chains")["model.path"] == of_grpo["model"]["path"]
    grpo, ppo = compare.make_jobs(asked("--task", "chains", "--only", "grpo", "ppo", "--seeds", "0"))
    alone = compare.config.compose(["+recipe=grpo_chains"])
    told = {"name", "rollouts", "checkpoint", "eval"}  # what the comparison itself sets, and the name
    assert {key for key in alone if alone[key] != grpo.config[key]} <= told
    assert (grpo.config["model"], grpo.config["data"]) == (ppo.config["model"], ppo.config["data"])
    assert ppo.config["critic"]["kind"] == "adapter", "all else is as in the algorithm's own recipe"
    assert compare.make_jobs(asked("--only", "grpo", "--seeds", "0"))[0].config["data"] != grpo.config["data"]


def test_what_the_user_says_of_a_key_comes_before_what_the_task_says(asked: Asked) -> None:
    words = ("--task", "chains", "--only", "grpo", "--seeds", "0", "--override", "generation.max_tokens=8")
    (job,) = compare.make_jobs(asked(*words))
    assert job.config["generation"]["max_tokens"] == 8
    assert job.config["data"]["_target_"].endswith("Chains")


def test_on_chains_dapo_has_steps_of_its_own_unless_the_command_line_says_how_many(asked: Asked) -> None:
    def steps(*words: str) -> dict[str, int]:
        jobs = compare.make_jobs(asked("--task", *words, "--only", "dapo", "grpo", "--seeds", "0"))
        return {job.name: job.config["steps"] for job in jobs}

    assert steps("chains") == {"dapo": 28, "grpo": 40}
    assert steps("arithmetic") == {"dapo": 24, "grpo": 40}
    assert steps("chains", "--override", "steps=5") == {"dapo": 5, "grpo": 5}
    assert steps("chains", "--completions", "512") == {"dapo": 2, "grpo": 2}


def test_on_chains_a2c_has_no_entropy_bonus_and_the_table_says_so(asked: Asked) -> None:
    jobs = compare.make_jobs(asked("--task", "chains", "--only", "a2c", "grpo", "--seeds", "0"))
    bonus = {job.name: job.config["algorithm"]["entropy_coef"] for job in jobs}
    assert bonus == {"a2c": 0, "grpo": 0.0}
    (own,) = compare.make_jobs(asked("--only", "a2c", "--seeds", "0"))
    assert own.config["algorithm"]["entropy_coef"] == 0.01
    text = compare.legend(made_up(planned=[("a2c", 0), ("grpo", 0)], task="chains"))
    assert "`; `a2c` with algorithm.entropy_coef=0. Seed 0." in text
    assert "`a2c` with" not in compare.legend(made_up(planned=[("grpo", 0)], task="chains"))


def test_each_task_has_a_folder_of_its_own() -> None:
    assert compare.parse([]).out == Path("runs/compare")
    assert compare.parse(["--task", "chains"]).out == Path("runs/compare_chains")
    assert compare.parse(["--task", "chains", "--out", "mine"]).out == Path("mine")


@pytest.fixture
def has_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TRL were installed."""
    monkeypatch.setattr(compare.compare_trl, "check_installed", lambda: None)


@pytest.mark.usefixtures("has_trl")
def test_trls_runs_have_the_words_of_the_references_and_begin_again(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = asked("--only", "grpo", "kimi", "--trl", "--seeds", "3", "--task", "chains", "--override", "steps=2")
    grpo, _, theirs = jobs = compare.make_jobs(options)
    assert [job.family for job in jobs] == ["GRPO", "Kimi", "TRL"]
    assert (theirs.key, theirs.folder) == ("trl_grpo/seed_3", tmp_path / "trl_grpo" / "seed_3")
    assert theirs.overrides[:-1] == grpo.overrides[:-1], "all but the folder"
    assert theirs.config == grpo.config
    make_up(grpo, [0.4, 0.5, 0.6])
    make_up(theirs, [0.4, 0.5], trl="1.16.0")  # begun, and not finished
    assert (compare.read_run(grpo).trl, compare.read_run(theirs).trl) == (None, "1.16.0")
    words = compare.command(theirs, Path("mine"))
    assert words[1:] == [compare.compare_trl.__file__, *theirs.overrides, "--config-dir", "mine"]
    monkeypatch.setattr(compare, "launch", lambda *_: Ended(0))
    run = compare.begin(theirs, "[1/1]", options)
    assert not theirs.folder.exists()
    assert run.is_fresh


@pytest.mark.usefixtures("has_trl")
def test_trls_runs_can_be_asked_for_alone(asked: Asked) -> None:
    for words in (["--only", "trl_grpo"], ["--only", "trl_grpo", "--trl"]):
        assert [job.key for job in compare.make_jobs(asked(*words, "--seeds", "0"))] == ["trl_grpo/seed_0"]


@pytest.mark.usefixtures("has_trl")
def test_a_config_that_trl_cannot_have_is_refused_before_anything_is_trained(asked: Asked) -> None:
    with pytest.raises(UserError, match=r"^algorithm\.std: "):
        compare.make_jobs(asked("--only", "grpo", "--trl", "--override", "algorithm.std=none"))


def test_without_trl_its_runs_are_refused(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^trl: is not installed; .*pip install .*'rlft\[bench\]'"):
        compare.make_jobs(asked("--only", "trl_grpo"))


# -- going on ----------------------------------------------------------------------------------------------------------
def test_a_finished_run_is_known_by_its_last_step_and_the_evaluation_after_it(asked: Asked) -> None:
    (job,) = jobs_of(asked, "--only", "grpo", "--seeds", "0")
    assert not compare.is_finished(job)
    make_up(job, [0.4, 0.5, 0.6])
    assert compare.is_finished(job)
    write_lines(job.folder / "eval.jsonl", [{"step": 0}, {"step": 1}])  # killed before the last evaluation
    assert not compare.is_finished(job)


def test_a_begun_run_is_resumed_and_another_is_started(asked: Asked) -> None:
    begun, new = jobs_of(asked, "--only", "grpo", "--seeds", "0", "1")
    make_up(begun, [0.4, 0.5])
    assert compare.command(begun, None)[1:] == ["-m", "rlft.cli", "resume", str(begun.folder)]
    words = compare.command(new, None)[3:]
    assert words[:2] == ["train", "+recipe=grpo_arithmetic"]
    assert words[-2:] == ["seed=1", f"hydra.run.dir={new.folder}"]


def test_a_key_that_the_script_itself_sets_is_refused(asked: Asked) -> None:
    with pytest.raises(UserError, match="steps: is given twice"):
        compare.make_jobs(asked("--only", "grpo", "--completions", "5120", "--override", "steps=3"))
    with pytest.raises(UserError, match=r"^trainer\.lr: "):
        compare.make_jobs(asked("--only", "grpo", "--override", "trainer.lr=-1"))


def test_a_run_of_another_config_is_refused_or_repeated_never_taken(asked: Asked) -> None:
    (job,) = jobs_of(asked, "--only", "grpo", "--seeds", "0")
    make_up(job, [0.4, 0.5, 0.6])
    compare.clear_changed([job], again=False)
    job.config["trainer"]["lr"], job.config["checkpoint"]["keep"] = 0.5, 9  # the second changes no number
    with pytest.raises(UserError, match=r"grpo/seed_0: trainer.lr: 0.001 -> 0.5\)"):
        compare.clear_changed([job], again=False)
    assert job.folder.exists()
    compare.clear_changed([job], again=True)
    assert not job.folder.exists()


def test_finished_runs_are_not_repeated_and_a_failed_one_does_not_stop_the_others(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    jobs = jobs_of(asked, "--only", "grpo", "--seeds", "0", "1", "2")
    make_up(jobs[0], [0.4, 0.5, 0.6])
    called: list[str] = []

    def launch(words: Sequence[str], log: Any, variables: Any) -> Ended:
        """Seed 1 fails, seed 2 trains."""
        job = jobs[1] if "seed=1" in words else jobs[2]
        called.append(job.key)
        if job is jobs[1]:
            log.write(b"step 1\nrlft: stopped: the loss is nan; lower trainer.lr\nbye\n")
            return Ended(1)
        make_up(job, [0.4, 0.5, 0.8])
        return Ended(0)

    monkeypatch.setattr(compare, "launch", launch)
    comparison = compare.train_all(jobs, asked())
    assert called == ["grpo/seed_1", "grpo/seed_2"]
    assert [run.seed for run in comparison.runs] == [0, 2]
    log = tmp_path / "grpo" / "seed_1.log"
    why = f"exit code 1: rlft: stopped: the loss is nan; lower trainer.lr ({log})"
    assert comparison.failures == {"grpo/seed_1": why}
    assert json.loads((jobs[2].folder / "comparison.json").read_text())["wall_seconds"] < 5
    assert "[3/3] grpo seed 2: 0.400 -> 0.800" in capsys.readouterr().out
    assert compare.publish(comparison, tmp_path) == 1
    assert why in (tmp_path / "comparison.md").read_text()


class Trains:
    """The process of a run that trains for a few polls; asked to stop, it ends after them without a word.

    code: that of a run that somebody else stops. alive: those that have not finished.
    """

    alive: ClassVar[list[Trains]] = []
    processor_seconds = None

    def __init__(self, job: Any, polls: int, code: int = 0) -> None:
        self.job, self.polls, self.code, self.signals = job, polls, code, list[int]()
        self.alive.append(self)

    def poll(self) -> int | None:
        self.polls -= 1
        if self.polls > 0:
            return None
        if self.signals or self.code:
            return 130
        if self in self.alive:
            self.alive.remove(self)
            make_up(self.job, [0.4, 0.5, 0.8])
        return 0

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Makes runs that train: of each its job, those that were in progress with it, and its OMP_NUM_THREADS."""

    def prepare(jobs: Sequence[Any], *how: Sequence[int]) -> list[tuple[str, list[str], str]]:
        begun: list[tuple[str, list[str], str]] = []
        left = iter(how)

        def launch(words: Sequence[str], log: Any, variables: Any) -> Trains:
            (job,) = [job for job in jobs if f"hydra.run.dir={job.folder}" in words]
            process = Trains(job, *next(left))
            begun.append((job.key, [other.job.key for other in Trains.alive], variables.get("OMP_NUM_THREADS", "")))
            return process

        monkeypatch.setattr(compare, "launch", launch)
        monkeypatch.setattr(compare, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(compare, "num_cores", lambda: 7)
        monkeypatch.setattr(Trains, "alive", [])
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        return begun

    return prepare


def test_so_many_runs_are_in_progress_at_a_time_each_with_its_share_of_the_cores(
    asked: Asked, trains: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(asked, "--only", "grpo", "--seeds", "0", "1", "2", "3")
    zero, one, two, three = (job.key for job in jobs)
    begun = trains(jobs, [9], [2], [2], [2])  # seed 0 takes so long that all others come and go beside it
    comparison = compare.train_all(jobs, asked("--jobs", "2"))
    # 7 cores for 2 runs: 3 each.
    assert begun == [(zero, [zero], "3"), (one, [zero, one], "3"), (two, [zero, two], "3"), (three, [zero, three], "3")]
    assert [run.seed for run in comparison.runs] == [0, 1, 2, 3]
    assert comparison.runs[0].machine.endswith(", 2 runs at a time")

    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert compare.environment(2)["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert compare.environment(9)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in compare.environment(1)


def test_a_request_to_stop_goes_to_every_run_in_progress_and_no_other_begins(
    asked: Asked, trains: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(asked, "--only", "grpo", "--seeds", "0", "1", "2")
    begun = trains(jobs, [3], [9], [9])  # the second saves for longer than the first, and hears of it once
    told = iter([True])
    monkeypatch.setattr(
        compare.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM) if next(told, False) else None
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        compare.train_all(jobs, asked("--jobs", "2"))
    assert [key for key, *_ in begun] == [jobs[0].key, jobs[1].key]
    assert [process.signals for process in Trains.alive] == [[signal.SIGINT], [signal.SIGINT]]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_request_goes_to_the_runs_that_still_save(
    asked: Asked, trains: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(asked, "--only", "grpo", "--seeds", "0", "1")
    trains(jobs, [2], [9])
    told = iter([True, False, False, True])
    monkeypatch.setattr(
        compare.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGINT) if next(told, False) else None
    )
    with pytest.raises(KeyboardInterrupt):
        compare.train_all(jobs, asked("--jobs", "2"))
    assert [process.signals for process in Trains.alive] == [[signal.SIGINT], [signal.SIGINT] * 2]


def test_a_run_that_somebody_else_stops_stops_the_others(asked: Asked, trains: Trained) -> None:
    jobs = jobs_of(asked, "--only", "grpo", "--seeds", "0", "1", "2")
    begun = trains(jobs, [2, 130], [9], [9])
    with pytest.raises(KeyboardInterrupt):
        compare.train_all(jobs, asked("--jobs", "2"))
    assert len(begun) == 2
    assert [process.signals for process in Trains.alive] == [[], [signal.SIGINT]]


def test_runs_in_progress_are_stopped_when_one_cannot_be_read(
    asked: Asked, trains: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(asked, "--only", "grpo", "--seeds", "0", "1")
    trains(jobs, [1000], [1])
    monkeypatch.setitem(make_up.__kwdefaults__, "key", "eval/format")
    with pytest.raises(UserError, match="was evaluated without exact_match"):
        compare.train_all(jobs, asked("--jobs", "2"))
    assert [process.signals for process in Trains.alive] == [[signal.SIGINT]]


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_no_runs_at_a_time_are_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.parse([f"--jobs={text}"])
    assert ended.value.code == 2
    assert f"must be 1 or more, got {text}" in capsys.readouterr().err


# -- table and checks --------------------------------------------------------------------------------------------------
def test_the_table_has_means_spreads_and_sums_over_the_seeds(asked: Asked) -> None:
    jobs = jobs_of(asked, "--only", "grpo")
    before, after, kl = [0.40, 0.42, 0.44], [0.90, 0.94, 0.98], [0.1, 0.2, 0.3]
    for job, first, last, divergence in zip(jobs, before, after, kl, strict=True):
        seconds = (2.0, 3.0, 10.0)[job.seed]  # a step
        processor = (None, 5.0, 8.0)[job.seed]  # the first was resumed
        peak = (1 + job.seed) * 10**8
        make_up(job, [first, 0.7, last], seconds=seconds, processor=processor, peak=peak, kl=divergence)
    (row,) = compare.make_rows(compare.collect(jobs, {}))
    # Deviations of three evenly spaced values are -d, 0, d: the sample standard deviation is d, the interval 4.302653 x
    # d / sqrt(3) = 2.484138 d to either side. Evaluations at 0, 256, 512: 0.5 is at 256 (0.5 - first) / (0.7 - first):
    # 85.33, 73.14, 59.08: mean 72.5, deviation 13.14, half an interval 32.6. Two steps of 2, 3 or 10 s: the median of
    # 4, 6, 20. Two steps of 256 completions. Of 5 and 8 processor seconds the median is 6.5, which rounds to even.
    assert compare.cells(row, "ab") == [
        "`grpo_arithmetic`",
        "0.420 ± 0.050",
        "0.940 ± 0.099",
        "ab",
        "73 ± 33",
        "0.750 ± 0.000",
        "0.200 ± 0.248",
        "512",
        "6",
        "6",
        "0.30 GB",
        "hold",
    ]
    text = compare.table([row], compare.collect(jobs, {}))
    assert text.splitlines()[0].count("|") == text.splitlines()[2].count("|") == 13
    assert "Seeds 0, 1, 2; mean ± half of its 95 % interval (Student's t over the seeds)" in text
    assert "a gain of at least 0.15, and 0.90 after training for grpo; all hold." in text
    assert "2 CPU cores (made up), torch 2.13.0, commit abc123, 2026-01-02." in text


def test_the_price_of_an_accuracy_is_on_the_line_to_the_first_evaluation_that_has_it() -> None:
    at = [0, 256, 512, 768]
    # 0.5 is a quarter of the way from 0.4 to 0.8: 256 + 64. Later values do not count.
    assert compare.completions_to(0.5, at, [0.1, 0.4, 0.8, 0.3]) == pytest.approx(320.0, abs=1e-9)
    assert compare.completions_to(0.5, at, [0.1, 0.5, 0.6, 0.7]) == pytest.approx(256.0, abs=1e-9)
    assert compare.completions_to(0.5, at, [0.6, 0.2, 0.1, 0.7]) == 0.0
    assert compare.completions_to(0.5, at, [0.1, 0.2, 0.3, 0.5]) == pytest.approx(768.0, abs=1e-9)
    assert compare.completions_to(0.5, at, [0.1, 0.2, 0.3, 0.4]) is None


def test_the_price_is_that_of_the_seeds_that_got_there() -> None:
    # 0.5 halfway from 0.4 to 0.6 and a quarter from 0.4 to 0.8, the evaluations 256 completions apart: 384 and 320.
    accuracies = [[0.4, 0.4, 0.6], [0.1, 0.4, 0.4], [0.2, 0.4, 0.8]]
    runs = [made_up_run("grpo", seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    (row,) = compare.make_rows(made_up(*runs))
    assert row.to_half == pytest.approx([384.0, 320.0], abs=1e-9)
    place = compare.COLUMNS.index("completions to 0.5")
    assert compare.cells(row)[place] == "352 (2 of 3)"
    (never,) = compare.make_rows(made_up(runs[1]))
    assert compare.cells(never)[place] == "not reached"


def test_accuracies_after_training_are_compared_by_seed() -> None:
    after = {"grpo": [0.90, 0.92, 0.94], "kimi": [0.95, 0.80, 0.87]}
    runs = [
        made_up_run(name, seed, [0.4, 0.5, value])
        for name, values in after.items()
        for seed, value in enumerate(values)
    ]
    comparison = made_up(*runs[:3], *reversed(runs[3:]))
    rows = compare.make_rows(comparison)
    # By seed: 0.05, -0.12, -0.07: mean -0.14 / 3.
    (difference,) = compare.differences_of(rows)
    assert (difference.first, difference.second, difference.seeds) == ("grpo", "kimi", 3)
    assert difference.mean == pytest.approx(0.14 / 3, abs=1e-12)
    text = compare.table(rows, comparison)
    assert "| `kimi` | -0.047 | " in text
    assert [line.split(" | ")[3] for line in text.splitlines()[2:4]] == ["a", "a"], "they do not differ"
    alone = made_up(runs[0], runs[3])
    assert "Holm" not in compare.table(compare.make_rows(alone), alone), "a seed alone says nothing"


def test_trls_row_says_whose_it_is_and_nothing_is_asked_of_it(tmp_path: Path) -> None:
    runs = [made_up_run("grpo", seed, [0.40, 0.5, 0.95 + seed / 100]) for seed in (0, 1)]
    runs += [replace(made_up_run("trl_grpo", seed, [0.40, 0.41, 0.42], "TRL"), trl="1.16.0") for seed in (0, 1)]
    comparison = made_up(*runs)
    rows = compare.make_rows(comparison)
    assert [(row.name, row.problems) for row in rows] == [("grpo", []), ("trl_grpo", [])]
    text = compare.table(rows, comparison)
    line = text.splitlines()[3]
    assert line.startswith("| TRL's GRPO | 0.400 ± 0.000 | 0.420 ± 0.000 |")
    assert line.endswith("| none |")
    assert "TRL's GRPO is evaluated by rlft." in text
    assert "torch 2.13.0, TRL 1.16.0, commit abc123" in text
    assert "| `trl_grpo` | -0.535 | " in text
    assert compare.publish(comparison, tmp_path) == 0
    assert compare.read_comparison(tmp_path / "comparison.json") == comparison
    assert compare.family_colours(rows)["TRL"] not in {compare.FAMILIES[f][1] for f in ("GRPO", "PPO", "Kimi")}
    assert "TRL" not in compare.table(rows[:1], made_up(*runs[:2]))


def test_nothing_is_asked_of_another_task(tmp_path: Path) -> None:
    comparison = made_up(made_up_run("grpo", 0, [0.10, 0.12, 0.15]), task="chains")
    rows = compare.make_rows(comparison)
    assert rows[0].problems == []
    text = compare.table(rows, comparison)
    assert "checks" not in text.casefold()
    assert text.splitlines()[0].count("|") == text.splitlines()[2].count("|") == 12
    assert text.splitlines()[2].startswith("| `grpo` | ")
    assert "Each row is `rlft train +recipe=<name>_arithmetic data=chains epochs=1 minibatches=4 " in text
    (panel,) = [panel for panel in compare.make_figure(rows).axes if panel.axison]
    assert len(panel.lines) == 1, "no line of what is asked"
    # Room of 0.05, the span of the values: 0.10 - 0.18 x 0.05 and 0.15 + 0.03 x 0.05.
    assert panel.get_ylim() == pytest.approx((0.091, 0.1515), abs=1e-9)
    assert compare.publish(comparison, tmp_path) == 0
    assert compare.read_comparison(tmp_path / "comparison.json") == comparison
    missing = made_up(planned=[("grpo", 0)], task="chains")
    assert compare.make_rows(missing)[0].problems == ["seed 0 is missing"]


def test_completions_that_dynamic_sampling_threw_away_are_counted(asked: Asked) -> None:
    (job,) = jobs_of(asked, "--only", "grpo", "--seeds", "0")
    make_up(job, [0.4, 0.5, 0.6], sampled=[256, 384])
    run = compare.read_run(job)
    # 256, then 256 + 384; the evaluation before the first step is at 0.
    assert (run.completions, run.evaluated_at) == ([256, 640], [0, 256, 640])


def test_accuracy_is_exact_match_also_where_another_reward_decides(asked: Asked) -> None:
    decides, told, absent = jobs_of(asked, "--only", "grpo")
    make_up(decides, [0.4, 0.5, 0.6])
    make_up(told, [0.4, 0.5, 0.7], key="eval/reward/exact_match")
    make_up(absent, [0.4, 0.5, 0.7], key="eval/format")
    assert compare.read_run(decides).accuracy == [0.4, 0.5, 0.6]
    assert compare.read_run(told).accuracy == [0.4, 0.5, 0.7]
    with pytest.raises(UserError, match="was evaluated without exact_match"):
        compare.read_run(absent)


def made_up_run(name: str, seed: int, accuracy: list[float], family: str = "GRPO") -> Any:
    return compare.Run(
        name=name,
        family=family,
        seed=seed,
        completions=[256, 512],
        reward=[0.5, 0.6],
        seconds=[1.0, 1.0],
        evaluated_at=[0, 256, 512],
        accuracy=accuracy,
        in_format=[0.5, 0.6, 0.7],
        kl_base=[None, None, None],
        processor_seconds=None,
        peak_bytes=10**9,
        machine="2 CPU cores (made up)",
        torch="2.13.0",
        commit="abc123",
        date="2026-01-02",
    )


def made_up(*runs: Any, planned: Sequence[tuple[str, int]] = (), task: str = "arithmetic") -> Any:
    places = [(run.name, run.family, run.seed) for run in runs] + [(name, "GRPO", seed) for name, seed in planned]
    return compare.Comparison(
        task=task,
        planned=[compare.Planned(name=name, family=family, seed=seed) for name, family, seed in places],
        runs=list(runs),
        failures={},
    )


@pytest.mark.parametrize(
    ("name", "accuracies", "problems"),
    [
        # Means over the seeds: 0.40 -> 0.55, a gain of exactly 0.15, which holds.
        ("kimi", [[0.40, 0.5, 0.56], [0.40, 0.5, 0.54]], []),
        # 0.40 -> 0.545
        ("kimi", [[0.40, 0.5, 0.55], [0.40, 0.5, 0.54]], ["gain 0.1450 < 0.15"]),
        # grpo must reach 0.90 as well: (0.88 + 0.92) / 2 = 0.90 does, (0.88 + 0.91) / 2 = 0.895 doesn't.
        ("grpo", [[0.40, 0.5, 0.88], [0.40, 0.5, 0.92]], []),
        ("grpo", [[0.40, 0.5, 0.88], [0.40, 0.5, 0.91]], ["after 0.8950 < 0.90"]),
        ("rloo", [[0.80, 0.5, 0.81], [0.80, 0.5, 0.81]], ["gain 0.0100 < 0.15", "after 0.8100 < 0.90"]),
    ],
)
def test_the_checks_are_of_the_means_over_seeds(name: str, accuracies: list[list[float]], problems: list[str]) -> None:
    runs = [made_up_run(name, seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    (row,) = compare.make_rows(made_up(*runs))
    assert row.problems == problems


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "rloo"])
def test_four_algorithms_must_reach_nine_of_ten(name: str) -> None:
    (row,) = compare.make_rows(made_up(made_up_run(name, 0, [0.4, 0.5, 0.8])))
    assert row.problems == ["after 0.8000 < 0.90"]


def test_a_seed_that_is_missing_fails_the_checks(tmp_path: Path) -> None:
    run = made_up_run("grpo", 0, [0.4, 0.5, 0.95])
    rows = compare.make_rows(made_up(run, planned=[("grpo", 1), ("kimi", 0)]))
    assert [(row.name, row.problems) for row in rows] == [
        ("grpo", ["seed 1 is missing"]),
        ("kimi", ["seed 0 is missing"]),
    ]
    assert compare.cells(rows[1]) == ["`kimi_arithmetic`", *["-"] * 10, "seed 0 is missing"]
    assert compare.checks_line(rows).endswith("not so: grpo, kimi.")


def test_algorithms_stand_by_family_then_by_name() -> None:
    classes = {"ppo": "PPO", "kimi": "Kimi", "rloo": "Reinforce", "gspo": "GRPO", "mine": "Mine", "dapo": "GRPO"}
    runs = [made_up_run(name, 0, [0.4, 0.5, 0.95], family) for name, family in classes.items()]
    rows = compare.make_rows(made_up(*runs))
    assert [row.name for row in rows] == ["dapo", "gspo", "rloo", "ppo", "kimi", "mine"]
    assert len(set(compare.family_colours(rows).values())) == 6, "the five that are known, and one"


# -- picture and raw numbers -------------------------------------------------------------------------------------------
def test_a_curve_is_the_mean_and_the_range_of_the_seeds() -> None:
    runs = [made_up_run("grpo", seed, [0.4, 0.5 + 0.2 * seed, 0.9]) for seed in (0, 1)]
    curve = compare.curve(runs)
    assert (curve.low, curve.high) == ([0.4, 0.5, 0.9], [0.4, 0.7, 0.9])
    assert curve.mean == pytest.approx([0.4, 0.6, 0.9], abs=1e-12)
    assert curve.completions == [0, 256, 512]


def test_every_algorithm_has_a_panel_with_its_own_curve_before_the_others() -> None:
    classes = {"grpo": "GRPO", "ppo": "PPO", "kimi": "Kimi", "a2c": "PPO", "mine": "Mine"}
    runs = [
        made_up_run(name, 0, [0.4, 0.5, 0.6 + index / 100], family)
        for index, (name, family) in enumerate(classes.items())
    ]
    rows = compare.make_rows(made_up(*runs))
    panels = [panel for panel in compare.make_figure(rows).axes if panel.axison]
    assert [panel.get_title(loc="left") for panel in panels] == ["GRPO", "A2C", "PPO-clip", "Kimi k1.5", "mine"]
    for row, panel in zip(rows, panels, strict=True):
        (own,) = [line for line in panel.lines if line.get_marker() == "o"]
        assert list(own.get_ydata()) == [0.4, 0.5, row.after[0]]
        assert own.get_color() == compare.family_colours(rows)[row.family]
        # The four others are faint; grpo and ppo have the line of 0.90 as well.
        assert len(panel.lines) == 5 + (row.name in ("grpo", "ppo"))
        low, high = panel.get_ylim()
        assert low < 0.4
        assert high > 1.0


@pytest.mark.parametrize("num_algorithms", [1, 16])
def test_the_picture_is_light_and_shows_every_familys_colour(tmp_path: Path, num_algorithms: int) -> None:
    from PIL import Image

    families = ["GRPO", "GRPO", "PPO", "Kimi", "Mine", *["PPO"] * 11][:num_algorithms]
    runs = [
        made_up_run(f"a{index}", seed, [0.4, 0.5 + 0.1 * seed, 0.9], family)
        for index, family in enumerate(families)
        for seed in (0, 1)
    ]
    rows = compare.make_rows(made_up(*runs))
    file = tmp_path / "picture.png"
    compare.draw(rows, file)
    assert file.stat().st_size < 200_000
    with Image.open(file) as image:
        width, height = image.size
        pixels = image.convert("RGB").tobytes()
    assert width > 700
    assert height > 400
    colours = set(zip(pixels[::3], pixels[1::3], pixels[2::3], strict=True))
    for family, colour in compare.family_colours(rows).items():
        nearest = min(max(abs(a - b) for a, b in zip(bytes.fromhex(colour[1:]), c, strict=True)) for c in colours)
        assert (nearest <= 8) == (family in families), family  # of 255: the palette may move a colour a little


def test_table_and_picture_are_redrawn_from_the_raw_numbers_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = made_up(*(made_up_run("grpo", seed, [0.4, 0.5, 0.95]) for seed in (0, 1)))
    assert compare.publish(comparison, tmp_path) == 0
    names = ("comparison.md", "comparison.png", "comparison.json")
    first = {name: (tmp_path / name).read_bytes() for name in names}
    for name in names[:2]:
        (tmp_path / name).unlink()
    assert compare.run(["--redraw", "--out", str(tmp_path)]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in names} == first
    assert compare.run(["--redraw", "--out", str(tmp_path / "empty")]) == 2
    assert "there are no raw numbers" in capsys.readouterr().err


def test_the_page_has_the_numbers_that_were_measured() -> None:
    recipes = SCRIPT.parents[1] / "recipes"
    page = (recipes / "README.md").read_text()
    comparison = compare.read_comparison(recipes / "chains.json")
    rows = compare.make_rows(comparison)
    assert {len(row.runs) for row in rows} == {5}
    lines = [line for line in compare.table(rows, comparison).splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 20 + 1 + 19, "two heads, the methods, and those against grpo"
    for line in lines:
        assert line in page


# -- the real thing ----------------------------------------------------------------------------------------------------
def test_a_real_run_is_stopped_resumed_and_then_not_repeated(tmp_path: Path) -> None:
    tiny = ["prompts_per_step=4", "group_size=2", "eval.num_prompts=4", "eval.num_samples=1", "eval.every=6"]
    words = ["--only", "grpo", "--seeds", "0", "--out", "out", "--completions", "96", "--override", *tiny]
    command = [sys.executable, str(SCRIPT), *words]
    metrics = tmp_path / "out" / "grpo" / "seed_0" / "metrics.jsonl"
    with (tmp_path / "first.log").open("wb") as log:
        first = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.stat().st_size) and first.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait(timeout=120) == 130, (tmp_path / "first.log").read_text()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert 1 <= len(steps) < 12, "stopped on its way, after a whole step"

    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert second.returncode in (0, 1), second.stderr  # so few completions teach little: the checks may fail
    assert f"[1/1] grpo seed 0: from step {steps[-1]} of 12 of 8 completions" in second.stdout
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [*range(1, 13)]
    saved = json.loads((tmp_path / "out" / "comparison.json").read_text())
    (run,) = saved["runs"]
    assert run["evaluated_at"] == [0, 6 * 8, 12 * 8]
    assert run["peak_bytes"] > 10**8
    assert run["kl_base"][0] == 0.0, "a fresh adapter is the base"
    assert run["kl_base"][-1] != 0.0
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 5_000

    before = metrics.stat().st_mtime_ns
    third = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert third.returncode == second.returncode
    assert "runs: 1 of 96 completions, 1 finished already" in third.stdout
    assert metrics.stat().st_mtime_ns == before
