"""A study's runs: which trials are begun and gone on with, and what evaluations mean for them.

A trial's runs are ordinary ones, one a seed, in <sweep>/<trial>/seed_<seed>; their evaluations are read from eval.jsonl
alone, so that it makes no difference in which process they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlft.loop.shell import BrokenRunError
from rlft.system.crash import one_line
from rlft.system.out_of_memory import OutOfMemoryError
from rlft.system.terminal import Say
from rlft.verbs.study.measure import curve
from rlft.verbs.study.trials import Trial, Trials

OF_THE_VALUES = (BrokenRunError, OutOfMemoryError)
"""Errors that end a run because of the values of its trial: numbers that are not finite, too much memory.

Which refusals do, `checked.Values` says."""


class PrunedError(RuntimeError):
    """The sweep has ended this run at an evaluation; its newest checkpoint stays."""


class FailedError(RuntimeError):
    """A run cannot be done with the values of its trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a trial. number: of the trial; index: of the seed in the trial; params: the trial's values."""

    trial: Trial
    index: int
    seed: int
    folder: Path


class Doing(Protocol):
    """Does runs that a study asks for."""

    def __call__(self, run: Run, look: Callable[[], bool]) -> None:
        """Does a run to its end, or goes on with it; calls `look` after each evaluation.

        Raises:
            PrunedError: `look` has answered that its trial is ended.
            FailedError: it cannot be done with these values.
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
    ) -> None:
        self.trials, self.folder, self.seeds, self.total = trials, folder, tuple(seeds), total
        self._steps, self._metric, self._name, self._say = steps, metric, name, say
        self._unfinished = trials.unfinished()

    def next(self) -> Trial | None:
        """The next trial whose runs are to be done: one that was interrupted, else a new one; None after the last."""
        while self._unfinished or self.trials.number_drawn < self.total:
            trial = self._unfinished.pop(0) if self._unfinished else self.trials.draw()
            self._say(f"trial {trial.number}: {self._name(trial)}")
            if trial.same_as is None:
                return trial
            self._say(f"trial {trial.number} has the values of trial {trial.same_as}, and so its result")
        return None

    def run(self, trial: Trial, index: int) -> Run:
        seed = self.seeds[index]
        folder = self.folder / str(trial.number) / f"seed_{seed}"
        return Run(trial=trial, index=index, seed=seed, folder=folder)

    def look(self, run: Run) -> bool:
        """Reports what a run has evaluated since the last look; returns whether its trial is thereby ended.

        The value of a trial at a step of its i-th run is the mean over the first i runs at that step.
        """
        trial = run.trial
        known = self.trials.reported(trial.number)
        curves = [curve(self.run(trial, i).folder, self._metric) for i in range(run.index + 1)]
        for step in sorted(curves[-1]):
            point = run.index * self._steps + step
            values = [values[step] for values in curves if step in values]
            may_end = point < self._steps * len(self.seeds)
            if point not in known and self.trials.report(
                trial.number, point, sum(values) / len(values), may_end=may_end
            ):
                return True
        return False

    def ended(self, trial: Trial) -> None:
        """All runs of a trial are done."""
        values = [curve(self.run(trial, i).folder, self._metric) for i in range(len(self.seeds))]
        self.trials.complete(trial.number, [of_run[max(of_run)] for of_run in values])
        self._say(self._result(trial))

    def was_pruned(self, trial: Trial) -> None:
        self._say(self._result(trial))

    def has_failed(self, trial: Trial, why: str) -> None:
        self.trials.fail(trial.number, why)
        self._say(f"trial {trial.number} failed: {why}")

    def _result(self, trial: Trial) -> str:
        row = next(row for row in self.trials.rows() if row.number == trial.number)
        value = "without a value" if row.value is None else f"{self._metric} {row.value:.4g}"
        how = f"ended early by {row.why}" if row.state == "pruned" else row.state
        return f"trial {trial.number} is {how}: {value}"


def one_after_the_other(study: Study, do: Doing, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Does all trials in turn, each with its seeds in turn.

    Args:
        study: says what is to be done.
        do: does a run.
        interrupted: whether a signal has come. One that comes in the last step of a run, or in one at whose end its
            trial is ended early, interrupts the study and not the run.

    Raises:
        KeyboardInterrupt: it was interrupted, before another run was begun.
    """
    while (trial := study.next()) is not None:
        try:
            for index in range(len(study.seeds)):
                if interrupted():
                    raise KeyboardInterrupt
                run = study.run(trial, index)
                do(run, lambda run=run: study.look(run))
                if study.look(run):
                    raise PrunedError
        except PrunedError:
            study.was_pruned(trial)
        except FailedError as error:
            study.has_failed(trial, one_line(error))
        else:
            study.ended(trial)
