"""A study's runs: which trials are begun and resumed, and what evaluations mean for them.

A trial has a run for each seed, in <sweep>/<trial>/seed_<seed>. These are ordinary runs, whose evaluations are read
from eval.jsonl alone, so that it makes no difference in which process they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlft.commands.sweep.measure import curve
from rlft.commands.sweep.trials import Trial, Trials
from rlft.logger.jsonl import EVALUATIONS
from rlft.loop.driver import BrokenRunError
from rlft.runs import checkpoint, run_folder, run_status
from rlft.system.crash import UnforeseenError, explains_itself, one_line
from rlft.system.out_of_memory import OutOfMemoryError
from rlft.system.terminal import Say

OF_THE_VALUES = (BrokenRunError, OutOfMemoryError)
"""Errors that end a run because of the values of its trial: numbers that are not finite, too much memory.

Which refusals do, `checked.Values` says."""
MOST_CRASHES = 2
"""After so many attempts in a row that ended without an explanation and without progress, a trial fails."""


class PrunedError(RuntimeError):
    """The sweep has pruned the trial of this run at an evaluation; its newest checkpoint stays."""


class FailedError(RuntimeError):
    """A run cannot be done with the values of its trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a trial. index: of its seed among the trial's seeds."""

    trial: Trial
    index: int
    seed: int
    folder: Path


class DoRun(Protocol):
    """Does the runs that a study asks for."""

    def __call__(self, run: Run, report_new: Callable[[], bool]) -> None:
        """Does a run to its end, or resumes it; calls `report_new` after each evaluation.

        Raises:
            PrunedError: `report_new` has answered that the trial is pruned.
            FailedError: the run cannot be done with these values.
        """
        ...


class Study:
    """The course of a study.

    Args:
        trials: what is known of its trials.
        folder: the sweep's folder.
        seeds: of each trial's runs.
        steps: of a run.
        metric: what is compared, by its name in eval.jsonl.
        total: trials that are drawn.
        name: (trial) -> its values in words.
        say: prints a line.
        changed: is called when a trial has begun or ended.
    """

    def __init__(
        self,
        trials: Trials,
        folder: Path,
        *,
        seeds: Sequence[int],
        steps: int,
        metric: str,
        total: int,
        name: Callable[[Trial], str],
        say: Say,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.trials, self.folder, self.seeds, self.total = trials, folder, tuple(seeds), total
        self._steps, self._metric, self._name, self._say = steps, metric, name, say
        self._changed = changed
        self._unfinished = trials.unfinished()

    def next(self) -> Trial | None:
        """The next trial whose runs are to be done: one that was interrupted, else a new one; None after the last."""
        while self._unfinished or self.trials.number_drawn < self.total:
            trial = self._unfinished.pop(0) if self._unfinished else self.trials.draw()
            self._say(f"trial {trial.number}: {self._name(trial)}")
            if trial.same_as is not None:
                self._say(f"trial {trial.number} has the values of trial {trial.same_as}, and so its result")
                self._changed()
            elif self.trials.attempt(trial.number, self._progress(trial)) > MOST_CRASHES:
                why = f"{MOST_CRASHES} attempts in a row ended without an explanation and without a new evaluation"
                self.has_failed(trial, f"{why} or checkpoint: its process was killed or crashed")
            else:
                self._changed()
                return trial
        return None

    def run(self, trial: Trial, index: int) -> Run:
        seed = self.seeds[index]
        folder = self.folder / str(trial.number) / f"seed_{seed}"
        return Run(trial=trial, index=index, seed=seed, folder=folder)

    def report_new(self, run: Run) -> bool:
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

    def ended(self, trial: Trial) -> None:
        """All runs of a trial are done. It fails if the last step of one was not evaluated."""
        runs = [self.run(trial, i) for i in range(len(self.seeds))]
        values = [self._last_value(run) for run in runs]
        for run, value in zip(runs, values, strict=True):
            if value is None:
                file = run.folder / EVALUATIONS
                self.has_failed(trial, f"{file} has no evaluation after the last step, {self._steps}")
                return
        self.trials.complete(trial.number, [value for value in values if value is not None])
        self._say(self._result(trial))
        self._changed()

    def was_pruned(self, run: Run) -> None:
        """The trial of this run, which has ended, is pruned."""
        if run_status.read(run.folder)[0] is not run_status.Status.finished:
            step = max(curve(run.folder, self._metric), default=0)
            run_status.write_stopped(run.folder, self._steps, why_pruned(step), PrunedError.__name__)
        self._say(self._result(run.trial))
        self._changed()

    def has_failed(self, trial: Trial, why: str) -> None:
        self.trials.fail(trial.number, why)
        self._say(f"trial {trial.number} failed: {why}")
        self._changed()

    def withdraw_attempt(self, trial: Trial) -> None:
        """An attempt at a trial has ended for a reason that is known and not its own, and is no crash."""
        self.trials.withdraw_attempt(trial.number)

    def _points(self, run: Run) -> Mapping[int, float]:
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

    def _result(self, trial: Trial) -> str:
        row = next(row for row in self.trials.rows() if row.number == trial.number)
        value = "without a value" if row.value is None else f"{self._metric} {row.value:.4g}"
        how = f"pruned by {row.why}" if row.state == "pruned" else row.state
        return f"trial {trial.number} is {how}: {value}"


def why_pruned(step: int) -> str:
    """The reason in the status of a run whose trial is pruned."""
    return f"pruned by its sweep after step {step}: its trial lags behind"


def one_after_the_other(study: Study, do: DoRun, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Does all trials in turn, each with its seeds in turn.

    Args:
        study: says what is to be done.
        do: does a run.
        interrupted: whether a signal has come. One that comes in the last step of a run, or in one at whose end its
            trial is pruned, interrupts the study and not the run.

    Raises:
        KeyboardInterrupt: it was interrupted, before another run was begun.
    """
    while (trial := study.next()) is not None:
        run = study.run(trial, 0)
        try:
            for index in range(len(study.seeds)):
                if interrupted():
                    raise KeyboardInterrupt
                run = study.run(trial, index)
                do(run, lambda run=run: study.report_new(run))
                if study.report_new(run):
                    raise PrunedError
        except PrunedError:
            study.was_pruned(run)
        except FailedError as error:
            study.has_failed(trial, one_line(error))
        except BaseException as error:
            if is_no_crash(error):
                study.withdraw_attempt(trial)
            raise
        else:
            study.ended(trial)


def is_no_crash(error: BaseException) -> bool:
    """Whether an error that ends the study says why: an interruption, a refusal, a full disk, a lost engine."""
    explained = explains_itself(error) and not isinstance(error, UnforeseenError)
    return explained or isinstance(error, KeyboardInterrupt)
