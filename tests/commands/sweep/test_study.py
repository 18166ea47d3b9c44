"""The course of a study with runs that are made up: seeds, pruning, failures, and kills at every moment."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_studies import (
    ALGORITHM,
    RANK,
    RATE,
    STEPS,
    FakeRuns,
    accuracy,
    by_number,
    do_all,
    keys,
    line,
    make_and_do,
    make_study,
    states,
    write,
)

from rlft.commands.sweep import study as studies
from rlft.commands.sweep.driver import Ending, How
from rlft.commands.sweep.space import Choice
from rlft.commands.sweep.study import Journal, Study, TrialRun
from rlft.loop.driver import BrokenRunError
from rlft.runs import run_status
from rlft.system.disk import DiskError


class Killed(BaseException):
    """Stands for a kill: nothing in the study handles it."""


def outcome(study: Study) -> list[tuple[Any, ...]]:
    """All that a study knows, in the order of its trials."""
    return [
        (row.number, dict(row.params), row.state, row.value, tuple(row.values), row.same_as, row.why,
         dict(study.trials.reported(row.number)))
        for row in by_number(study)
    ]  # fmt: skip


def test_the_value_of_a_trial_is_the_mean_over_its_seeds_after_the_last_step(tmp_path: Path) -> None:
    study, runs = make_study(tmp_path, keys(trials=2, seeds=3)), FakeRuns()
    do_all(study, runs)
    assert runs.ran == [(trial, seed) for trial in (0, 1) for seed in (0, 1, 2)]
    for row in study.trials.rows():
        values = [accuracy(row.params, STEPS, seed) for seed in (0, 1, 2)]
        assert list(row.values) == values
        assert row.value == sum(values) / 3


def test_of_the_first_run_each_evaluation_is_reported_and_of_later_ones_the_mean_at_their_ends(tmp_path: Path) -> None:
    runs = FakeRuns(value=lambda params, step, seed: step + 10.0 * seed)
    study = make_and_do(tmp_path, keys(trials=1, seeds=3), runs=runs)
    # 9 steps in each of 3 runs, which end at 9, 19 and 29
    whole_runs = {18: (9 + 19) / 2, 27: (9 + 19 + 29) / 3}
    assert study.trials.reported(0) == {step: step for step in range(1, 10)} | whole_runs


def scripted(curves: Mapping[str, Sequence[float]]) -> FakeRuns:
    """Runs with these evaluations for each rank, whatever their seed."""
    steps = len(next(iter(curves.values())))
    return FakeRuns(value=lambda params, step, seed: curves[params["lora.rank"]][step - 1], steps=steps)


def states_of(study: Study) -> dict[str, str]:
    """{rank: what became of the trial}."""
    return {str(row.params["lora.rank"]): row.state for row in study.trials.rows()}


def test_a_slow_starter_that_is_the_best_in_the_end_is_not_pruned_by_early_steps_of_its_later_seeds(
    tmp_path: Path,
) -> None:
    """Rungs are at 1, 3 and 9 of the 15 steps of three runs; 9 is inside the second one, at its fourth step."""
    ranks = Choice(key="lora.rank", values=tuple("abcdef"))
    curves = {name: [0.4, 0.4, 0.4, 0.8, 0.8] for name in "abcdef"}
    curves["f"] = [0.5, 0.5, 0.5, 0.6, 0.9]  # ahead at 1 and 3, behind at 4, the best at the end
    config = keys(sampler="grid", trials=6, seeds=3, pruner="hyperband")
    study = make_study(tmp_path, config, ranks, steps=5)
    do_all(study, scripted(curves))
    assert states_of(study)["f"] == "complete"
    assert study.trials.rows()[0].params == {"lora.rank": "f"}
    assert set(study.trials.reported(5)) == {1, 2, 3, 4, 5, 10, 15}


def test_at_the_end_of_a_run_the_value_there_counts_and_before_it_the_best_so_far(tmp_path: Path) -> None:
    ranks = Choice(key="lora.rank", values=tuple("abcdef"))
    curves = {name: [0.3, 0.5, 0.6] for name in "ab"}
    curves["c"] = [0.9, 0.2, 0.7]  # falls back within the run, and recovers
    curves["d"] = [0.9, 0.9, 0.1]  # ends where the others began
    curves["e"] = [0.1, 0.9, 0.9]
    curves["f"] = [0.3, 0.5, 0.7]
    config = keys(sampler="grid", trials=6, seeds=2, pruner="median", startup=2)
    study, runs = make_study(tmp_path, config, ranks, steps=3), scripted(curves)
    do_all(study, runs)
    assert states_of(study) == {"a": "complete", "b": "complete", "c": "complete", "d": "pruned", "e": "pruned",
                                "f": "complete"}  # fmt: skip
    why = {str(row.params["lora.rank"]): row.why for row in study.trials.rows()}
    # At step 1 the complete a, b and c have 0.3, 0.3 and 0.9; at step 3 0.6, 0.6 and 0.7.
    assert (why["d"], why["e"]) == ("median at step 3", "median at step 1")
    assert [seed for trial, seed in runs.ran if trial == 3] == [0], "it has no second run"


def test_a_trial_is_pruned_after_a_later_seed_by_the_mean_so_far(tmp_path: Path) -> None:
    """The first run of the last trial is as good as the others' and its second is worse: 0.5 against 0.4."""
    runs = FakeRuns(value=lambda params, step, seed: 0.3 if (params, seed) == (LAST, 1) else 0.5)
    config = keys(sampler="grid", trials=4, seeds=3, pruner="median", startup=3)
    study = make_and_do(tmp_path, config, RANK, ALGORITHM, runs=runs)
    last = next(row for row in study.trials.rows() if row.params == LAST)
    assert (last.state, last.value, last.why) == ("pruned", (0.5 + 0.3) / 2, "median after 2 seeds")


