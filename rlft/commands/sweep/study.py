"""A study: which trials are begun and resumed, and what the evaluations of their runs mean for them.

A trial has a run for each seed, in <sweep>/<trial>/seed_<seed>. These are ordinary runs, whose evaluations are read
from eval.jsonl alone, so that it makes no difference in which process they are done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlft.commands.sweep import record
from rlft.commands.sweep.checks import Checked, check_possible, curve, lower_is_better
from rlft.commands.sweep.driver import Ending, How, JobsFailedError, PrunedError, Run, Source, why_pruned
from rlft.commands.sweep.page import TABLE, Page
from rlft.commands.sweep.space import Interval, Space, StudyConfig, number_of_trials
from rlft.commands.sweep.trials import Trial, Trials
from rlft.config.overrides import key_of
from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.lines import EVALUATIONS
from rlft.runs.run_status import Status
from rlft.system.terminal import resuming, say
from rlft.types import counted, require

MOST_CRASHES = 2  # attempts in a row that end without an explanation and without progress; the next makes a trial fail


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialRun(Run):
    """One run of a trial. index: of its seed among the trial's seeds."""

    trial: Trial
    index: int
    seed: int


class Study(Source[TrialRun]):
    """The course of a study, see `driver.Source`."""

    def __init__(self, trials: Trials, folder: Path, checked: Checked, keys: StudyConfig) -> None:
        self.trials, self.folder, self.total = trials, folder, number_of_trials(keys, checked.space)
        self.seeds = [int(checked.plains[0]["seed"]) + i for i in range(keys.seeds)]
        self._space, self._steps, self._metric = checked.space, checked.plans[0].num_steps, keys.metric
        self._check_possible = partial(check_possible, checked.space, checked.parsed.config_dir, checked.command)
        self._page = Page(folder, trials, checked.space, keys.metric, self.seeds)
        unfinished = trials.unfinished()
        self._waiting = [self.run(trial, 0) for trial in unfinished]
        done = trials.number_drawn - len(unfinished)
        resumed = f"if it is stopped, resume it with: {resuming(folder)}"
        first = f"sweep of {counted(self.total, 'trial')}, {done} done; {resumed}"
        self.beginning = [first, *notes(keys, checked.space)]
        self.again = f"resume the sweep with: {resuming(folder)}"

    def next(self) -> TrialRun | None:
        """The next seed of a trial that has begun, else the first run of a new trial; None after the last."""
        while not self.is_done():
            run = self._waiting.pop(0) if self._waiting else self.run(self.trials.draw(), 0)
            trial = run.trial
            say(f"trial {trial.number}: {self._space.name(trial.params)}" if run.index == 0 else run.name)
            if trial.same_as is not None:
                say(f"trial {trial.number} has the values of trial {trial.same_as}, and so its result")
                self._page.write_table()
            elif self.trials.attempt(trial.number, self._progress(trial)) > MOST_CRASHES:
                why = f"{MOST_CRASHES} attempts in a row ended without an explanation and without a new evaluation"
                self._has_failed(trial, f"{why} or checkpoint: its process was killed or crashed")
            else:
                if run.index == 0:
                    self._page.write_table()
                return run
        return None

    def is_done(self) -> bool:
        return not self._waiting and self.trials.number_drawn >= self.total

    def run(self, trial: Trial, index: int) -> TrialRun:
        seed = self.seeds[index]
        words = [word for word in self._space.words(trial.params) if key_of(word) != "seed"]
        return TrialRun(
            number=trial.number * len(self.seeds) + index,
            name=f"trial {trial.number}, seed {seed}",
            words=[*words, f"seed={seed}"],
            folder=self.folder / str(trial.number) / f"seed_{seed}",
            trial=trial,
            index=index,
            seed=seed,
        )

    def is_pruned(self, run: TrialRun) -> bool:
        """Reports what a run has evaluated since the last call; returns whether its trial is thereby pruned.

        Every evaluation of a trial's first run is compared with those of other trials at the same step. Of a later run
        only the last one counts, at the steps of all runs so far: there the mean over whole runs is compared with that
        of other trials, while the early steps of one more seed say nothing that the finished runs don't say better.
        """
        known, all_steps = self.trials.reported(run.trial.number), self._steps * len(self.seeds)
        for point, value in self._points(run).items():
            may_end = point < all_steps
            if point not in known and self.trials.report(run.trial.number, point, value, may_end=may_end):
                return True
        return False

    def ended(self, run: TrialRun, ending: Ending) -> None:
        """Ends a trial with its run, or lets the run of its next seed follow. An interrupted one stays as it is.

        UserError: the run was refused, and so would be any other by now: its data or its base are gone.
        """
        trial = run.trial
        self.trials.withdraw_attempt(trial.number)  # only what takes this process with it is a crash
        if ending.how is How.finished and run.index + 1 < len(self.seeds):
            self._waiting.insert(0, self.run(trial, run.index + 1))
        elif ending.how is How.finished:
            self._complete(trial)
        elif ending.how is How.pruned:
            if run_status.read(run.folder)[0] is not Status.finished:
                why = why_pruned(max(curve(run.folder, self._metric), default=0))
                run_status.write(run.folder, self._steps, Status.stopped, why, PrunedError.__name__)
            self._has_ended(trial)
        elif ending.how in (How.failed, How.refused):
            if ending.how is How.refused:
                self._check_possible()
            self._has_failed(trial, ending.problem)

    def conclude(self) -> None:
        rows = self.trials.rows()
        failed = [row for row in rows if row.state == "failed"]
        if len(failed) == len(rows):
            raise JobsFailedError(f"no trial could be done; trial {rows[0].number} failed: {rows[0].why}")
        if failed:
            say(f"note: {len(failed)} of {counted(len(rows), 'trial')} failed; {TABLE} says why")

    def show(self) -> None:
        self._page.show()

    def _complete(self, trial: Trial) -> None:
        """All runs of a trial are done. It fails if the last step of one was not evaluated."""
        runs = [self.run(trial, i) for i in range(len(self.seeds))]
        values = [self._last_value(run) for run in runs]
        if None in values:
            file = runs[values.index(None)].folder / EVALUATIONS
            self._has_failed(trial, f"{file} has no evaluation after the last step, {self._steps}")
            return
        self.trials.complete(trial.number, [value for value in values if value is not None])
        self._has_ended(trial)

    def _has_failed(self, trial: Trial, why: str) -> None:
        self.trials.fail(trial.number, why)
        say(f"trial {trial.number} failed: {why}")
        self._page.write_table()

    def _has_ended(self, trial: Trial) -> None:
        row = next(row for row in self.trials.rows() if row.number == trial.number)
        value = "without a value" if row.value is None else f"{self._metric} {row.value:.4g}"
        how = f"pruned by {row.why}" if row.state == "pruned" else row.state
        say(f"trial {trial.number} is {how}: {value}")
        self._page.write_table()

    def _points(self, run: TrialRun) -> Mapping[int, float]:
        """{steps of a trial, those of earlier runs included: the metric there} that a run adds to its trial."""
        if run.index == 0:
            return dict(sorted(curve(run.folder, self._metric).items()))
        last = [self._last_value(self.run(run.trial, i)) for i in range(run.index + 1)]
        known = [value for value in last if value is not None]
        return {} if len(known) < len(last) else {self._steps * len(known): sum(known) / len(known)}

    def _last_value(self, run: Run) -> float | None:
        """The metric after the last step; None if that was not evaluated."""
        return curve(run.folder, self._metric).get(self._steps)

    def _progress(self, trial: Trial) -> tuple[int, int]:
        """(steps saved in checkpoints, steps evaluated), of all runs together."""
        folders = [self.run(trial, i).folder for i in range(len(self.seeds))]
        saved = [checkpoint.finished(run_folder.checkpoints(folder))[-1:] for folder in folders]
        evaluated = [max(curve(folder, self._metric), default=0) for folder in folders]
        return sum(checkpoint.step_of(one) for newest in saved for one in newest), sum(evaluated)


