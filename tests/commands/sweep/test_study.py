"""Studies: what Optuna draws and judges, what is done next, and that a kill at any moment changes nothing."""

import contextlib
import csv
import errno
import itertools
import json
import os
import signal

import optuna
import pytest
from in_one_test import each
from slow_cases import slow

from rlft.commands.sweep import page, study as studies
from rlft.commands.sweep.driver import Ending, How
from rlft.commands.sweep.space import Choice, Interval, Space
from rlft.commands.sweep.study import JOURNAL, Journal, pruner
from rlft.loop.driver import BrokenRunError
from rlft.runs import run_status
from rlft.system.disk import DiskError
from rlft.types import UserError
from tests.commands.sweep.fake_studies import (
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
    make_trials,
    states,
    write,
)


class Killed(BaseException):
    """Stands for a kill: nothing in the study handles it."""


def outcome(study):
    """All that a study knows, in the order of its trials."""
    return [
        (row.number, dict(row.params), row.state, row.value, tuple(row.values), row.why,
         dict(study.trials.reported(row.number)))
        for row in by_number(study)
    ]  # fmt: skip


def test_the_value_of_a_trial_is_the_mean_over_its_seeds_after_the_last_step(tmp_path):
    study, runs = make_study(tmp_path, keys(trials=2, seeds=3)), FakeRuns()
    do_all(study, runs)
    assert runs.ran == [(trial, seed) for trial in (0, 1) for seed in (0, 1, 2)]
    for row in study.trials.rows():
        values = [accuracy(row.params, STEPS, seed) for seed in (0, 1, 2)]
        assert list(row.values) == values
        assert row.value == sum(values) / 3


def test_of_the_first_run_each_evaluation_is_reported_and_of_later_ones_the_mean_at_their_ends(tmp_path):
    runs = FakeRuns(value=lambda params, step, seed: step + 10.0 * seed)
    study = make_and_do(tmp_path, keys(trials=1, seeds=3), runs=runs)
    # 9 steps in each of 3 runs, which end at 9, 19 and 29
    whole_runs = {18: (9 + 19) / 2, 27: (9 + 19 + 29) / 3}
    assert study.trials.reported(0) == {step: step for step in range(1, 10)} | whole_runs


def scripted(curves):
    """Runs with these evaluations for each rank, whatever their seed."""
    steps = len(next(iter(curves.values())))
    return FakeRuns(value=lambda params, step, seed: curves[params["lora.rank"]][step - 1], steps=steps)


def states_of(study):
    """{rank: what became of the trial}."""
    return {str(row.params["lora.rank"]): row.state for row in study.trials.rows()}


def test_a_slow_starter_that_is_the_best_in_the_end_is_not_pruned_by_early_steps_of_its_later_seeds(tmp_path):
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


def test_at_the_end_of_a_run_the_value_there_counts_and_before_it_the_best_so_far(tmp_path, capsys):
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
    assert "trial 3 is pruned by median at step 3" in capsys.readouterr().err
    assert [seed for trial, seed in runs.ran if trial in (3, 4)] == [0, 0], "they have no second run"
    assert max(study.trials.reported(4)) == 1, "it ends at that evaluation"


def test_a_trial_is_pruned_after_a_later_seed_by_the_mean_so_far(tmp_path):
    """The first run of the last trial is as good as the others' and its second is worse: 0.5 against 0.4."""
    runs = FakeRuns(value=lambda params, step, seed: 0.3 if (params, seed) == (LAST, 1) else 0.5)
    config = keys(sampler="grid", trials=4, seeds=3, pruner="median", startup=3)
    study = make_and_do(tmp_path, config, RANK, ALGORITHM, runs=runs)
    last = next(row for row in study.trials.rows() if row.params == LAST)
    assert (last.state, last.value, last.why) == ("pruned", (0.5 + 0.3) / 2, "median after 2 seeds")


LAST = {"lora.rank": "16", "algorithm": "gspo"}


def test_a_trial_whose_last_step_was_not_evaluated_fails_and_says_in_which_file(tmp_path):
    def cut(run, is_pruned):
        runs(run, is_pruned)
        if run.trial.number == 1:
            write(run.folder, [line(0, 0.1), line(STEPS - 1, 0.9)])

    runs = FakeRuns()
    study = make_and_do(tmp_path, keys(trials=3, seeds=2), runs=cut)
    file = tmp_path / "1" / "seed_0" / "eval.jsonl"
    assert by_number(study)[1].why == f"{file} has no evaluation after the last step, {STEPS}"
    assert states(study) == ["complete", "failed", "complete"]
    assert study.trials.rows()[-1].number == 1