LAST = {"lora.rank": "16", "algorithm": "gspo"}


def test_a_pruned_trial_ends_at_its_evaluation_and_has_no_further_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, runs = make_study(tmp_path, keys(trials=12, seeds=2, pruner="median", startup=2)), FakeRuns()
    do_all(study, runs)
    pruned = [row for row in study.trials.rows() if row.state == "pruned"]
    assert len(pruned) >= 3
    for row in pruned:
        point = max(study.trials.reported(row.number))
        assert point < STEPS, "in these runs whoever lags behind does from the first step on"
        assert row.why == f"median at step {point}"
        assert [seed for trial, seed in runs.ran if trial == row.number] == [0]
    assert f"trial {pruned[0].number} is pruned by median at step" in capsys.readouterr().err


def test_a_trial_whose_last_step_was_not_evaluated_fails_and_says_in_which_file(tmp_path: Path) -> None:
    def cut(run: TrialRun, is_pruned: Callable[[], bool]) -> None:
        runs(run, is_pruned)
        if run.trial.number == 1:
            write(run.folder, [line(0, 0.1), line(STEPS - 1, 0.9)])

    runs = FakeRuns()
    study = make_and_do(tmp_path, keys(trials=3, seeds=2), runs=cut)
    file = tmp_path / "1" / "seed_0" / "eval.jsonl"
    assert by_number(study)[1].why == f"{file} has no evaluation after the last step, {STEPS}"
    assert states(study) == ["complete", "failed", "complete"]
    assert study.trials.rows()[-1].number == 1


def crash(study: Study, **more: Any) -> FakeRuns:
    """Resumes a study whose trial 1 crashes before step 5, or before another with `at`."""
    at, error = more.get("at", 5), more.get("error", Killed())

    def before(run: TrialRun, step: int) -> None:
        if (run.trial.number, step) == (1, at):
            raise error

    runs = FakeRuns(before=before)
    with contextlib.suppress(type(error)):
        do_all(study, runs)
    return runs


def test_a_trial_that_kills_its_process_twice_without_progress_fails_and_the_sweep_goes_on(tmp_path: Path) -> None:
    for _ in range(3):  # the second attempt finds the evaluations of the first, the third nothing new
        crash(make_study(tmp_path, keys(trials=4)))
    study = make_study(tmp_path, keys(trials=4))
    assert [trial.number for trial in study.trials.unfinished()] == [1]
    runs = crash(study)
    assert runs.ran == [(2, 0), (3, 0)]
    assert states(study) == ["complete", "failed", "complete", "complete"]
    said = "2 attempts in a row ended without an explanation and without a new evaluation or che"
    assert by_number(study)[1].why.startswith(said)


def test_a_trial_whose_process_dies_ever_later_goes_on(tmp_path: Path) -> None:
    for at in (2, 3, 4, 5, 6, 7):
        crash(make_study(tmp_path, keys(trials=2)), at=at)
    assert states(make_and_do(tmp_path, keys(trials=2))) == ["complete"] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DiskError(errno.ENOSPC, None)])
def test_an_attempt_that_a_signal_or_the_disk_ends_is_no_crash(error: BaseException, tmp_path: Path) -> None:
    for _ in range(5):
        crash(make_study(tmp_path, keys(trials=2)), error=error)
    assert states(make_and_do(tmp_path, keys(trials=2))) == ["complete"] * 2


def test_a_pruned_run_has_the_same_status_however_it_was_ended(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=1))
    run = study.next()
    assert run is not None
    write(run.folder, [line(0, 0.1), line(2, 0.2)])
    run_status.write(run.folder, STEPS, run_status.Status.interrupted)
    study.ended(run, Ending(How.pruned))
    reason = "pruned by its sweep after step 2: its trial lags behind"
    assert run_status.read(run.folder) == (run_status.Status.stopped, reason)
    assert (run_status.error(run.folder), run_status.num_steps(run.folder)) == ("PrunedError", STEPS)


