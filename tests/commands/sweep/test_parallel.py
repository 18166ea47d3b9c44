"""Trials side by side: how many run at a time, their seeds in turn, pruning, failures and interruptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_studies import RANK, RATE, STEPS, FakeRuns, keys, line, make_study, write

from rlft.commands.sweep.jobs import JobsFailedError
from rlft.commands.sweep.parallel import ParallelTrials
from rlft.commands.sweep.runs import Run, Study
from rlft.runs import run_status
from rlft.system.interrupt import EXIT_CODE


class FakeJobs:
    """Processes that evaluate once at each poll, and end after their last step. fails: {job: (exit code, problem)}."""

    def __init__(self, study: Study, fails: dict[int, tuple[int, str]]) -> None:
        self.study, self.fails = study, fails
        self.failed: dict[int, str] = {}
        self.codes: dict[int, int] = {}
        self.running: dict[int, tuple[Path, int]] = {}
        self.started: list[int] = []
        self.stopped: list[int] = []
        self.most = 0

    def start(self, number: int, name: str, words: list[str], folder: Path) -> None:
        self.started.append(number)
        self.running[number] = (folder, 0)
        self.most = max(self.most, len(self.running))

    def is_running(self, number: int) -> bool:
        return number in self.running

    def stop(self, number: int) -> None:
        self.stopped.append(number)

    def end(self, number: int, code: int) -> None:
        self.codes[number] = code
        del self.running[number]

    def poll(self) -> None:
        for number, (folder, step) in list(self.running.items()):
            if number in self.stopped:
                self.end(number, EXIT_CODE)
                continue
            seeds = len(self.study.seeds)
            params = self.study.trials._all()[number // seeds].params
            if number in self.fails and step == 3:
                code, self.failed[number] = self.fails[number]
                self.end(number, code)
                continue
            value = FakeRuns().value
            lines = [line(0, 0.0), *(line(s, value(params, s, number % seeds)) for s in range(1, step + 2))]
            write(folder, lines)
            self.running[number] = (folder, step + 1)
            if step + 1 == STEPS:
                self.end(number, 0)


class FakeInterrupt:
    requested = False


def parallel(study: Study, limit: int = 2, **fails: tuple[int, str]) -> tuple[ParallelTrials, FakeJobs, FakeInterrupt]:
    jobs = FakeJobs(study, {int(name.removeprefix("job")): how for name, how in fails.items()})
    interrupt: Any = FakeInterrupt()
    process: Any = jobs
    return ParallelTrials(study, process, limit, words, values_refused, interrupt), jobs, interrupt


def values_refused(run: Run, key: str) -> bool:
    return key == "trainer.lr"


def words(run: Run) -> list[str]:
    return ["train", f"seed={run.seed}"]


def test_so_many_trials_run_at_a_time_and_the_seeds_of_one_follow_each_other(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=5, seeds=2), RATE)
    driver, jobs, _ = parallel(study)
    driver.run()
    assert jobs.most == 2
    assert sorted(jobs.started) == list(range(10))
    assert jobs.started[:2] == [0, 2], "the first seeds of trials 0 and 1"
    assert [row.state for row in study.trials.rows()] == ["complete"] * 5
    assert all(len(row.values) == 2 for row in study.trials.rows())


def test_a_trial_that_lags_behind_is_stopped_by_a_signal(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=10, pruner="median", startup=2), RATE)
    driver, jobs, _ = parallel(study)
    driver.run()
    pruned = {row.number for row in study.trials.rows() if row.state == "pruned"}
    assert len(pruned) >= 2
    assert set(jobs.stopped) == pruned


@pytest.mark.parametrize(
    ("code", "error", "problem"),
    [(2, None, "trainer.lr: must be above 0"), (1, "BrokenRunError", "loss/total is not finite")],
)
def test_a_trial_whose_values_cannot_be_done_fails_alone(
    code: int, error: str | None, problem: str, tmp_path: Path
) -> None:
    study = make_study(tmp_path, keys(trials=4), RATE)
    if error is not None:
        folder = tmp_path / "1" / "seed_0"
        folder.mkdir(parents=True)
        (folder / "status.json").write_text(json.dumps({"status": "stopped", "error": error}))
    driver, _, _ = parallel(study, job1=(code, problem))
    driver.run()
    states = {row.number: row.state for row in study.trials.rows()}
    assert states == {0: "complete", 1: "failed", 2: "complete", 3: "complete"}


def stopped(folder: Path, error: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"status": "stopped", "error": error}))


@pytest.mark.parametrize(
    ("code", "error", "state"),
    [
        (-9, None, "failed"),  # killed by the kernel
        (1, "UnforeseenError", "failed"),
        (1, "DiskError", "complete"),  # whatever it was, it is told, and can be put right
        (2, None, "complete"),
    ],
)
def test_a_trial_whose_process_crashes_again_and_again_fails_and_the_sweep_goes_on(
    code: int, error: str | None, state: str, tmp_path: Path
) -> None:
    """Each attempt evaluates three steps: the second has evaluated no more than the first."""
    for _ in range(3):
        study = make_study(tmp_path, keys(trials=4), RATE)
        if error is not None:
            stopped(tmp_path / "1" / "seed_0", error)
        driver, _, _ = parallel(study, 1, job1=(code, "gone"))
        with pytest.raises(JobsFailedError, match="trial 1: gone"):
            driver.run()
    study = make_study(tmp_path, keys(trials=4), RATE)
    driver, jobs, _ = parallel(study, 1)
    driver.run()
    states = {row.number: row.state for row in study.trials.rows()}
    assert states == {0: "complete", 1: state, 2: "complete", 3: "complete"}
    assert (1 in jobs.started) == (state == "complete")


def test_interruptions_and_what_stops_beside_a_failure_are_no_crashes(tmp_path: Path) -> None:
    for _ in range(4):
        study = make_study(tmp_path, keys(trials=4), RATE)
        driver, jobs, interrupt = parallel(study, 2)
        poll = jobs.poll

        def signalled(poll: Any = poll, jobs: FakeJobs = jobs, interrupt: FakeInterrupt = interrupt) -> None:
            poll()
            interrupt.requested = True
            jobs.stopped += [0, 1]

        jobs.poll = signalled
        with pytest.raises(KeyboardInterrupt):
            driver.run()
    study = make_study(tmp_path, keys(trials=4), RATE)
    driver, _, _ = parallel(study)
    driver.run()
    assert {row.state for row in study.trials.rows()} == {"complete"}


def test_a_run_that_is_pruned_side_by_side_says_so_in_its_status(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=10, pruner="median", startup=2), RATE)
    driver, jobs, _ = parallel(study)
    end = jobs.end

    def interrupted(number: int, code: int) -> None:
        if code == EXIT_CODE:  # the process has saved and says that it was interrupted
            run_status.write_interrupted(tmp_path / str(number) / "seed_0", STEPS)
        end(number, code)

    jobs.end = interrupted
    driver.run()
    assert jobs.stopped
    for number in jobs.stopped:
        status, reason = run_status.read(tmp_path / str(number) / "seed_0")
        assert status is run_status.Status.stopped
        assert reason.startswith("pruned by its sweep after step ")


@pytest.mark.parametrize(
    "failure",
    [
        (1, "the disk is full"),
        (2, "resume: another process is running this run"),
        (2, "generation.engine: vLLM could not start: the GPU is taken"),
        (2, "reward.http.url: does not answer"),
    ],
)
def test_any_other_failure_stops_the_others_and_leaves_trials_to_go_on(
    failure: tuple[int, str], tmp_path: Path
) -> None:
    study = make_study(tmp_path, keys(trials=6), RATE)
    driver, jobs, _ = parallel(study, job1=failure)
    with pytest.raises(JobsFailedError, match=f"trial 1: {failure[1]}"):
        driver.run()
    assert jobs.stopped == [0]
    assert [trial.number for trial in study.trials.unfinished()] == [0, 1]


def test_an_interruption_begins_nothing_more_and_leaves_trials_to_go_on(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=6, seeds=2), RATE, RANK)
    driver, jobs, interrupt = parallel(study)
    poll = jobs.poll

    def signalled() -> None:
        poll()
        if len(jobs.started) == 2 and jobs.running.get(0, (None, 0))[1] == 4:
            interrupt.requested = True
            jobs.stopped += [0, 2]

    jobs.poll = signalled
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    assert jobs.started == [0, 2]
    assert [trial.number for trial in study.trials.unfinished()] == [0, 1]
    again = make_study(tmp_path, keys(trials=6, seeds=2), RATE, RANK)
    driver, jobs, _ = parallel(again)
    driver.run()
    assert jobs.started[:2] == [0, 2], "the trials that were interrupted come first"
    assert [row.state for row in again.trials.rows()] == ["complete"] * 6
