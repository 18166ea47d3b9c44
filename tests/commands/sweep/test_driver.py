"""The driver of sweeps: how many runs at a time, seeds in turn, pruning, failures, interruptions, and this process."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_studies import RANK, RATE, STEPS, FakeRuns, by_number, keys, line, make_study, states, write
from in_one_test import each

from rlft.commands.sweep import study as studies
from rlft.commands.sweep.checks import check, curve
from rlft.commands.sweep.driver import Driver, Ending, How, InThisProcess, JobsFailedError, PrunedError, Run
from rlft.commands.sweep.study import Study
from rlft.config.keys import flatten
from rlft.config.overrides import parse
from rlft.config.schema import ConsoleConfig
from rlft.logger.console import PRINTED, Console, show_rows
from rlft.logger.interface import RunInfo
from rlft.loop.driver import BrokenRunError
from rlft.loop.engines import Engines
from rlft.runs import run_folder, run_status
from rlft.runs.lines import METRICS, read_lines, silent
from rlft.runs.run_folder import read
from rlft.system.disk import DiskError
from rlft.types import UserError

INTERRUPTED = Ending(How.interrupted)


class FakePlace:
    """Processes that evaluate once at each look, and end after their last step. fails: {job: its ending}."""

    def __init__(self, study: Study, fails: dict[int, Ending]) -> None:
        self.study, self.fails = study, fails
        self.running: dict[int, tuple[Any, int]] = {}
        self.endings: dict[int, Ending] = {}
        self.started: list[int] = []
        self.stopped: list[int] = []
        self.most = 0

    def start(self, run: Any, is_pruned: Callable[[], bool]) -> None:
        self.started.append(run.number)
        self.running[run.number] = (run, 0)
        self.most = max(self.most, len(self.running))

    def ending(self, run: Run) -> Ending | None:
        return self.endings.get(run.number)

    def stop(self, run: Run) -> None:
        if run.number in self.running and run.number not in self.stopped:
            self.stopped.append(run.number)

    def end(self, number: int, ending: Ending) -> None:
        self.endings[number] = ending
        del self.running[number]

    def wait(self) -> None:
        for number, (run, step) in list(self.running.items()):
            if number in self.stopped:
                self.end(number, INTERRUPTED)
            elif number in self.fails and step == 3:
                self.end(number, self.fails[number])
            else:
                value = FakeRuns().value
                values = [line(s, value(run.trial.params, s, run.seed)) for s in range(1, step + 2)]
                write(run.folder, [line(0, 0.0), *values])
                self.running[number] = (run, step + 1)
                if step + 1 == STEPS:
                    self.end(number, Ending(How.finished))


class FakeInterrupt:
    requested = False


def side_by_side(study: Study, limit: int = 2, **fails: Ending) -> tuple[Driver[Any], FakePlace, FakeInterrupt]:
    place = FakePlace(study, {int(name.removeprefix("job")): how for name, how in fails.items()})
    interrupt = FakeInterrupt()
    return Driver(study, place, limit, lambda: interrupt.requested), place, interrupt


@pytest.fixture(autouse=True)
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "check_possible", lambda *_: None)


def test_so_many_trials_run_at_a_time_and_the_seeds_of_one_follow_each_other(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=5, seeds=2), RATE)
    driver, place, _ = side_by_side(study)
    driver.run()
    assert place.most == 2
    assert sorted(place.started) == list(range(10))
    assert place.started[:2] == [0, 2], "the first seeds of trials 0 and 1"
    assert states(study) == ["complete"] * 5
    assert all(len(row.values) == 2 for row in study.trials.rows())


def test_a_trial_that_lags_behind_is_stopped_by_a_signal(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=10, pruner="median", startup=2), RATE)
    driver, place, _ = side_by_side(study)
    driver.run()
    pruned = {row.number for row in study.trials.rows() if row.state == "pruned"}
    assert len(pruned) >= 2
    assert set(place.stopped) == pruned


REFUSED = Ending(How.refused, "trainer.lr: must be above 0")
FAILURES = {
    "refused": REFUSED,
    "not finite": Ending(How.failed, "loss/total is nan"),
    "out of memory": Ending(How.failed, "CUDA out of memory"),
    "a reward that raises": Ending(How.failed, "ValueError: no number"),
    "killed": Ending(How.failed, "it was killed by SIGKILL"),
    "silent": Ending(How.failed, "its process has not answered for 600 s"),
}
STOPS = {"interrupted": INTERRUPTED, "disk": Ending(How.disk, "the disk is full")}


def test_whatever_ends_trials_they_fail_alone_and_the_sweep_comes_to_its_end(tmp_path: Path) -> None:
    """Random endings of random trials, one or several at a time, with one or two seeds; then the sweep is repeated."""
    random_numbers = random.Random(7)
    for case in range(40):
        folder, seeds = tmp_path / str(case), random_numbers.choice((1, 2))
        failing = {n: random_numbers.choice(list(FAILURES)) for n in range(5 * seeds) if random_numbers.random() < 0.4}
        study = make_study(folder, keys(trials=5, seeds=seeds, sampler="random"), RATE)
        driver, place, _ = side_by_side(study, random_numbers.choice((1, 2, 3)))
        place.fails = {number: FAILURES[name] for number, name in failing.items()}
        driver.run()
        first = {n // seeds: FAILURES[failing[n]].problem for n in sorted(failing, reverse=True)}
        for row in by_number(study):
            assert (row.state, row.why) == (("failed", first[row.number]) if row.number in first else ("complete", ""))
        again = make_study(folder, keys(trials=5, seeds=seeds, sampler="random"), RATE)
        assert (again.is_done(), again.trials.unfinished()) == (True, [])
        if len(first) == 5:
            with pytest.raises(JobsFailedError, match="no trial could be done; trial "):
                again.conclude()
        else:
            again.conclude()


@each("name", STOPS)
def test_only_a_signal_and_a_disk_stop_a_sweep_and_leave_the_trial_to_go_on(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    for _ in range(4):  # however often it is resumed: that is no crash of the trial
        study = make_study(folder, keys(trials=4), RATE)
        driver, _, _ = side_by_side(study, 2, job1=STOPS[name])
        with pytest.raises(KeyboardInterrupt if name == "interrupted" else JobsFailedError):
            driver.run()
        assert 1 in [trial.number for trial in study.trials.unfinished()]
    study = make_study(folder, keys(trials=4), RATE)
    side_by_side(study, 2)[0].run()
    assert states(study) == ["complete"] * 4


def test_a_refusal_that_every_trial_would_meet_ends_the_study_and_is_no_trials_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = UserError("model.path", "does not exist", got="base", remedy="put it back")

    def refuse(*_: Any) -> None:
        raise gone

    monkeypatch.setattr(studies, "check_possible", refuse)
    study = make_study(tmp_path, keys(trials=6), RATE)
    driver, place, _ = side_by_side(study, job1=REFUSED)
    with pytest.raises(UserError) as ended:
        driver.run()
    assert ended.value is gone
    assert place.stopped == [0]
    assert [trial.number for trial in study.trials.unfinished()] == [0, 1]


def test_an_interruption_begins_nothing_more_and_leaves_trials_to_go_on(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=6, seeds=2), RATE, RANK)
    driver, place, interrupt = side_by_side(study)
    wait = place.wait

    def signalled() -> None:
        wait()
        if len(place.started) == 2 and place.running.get(0, (None, 0))[1] == 4:
            interrupt.requested = True
            place.stopped += [0, 2]

    place.wait = signalled
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    assert place.started == [0, 2]
    assert [trial.number for trial in study.trials.unfinished()] == [0, 1]
    again = make_study(tmp_path, keys(trials=6, seeds=2), RATE, RANK)
    driver, place, _ = side_by_side(again)
    driver.run()
    assert place.started[:2] == [0, 2], "the trials that were interrupted come first"
    assert states(again) == ["complete"] * 6


# -- in this process ---------------------------------------------------------------------------------------------------
SMALL = (
    "steps=3", "prompts_per_step=2", "group_size=2", "lora.rank=2", "eval.every=1", "eval.num_prompts=2",
    "eval.num_samples=1", "generation=transformers", "generation.max_tokens=4", "model.device=cpu", "data.size=16",
    "data.held_out_size=4", "scoring.workers=0", "console=null", "seed=7",
)  # fmt: skip


def run_of(folder: Path, rate: float = 1e-3) -> Run:
    return Run(number=0, name="", words=[*SMALL, f"trainer.lr={rate}"], folder=folder)


def here(engines: Any) -> InThisProcess:
    return InThisProcess("train", None, engines, silent, prunes=True)


def test_a_run_that_is_pruned_ends_at_that_evaluation_and_says_why(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    with Engines() as engines, pytest.raises(PrunedError):
        here(engines)._do(run, lambda: 1 in curve(run.folder, "accuracy"))  # not before the first step
    assert read(run.folder)["seed"] == 7
    assert [line["step"] for line in read_lines(run.folder / METRICS)] == [1]
    reason = "pruned by its sweep after step 1: its trial lags behind"
    assert run_status.read(run.folder) == (run_status.Status.stopped, reason)
    assert run_status.error(run.folder) == "PrunedError"


def test_a_run_that_is_refused_says_for_what(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = here(None)
    for run, key in ((run_of(tmp_path, -1.0), "trainer.lr"), (run_of(tmp_path / "file" / "run"), "hydra.run.dir")):
        place.start(run, lambda: False)
        ending = place.ending(run)
        assert ending.how is How.refused
        assert ending.problem.startswith(f"{key}: ")


class Broken:
    """Raises an error where engines would be started or used."""

    def __init__(self, error: BaseException) -> None:
        self._error, self.closed = error, 0

    def close(self) -> None:
        self.closed += 1

    def __getattr__(self, name: str) -> Any:
        raise self._error


def test_an_error_of_a_run_is_how_it_ended(tmp_path: Path) -> None:
    taken = UserError("generation.engine", "vLLM could not start: no memory", got="vllm", remedy="free the GPU")
    for error, expected in (
        (taken, Ending(How.refused, str(taken))),
        (BrokenRunError("the loss is not finite"), Ending(How.failed, "the loss is not finite")),
        (SystemExit(3), Ending(How.failed, "SystemExit: 3")),
    ):
        engines = Broken(error)
        place, run = here(engines), run_of(tmp_path / type(error).__name__)
        place.start(run, lambda: False)
        assert place.ending(run) == expected
        assert engines.closed == 1


def test_jobs_record_the_same_values_whether_they_were_planned_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "commit_of", lambda path: "0123abcd")
    checked = check("train", parse(["-m", *SMALL, "trainer.lr=0.001,0.002"]), tmp_path)
    place = here(Broken(BrokenRunError("no engines")))
    configs = []
    for number, resolved in enumerate(checked.configs):
        run = Run(number=number, name="", words=(), folder=tmp_path / str(number), resolved=resolved,
                  plan=checked.plans.get(number))  # fmt: skip
        place.start(run, lambda: False)
        configs.append({key: value for key, value in flatten(read(run.folder)).items() if key != "trainer.lr"})
    assert [*checked.plans] == [0]
    assert configs[0] == configs[1]
    assert configs[0]["model.revision"] == "0123abcd"


def test_a_disk_that_is_full_is_no_ending_of_a_run_but_of_the_sweep(tmp_path: Path) -> None:
    engines = Broken(DiskError(errno.ENOSPC, tmp_path))
    with pytest.raises(DiskError, match="the disk is full"):
        here(engines).start(run_of(tmp_path / "run"), lambda: False)
    assert engines.closed == 1


def test_a_signal_comes_too_late_for_a_run_that_is_pruned(tmp_path: Path) -> None:
    place, run = here(Broken(KeyboardInterrupt())), run_of(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        place.start(run, lambda: False)
    place.start(run, lambda: True)
    assert place.ending(run) == Ending(How.pruned)


def test_the_start_up_table_is_printed_once_in_a_sweep_then_only_rows_that_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printed(rank: int) -> str:
        rows = [("model", "tiny", "on cpu"), ("trainable", str(rank), "LoRA")]
        console = Console(ConsoleConfig(live=False, plain_seconds=0.0))
        show_rows([("data", "mine", "here")], "run in 0")
        console.start(RunInfo(folder=Path("0"), name="run", config={}, step=0, steps=4, sizes=rows))
        return " ".join(capsys.readouterr().out.split())

    whole = "run in 0 data mine here model tiny on cpu trainable 4 LoRA"
    assert [printed(4), printed(4)] == [whole, whole], "of runs that are no sweep's"
    before = PRINTED.set(set())
    assert [printed(4), printed(4), printed(8)] == [whole, "", "trainable 8 LoRA"]
    PRINTED.reset(before)