def crash(study, at=5, error=None):
    """Resumes a study whose trial 1 crashes before this step."""

    def before(run, step):
        if (run.trial.number, step) == (1, at):
            raise error or Killed

    runs = FakeRuns(before=before)
    with contextlib.suppress(Killed if error is None else type(error)):
        do_all(study, runs)
    return runs


def test_a_trial_that_kills_its_process_twice_without_progress_fails_and_the_sweep_goes_on(tmp_path):
    for _ in range(3):  # the second attempt finds the evaluations of the first, the third nothing new
        crash(make_study(tmp_path, keys(trials=4)))
    study = make_study(tmp_path, keys(trials=4))
    assert [trial.number for trial in study.trials.unfinished()] == [1]
    runs = crash(study)
    assert runs.ran == [(2, 0), (3, 0)]
    assert states(study) == ["complete", "failed", "complete", "complete"]
    said = "2 attempts in a row ended without an explanation and without a new evaluation or che"
    assert by_number(study)[1].why.startswith(said)


def test_a_trial_whose_process_dies_ever_later_goes_on(tmp_path):
    for at in (2, 3, 4, 5, 6, 7):
        crash(make_study(tmp_path, keys(trials=2)), at=at)
    assert states(make_and_do(tmp_path, keys(trials=2))) == ["complete"] * 2


@each("error", [KeyboardInterrupt(), DiskError(errno.ENOSPC, None), None])
def test_an_attempt_that_a_signal_or_the_disk_ends_is_no_crash(error, tmp_path):
    """However often it comes; None: a signal between two seeds, of which the first is there from the second time on."""
    folder = tmp_path / type(error).__name__
    for _ in range(5):
        study, runs = make_study(folder, keys(trials=2, seeds=2)), FakeRuns()
        if error is not None:
            crash(study, error=error)
        else:
            with pytest.raises(KeyboardInterrupt):
                do_all(study, runs, lambda runs=runs: len(runs.ran) == 1)
    assert states(make_and_do(folder, keys(trials=2, seeds=2))) == ["complete"] * 2


def test_a_pruned_run_has_the_same_status_however_it_was_ended(tmp_path):
    study = make_study(tmp_path, keys(trials=1))
    run = study.next()
    write(run.folder, [line(0, 0.1), line(2, 0.2)])
    run_status.write(run.folder, STEPS, run_status.Status.interrupted)
    study.ended(run, Ending(How.pruned))
    reason = "pruned by its sweep after step 2: its trial lags behind"
    assert run_status.read(run.folder) == (run_status.Status.stopped, reason)
    assert (run_status.error(run.folder), run_status.num_steps(run.folder)) == ("PrunedError", STEPS)


def test_every_trial_that_begins_or_ends_is_told_at_once(tmp_path, monkeypatch):
    """Trial 1 cannot be done and fails, the others go on."""
    told = []
    study = make_study(tmp_path, keys(trials=6, startup=6))
    monkeypatch.setattr(studies.Page, "write_table", lambda page, trials: told.append(states(study)))

    def before(run, step):
        if run.trial.number == 1:
            raise BrokenRunError("the loss is not finite")

    do_all(study, FakeRuns(before=before))
    assert told[:4] == [["unfinished"], ["complete"], ["complete", "unfinished"], ["complete", "failed"]]
    assert len(told) == 2 * 6
    assert by_number(study)[1].why == "the loss is not finite"
    assert {row.state for row in by_number(study) if row.number != 1} == {"complete"}


def test_a_signal_that_comes_too_late_for_a_run_ends_the_study_before_the_next_one(tmp_path):
    study, runs = make_study(tmp_path, keys(trials=4, seeds=2)), FakeRuns()
    with pytest.raises(KeyboardInterrupt):
        do_all(study, runs, lambda: len(runs.ran) == 3)
    assert runs.ran == [(0, 0), (0, 1), (1, 0)]
    again = make_study(tmp_path, keys(trials=4, seeds=2))
    assert states(again) == ["complete", "unfinished"]
    do_all(again, runs, lambda: len(runs.ran) == 9)
    assert again.is_done(), "a signal in the last step of all is too late for the sweep, too"


