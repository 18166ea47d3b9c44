"""A study: trials whose values Optuna draws and judges, which are begun and resumed, and what they have measured.

Whatever is decided is kept in the sweep's folder whole or not at all, so that a study that was killed resumes what
was being done, to the same end: a trial and all its values, an evaluation and what it means for the trial. Each trial
is drawn with a seed of its own, from (sweep.seed, number), because Optuna does not keep the state of its generators.

A trial has a run for each seed, in <sweep>/<trial>/seed_<seed>. These are ordinary runs, whose evaluations are read
from eval.jsonl alone, so that it makes no difference in which process they are done.
"""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState

from rlft.commands.sweep.checks import Checked, check_possible, curve, lower_is_better
from rlft.commands.sweep.driver import Ending, How, JobsFailedError, PrunedError, Run, Source, why_pruned
from rlft.commands.sweep.page import TABLE, Page, Trial
from rlft.commands.sweep.space import (
    Choice,
    Interval,
    Space,
    StudyConfig,
    check_same_study,
    number_of_trials,
    record_of,
    tries_each,
    write_record,
)
from rlft.config.overrides import key_of
from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.lines import EVALUATIONS
from rlft.runs.run_status import Status
from rlft.system.files import write_atomically
from rlft.system.interrupt import Deferred
from rlft.system.seeds import derive
from rlft.system.terminal import resuming, say
from rlft.types import UserError, counted, require

JOURNAL = "optuna.log"
"""The file in the sweep's folder, in the format of Optuna's JournalFileBackend, which optuna-dashboard reads."""
NAME = "sweep"
REDUCTION = 3  # Hyperband lets one of so many trials continue at each rung

SAME_AS, VALUES, WHY, ATTEMPTS = "same_as", "values", "why", "attempts"
"""Attributes of a trial: of older studies the number of the trial whose result it has; its value by seed; why it failed
or was pruned; how far its runs were each time that they were begun or resumed, since they last ended by themselves."""


class Journal(BaseJournalBackend):
    """Optuna's records, which the file holds as they were at the end of the last transaction.

    Optuna's own backends write each record by itself, so that a kill leaves half of a decision.

    file: is replaced as a whole: a kill leaves it as it was before or after. One process uses it at a time.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._is_whole = file, True
        self._lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        self._records: list[dict[str, Any]] = [json.loads(line) for line in self._lines]

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return self._records[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._records += logs
        self._lines += [json.dumps(log, separators=(",", ":")) + "\n" for log in logs]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Writes all records at its end; after an exception inside neither then nor ever after."""
        try:
            yield
        except BaseException:
            self._is_whole = False  # Optuna remembers half of a change, which would be written with the next one
            raise
        if self._is_whole:
            self._write()

    def _write(self) -> None:
        write_atomically(self._file, (line.encode() for line in self._lines))


STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished",
}


