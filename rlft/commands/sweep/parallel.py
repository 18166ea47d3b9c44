"""The runs of a study in processes of their own, several trials at a time (cluster.jobs)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from rlft.commands.sweep.checked import Values
from rlft.commands.sweep.in_process import words_of
from rlft.commands.sweep.jobs import JobsFailedError, SideBySide, gpus_of, opened_for
from rlft.commands.sweep.runs import OF_THE_VALUES, Run, Study
from rlft.commands.sweep.space import Space
from rlft.config.cluster import ClusterConfig
from rlft.config.overrides import SWEEPING, Arguments
from rlft.runs import run_status
from rlft.system.crash import UnforeseenError
from rlft.system.interrupt import Interrupt
from rlft.system.terminal import override, say

REFUSED, STOPPED = 2, 1
"""Exit codes of `rlft`."""

ValuesRefused = Callable[[Run, str], bool]
"""(a run that was refused, the key that the refusal names) -> whether it was refused for the values of its trial."""


class ParallelTrials:
    """Does the trials of a study, `limit` at a time; the seeds of a trial one after the other.

    Args:
        study: says what is to be done, and what evaluations mean.
        jobs: starts and watches processes.
        limit: trials at a time.
        words: (run) -> the words after `rlft` that do it.
        values_refused: tells a refusal of a trial's values from any other.
        interrupt: its first signal makes all runs save and end; their trials are resumed when the study is.
    """

    def __init__(
        self,
        study: Study,
        jobs: SideBySide,
        limit: int,
        words: Callable[[Run], list[str]],
        values_refused: ValuesRefused,
        interrupt: Interrupt,
    ) -> None:
        self._study, self._jobs, self._limit, self._words = study, jobs, limit, words
        self._values_refused, self._interrupt = values_refused, interrupt
        self._active: dict[int, Run] = {}
        self._pruned: set[int] = set()
        self._broken = ""

    def run(self) -> None:
        """Does all trials.

        Raises:
            KeyboardInterrupt: the study was interrupted; its runs have saved.
            JobsFailedError: a run has failed for a reason that is not its trial's values; the others have saved.
        """
        try:
            while self._begin() or self._active:
                self._jobs.poll()
                for number, run in list(self._active.items()):
                    self._follow(number, run)
        except KeyboardInterrupt:  # a second signal
            for run in self._active.values():
                self._study.withdraw_attempt(run.trial)
            raise
        if self._broken:
            raise JobsFailedError(self._broken)
        if self._interrupt.requested:
            raise KeyboardInterrupt

    def _begin(self) -> bool:
        """Starts a trial where there is room; returns whether it did."""
        if len(self._active) >= self._limit or self._interrupt.requested or self._broken:
            return False
        trial = self._study.next()
        if trial is not None:
            self._start(self._study.run(trial, 0))
        return trial is not None

    def _start(self, run: Run) -> None:
        number = run.trial.number * len(self._study.seeds) + run.index
        self._active[number] = run
        self._jobs.start(number, f"trial {run.trial.number}, seed {run.seed}", self._words(run), run.folder)

    def _follow(self, number: int, run: Run) -> None:
        is_over = not self._jobs.is_running(number)  # asked first: what it has written by then is all
        if number in self._pruned:
            if is_over:
                del self._active[number]
                self._study.was_pruned(run)
        elif self._study.report_new(run):
            self._pruned.add(number)
            self._jobs.stop(number)
        elif is_over:
            del self._active[number]
            self._go_on_after(number, run)

    def _go_on_after(self, number: int, run: Run) -> None:
        problem = self._jobs.failed.get(number)
        if problem is not None:
            self._failed(number, run, problem)
        elif self._jobs.codes.get(number) != 0:  # interrupted: the trial is resumed when the study is
            self._study.withdraw_attempt(run.trial)
        elif run.index + 1 < len(self._study.seeds):
            if self._interrupt.requested or self._broken:
                self._study.withdraw_attempt(run.trial)
            else:
                self._start(self._study.run(run.trial, run.index + 1))
        else:
            self._study.ended(run.trial)

    def _failed(self, number: int, run: Run, problem: str) -> None:
        code, error = self._jobs.codes.get(number), run_status.error(run.folder)
        refused = code == REFUSED and self._values_refused(run, problem.partition(":")[0])
        if refused or (code == STOPPED and error in [kind.__name__ for kind in OF_THE_VALUES]):
            self._study.has_failed(run.trial, problem)
            return
        is_explained = code == REFUSED or (code == STOPPED and error not in (None, UnforeseenError.__name__))
        if is_explained:
            self._study.withdraw_attempt(run.trial)
        self._broken = self._broken or f"trial {run.trial.number}: {problem}"
        for other in self._active:
            self._jobs.stop(other)


def run_in_parallel(
    study: Study, space: Space, cluster: ClusterConfig, verb: str, parsed: Arguments, *, on_gpus: bool
) -> None:
    """Does all trials, `cluster.jobs` at a time, each on a GPU of its own where they are on GPUs."""
    options = [option for option in parsed.options if option not in SWEEPING]
    values = Values(space, parsed.config_dir, verb)

    def words(run: Run) -> list[str]:
        return [verb, *options, *words_of(run, space), "resume=auto", override("hydra.run.dir", run.folder)]

    def values_refused(run: Run, key: str) -> bool:
        return values.are_refused(words_of(run, space), key)

    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(say))
        interrupt.in_step = True  # a signal ends the runs as it ends one, after its step
        launcher = stack.enter_context(opened_for(cluster, study.folder, on_gpus=on_gpus))
        gpus = gpus_of(cluster) if on_gpus else []
        jobs = SideBySide(launcher, cluster, interrupt, say, on_gpus=on_gpus, gpus=gpus)
        ParallelTrials(study, jobs, cluster.jobs, words, values_refused, interrupt).run()
