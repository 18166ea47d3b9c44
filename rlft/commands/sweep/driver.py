"""The driver of sweeps: runs what a source asks for, so many at a time, here or in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rlft.commands.launch import launch, resolve_in
from rlft.config import compose as configs
from rlft.config.resolved import AUTO, Resolved
from rlft.runs import run_folder
from rlft.system.crash import UnforeseenError, explains_itself, one_line
from rlft.system.terminal import Say
from rlft.types import Evaluation, Logger, UserError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One run of a sweep.

    Attributes:
        number: of its job, from 0.
        name: what it is called.
        words: the overrides of its config.
        folder: where it is, or will be.
        resolved: its config, if the sweep has read it already.
        plan: its plan, if the sweep has made it already.
    """

    number: int
    name: str
    words: Sequence[str]
    folder: Path
    resolved: Resolved | None = field(default=None, repr=False)
    plan: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended. It has all its steps if there is neither a problem nor an interruption.

    Attributes:
        problem: why it failed.
        is_interrupted: whether a signal ended it, after saving.
        kind: the class of the error that ended it; "" if it did not say.
        key: what a refusal names; None if it was not refused.
        is_explained: whether it ended for a reason that is known and is no crash.
        error: the error itself, if it was raised in this process.
    """

    problem: str = ""
    is_interrupted: bool = False
    kind: str = ""
    key: str | None = None
    is_explained: bool = False
    error: BaseException | None = None

    @property
    def is_finished(self) -> bool:
        return not self.problem and not self.is_interrupted


R = TypeVar("R", bound=Run)


class Source(Protocol[R]):
    """What the runs of a sweep are, and what becomes of them.

    Attributes:
        beginning: lines about the sweep that begins or goes on.
        again: how it is resumed once it is interrupted.
    """

    beginning: Sequence[str]
    again: str

    def next(self) -> R | None:
        """The next run to begin or resume; None if there is none now."""
        ...

    def is_done(self) -> bool:
        """Whether no run is left to begin."""
        ...

    def ended(self, run: R, ending: Ending) -> R | None:
        """A run is finished or has failed; returns the one that follows it at once.

        Raises:
            Exception: the sweep cannot go on, once the runs beside it have saved.
        """
        ...

    def is_pruned(self, run: R) -> bool:
        """Whether a run is to end where it is, for what it has evaluated since the last call."""
        return False

    def was_pruned(self, run: R) -> None:
        """A run has ended that was pruned."""

    def withdraw(self, run: R) -> None:
        """A run that was begun, or follows one, is left for when the sweep is resumed; that is no crash of its own."""

    def conclude(self) -> None:
        """Raises what the sweep ends with if runs have failed, once it is done."""
        ...

    def show(self) -> None:
        """Writes and prints the results so far."""
        ...


class Place(Protocol):
    """Where runs are done."""

    def start(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        """Begins or resumes a run; calls `is_pruned` after each evaluation, if it does not return before that."""
        ...

    def ending(self, run: Run) -> Ending | None:
        """How a run ended; None while it is being done."""
        ...

    def wait(self) -> None:
        """Waits a moment for runs that are being done."""

    def stop(self, run: Run) -> None:
        """Makes a run save its step and end, unless it has ended."""


class Driver(Generic[R]):
    """Does the runs of a source.

    Args:
        source: says what is to be done, and what evaluations mean.
        place: does it.
        limit: runs at a time.
        interrupted: whether a signal has come, after which nothing is begun. One that comes too late for a run, because
            it was in its last step or was pruned, interrupts the sweep and not the run.
    """

    def __init__(self, source: Source[R], place: Place, limit: int, interrupted: Callable[[], bool]) -> None:
        self._source, self._place, self._limit, self._interrupted = source, place, limit, interrupted
        self._active: list[R] = []
        self._pruned: list[R] = []
        self._broken: Exception | None = None
        self._is_cut = False

    def run(self) -> None:
        """Does all runs.

        Raises:
            KeyboardInterrupt: the sweep was interrupted; its runs have saved.
            Exception: of the source, because it cannot go on; the other runs have saved.
        """
        try:
            while self._begin() or self._active:
                self._place.wait()
                for run in list(self._active):
                    self._follow(run)
        except KeyboardInterrupt:  # a second signal, or one between two runs
            for run in self._active:
                self._withdraw(run)
            raise
        if self._broken is not None:
            raise self._broken
        if self._interrupted() and (self._is_cut or not self._source.is_done()):
            raise KeyboardInterrupt

    def _withdraw(self, run: R) -> None:
        self._is_cut = True
        self._source.withdraw(run)

    def _is_ending(self) -> bool:
        return self._broken is not None or self._interrupted()

    def _begin(self) -> bool:
        """Begins a run where there is room; returns whether it did."""
        if len(self._active) >= self._limit or self._is_ending():
            return False
        run = self._source.next()
        if run is not None:
            self._start(run)
        return run is not None

    def _start(self, run: R) -> None:
        self._active.append(run)
        self._place.start(run, lambda: self._is_pruned(run))

    def _is_pruned(self, run: R) -> bool:
        if run not in self._pruned and self._source.is_pruned(run):
            self._pruned.append(run)
        return run in self._pruned

    def _follow(self, run: R) -> None:
        ending = self._place.ending(run)  # asked first: what it has evaluated by then is all
        if (ending is None or ending.is_finished) and self._is_pruned(run):
            self._place.stop(run)
        if ending is None:
            return
        self._active.remove(run)
        if run in self._pruned:
            self._source.was_pruned(run)
            return
        if ending.is_interrupted:
            self._withdraw(run)
            if ending.error is not None:
                raise ending.error
            return
        try:
            following = self._source.ended(run, ending)
        except Exception as error:  # it ends the sweep, once the other runs have saved
            self._broken = self._broken or error
            for other in self._active:
                self._place.stop(other)
            return
        if following is not None and self._is_ending():
            self._withdraw(following)
        elif following is not None:
            self._start(following)


class PrunedError(RuntimeError):
    """The sweep has pruned this run at an evaluation; its newest checkpoint stays."""


def why_pruned(step: int) -> str:
    """The reason in the status of a run that is pruned."""
    return f"pruned by its sweep after step {step}: its trial lags behind"


class InThisProcess(Place):
    """Does runs in this process, with what they can share: a loaded base, a started engine.

    Args:
        verb: of the runs.
        config_dir: the user's folder with more YAML.
        engines: of the sweep.
        say: prints a line about each run.
        prunes: whether runs may be pruned.
    """

    def __init__(self, verb: str, config_dir: Path | None, engines: Any, say: Say, *, prunes: bool) -> None:
        self._verb, self._config_dir, self._engines, self._say = verb, config_dir, engines, say
        self._prunes, self._ending = prunes, Ending()

    def start(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        """Does the run to its end."""
        self._say(f"job {run.number}: {run.name}")
        self._ending = Ending()
        try:
            self._do(run, is_pruned)
        except PrunedError:
            return
        except KeyboardInterrupt as error:
            self._ending = Ending(is_interrupted=True, is_explained=True, error=error)
        except Exception as error:  # the source says whether the sweep goes on
            self._ending = failure(error)
            self._say(f"job {run.number} failed: {self._ending.problem}")

    def ending(self, run: Run) -> Ending:
        return self._ending

    def _do(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        """Does what the run lacks."""
        resolved, plan = run.resolved, run.plan
        if resolved is not None and not run_folder.config_file(run.folder).exists():
            resolved = replace(resolved, plain=run_folder.with_kept_values(resolved.plain, None))
        else:  # a run that goes on keeps values of its own
            plain = resolved.plain if resolved else configs.compose(run.words, self._config_dir, self._verb)
            resolved, plan = resolve_in(run.folder, {**plain, "resume": AUTO}, self._verb), None
        try:
            loggers = [PruningLogger(is_pruned)] if self._prunes else []
            launch(resolved, run.folder, self._engines, plan=plan, may_be_finished=True, loggers=loggers)
        except (UserError, KeyboardInterrupt):
            with suppress(OSError):  # a run that was refused, or stopped before it started, leaves no folder
                for folder in (run.folder, *list(run.folder.parents)[:2]):
                    folder.rmdir()
            raise


def failure(error: Exception) -> Ending:
    """How a run ended that raised this error."""
    return Ending(
        problem=one_line(error) or type(error).__name__,
        kind=type(error).__name__,
        key=error.key if isinstance(error, UserError) else None,
        is_explained=explains_itself(error) and not isinstance(error, UnforeseenError),
        error=error,
    )


class PruningLogger(Logger):
    """Asks after each evaluation whether the run is pruned, and ends it then."""

    def __init__(self, is_pruned: Callable[[], bool]) -> None:
        self._is_pruned = is_pruned

    def evaluation(self, evaluation: Evaluation) -> None:
        if self._is_pruned():
            raise PrunedError(why_pruned(evaluation.step))