def opened(checked: Checked, keys: StudyConfig, folder: Path, *, resumed: bool) -> Study:
    """The study in this folder, recorded there if it is new; a `resumed` one must have something left to do."""
    fingerprints = [plan.fingerprints for plan in checked.plans.values()]
    now = record.record_of(checked.command, checked.parsed, checked.plains, fingerprints)
    record.check_same_study(folder, now)
    steps, total = checked.plans[0].num_steps, number_of_trials(keys, checked.space)
    trials = Trials(
        folder,
        keys,
        checked.space,
        lower=lower_is_better(keys.metric, keys.direction),
        steps=steps,
        first_evaluation=min(steps, int(checked.plains[0]["eval"]["every"])),
        parallel=checked.cluster is not None and checked.cluster.jobs > 1,
    )
    done = trials.number_drawn - len(trials.unfinished())
    problem, remedy = "the sweep has all its trials", f"raise it: {resuming(folder)} sweep.trials={2 * done}"
    if keys.sampler == "grid":
        problem, remedy = "the grid's combinations are all done", "begin another sweep, with other values"
    require(not resumed or done < total, "sweep.trials", problem, got=total, remedy=remedy)
    record.write_record(folder, now)
    return Study(trials, folder, checked, keys)


def notes(keys: StudyConfig, space: Space) -> list[str]:
    log = [one.key for one in space.varied if isinstance(one, Interval) and one.log]
    lines = [f"sampled on a log scale: {', '.join(log)} (otherwise write tag(linear,interval(..)))"] if log else []
    total = number_of_trials(keys, space)
    if keys.pruner == "median" and keys.startup >= total:
        problem = f"note: of {total} trials median prunes none: it waits for sweep.startup={keys.startup} complete ones"
        lines.append(f"{problem}; lower sweep.startup, or raise sweep.trials")
    if keys.sampler != "grid" and space.size is not None and space.size <= total:
        lines.append(f"note: there are {space.size} combinations in all; sweep.sampler=grid tries each of them once")
    return lines