CASES = {  # of which `make test` has the last two
    "tpe with hyperband": (keys(trials=9, pruner="hyperband"), (RATE, RANK)),
    "tpe whose values repeat": (keys(trials=7, startup=1, pruner="median"), (RANK, ALGORITHM)),
    "tpe with median and seeds": (keys(trials=6, pruner="median", startup=2, seeds=2), (RATE, ALGORITHM)),
    "a grid": (keys(trials=4, sampler="grid", pruner="median", startup=1), (RANK, ALGORITHM)),
}


@pytest.mark.parametrize("case", [*map(slow, list(CASES)[:2]), *list(CASES)[2:]])
def test_a_study_that_is_killed_at_any_moment_goes_on_to_the_same_end(case, tmp_path, monkeypatch):
    """Each process in turn is killed before or after its first, second, third or sixth time that something is kept."""
    config, varied = CASES[case]
    whole = make_and_do(tmp_path / "whole", config, *varied)
    kept, kills, write = 0, 0, Journal._write
    moments = itertools.cycle(itertools.product((1, 2, 3, 6), ("before", "after")))
    moment = next(moments)

    def writing(journal):
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


def test_more_trials_go_on_after_the_last(tmp_path):
    make_and_do(tmp_path / "in_two", keys(trials=3))
    in_two = make_and_do(tmp_path / "in_two", keys(trials=8))
    assert outcome(in_two) == outcome(make_and_do(tmp_path / "at_once", keys(trials=8)))


def test_hyperband_prunes_trials_where_the_steps_have_tripled(tmp_path):
    study = make_and_do(tmp_path, keys(trials=20, pruner="hyperband"))
    pruned = [row for row in study.trials.rows() if row.state == "pruned"]
    assert len(pruned) >= 5
    # rungs at 1 and 3 steps; one at 9 is the end
    assert {max(study.trials.reported(row.number)) for row in pruned} <= {1, 3}
    made = pruner(keys(pruner="hyperband", seeds=3), 2, STEPS)
    assert isinstance(made, optuna.pruners.HyperbandPruner)
    assert (made._min_resource, made._max_resource) == (2, 3 * STEPS), "the steps of all runs, from the evaluation on"


SPACE = Space(fixed=(), varied=(RATE, RANK, ALGORITHM))


def done(trials, number):
    """The values of so many trials that are drawn and completed one after the other."""
    found = []
    for _ in range(number):
        trial = trials.draw()
        trials.complete(trial.number, [accuracy(trial.params, STEPS, 0)])
        found.append(dict(trial.params))
    return found


