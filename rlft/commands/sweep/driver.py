"""The driver of sweeps: runs what a source asks for, so many at a time, here or in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rlft.commands.launch import launch, resolve_in
from rlft.config import compose as configs
from rlft.config.resolved import AUTO, Resolved
from rlft.config.trainer import ClusterConfig
from rlft.logger.interface import Logger
from rlft.runs import run_folder, run_status
from rlft.system import disk
from rlft.system.crash import explains_itself, one_line
from rlft.system.interrupt import EXIT_CODE, Interrupt
from rlft.system.process.child import start_python
from rlft.system.process.member import Launcher, Member, MemberError, MemberSpec, last_lines
from rlft.system.process.running_time import RunningTime
from rlft.system.terminal import Say
from rlft.types import Evaluation, UserError

FACTORY = "rlft.commands.sweep.driver:JobProcess"
POLL_S = 0.2
REFUSED, STOPPED = 2, 1
"""Exit codes of `rlft`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One run of a sweep.

    Attributes:
        number: of its job, from 0.
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
        problem: why it failed, in one line.
        is_interrupted: whether a signal ended it, after saving.
        is_refused: whether it was refused.
        is_of_the_disk: whether a disk is to blame, which stops a sweep as a signal does: no run could save.
        error: what an interruption or a disk raised in this process.
    """

    problem: str = ""
    is_interrupted: bool = False
    is_refused: bool = False
    is_of_the_disk: bool = False
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
        """A run is finished or has failed, which stops no other; returns the one that follows it at once.

        Raises:
            Exception: no run can be done any more, so that the sweep ends once the runs beside it have saved.
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
        interrupted: whether a signal has come, after which nothing is begun. One that comes too late for a run, because
            it was in its last step or was pruned, interrupts the sweep and not the run.
    """

    def __init__(self, source: Source[R], place: Place, limit: int, interrupted: Callable[[], bool]) -> None:
        self._source, self._place, self._limit, self._interrupted = source, place, limit, interrupted
        self._active: list[R] = []
        self._pruned: list[R] = []
        self._broken: BaseException | None = None
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
        if self._is_cut or (self._interrupted() and not self._source.is_done()):
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
        if (run := self._source.next()) is not None:
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
        if ending.is_of_the_disk:
            self._withdraw(run)
            self._break(ending.error or JobsFailedError(f"job {run.number}: {ending.problem}"))
            return
        try:
            following = self._source.ended(run, ending)
        except Exception as error:
            self._break(error)
            return
        if following is not None and self._is_ending():
            self._withdraw(following)
        elif following is not None:
            self._start(following)

    def _break(self, error: BaseException) -> None:
        """Ends the sweep with this error, once the other runs have saved."""
        self._broken = self._broken or error
        for other in self._active:
            self._place.stop(other)


class PrunedError(RuntimeError):
    """The sweep has pruned this run at an evaluation; its newest checkpoint stays."""


def why_pruned(step: int) -> str:
    """The reason in the status of a run that is pruned."""
    return f"pruned by its sweep after step {step}: its trial lags behind"


class InThisProcess(Place):
    """Does runs in this process, with what they can share: a loaded base, a started engine of `engines`.

    `prunes` is whether runs may be pruned.
    """

    def __init__(self, command: str, config_dir: Path | None, engines: Any, say: Say, *, prunes: bool) -> None:
        self._command, self._config_dir, self._engines, self._say = command, config_dir, engines, say
        self._prunes, self._ending = prunes, Ending()

    def start(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        self._say(f"job {run.number}: {run.name}")
        self._ending = Ending()
        try:
            self._do(run, is_pruned)
        except PrunedError:
            return
        except KeyboardInterrupt as error:
            self._ending = Ending(is_interrupted=True, error=error)
        except (Exception, SystemExit) as error:  # a run ends alone, whatever it raises
            self._ending = failure(error)
            self._say(f"job {run.number} failed: {self._ending.problem}")
            if self._engines is not None:  # the next run gets a base and an engine that nothing has happened to
                with suppress(Exception):
                    self._engines.close()

    def ending(self, run: Run) -> Ending:
        return self._ending

    def _do(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        resolved, plan, goes_on = run.resolved, run.plan, run_folder.config_file(run.folder).exists()
        plain = resolved.plain if resolved else configs.compose(run.words, self._config_dir, self._command)
        kept = run_folder.with_kept_values(plain, run.folder if goes_on else None)
        if resolved is None or (goes_on and kept != plain):  # the run that goes on has other values than were planned
            resolved, plan = resolve_in(run.folder, {**plain, "resume": AUTO}, self._command), None
        elif goes_on:
            resumed: dict[str, Any] = {"resume": str(run.folder)}
            run_folder.check_same_config(run.folder, kept | resumed)
            resolved = replace(resolved, plain=kept | resumed, config=replace(resolved.config, **resumed))
            plan = plan and replace(plan, plain=resolved.plain, config=replace(plan.config, **resumed))
        else:
            resolved = replace(resolved, plain=kept)
        try:
            loggers = [PruningLogger(is_pruned)] if self._prunes else []
            launch(resolved, run.folder, self._engines, plan=plan, may_be_finished=True, loggers=loggers)
        except (UserError, KeyboardInterrupt):
            with suppress(OSError):  # a run that was refused, or stopped before it started, leaves no folder
                for folder in (run.folder, *list(run.folder.parents)[:2]):
                    folder.rmdir()
            raise


def failure(error: BaseException) -> Ending:
    """The ending by this error, which is not kept: its traceback would hold the run's tensors."""
    disk_error = disk.failure_of(error) if isinstance(error, OSError | disk.DiskError) else None
    text, kind = one_line(error), type(error).__name__
    return Ending(
        problem=text if explains_itself(error) else f"{kind}: {text}" if text else kind,
        is_refused=isinstance(error, UserError),
        is_of_the_disk=disk_error is not None,
        error=disk_error,
    )


