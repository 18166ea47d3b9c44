"""The course of a study with runs that are made up: seeds, pruning, failures, and kills at every moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_studies import ALGORITHM, RANK, RATE, STEPS, FakeRuns, accuracy, keys, make_study

from rlft.verbs.study.runs import FailedError, Run, Study, one_after_the_other
from rlft.verbs.study.trials import Journal


def outcome(study: Study) -> list[tuple[Any, ...]]:
    """All that a study knows, in the order of its trials."""
    rows = sorted(study.trials.rows(), key=lambda row: row.number)
    return [
        (row.number, dict(row.params), row.state, row.value, tuple(row.values), row.same_as, row.why,
         sorted(study.trials.reported(row.number)))
        for row in rows
    ]  # fmt: skip


def test_the_value_of_a_trial_is_the_mean_over_its_seeds_after_the_last_step(tmp_path: Path) -> None:
    study, runs = make_study(tmp_path, keys(trials=2, seeds=3)), FakeRuns()
    one_after_the_other(study, runs)
    assert runs.ran == [(trial, seed) for trial in (0, 1) for seed in (0, 1, 2)]
    for row in study.trials.rows():
        values = [accuracy(row.params, STEPS, seed) for seed in (0, 1, 2)]
        assert list(row.values) == values
        assert row.value == sum(values) / 3
        assert study.trials.reported(row.number) == set(range(1, 3 * STEPS + 1)), "the seeds follow each other"


def test_what_is_reported_of_a_later_seed_is_the_mean_of_all_at_that_step(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=1, seeds=2))
    one_after_the_other(study, FakeRuns(value=lambda params, step, seed: step + 10.0 * seed))
    [trial] = study.trials._all()
    assert [trial.intermediate_values[STEPS + step] for step in (1, 9)] == [6.0, 14.0]  # (1 + 11) / 2, (9 + 19) / 2


def test_a_pruned_trial_ends_at_its_evaluation_and_has_no_further_seeds(tmp_path: Path) -> None:
    said: list[str] = []
    study, runs = make_study(tmp_path, keys(trials=12, seeds=2, pruner="median", startup=2), said=said), FakeRuns()
    one_after_the_other(study, runs)
    pruned = [row for row in study.trials.rows() if row.state == "pruned"]
    assert len(pruned) >= 3
    for row in pruned:
        points = study.trials.reported(row.number)
        assert row.why == f"median at step {max(points)}"
        seeds = [seed for trial, seed in runs.ran if trial == row.number]
        assert len(seeds) == (1 if max(points) <= STEPS else 2)
    assert any(line.startswith(f"trial {pruned[0].number} is ended early by median") for line in said)


def test_hyperband_ends_trials_where_the_steps_have_tripled(tmp_path: Path) -> None:
    study = make_study(tmp_path, keys(trials=20, pruner="hyperband"))
    one_after_the_other(study, FakeRuns())
    pruned = [row for row in study.trials.rows() if row.state == "pruned"]
    assert len(pruned) >= 5
    # rungs at 1 and 3 steps; one at 9 is the end
    assert {max(study.trials.reported(row.number)) for row in pruned} <= {1, 3}


def test_a_trial_that_cannot_be_done_fails_and_the_others_go_on(tmp_path: Path) -> None:
    def before(run: Run, step: int) -> None:
        if run.trial.number == 1:
            raise FailedError("the loss is not finite")

    study = make_study(tmp_path, keys(trials=4))
    one_after_the_other(study, FakeRuns(before=before))
    rows = {row.number: row for row in study.trials.rows()}
    assert [rows[n].state for n in range(4)] == ["complete", "failed", "complete", "complete"]
    assert rows[1].why == "the loss is not finite"


def test_any_other_error_ends_the_study_and_leaves_the_trial_to_go_on(tmp_path: Path) -> None:
    def before(run: Run, step: int) -> None:
        if (run.trial.number, step) == (1, 5):
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        one_after_the_other(make_study(tmp_path, keys(trials=3)), FakeRuns(before=before))
    again = make_study(tmp_path, keys(trials=3))
    assert [trial.number for trial in again.trials.unfinished()] == [1]
    one_after_the_other(again, FakeRuns())
    assert {row.state for row in again.trials.rows()} == {"complete"}


def test_a_signal_that_comes_too_late_for_a_run_ends_the_study_before_the_next_one(tmp_path: Path) -> None:
    study, runs = make_study(tmp_path, keys(trials=4, seeds=2)), FakeRuns()
    with pytest.raises(KeyboardInterrupt):
        one_after_the_other(study, runs, lambda: len(runs.ran) == 3)
    assert runs.ran == [(0, 0), (0, 1), (1, 0)]
    again = make_study(tmp_path, keys(trials=4, seeds=2))
    assert [row.state for row in again.trials.rows()] == ["complete", "unfinished"]


class Killed(BaseException):
    """Stands for a kill: nothing in the study handles it."""


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
    """Killed before or after each time that something is kept, in turn, until it is done."""
    config, varied = CASES[case]
    (tmp_path / "whole").mkdir()
    whole = make_study(tmp_path / "whole", config, *varied)
    one_after_the_other(whole, FakeRuns())

    (tmp_path / "killed").mkdir()
    kept, write = 0, Journal._write

    def writing(journal: Journal) -> None:
        nonlocal kept
        kept += 1
        if kept % 5 == 3:
            raise Killed  # before it is kept
        write(journal)
        if kept % 5 == 0:
            raise Killed  # just after

    monkeypatch.setattr(Journal, "_write", writing)
    for _ in range(1000):
        try:
            study = make_study(tmp_path / "killed", config, *varied)
            one_after_the_other(study, FakeRuns())
            break
        except Killed:
            continue
    monkeypatch.setattr(Journal, "_write", write)
    assert kept > 30
    assert outcome(make_study(tmp_path / "killed", config, *varied)) == outcome(whole)


def test_more_trials_go_on_after_the_last(tmp_path: Path) -> None:
    (tmp_path / "at_once").mkdir()
    (tmp_path / "in_two").mkdir()
    at_once = make_study(tmp_path / "at_once", keys(trials=8))
    one_after_the_other(at_once, FakeRuns())
    for number in (3, 8):
        study = make_study(tmp_path / "in_two", keys(trials=number))
        one_after_the_other(study, FakeRuns())
    assert outcome(study) == outcome(at_once)
