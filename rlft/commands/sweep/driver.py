"""The driver of sweeps: begins the runs of a source in a place, so many at a time, and tells the source how each ended.

The source says which runs there are and what an ending means: a grid (`command.py`) or a study (`study.py`). The place
does them: in this process, one after the other, with what they can share (a loaded base, a started engine); or
concurrently (cluster.jobs), in `rlft` processes of their own, here or on a cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rlft.commands.launch import launch, resolve_in
from rlft.config import compose as configs
from rlft.config.resolved import AUTO, Resolved
from rlft.config.trainer import ClusterConfig
from rlft.logger.interface import Logger
from rlft.runs import run_folder, run_status
from rlft.system import disk
from rlft.system.crash import described, escaped, explains_itself
from rlft.system.interrupt import EXIT_CODE, Interrupt
from rlft.system.process.child import start_python
from rlft.system.process.running_time import RunningTime
from rlft.system.process.worker import Launcher, Worker, WorkerError, WorkerSpec, last_lines
from rlft.system.terminal import Say
from rlft.types import Evaluation, UserError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One run of a sweep."""

    number: int  # of its job, from 0
    name: str
    words: Sequence[str]
    folder: Path
    resolved: Resolved | None = field(default=None, repr=False)  # its config, if the sweep has it already
    plan: Any = field(default=None, repr=False)  # its plan, if the sweep has it already


class How(Enum):
    """How a run ended. Of these only a disk stops a sweep, as a signal does: no other run could save.

    An interrupted run has saved, after a signal; a refused one has not begun; a pruned one is not worth its time.
    """

    finished = auto()
    pruned = auto()
    interrupted = auto()
    failed = auto()
    refused = auto()
    disk = auto()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended, and in one line why, unless it is finished, pruned or interrupted."""

    how: How
    problem: str = ""


R = TypeVar("R", bound=Run)


class Source(Protocol[R]):
    """What the runs of a sweep are, and what becomes of them."""

    beginning: Sequence[str]  # lines about the sweep that begins or is resumed
    again: str  # how it is resumed once it is interrupted

    def next(self) -> R | None:
        """The next run to begin or resume; None if there is none now."""

    def is_done(self) -> bool:
        """Whether no run is left to begin."""
        ...

    def is_pruned(self, run: R) -> bool:
        """Whether a run is to end where it is, for what it has evaluated since the last call."""
        return False

    def ended(self, run: R, ending: Ending) -> None:
        """A run that `next` gave has ended. An exception ends the sweep, once the runs next to it have saved."""

    def conclude(self) -> None:
        """Raises what the sweep ends with if runs have failed, once it is done."""

    def show(self) -> None:
        """Writes and prints the results so far."""


class Place(Protocol):
    """Where runs are done."""

    def start(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        """Begins or resumes a run.

        A place that returns only at the end of the run calls `is_pruned` after each evaluation, and raises what ends
        the sweep: KeyboardInterrupt or DiskError.
        """

    def ending(self, run: Run) -> Ending | None:
        """How a run ended; None while it is being done."""

    def wait(self) -> None:
        """Waits a moment for runs that are being done."""

    def stop(self, run: Run) -> None:
        """Makes a run save its step and end, unless it has ended."""


class JobsFailedError(RuntimeError):
    """Jobs of a sweep have failed; the others are finished."""


class Driver(Generic[R]):
    """Does the runs of a source.

    limit: how many are done at a time.
    interrupted: whether a signal has come, after which nothing is begun. One that comes too late for a run, because
    it was in its last step or was pruned, interrupts the sweep and not the run.
    """

    def __init__(self, source: Source[R], place: Place, limit: int, interrupted: Callable[[], bool]) -> None:
        self._source, self._place, self._limit, self._interrupted = source, place, limit, interrupted
        self._active: list[R] = []
        self._pruned: list[R] = []
        self._error: Exception | None = None
        self._is_cut = False

    def run(self) -> None:
        """Does all runs; raises an interruption, or what the source or a disk has raised, once they have saved."""
        try:
            while self._begin() or self._active:
                self._place.wait()
                for run in list(self._active):
                    self._follow(run)
        except (KeyboardInterrupt, disk.DiskError):  # in this process; or a second signal, or one between two runs
            for run in self._active:
                self._source.ended(run, Ending(How.interrupted))
            raise
        if self._error is not None:
            raise self._error
        if self._is_cut or (self._interrupted() and not self._source.is_done()):
            raise KeyboardInterrupt

    def _begin(self) -> bool:
        """Begins a run where there is room; returns whether it did."""
        if len(self._active) >= self._limit or self._error is not None or self._interrupted():
            return False
        if (run := self._source.next()) is None:
            return False
        self._active.append(run)
        self._place.start(run, partial(self._is_pruned, run))
        return True

    def _is_pruned(self, run: R) -> bool:
        if run not in self._pruned and self._source.is_pruned(run):
            self._pruned.append(run)
        return run in self._pruned

    def _follow(self, run: R) -> None:
        """Stops a run that is pruned, and tells the source of one that has ended."""
        ending = self._place.ending(run)  # asked first: what it has evaluated by then is all
        if (ending is None or ending.how is How.finished) and self._is_pruned(run):
            self._place.stop(run)
        if ending is None:
            return
        self._active.remove(run)
        if run in self._pruned:
            ending = Ending(How.pruned)
        if ending.how is How.interrupted:
            self._is_cut = True
        if ending.how is How.disk:
            self._break(JobsFailedError(f"job {run.number}: {ending.problem}"))
        try:
            self._source.ended(run, ending)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Ends the sweep with this error, once the other runs have saved."""
        self._error = self._error or error
        for other in self._active:
            self._place.stop(other)


