"""Where rewards run: worker processes that may hang, crash or be killed, without the run hanging or crashing with them.

There are no threads: the calling thread sends tasks over a pipe to each worker and waits with a deadline. So it is
known at once which task a dead worker had, a killed worker cannot leave a lock taken, and the workers' parent, with
which they end, is the thread that made the pool: make it where the loop runs.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from rlft.reward.workers.reward_spec import RewardSpec
from rlft.reward.workers.worker import (
    NOWHERE,
    READY,
    Cause,
    Failure,
    Progress,
    Reply,
    Task,
    answer,
    load,
    out_of_time,
    pack,
    programs_ended,
    serve,
)
from rlft.system.process.children import how_it_ended, kill, spawned
from rlft.system.process.running_time import TICK_S, RunningTime, is_stopped

START_LIMIT_S = 300.0
STOPPED_LIMIT_S = 300.0
"""Seconds that a worker may be stopped (SIGSTOP) while the run goes on, before another worker gets its task."""
MAX_FAILED_STARTS = 3  # in a row, without a successful one in between
GRACE_S = 1.0  # added to the worker's own limit, which reports more: the pool's is for code that ignores signals

StopWhen = Callable[[Reply], bool]


class RewardError(RuntimeError):
    """A reward failed and the run must not go on without it; the message says which one, where, and what to do."""


class Pool(Protocol):
    """Runs tasks; `ran_programs` says whether the rewards of the last reply have run programs."""

    ran_programs: bool

    def run(self, tasks: Sequence[Task], stop_when: StopWhen) -> Iterator[tuple[Task, Reply]]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Worker:
    """A worker process and its task.

    Attributes:
        process: the process.
        pipe: the parent's end of the pipe to it.
        progress: what it is doing, in shared memory.
        left_s: seconds that the task, or its start, may still take, counted while both the worker and its parent run.
        stopped_s: seconds for which only the worker has been stopped.
        ready: whether it has started.
        task: its task.
    """

    process: BaseProcess
    pipe: connection.Connection
    progress: Progress
    left_s: float
    stopped_s: float = 0.0
    ready: bool = False
    task: Task | None = None


class WorkerPool:
    """Runs tasks in worker processes, which start in the background.

    `ran_programs` says whether the rewards of the last reply have run programs.

    Args:
        specs: the rewards.
        num_workers: number of processes.
        timeout_s: seconds that a reward may take for a group.
    """

    def __init__(self, specs: Sequence[RewardSpec], num_workers: int, timeout_s: float) -> None:
        self._specs, self._num_workers, self._timeout_s = tuple(specs), num_workers, timeout_s
        self._workers: list[Worker] = []
        self._failed_starts = 0
        self._clock = RunningTime()
        self._is_stopped = False
        self.ran_programs = False
        self._fill()
        atexit.register(self.close)  # before multiprocessing's own exit, which would wait for the workers

    def run(self, tasks: Sequence[Task], stop_when: StopWhen) -> Iterator[tuple[Task, Reply]]:
        """Each task with its reply, in order of completion; no task is begun after a reply for which `stop_when` holds.

        A reply lacks rewards that a killed worker had not reached, and rewards that a signal disturbed.

        Raises:
            RewardError: workers cannot start.
        """
        # Workers with a task are left from a run that was interrupted.
        self._discard([worker for worker in self._workers if worker.task])
        waiting = deque(tasks)
        self._clock.since_last()  # the time before is not counted
        while waiting or any(worker.task for worker in self._workers):
            if self._is_stopped:
                raise RewardError("scoring was stopped: the run is ending")
            self._fill()
            self._deal(waiting)
            self._replace_stopped(waiting)
            for worker in self._awake():
                task, reply = worker.task, self._hear(worker)
                if task is not None and reply is not None:
                    if stop_when(reply):
                        waiting.clear()
                    yield task, reply

    def stop(self) -> None:
        """Makes a `run` in another thread raise when it next checks the workers. Only `close` may follow."""
        self._is_stopped = True

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Safe to call twice."""
        atexit.unregister(self.close)
        self._discard(list(self._workers))

    def _fill(self) -> None:
        while len(self._workers) < self._num_workers:
            self._workers.append(start_worker(self._specs, self._timeout_s))

    def _deal(self, waiting: deque[Task]) -> None:
        for worker in [worker for worker in self._workers if worker.ready and not worker.task]:
            if not waiting:
                return
            try:
                worker.pipe.send_bytes(packed_task(waiting[0]))
            except OSError:  # it died while idle, not because of the task: the next worker gets the task
                self._discard([worker])
                continue
            worker.task = waiting.popleft()
            worker.left_s = self._timeout_s * len(worker.task.rewards) + GRACE_S

    def _replace_stopped(self, waiting: deque[Task]) -> None:
        """Replaces workers that somebody has stopped and not continued; others get their tasks."""
        for worker in [worker for worker in self._workers if worker.stopped_s > STOPPED_LIMIT_S]:
            waiting.extend([worker.task] if worker.task else [])
            self._discard([worker])

    def _awake(self) -> list[Worker]:
        """Waits for workers that have sent a message, have died or are out of time, and returns them."""
        active = [worker for worker in self._workers if worker.task or not worker.ready]
        left_s = min((worker.left_s for worker in active), default=0.0)
        pipes = [worker.pipe for worker in active]
        sentinels = [worker.process.sentinel for worker in active]
        readable = connection.wait([*pipes, *sentinels], timeout=max(0.0, min(left_s, TICK_S)))
        self._count_time(active)
        return [
            worker
            for worker in active
            if worker.pipe in readable or worker.left_s <= 0 or not worker.process.is_alive()
        ]

    def _count_time(self, workers: Sequence[Worker]) -> None:
        passed = self._clock.since_last()
        for worker in workers:
            if is_stopped(worker.process.pid or 0):
                worker.stopped_s += passed
            else:
                worker.left_s -= passed
                worker.stopped_s = 0.0

    def _hear(self, worker: Worker) -> Reply | None:
        """The reply to the worker's task; None if it has just started."""
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            if worker.pipe.poll():
                message = worker.pipe.recv()
                if message == READY:
                    worker.ready, self._failed_starts = True, 0
                    return None
                worker.task = None
                reply, self.ran_programs = message
                return reply
        self.ran_programs = False
        return self._bury(worker)

    def _bury(self, worker: Worker) -> Reply | None:
        """The reply for a worker that has died or is out of time: the failure of the reward that it was computing."""
        late = worker.process.is_alive() and worker.left_s <= 0
        self._discard([worker])
        ended = how_it_ended(worker.process.exitcode)
        if worker.task is None:
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                what = "took too long to start" if late else f"{ended} before their first task"
                remedy = "see their output above; a script that scores needs an `if __name__ == '__main__'` guard"
                raise RewardError(f"{MAX_FAILED_STARTS} reward workers in a row {what}; {remedy}")
            return None
        reward, completion = worker.progress[0], worker.progress[1]
        at = None if completion == NOWHERE else completion
        died = Failure(cause=Cause.died, problem=f"took its worker process with it, which {ended},", completion=at)
        return {worker.task.rewards[max(0, reward)]: out_of_time(self._timeout_s, at) if late else died}

    def _discard(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            kill(worker.process)
            worker.pipe.close()


class InProcess:
    """A pool without workers, for debugging a reward and for tiny tests. Nothing is isolated."""

    def __init__(self, specs: Sequence[RewardSpec], timeout_s: float) -> None:
        self._rewards, self._timeout_s = load(specs), timeout_s
        self.ran_programs = False

    def run(self, tasks: Sequence[Task], stop_when: StopWhen) -> Iterator[tuple[Task, Reply]]:
        for task in tasks:
            programs_before = programs_ended()
            reply = answer(task, self._rewards, self._timeout_s, [NOWHERE, NOWHERE])
            self.ran_programs = programs_ended() != programs_before
            yield task, reply
            if stop_when(reply):
                return

    def stop(self) -> None:
        """Does nothing: the calling thread runs the rewards."""

    def close(self) -> None:
        """Does nothing: there is nothing to end."""


def start_worker(specs: Sequence[RewardSpec], timeout_s: float) -> Worker:
    """Starts a worker process; returns before it is ready."""
    progress: Any = multiprocessing.get_context("spawn").RawArray("i", [NOWHERE, NOWHERE])
    process, pipe = spawned(serve, specs, timeout_s, progress, os.getpid(), name="rlft-reward-worker")
    return Worker(process=process, pipe=pipe, progress=progress, left_s=START_LIMIT_S)


def packed_task(task: Task) -> bytes:
    """The task as it is sent to a worker. Raises RewardError if its prompt cannot be sent."""
    try:
        return pack(task)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        prompt = task.group.prompt.id
        raise RewardError(
            f"prompt {prompt!r} cannot be sent to a reward worker ({error}); keep its metadata to plain data, "
            "or score in the trainer's process with scoring.workers=0"
        ) from error