def test_the_same_seed_draws_the_same_trials_and_another_seed_others(tmp_path):
    first, again, other = (done(make_trials(tmp_path / str(i), keys(seed=i // 2), SPACE), 8) for i in range(3))
    assert first == again != other


def test_values_are_drawn_near_those_that_did_well(tmp_path):
    """The best rate is 1e-3, in the middle of three decades: half a decade around it is a third of what random has."""
    near = {}
    for name in ("tpe", "random"):
        found = done(make_trials(tmp_path / name, keys(sampler=name, startup=8), SPACE), 40)[20:]
        near[name] = sum(10**-3.5 < float(str(params["trainer.lr"])) < 10**-2.5 for params in found)
    assert near["tpe"] > 1.5 * near["random"]


ALL_FOUR = [("4", "grpo"), ("4", "gspo"), ("16", "grpo"), ("16", "gspo")]


def test_a_grid_has_each_combination_once_in_the_order_of_a_plain_sweep(tmp_path):
    found = done(make_trials(tmp_path, keys(sampler="grid"), Space(fixed=(), varied=(RANK, ALGORITHM))), 4)
    assert [(params["lora.rank"], params["algorithm"]) for params in found] == ALL_FOUR


@each(("trials", "told"), [(4, "4 trials, one for each combination"), (3, "3 trials")])
def test_no_combination_is_tried_twice_where_there_are_trials_for_all(trials, told, tmp_path):
    folder = tmp_path / str(trials)
    study, runs = make_study(folder, keys(trials=trials), RANK, ALGORITHM), FakeRuns()
    assert study.beginning[0].startswith(f"sweep of {told}, 0 done;")
    do_all(study, runs)
    assert len(runs.ran) == trials
    more = make_and_do(folder, keys(trials=20), RANK, ALGORITHM)
    assert {(row.params["lora.rank"], row.params["algorithm"]) for row in more.trials.rows()} == {*ALL_FOUR}


def test_a_trial_of_an_older_study_that_has_the_result_of_another_is_no_setting_of_its_own(tmp_path, monkeypatch):
    settings = []
    monkeypatch.setattr(page, "print_best", lambda results, _: settings.extend(result.folder for result in results))
    config = keys(sampler="random", trials=3)
    trials = make_trials(tmp_path, config, Space(fixed=(), varied=(RATE, RANK)))
    [first] = done(trials, 1)
    with trials._changing():
        trials._study.enqueue_trial(first, user_attrs={"same_as": 0, "values": [0.9]})
        trials._study.tell(trials._study.ask(trials._distributions), 0.9)
    make_and_do(tmp_path, config, RATE, RANK).show()
    assert {folder.parent.name for folder in settings} == {"0", "2"}
    with (tmp_path / "sweep.csv").open(newline="") as stream:
        folders = {row["trial"]: row["folder"] for row in csv.DictReader(stream)}
    assert folders == {"0": str(tmp_path / "0"), "1": str(tmp_path / "0"), "2": str(tmp_path / "2")}


def test_an_interval_of_whole_numbers_has_whole_numbers(tmp_path):
    whole = Space(fixed=(), varied=(Interval(key="lora.rank", low=4, high=64, whole=True, log=False),))
    values = [params["lora.rank"] for params in done(make_trials(tmp_path, keys(), whole), 6)]
    assert all(isinstance(value, int) and 4 <= value <= 64 for value in values)
    assert len(set(values)) > 3


def test_median_prunes_a_trial_that_is_worse_than_half_of_the_others_there(tmp_path):
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


def test_where_lower_is_better_the_larger_value_is_pruned_and_the_least_comes_first(tmp_path):
    trials = make_trials(tmp_path, keys(pruner="median", startup=1, sampler="random"), SPACE, lower=True)
    for value in (2.0, 1.0):
        number = trials.draw().number
        trials.report(number, 3, value, may_end=False)
        trials.complete(number, [value])
    assert trials.report(trials.draw().number, 3, 1.6, may_end=True)  # the median of 2 and 1 is 1.5
    assert [row.value for row in trials.rows()] == [1.0, 2.0, 1.6], "complete ones first"


def test_what_is_not_finite_makes_a_trial_fail(tmp_path):
    trials = make_trials(tmp_path, keys(), SPACE)
    trials.complete(trials.draw().number, [0.5, float("nan")])
    [row] = trials.rows()
    assert (row.state, row.value, row.why) == ("failed", None, "its metric is not finite")


def test_attempts_at_a_trial_that_has_ended_are_not_forgotten(tmp_path):
    """A second Ctrl-C may come while the run of a pruned trial still saves."""
    trials = make_trials(tmp_path, keys(), SPACE)
    number = trials.draw().number
    trials.attempt(number, [0])
    trials.fail(number, "pruned")
    before = (tmp_path / JOURNAL).read_bytes()
    trials.forget_attempts(number)
    assert (tmp_path / JOURNAL).read_bytes() == before


def test_a_signal_in_a_change_comes_behind_it(tmp_path, monkeypatch):
    trials = make_trials(tmp_path, keys(), SPACE)
    ask = trials._study.ask

    def interrupted_ask(distributions):
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


def test_the_journal_holds_what_was_kept_last_and_optunas_own_reader_reads_it(tmp_path):
    trials = make_trials(tmp_path, keys(), SPACE)
    done(trials, 2)
    before = (tmp_path / JOURNAL).read_bytes()
    journal = Journal(tmp_path / JOURNAL)

    def interrupted():
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


@each("damage", [lambda text: text[:-20], lambda text: text + "{}\n", lambda text: "\x00\x01\n"])
def test_a_journal_that_is_damaged_is_refused(damage, tmp_path):
    """By a torn line, a line that is no record, or something that is no text."""
    file = tmp_path / JOURNAL
    file.unlink(missing_ok=True)
    done(make_trials(tmp_path, keys(), SPACE), 2)
    file.write_text(damage(file.read_text()))
    said = rf"^hydra.sweep.dir: optuna.log in that folder is damaged \(\w+\), got {tmp_path};"
    with pytest.raises(UserError, match=said):
        make_trials(tmp_path, keys(), SPACE)