def test_every_trial_that_begins_or_ends_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial 1 cannot be done and fails, the others go on; of four combinations six trials repeat some."""
    told: list[list[str]] = []
    study = make_study(tmp_path, keys(trials=6, startup=6), RANK, ALGORITHM)
    monkeypatch.setattr(studies.Page, "write_table", lambda page, trials: told.append(states(study)))

    def before(run: TrialRun, step: int) -> None:
        if run.trial.number == 1:
            raise BrokenRunError("the loss is not finite")

    do_all(study, FakeRuns(before=before))
    assert told[:4] == [["unfinished"], ["complete"], ["complete", "unfinished"], ["complete", "failed"]]
    repeated = sum(row.same_as is not None for row in study.trials.rows())
    assert repeated > 0
    assert len(told) == 2 * (6 - repeated) + repeated
    assert by_number(study)[1].why == "the loss is not finite"
    assert {row.state for row in by_number(study) if 1 not in (row.number, row.same_as)} == {"complete"}


def test_a_signal_that_comes_too_late_for_a_run_ends_the_study_before_the_next_one(tmp_path: Path) -> None:
    study, runs = make_study(tmp_path, keys(trials=4, seeds=2)), FakeRuns()
    with pytest.raises(KeyboardInterrupt):
        do_all(study, runs, lambda: len(runs.ran) == 3)
    assert runs.ran == [(0, 0), (0, 1), (1, 0)]
    again = make_study(tmp_path, keys(trials=4, seeds=2))
    assert states(again) == ["complete", "unfinished"]
    do_all(again, runs, lambda: len(runs.ran) == 9)
    assert again.is_done(), "a signal in the last step of all is too late for the sweep, too"


def test_a_signal_between_two_seeds_is_no_crash_of_the_trial(tmp_path: Path) -> None:
    for _ in range(4):  # each time its first run is there already, so that there is no progress
        study, runs = make_study(tmp_path, keys(trials=1, seeds=2)), FakeRuns()
        with pytest.raises(KeyboardInterrupt):
            do_all(study, runs, lambda runs=runs: len(runs.ran) == 1)
    assert states(make_and_do(tmp_path, keys(trials=1, seeds=2))) == ["complete"]


CASES = {
    "tpe with hyperband": (keys(trials=9, pruner="hyperband"), (RATE, RANK)),
    "tpe with median and seeds": (keys(trials=6, pruner="median", startup=2, seeds=2), (RATE, ALGORITHM)),
    "tpe whose values repeat": (keys(trials=7, startup=1, pruner="median"), (RANK, ALGORITHM)),
    "a grid": (keys(trials=4, sampler="grid", pruner="median", startup=1), (RANK, ALGORITHM)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_study_that_is_killed_at_any_moment_goes_on_to_the_same_end(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process in turn is killed before or after its first, second, third or sixth time that something is kept."""
    config, varied = CASES[case]
    whole = make_and_do(tmp_path / "whole", config, *varied)
    kept, kills, write = 0, 0, Journal._write
    moments = itertools.cycle(itertools.product((1, 2, 3, 6), ("before", "after")))
    moment = next(moments)

    def writing(journal: Journal) -> None:
        nonlocal kept
        kept += 1
        if (kept, "before") == moment:
            raise Killed
        write(journal)
        if (kept, "after") == moment:
            raise Killed

    monkeypatch.setattr(Journal, "_write", writing)
    monkeypatch.setattr(studies, "MOST_CRASHES", 100)  # some of these come before a trial has done anything
    while True:
        try:
            make_and_do(tmp_path / "killed", config, *varied)
            break
        except Killed:
            kept, kills, moment = 0, kills + 1, next(moments)
    monkeypatch.setattr(Journal, "_write", write)
    assert kills > 16, "each moment came twice"
    assert outcome(make_study(tmp_path / "killed", config, *varied)) == outcome(whole)


def test_more_trials_go_on_after_the_last(tmp_path: Path) -> None:
    make_and_do(tmp_path / "in_two", keys(trials=3))
    in_two = make_and_do(tmp_path / "in_two", keys(trials=8))
    assert outcome(in_two) == outcome(make_and_do(tmp_path / "at_once", keys(trials=8)))


def test_hyperband_prunes_trials_where_the_steps_have_tripled(tmp_path: Path) -> None:
    study = make_and_do(tmp_path, keys(trials=20, pruner="hyperband"))
    pruned = [row for row in study.trials.rows() if row.state == "pruned"]
    assert len(pruned) >= 5
    # rungs at 1 and 3 steps; one at 9 is the end
    assert {max(study.trials.reported(row.number)) for row in pruned} <= {1, 3}
