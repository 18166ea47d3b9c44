"""Jobs of a sweep side by side (cluster.jobs): each is an `rlft` of its own, on a GPU of its own where there are any.

A job is the run that it would be alone: it has its folder, is resumed where it stopped when the sweep is repeated, and
saves when the sweep is interrupted. Its output is in `<sweep>/cluster/job-<number>.log`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlft.commands.sweep.job_process import FACTORY
from rlft.config.cluster import ClusterConfig
from rlft.system.interrupt import EXIT_CODE, Interrupt
from rlft.system.process.member import Launcher, Member, MemberError, MemberSpec, last_lines
from rlft.system.process.running_time import RunningTime
from rlft.system.terminal import Say
from rlft.types import UserError

POLL_S = 0.2


class JobsFailedError(RuntimeError):
    """Jobs of a sweep have failed; the others are finished."""


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """A job that has been started.

    answer: of its member to the last call; clock: since that call; stopping: since `stop` was called, if it was;
    is_signalled: whether it has been told to save and end. A second signal would abandon the step in progress.
    """

    number: int
    member: Member
    folder: Path
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


class SideBySide:
    """Runs jobs, so many at a time.

    Args:
        launcher: starts a member for each job.
        config: how many run at a time, and how long a member may take to answer.
        on_gpus: whether each job needs a GPU of its own.
        gpus: of this machine, which jobs get in turn; empty where a cluster that is joined gives them out.
        interrupt: its first signal makes the jobs save and end.
        say: prints a line.

    failed: {number: why} of jobs that have failed. codes: {number: exit code} of all whose process has ended by itself.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: ClusterConfig,
        interrupt: Interrupt,
        say: Say,
        *,
        on_gpus: bool = False,
        gpus: Sequence[str] = (),
    ) -> None:
        self._launcher, self._jobs, self._timeout_s = launcher, config.jobs, config.timeout
        self._on_gpus, self._free_gpus = on_gpus, list(gpus)
        self._interrupt, self._say = interrupt, say
        self._running: list[RunningJob] = []
        self.failed: dict[int, str] = {}
        self.codes: dict[int, int] = {}

    def start(self, number: int, name: str, words: Sequence[str], folder: Path) -> None:
        """Starts a job as soon as fewer than `jobs` run; nothing after an interruption."""
        while len(self._running) >= self._jobs:
            self.poll()
        if self._interrupt.requested:
            return
        gpu = self._free_gpus.pop(0) if self._free_gpus else None
        spec = MemberSpec(
            name=f"job-{number}",
            factory=FACTORY,
            arguments={"words": list(words), "cwd": str(Path.cwd())},
            gpus=1.0 if self._on_gpus and gpu is None else 0.0,
            threads=threads_of_a_job(self._jobs),
            environment={} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu},
        )
        member = self._launcher.start(spec)
        self._say(f"job {number}: {name}; its output is in {os.path.relpath(member.log)}")
        answer = member.call("exit_code")
        self._running.append(RunningJob(number=number, member=member, folder=folder, gpu=gpu, answer=answer))

    def finish(self) -> None:
        """Waits for the jobs that run.

        Raises:
            KeyboardInterrupt: the sweep was interrupted; its jobs have saved.
            JobsFailedError: jobs have failed.
        """
        while self._running:
            self.poll()
        if self._interrupt.requested:
            raise KeyboardInterrupt
        if self.failed:
            number, problem = next(iter(self.failed.items()))
            others = f"{len(self.failed)} jobs failed, the first of them " if len(self.failed) > 1 else ""
            raise JobsFailedError(f"{others}job {number}: {problem}")

    def is_running(self, number: int) -> bool:
        return any(job.number == number for job in self._running)

    def stop(self, number: int) -> None:
        """Makes a running job save its step and end, which is no failure; `poll` kills one that does not in time."""
        for job in (job for job in self._running if job.number == number and job.stopping is None):
            job.stopping = RunningTime()
            job.end_after_its_step()

    def poll(self) -> None:
        """Waits a moment, then asks the running jobs again and passes a signal on."""
        wait_for([job.answer for job in self._running], timeout=POLL_S)
        time.sleep(POLL_S)
        if self._interrupt.requested:
            for job in self._running:
                job.end_after_its_step()
        for job in list(self._running):
            self._check(job)

    def _check(self, job: RunningJob) -> None:
        if job.stopping is not None and job.stopping() > self._timeout_s:
            late = f"has not ended {self._timeout_s:g} s after it was asked to (cluster.timeout)"
            self._say(f"job {job.number} {late}: its process is killed, its checkpoints stay in {job.folder}")
            self._remove(job)
            return
        if not job.answer.done():
            if job.clock() > self._timeout_s:
                self._end(job, f"its process has not answered for {self._timeout_s:g} s (cluster.timeout)")
            return
        try:
            code = job.answer.result()
        except (MemberError, OSError) as error:
            self._end(job, str(error))
            return
        if code is None:
            job.answer, job.clock = job.member.call("exit_code"), RunningTime()
            return
        self.codes[job.number] = code
        if code == 0:
            self._end(job, None)
        elif code == EXIT_CODE and (self._interrupt.requested or job.stopping is not None):
            self._remove(job)
        else:
            log = job.member.log
            self._end(job, f"{_refusal(log) or f'it ended with exit code {code}'}; its output is in {log}")

    def _end(self, job: RunningJob, problem: str | None) -> None:
        self._remove(job)
        if problem is None:
            self._say(f"job {job.number} is finished: {job.folder}")
            return
        self.failed[job.number] = problem
        self._say(f"job {job.number} failed: {problem.splitlines()[0]}")

    def _remove(self, job: RunningJob) -> None:
        self._running.remove(job)
        job.member.kill()
        if job.gpu is not None:
            self._free_gpus.append(job.gpu)