# -- runs in this process ----------------------------------------------------------------------------------------------
class PrunedError(RuntimeError):
    """The sweep has pruned this run at an evaluation; its newest checkpoint stays."""


def why_pruned(step: int) -> str:
    return f"pruned by its sweep after step {step}: its trial lags behind"


class PruningLogger(Logger):
    """Asks after each evaluation whether the run is pruned, and ends it then."""

    def __init__(self, is_pruned: Callable[[], bool]) -> None:
        self._is_pruned = is_pruned

    def evaluation(self, evaluation: Evaluation) -> None:
        if self._is_pruned():
            raise PrunedError(why_pruned(evaluation.step))


class InThisProcess(Place):
    """Does runs, which may be pruned if it `prunes`, in this process, with what `engines` keeps for the next one."""

    def __init__(self, command: str, config_dir: Path | None, engines: Any, say: Say, *, prunes: bool) -> None:
        self._command, self._config_dir, self._engines, self._say = command, config_dir, engines, say
        self._prunes, self._ending = prunes, Ending(How.finished)

    def start(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        self._say(f"job {run.number}: {run.name} in {run.folder}")
        self._ending = Ending(How.finished)
        try:
            self._do(run, is_pruned)
        except PrunedError:
            self._ending = Ending(How.pruned)
        except KeyboardInterrupt:
            if not is_pruned():  # else it comes too late for this run
                raise
            self._ending = Ending(How.pruned)
        except (Exception, SystemExit) as error:  # a run ends alone, whatever it raises
            self._ending = failure(error)  # without the error, whose traceback would hold the run's tensors
            self._say(f"job {run.number} failed: {self._ending.problem}")
            if self._engines is not None:  # the next run gets a base and an engine that nothing has happened to
                with suppress(Exception):
                    self._engines.close()
            if isinstance(error, OSError | disk.DiskError) and (of_the_disk := disk.failure_of(error)) is not None:
                raise of_the_disk from None

    def ending(self, run: Run) -> Ending:
        return self._ending

    def _do(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        resolved, plan = run.resolved, run.plan
        if resolved is not None and not run_folder.config_file(run.folder).exists():
            resolved = replace(resolved, plain=run_folder.with_kept_values(resolved.plain, None))
            plan = plan and replace(plan, plain=resolved.plain)
        else:
            plain = resolved.plain if resolved else configs.compose(run.words, self._config_dir, self._command)
            resolved, plan = resolve_in(run.folder, {**plain, "resume": AUTO}, self._command), None
        try:
            loggers = [PruningLogger(is_pruned)] if self._prunes else []
            launch(resolved, run.folder, self._engines, plan=plan, may_be_finished=True, loggers=loggers)
        except (UserError, KeyboardInterrupt):
            with suppress(OSError):  # a run that was refused, or stopped before it started, leaves no folder
                for folder in (run.folder, *list(run.folder.parents)[:2]):
                    folder.rmdir()
            raise


def failure(error: BaseException) -> Ending:
    problem = escaped(error) if explains_itself(error) else described(error)
    return Ending(How.refused if isinstance(error, UserError) else How.failed, problem)


FACTORY = "rlft.commands.sweep.driver:JobProcess"
POLL_S = 0.2
REFUSED, STOPPED = 2, 1  # exit codes of `rlft`


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """A job that has been started."""

    run: Run
    worker: Worker
    gpu: str | None
    answer: Future[Any]  # of its worker to the last call
    clock: RunningTime = field(default_factory=RunningTime)  # since that call
    stopping: RunningTime | None = None  # since `stop` was called, if it was
    is_signalled: bool = False  # to save and end; a second signal would abandon the step in progress

    def end_after_its_step(self) -> None:
        """Makes it finish its step, save and end; tells it once, whatever the reasons."""
        if not self.is_signalled:
            self.is_signalled = True
            self.worker.call("send", int(signal.SIGINT))


class SideBySide(Place):
    """Does runs side by side (cluster.jobs): each is an `rlft` of its own, on a GPU of its own where there are any.

    A job is the run that it would be alone: it has its folder, is resumed where it stopped when the sweep is repeated,
    and saves when the sweep is interrupted. Its output is in `<sweep>/cluster/job-<number>.log`.
    """

    def __init__(
        self,
        launcher: Launcher,
        words: Callable[[Run], Sequence[str]],  # (run) -> the words after `rlft` that do it
        config: ClusterConfig,  # how many run at a time, and how long a worker may take to answer
        interrupt: Interrupt,  # its first signal makes the jobs save and end
        say: Say,
        *,
        on_gpus: bool = False,  # whether each job needs a GPU of its own
        # Of this machine, which jobs get in turn; empty where a cluster that is joined gives them out.
        gpus: Sequence[str] = (),
    ) -> None:
        self._launcher, self._words, self._jobs, self._timeout_s = launcher, words, config.jobs, config.timeout
        self._on_gpus, self._free_gpus = on_gpus, list(gpus)
        self._interrupt, self._say = interrupt, say
        self._running: dict[Run, RunningJob] = {}
        self._endings: dict[Run, Ending] = {}

    def start(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        gpu = self._free_gpus.pop(0) if self._free_gpus else None
        spec = WorkerSpec(
            name=f"job-{run.number}",
            factory=FACTORY,
            arguments={"words": list(self._words(run)), "cwd": str(Path.cwd())},
            gpus=1.0 if self._on_gpus and gpu is None else 0.0,
            threads=threads_of_a_job(self._jobs),
            environment={} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu},
        )
        worker = self._launcher.start(spec)
        self._say(f"job {run.number}: {run.name}; its output is in {os.path.relpath(worker.log)}")
        self._running[run] = RunningJob(run=run, worker=worker, gpu=gpu, answer=worker.call("exit_code"))

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
            self._end(job, Ending(How.interrupted))
            return
        if not job.answer.done():
            if job.clock() > self._timeout_s:
                problem = f"its process has not answered for {self._timeout_s:g} s (cluster.timeout)"
                self._end(job, Ending(How.failed, problem))
            return
        try:
            code = job.answer.result()
        except (WorkerError, OSError) as error:
            self._end(job, Ending(How.failed, str(error)))
            return
        if code is None:
            job.answer, job.clock = job.worker.call("exit_code"), RunningTime()
        elif code == EXIT_CODE or (code < 0 and (self._interrupt.requested or job.stopping is not None)):
            self._end(job, Ending(How.interrupted))
        else:
            self._end(job, self._ended_with(job, code))

    def _ended_with(self, job: RunningJob, code: int) -> Ending:
        """How a job ended whose process has ended by itself."""
        if code == 0:
            return Ending(How.finished)
        log = job.worker.log
        how = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        problem = f"{(_refusal(log) if code > 0 else None) or how}; its output is in {log}"
        if code == STOPPED and run_status.error(job.run.folder) == disk.DiskError.__name__:
            return Ending(How.disk, problem)
        return Ending(How.refused if code == REFUSED else How.failed, problem)

    def _end(self, job: RunningJob, ending: Ending) -> None:
        del self._running[job.run]
        self._endings[job.run] = ending
        job.worker.kill()
        if job.gpu is not None:
            self._free_gpus.append(job.gpu)
        if ending.problem:
            self._say(f"job {job.run.number} failed: {ending.problem.splitlines()[0]}")
        elif ending.how is How.finished:
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
    """An `rlft` process in a worker of the cluster, whose log is its output; starts at once."""

    def __init__(self, words: Sequence[str], cwd: str) -> None:
        self._process = start_python("rlft:main", words, cwd=cwd)

    def exit_code(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        """Sends the job a signal; does nothing if it has ended."""
        self._process.send_signal(number)