class PruningLogger(Logger):
    """Asks after each evaluation whether the run is pruned, and ends it then."""

    def __init__(self, is_pruned: Callable[[], bool]) -> None:
        self._is_pruned = is_pruned

    def evaluation(self, evaluation: Evaluation) -> None:
        if self._is_pruned():
            raise PrunedError(why_pruned(evaluation.step))


class JobsFailedError(RuntimeError):
    """Jobs of a sweep have failed; the others are finished."""


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """A job that has been started.

    answer: of its member to the last call; clock: since that call; stopping: since `stop` was called, if it was;
    is_signalled: whether it has been told to save and end. A second signal would abandon the step in progress.
    """

    run: Run
    member: Member
    gpu: str | None
    answer: Future[Any]
    clock: RunningTime = field(default_factory=RunningTime)
    stopping: RunningTime | None = None
    is_signalled: bool = False

    def end_after_its_step(self) -> None:
        """Makes it finish its step, save and end; tells it once, whatever the reasons."""
        if not self.is_signalled:
            self.is_signalled = True
            self.member.call("send", int(signal.SIGINT))


class SideBySide(Place):
    """Does runs side by side (cluster.jobs): each is an `rlft` of its own, on a GPU of its own where there are any.

    A job is the run that it would be alone: it has its folder, is resumed where it stopped when the sweep is repeated,
    and saves when the sweep is interrupted. Its output is in `<sweep>/cluster/job-<number>.log`.

    Args:
        words: (run) -> the words after `rlft` that do it.
        config: how many run at a time, and how long a member may take to answer.
        interrupt: its first signal makes the jobs save and end.
        on_gpus: whether each job needs a GPU of its own.
        gpus: of this machine, which jobs get in turn; empty where a cluster that is joined gives them out.
    """

    def __init__(
        self,
        launcher: Launcher,
        words: Callable[[Run], Sequence[str]],
        config: ClusterConfig,
        interrupt: Interrupt,
        say: Say,
        *,
        on_gpus: bool = False,
        gpus: Sequence[str] = (),
    ) -> None:
        self._launcher, self._words, self._jobs, self._timeout_s = launcher, words, config.jobs, config.timeout
        self._on_gpus, self._free_gpus = on_gpus, list(gpus)
        self._interrupt, self._say = interrupt, say
        self._running: dict[Run, RunningJob] = {}
        self._endings: dict[Run, Ending] = {}

    def start(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        gpu = self._free_gpus.pop(0) if self._free_gpus else None
        spec = MemberSpec(
            name=f"job-{run.number}",
            factory=FACTORY,
            arguments={"words": list(self._words(run)), "cwd": str(Path.cwd())},
            gpus=1.0 if self._on_gpus and gpu is None else 0.0,
            threads=threads_of_a_job(self._jobs),
            environment={} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu},
        )
        member = self._launcher.start(spec)
        self._say(f"job {run.number}: {run.name}; its output is in {os.path.relpath(member.log)}")
        self._running[run] = RunningJob(run=run, member=member, gpu=gpu, answer=member.call("exit_code"))

    def wait(self) -> None:
        """Waits a moment, then asks the running jobs again and passes a signal on."""
        wait_for([job.answer for job in self._running.values()], timeout=POLL_S)
        time.sleep(POLL_S)
        for job in list(self._running.values()):
            if self._interrupt.requested:
                job.end_after_its_step()
            self._check(job)

    def ending(self, run: Run) -> Ending | None:
        return self._endings.get(run)

    def stop(self, run: Run) -> None:
        """As in `Place`; `wait` kills a job that does not end in time, which is no failure."""
        job = self._running.get(run)
        if job is not None and job.stopping is None:
            job.stopping = RunningTime()
            job.end_after_its_step()

    def _check(self, job: RunningJob) -> None:
        number = job.run.number
        if job.stopping is not None and job.stopping() > self._timeout_s:
            late = f"has not ended {self._timeout_s:g} s after it was asked to (cluster.timeout)"
            self._say(f"job {number} {late}: its process is killed, its checkpoints stay in {job.run.folder}")
            self._end(job, Ending(is_interrupted=True))
            return
        if not job.answer.done():
            if job.clock() > self._timeout_s:
                problem = f"its process has not answered for {self._timeout_s:g} s (cluster.timeout)"
                self._end(job, Ending(problem=problem))
            return
        try:
            code = job.answer.result()
        except (MemberError, OSError) as error:
            self._end(job, Ending(problem=str(error)))
            return
        if code is None:
            job.answer, job.clock = job.member.call("exit_code"), RunningTime()
        elif code == EXIT_CODE or (code < 0 and (self._interrupt.requested or job.stopping is not None)):
            self._end(job, Ending(is_interrupted=True))
        else:
            self._end(job, self._ended_with(job, code))

    def _ended_with(self, job: RunningJob, code: int) -> Ending:
        """How a job ended whose process has ended by itself."""
        if code == 0:
            return Ending()
        log = job.member.log
        how = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        problem = f"{(_refusal(log) if code > 0 else None) or how}; its output is in {log}"
        is_of_the_disk = code == STOPPED and run_status.error(job.run.folder) == disk.DiskError.__name__
        return Ending(problem=problem, is_refused=code == REFUSED, is_of_the_disk=is_of_the_disk)

    def _end(self, job: RunningJob, ending: Ending) -> None:
        del self._running[job.run]
        self._endings[job.run] = ending
        job.member.kill()
        if job.gpu is not None:
            self._free_gpus.append(job.gpu)
        if ending.problem:
            self._say(f"job {job.run.number} failed: {ending.problem.splitlines()[0]}")
        elif ending.is_finished:
            self._say(f"job {job.run.number} is finished: {job.run.folder}")


def threads_of_a_job(jobs: int) -> int:
    """Threads of a job's torch: OMP_NUM_THREADS where it is set, else its share of this process's."""
    import torch

    return int(os.environ.get("OMP_NUM_THREADS") or max(1, torch.get_num_threads() // jobs))


def _refusal(log: Path) -> str | None:
    """What an `rlft` has said last of its failure."""
    said = [line for line in last_lines(log).splitlines() if line.startswith("rlft: ")]
    return said[-1].removeprefix("rlft: ").removeprefix("stopped: ") if said else None


class JobProcess:
    """An `rlft` process in a member of the cluster, whose log is its output; starts at once."""

    def __init__(self, words: Sequence[str], cwd: str) -> None:
        self._process = start_python("rlft:main", words, cwd=cwd)

    def exit_code(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        """Sends the job a signal; does nothing if it has ended."""
        self._process.send_signal(number)
