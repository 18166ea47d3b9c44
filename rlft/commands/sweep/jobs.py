"""Concurrent runs of a sweep (cluster.jobs): each is an `rlft` process of its own, here or on a cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlft.commands.sweep.driver import Ending, How, Place, Run
from rlft.config.trainer import ClusterConfig
from rlft.runs import run_status
from rlft.system import disk
from rlft.system.interrupt import EXIT_CODE, Interrupt
from rlft.system.process.child import start_python
from rlft.system.process.running_time import RunningTime
from rlft.system.process.worker import Launcher, Worker, WorkerError, WorkerSpec, last_lines
from rlft.system.terminal import Say

FACTORY = "rlft.commands.sweep.jobs:JobProcess"
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
