"""What Optuna draws and how it judges, with the journal that keeps it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from fake_studies import ALGORITHM, RANK, RATE, STEPS, accuracy, keys, make_trials

from rlft.commands.sweep.space import Interval, Space
from rlft.commands.sweep.study import JOURNAL, Journal, Trials, pruner
from rlft.types import UserError

SPACE = Space(fixed=(), varied=(RATE, RANK, ALGORITHM))
WHOLE = Space(fixed=(), varied=(Interval(key="lora.rank", low=4, high=64, whole=True, log=False),))


def done(trials: Trials, number: int) -> list[dict[str, object]]:
    """The values of so many trials that are drawn and completed one after the other."""
    found = []
    for _ in range(number):
        trial = trials.draw()
        if trial.same_as is None:
            trials.complete(trial.number, [accuracy(trial.params, STEPS, 0)])
        found.append(dict(trial.params))
    return found


def test_the_same_seed_draws_the_same_trials_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (done(make_trials(tmp_path / str(i), keys(seed=i // 2), SPACE), 8) for i in range(3))
    assert first == again != other


def test_a_trial_is_drawn_as_if_the_process_had_never_ended(tmp_path: Path) -> None:
    """Each with a generator of its own: a study that is opened anew before each trial draws the same."""
    whole = done(make_trials(tmp_path / "whole", keys(), SPACE), 10)
    assert [done(make_trials(tmp_path / "parts", keys(), SPACE), 1)[0] for _ in range(10)] == whole


def test_values_are_drawn_near_those_that_did_well(tmp_path: Path) -> None:
    """The best rate is 1e-3, in the middle of three decades: half a decade around it is a third of what random has."""
    near = {}
    for name in ("tpe", "random"):
        found = done(make_trials(tmp_path / name, keys(sampler=name, startup=8), SPACE), 40)[20:]
        near[name] = sum(10**-3.5 < float(str(params["trainer.lr"])) < 10**-2.5 for params in found)
    assert near["tpe"] > 1.5 * near["random"]


def test_a_grid_has_each_combination_once_in_the_order_of_a_plain_sweep(tmp_path: Path) -> None:
    grid = Space(fixed=(), varied=(RANK, ALGORITHM))
    found = done(make_trials(tmp_path, keys(sampler="grid"), grid), 4)
    assert [(params["lora.rank"], params["algorithm"]) for params in found] == [
        ("4", "grpo"), ("4", "gspo"), ("16", "grpo"), ("16", "gspo"),
    ]  # fmt: skip


def test_an_interval_of_whole_numbers_has_whole_numbers(tmp_path: Path) -> None:
    values = [params["lora.rank"] for params in done(make_trials(tmp_path, keys(), WHOLE), 6)]
    assert all(isinstance(value, int) and 4 <= value <= 64 for value in values)
    assert len(set(values)) > 3


def test_a_trial_with_the_values_of_an_earlier_one_has_its_result_at_once(tmp_path: Path) -> None:
    trials = make_trials(tmp_path, keys(), Space(fixed=(), varied=(RANK,)))
    first = trials.draw()
    trials.report(first.number, 1, 0.2, may_end=True)
    trials.complete(first.number, [0.4, 0.6])
    later = [trials.draw() for _ in range(6)]
    [same] = {trial.same_as for trial in later if trial.params == first.params}
    assert same == 0
    repeated = next(trial.number for trial in later if trial.same_as == 0)
    rows = {row.number: row for row in trials.rows()}
    assert (rows[repeated].state, rows[repeated].value, rows[repeated].values) == ("complete", 0.5, [0.4, 0.6])
    assert trials.reported(repeated) == {1: 0.2}, "so that it counts for the others like one that was run"


def test_median_prunes_a_trial_that_is_worse_than_half_of_the_others_there(tmp_path: Path) -> None:
    trials = make_trials(tmp_path, keys(pruner="median", startup=3, sampler="random"), SPACE)
    for value in (0.3, 0.4, 0.5):
        number = trials.draw().number
        assert not trials.report(number, 3, value, may_end=True), "startup=3 trials are finished first"
        trials.complete(number, [value])
    below, above, last = (trials.draw().number for _ in range(3))
    assert trials.report(below, 3, 0.39, may_end=True)  # the median of 0.3, 0.4 and 0.5 is 0.4
    assert not trials.report(above, 3, 0.41, may_end=True)
    assert not trials.report(last, 3, 0.1, may_end=False), "a trial that is at its end is not pruned"
    row = next(row for row in trials.rows() if row.number == below)
    assert (row.state, row.value, row.why) == ("pruned", 0.39, "median at step 3")


def test_where_lower_is_better_the_larger_value_is_pruned_and_the_least_comes_first(tmp_path: Path) -> None:
    trials = make_trials(tmp_path, keys(pruner="median", startup=1, sampler="random"), SPACE, lower=True)
    for value in (2.0, 1.0):
        number = trials.draw().number
        trials.report(number, 3, value, may_end=False)
        trials.complete(number, [value])
    assert trials.report(trials.draw().number, 3, 1.6, may_end=True)  # the median of 2 and 1 is 1.5
    assert [row.value for row in trials.rows()] == [1.0, 2.0, 1.6], "complete ones first"


def test_what_is_not_finite_makes_a_trial_fail(tmp_path: Path) -> None:
    trials = make_trials(tmp_path, keys(), SPACE)
    trials.complete(trials.draw().number, [0.5, float("nan")])
    [row] = trials.rows()
    assert (row.state, row.value, row.why) == ("failed", None, "its metric is not finite")


def test_the_key_that_matters_is_the_most_important_one(tmp_path: Path) -> None:
    trials = make_trials(tmp_path, keys(sampler="random", trials=30), SPACE)
    done(trials, 3)
    assert trials.importance() == {}, "three trials say nothing"
    done(trials, 40)
    shares = trials.importance()
    assert max(shares, key=lambda key: shares[key]) == "trainer.lr"
    assert sum(shares.values()) == pytest.approx(1.0)


def test_an_attempt_at_a_trial_that_has_ended_is_not_withdrawn(tmp_path: Path) -> None:
    """A second Ctrl-C may come while the run of a pruned trial still saves."""
    trials = make_trials(tmp_path, keys(), SPACE)
    number = trials.draw().number
    trials.attempt(number, [0])
    trials.fail(number, "pruned")
    before = (tmp_path / JOURNAL).read_bytes()
    trials.withdraw_attempt(number)
    assert (tmp_path / JOURNAL).read_bytes() == before


def test_a_signal_in_a_change_comes_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = make_trials(tmp_path, keys(), SPACE)
    ask = trials._study.ask

    def interrupted_ask(distributions: Any) -> optuna.Trial:
        os.kill(os.getpid(), signal.SIGINT)
        return ask(distributions)

    monkeypatch.setattr(trials._study, "ask", interrupted_ask)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
    try:
        with pytest.raises(KeyboardInterrupt):
            trials.draw()
    finally:
        signal.signal(signal.SIGINT, previous)
    [kept] = make_trials(tmp_path, keys(), SPACE).unfinished()
    assert {*kept.params} == {"trainer.lr", "lora.rank", "algorithm"}, "the whole trial, and not a part of it"


def test_the_journal_holds_what_was_kept_last_and_optunas_own_reader_reads_it(tmp_path: Path) -> None:
    trials = make_trials(tmp_path, keys(), SPACE)
    done(trials, 2)
    before = (tmp_path / JOURNAL).read_bytes()
    journal = Journal(tmp_path / JOURNAL)

    def interrupted() -> None:
        with journal.transaction():
            journal.append_logs([{"op_code": 4, "worker_id": "x", "study_id": 0}])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with journal.transaction():
        journal.append_logs([{"op_code": 4, "worker_id": "y", "study_id": 0}])
    assert (tmp_path / JOURNAL).read_bytes() == before, "half of a change is not written with the next one either"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / JOURNAL)))
    study = optuna.load_study(study_name=None, storage=storage)
    assert [trial.value for trial in study.trials] == [
        row.value for row in sorted(trials.rows(), key=lambda r: r.number)
    ]
    assert all(json.loads(entry) for entry in before.splitlines())


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-20], lambda text: text + "{}\n", lambda text: "\x00\x01\n"],
    ids=["a torn line", "a line that is no record", "no text"],
)  # fmt: skip
def test_a_journal_that_is_damaged_is_refused(damage: Callable[[str], str], tmp_path: Path) -> None:
    done(make_trials(tmp_path, keys(), SPACE), 2)
    file = tmp_path / JOURNAL
    file.write_text(damage(file.read_text()))
    with pytest.raises(
        UserError, match=rf"^hydra.sweep.dir: optuna.log in that folder is damaged \(\w+\), got {tmp_path};"
    ):
        make_trials(tmp_path, keys(), SPACE)


def test_hyperband_counts_the_steps_of_all_runs_from_the_first_evaluation_on() -> None:
    made = pruner(keys(pruner="hyperband", seeds=3), 2, STEPS)
    assert isinstance(made, optuna.pruners.HyperbandPruner)
    assert (made._min_resource, made._max_resource) == (2, 3 * STEPS)