class Trials:
    """The trials of one study. first_evaluation: the step of a run's first evaluation after some training.

    `parallel`: whether trials run concurrently, so that values near those of running ones are avoided.
    """

    def __init__(
        self,
        folder: Path,
        config: StudyConfig,
        space: Space,
        *,
        lower: bool,
        steps: int,
        first_evaluation: int,
        parallel: bool,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._config, self._space, self._parallel, self._steps = config, space, parallel, steps
        self.lower_is_better, self._tries_each = lower, tries_each(config, space)
        self._distributions = {one.key: distribution(one) for one in space.varied}
        try:
            self._journal = Journal(folder / JOURNAL)
            storage = JournalStorage(self._journal)
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, OptunaError) as error:
            problem = f"{JOURNAL} in that folder is damaged ({type(error).__name__})"
            remedy = "restore it from a copy, or begin another sweep"
            raise UserError("hydra.sweep.dir", problem, got=folder, remedy=remedy) from None
        with self._changing():
            self._study = optuna.create_study(
                storage=storage,
                study_name=NAME,
                direction="minimize" if lower else "maximize",
                pruner=pruner(config, first_evaluation, steps),
                load_if_exists=True,
            )

    @property
    def number_drawn(self) -> int:
        """How many trials have begun; where each combination is tried once, how many combinations."""
        return self._number(None)

    @property
    def number_done(self) -> int:
        """How many of them have ended."""
        return self._number((TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))

    def _number(self, states: tuple[TrialState, ...] | None) -> int:
        every = self._all(states)
        return len({frozenset(trial.params.items()) for trial in every} if self._tries_each else every)

    def unfinished(self) -> list[Trial]:
        """The trials that have begun and not ended, in their order."""
        return [trial_of(trial) for trial in self._all((TrialState.RUNNING,))]

    def draw(self) -> Trial:
        """Begins another trial."""
        earlier = [trial.params for trial in self._all()]
        number = len(earlier)
        self._study.sampler = sampler(self._config, number, parallel=self._parallel)
        with self._changing():
            if self._tries_each:
                self._study.enqueue_trial(next(each for each in self._space.combinations() if each not in earlier))
            self._study.ask(self._distributions)
        return trial_of(self._all()[number])

    def attempt(self, number: int, progress: Sequence[int]) -> int:
        """Records that the runs of a trial are begun or resumed; returns how often they were with this progress.

        `progress` is how far its runs are.
        """
        with self._changing():
            trial = self._handle(number)
            attempts = [*trial.user_attrs.get(ATTEMPTS, ()), list(progress)]
            trial.set_user_attr(ATTEMPTS, attempts)
        return attempts.count(list(progress))

    def forget_attempts(self, number: int) -> None:
        """None of the attempts so far counts; nothing if the trial has ended."""
        if not self._all()[number].state.is_finished():
            with self._changing():
                self._handle(number).set_user_attr(ATTEMPTS, [])

    def reported(self, number: int) -> Mapping[int, float]:
        """{point: value} that was reported of a trial."""
        return self._all()[number].intermediate_values

    def report(self, number: int, point: int, value: float, *, may_end: bool) -> bool:
        """Reports the value of a trial at a point, once; returns whether the trial is thereby pruned.

        Args:
            point: how far it is, in steps, those of its earlier runs included.
            value: of its first run within that; at the end of a run the mean over all that have come so far.
            may_end: whether it can be pruned here.
        """
        with self._changing():
            trial = self._handle(number)
            trial.report(value, point)
            ends = may_end and trial.should_prune()
            if ends:
                where = f"at step {point}" if point <= self._steps else f"after {counted(point // self._steps, 'seed')}"
                trial.set_user_attr(WHY, f"{self._config.pruner} {where}")
                self._study.tell(number, state=TrialState.PRUNED)
        return ends

    def complete(self, number: int, values: Sequence[float]) -> None:
        """Ends a trial with its value by seed. One that is not finite makes it fail."""
        if not all(map(math.isfinite, values)):
            self.fail(number, "its metric is not finite")
            return
        with self._changing():
            self._handle(number).set_user_attr(VALUES, list(values))
            self._study.tell(number, sum(values) / len(values))

    def fail(self, number: int, why: str) -> None:
        with self._changing():
            self._handle(number).set_user_attr(WHY, why)
            self._study.tell(number, state=TrialState.FAIL)

    def rows(self) -> list[Trial]:
        """The trials, the best first; then those that were pruned, failed, and are unfinished."""
        order, sign = list(STATES.values()), 1.0 if self.lower_is_better else -1.0
        rows = [trial_of(trial) for trial in self._all()]
        return sorted(rows, key=lambda row: (order.index(row.state), sign * (row.value or 0.0), row.number))

    def picture(self, metric: str) -> bytes:
        """The metric of the complete trials by each key, as a PNG."""
        import matplotlib

        matplotlib.use("Agg")  # which needs no display
        from matplotlib import pyplot
        from optuna.visualization.matplotlib import plot_slice

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plot_slice(self._study, target_name=metric)
        drawn, file = pyplot.gcf(), io.BytesIO()
        drawn.set_size_inches(4 * len(self._distributions), 4)
        for panel in drawn.axes:
            panel.tick_params(axis="x", which="both", labelrotation=90)
        drawn.savefig(file, dpi=120, bbox_inches="tight", metadata={"Software": None})
        pyplot.close(drawn)
        return file.getvalue()

    def _all(self, states: tuple[TrialState, ...] | None = None) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states)

    def _handle(self, number: int) -> optuna.Trial:
        return optuna.Trial(self._study, self._all()[number]._trial_id)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A change, which a signal does not interrupt: it is kept whole, and the signal is delivered behind it."""
        with Deferred(), warnings.catch_warnings(), self._journal.transaction():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield


def trial_of(trial: FrozenTrial) -> Trial:
    return Trial(
        number=trial.number,
        params=trial.params,
        state=STATES[trial.state],
        value=trial.value,
        values=trial.user_attrs.get(VALUES, ()),
        same_as=trial.user_attrs.get(SAME_AS),
        why=trial.user_attrs.get(WHY, ""),
    )


def distribution(one: Choice | Interval) -> BaseDistribution:
    if isinstance(one, Choice):
        return CategoricalDistribution(one.values)
    if one.whole:
        return IntDistribution(int(one.low), int(one.high), log=one.log)
    return FloatDistribution(one.low, one.high, log=one.log)


def sampler(config: StudyConfig, number: int, *, parallel: bool) -> BaseSampler:
    seed = derive(config.seed, number, "sweep") % 2**32
    if config.sampler == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, n_startup_trials=config.startup, constant_liar=parallel)


def pruner(config: StudyConfig, first_evaluation: int, steps: int) -> BasePruner:
    """What prunes trials. steps: of one run; Hyperband counts those of all runs of a trial."""
    if config.pruner == "median":
        return Median(config.startup, steps)
    if config.pruner == "hyperband":
        all_steps = steps * config.seeds
        return HyperbandPruner(min_resource=first_evaluation, max_resource=all_steps, reduction_factor=REDUCTION)
    return NopPruner()


class Median(MedianPruner):
    """Prunes a trial that is worse than the median of the complete ones at the same point.

    Before the last step of the first run its best value so far counts, as Optuna has it: an evaluation is noisy, and a
    run may still recover. At the end of a run the value there counts, which is what trials are compared by.
    """

    def __init__(self, startup: int, steps: int) -> None:
        super().__init__(n_startup_trials=startup)
        self._steps = steps

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        point = trial.last_step
        if point is not None and point >= self._steps:
            trial = copy.copy(trial)
            trial.intermediate_values = {point: trial.intermediate_values[point]}
        return super().prune(study, trial)


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
        self._page = Page(
            folder=folder,
            space=checked.space,
            metric=keys.metric,
            lower_is_better=trials.lower_is_better,
            seeds=self.seeds,
        )
        unfinished = trials.unfinished()
        self._waiting = [self.run(trial, 0) for trial in unfinished]
        resumed = f"if it is stopped, resume it with: {resuming(folder)}"
        each = ", one for each combination" if tries_each(keys, checked.space) else ""
        first = f"sweep of {counted(self.total, 'trial')}{each}, {trials.number_done} done; {resumed}"
        self.beginning = [first, *notes(keys, checked.space)]
        self.again = f"resume the sweep with: {resuming(folder)}"

    def next(self) -> TrialRun | None:
        """The next seed of a trial that has begun, else the first run of a new trial; None after the last."""
        while not self.is_done():
            run = self._waiting.pop(0) if self._waiting else self.run(self.trials.draw(), 0)
            trial = run.trial
            say(f"trial {trial.number}: {self._space.name(trial.params)}" if run.index == 0 else run.name)
            if self.trials.attempt(trial.number, self._progress(trial)) > MOST_CRASHES:
                why = f"{MOST_CRASHES} attempts in a row ended without an explanation and without a new evaluation"
                self._has_failed(trial, f"{why} or checkpoint: its process was killed or crashed")
            else:
                if run.index == 0:
                    self._page.write_table(self.trials.rows())
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
        self.trials.forget_attempts(trial.number)  # only what takes this process with it is a crash
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
        self._page.show(self.trials.rows(), partial(self.trials.picture, self._metric))

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
        self._page.write_table(self.trials.rows())

    def _has_ended(self, trial: Trial) -> None:
        row = next(row for row in self.trials.rows() if row.number == trial.number)
        value = "without a value" if row.value is None else f"{self._metric} {row.value:.4g}"
        how = f"pruned by {row.why}" if row.state == "pruned" else row.state
        say(f"trial {trial.number} is {how}: {value}")
        self._page.write_table(self.trials.rows())

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
    now = record_of(checked.command, checked.parsed, checked.plains, fingerprints)
    check_same_study(folder, now)
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
    done = trials.number_done
    problem, remedy = "the sweep has all its trials", f"raise it: {resuming(folder)} sweep.trials={2 * done}"
    if tries_each(keys, checked.space):
        problem, remedy = f"all {counted(total, 'combination')} are done", "begin another sweep, with other values"
    require(not resumed or done < total, "sweep.trials", problem, got=keys.trials, remedy=remedy)
    write_record(folder, now)
    return Study(trials, folder, checked, keys)


def notes(keys: StudyConfig, space: Space) -> list[str]:
    log = [one.key for one in space.varied if isinstance(one, Interval) and one.log]
    lines = [f"sampled on a log scale: {', '.join(log)} (otherwise write tag(linear,interval(..)))"] if log else []
    total = number_of_trials(keys, space)
    if keys.pruner == "median" and keys.startup >= total:
        problem = f"note: of {total} trials median prunes none: it waits for sweep.startup={keys.startup} complete ones"
        more = "" if tries_each(keys, space) else ", or raise sweep.trials"
        lines.append(f"{problem}; lower sweep.startup{more}")
    return lines