def are_on_gpus(plains: Sequence[Mapping[str, Any]]) -> bool:
    """Whether jobs with these plain configs compute on GPUs here."""
    from rlft.model.backbone import resolve_device

    return any(resolve_device(plain["model"]["device"]).type == "cuda" for plain in plains)


def gpus_of(config: ClusterConfig) -> list[str]:
    """The GPUs of this machine for jobs, as CUDA_VISIBLE_DEVICES names them; none where a cluster has its own.

    Raises:
        UserError: there are fewer than jobs at a time.
    """
    import torch

    if config.address is not None:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if len(gpus) < config.jobs:
        problem = f"each job that runs at a time has a GPU of its own, and there are {len(gpus)} here"
        raise UserError("cluster.jobs", problem, got=config.jobs, remedy=f"use cluster.jobs={max(1, len(gpus))}")
    return gpus


def opened_for(config: ClusterConfig, folder: Path, *, on_gpus: bool) -> AbstractContextManager[Launcher]:
    """The launcher of a sweep's jobs. folder: of the sweep."""
    from rlft.system.process.launcher import open_launcher

    return open_launcher(config, folder, on_gpus=on_gpus, threads=threads_of_a_job(config.jobs))


def threads_of_a_job(jobs: int) -> int:
    """Threads of a job's torch: OMP_NUM_THREADS where it is set, else its share of this process's."""
    import torch

    return int(os.environ.get("OMP_NUM_THREADS") or max(1, torch.get_num_threads() // jobs))


def _refusal(log: Path) -> str | None:
    """What an `rlft` has said last of its failure."""
    said = [line for line in last_lines(log).splitlines() if line.startswith("rlft: ")]
    return said[-1].removeprefix("rlft: ").removeprefix("stopped: ") if said else None


def cluster_of(plains: Sequence[Mapping[str, Any]]) -> ClusterConfig | None:
    """The `cluster` section of a sweep's jobs; None where its verb has none.

    Raises:
        UserError: jobs differ in how many run side by side and where, or would be spread themselves.
    """
    sections = [plain.get("cluster") for plain in plains]
    if not isinstance(first := sections[0], Mapping):
        return None
    for key in ("kind", "address", "jobs", "timeout"):
        values = {json.dumps(section[key]) for section in sections if isinstance(section, Mapping)}
        if len(values) > 1:
            raise UserError(
                f"cluster.{key}",
                "is one for all jobs of a sweep",
                got=", ".join(sorted(values)),
                remedy="give one value",
            )
    config = ClusterConfig(**first)
    several = {"engines": config.engines > 0, "ranks": config.ranks > 1, "scoring": config.scoring}
    if config.jobs > 1 and any(several.values()):
        name = next(name for name, is_so in several.items() if is_so)
        value = getattr(config, name)
        problem = f"a job that runs beside others (cluster.jobs={config.jobs}) is one process"
        raise UserError(f"cluster.{name}", problem, got=value, remedy="leave it out, or set cluster.jobs=1")
    return config
