"""Where rewards run: worker processes that may hang, crash or be killed, without the run hanging or crashing with them.

The workers end with the thread that made the pool: make it where the loop runs.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from rlft.reward.workers.reward_spec import RewardSpec
from rlft.reward.workers.worker import (
    NOWHERE,
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
    progress_in,
)
from rlft.system.process.child import GRACE_S, Child, Children, Ended

StopWhen = Callable[[Reply], bool]


class RewardError(RuntimeError):
    """A reward failed and the run must not go on without it; the message says which one, where, and what to do."""


class Pool(Protocol):
    """Runs tasks; `ran_programs` says whether the rewards of the last reply have run programs."""

    ran_programs: bool

    def run(self, tasks: Sequence[Task], stop_when: StopWhen) -> Iterator[tuple[Task, Reply]]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class RewardWorker(Child):
    """A worker process; `progress` is what it is doing, in shared memory, and `task` what it was given last."""

    def __init__(self, specs: Sequence[RewardSpec], timeout_s: float) -> None:
        memory = shared_memory(mmap.PAGESIZE)
        try:
            self.progress: Progress = progress_in(memory)
            arguments = (specs, timeout_s, memory)
            super().__init__("rlft-reward-worker", "rlft.reward.workers.worker:serve", arguments, descriptors=(memory,))
        finally:
            os.close(memory)
        self.task: Task | None = None


class WorkerPool:
    """Runs tasks in worker processes, which start in the background.

    `ran_programs` says whether the rewards of the last reply have run programs.

    Args:
        specs: the rewards.
        num_workers: number of processes.
        timeout_s: seconds that a reward may take for a group.
    """

    def __init__(self, specs: Sequence[RewardSpec], num_workers: int, timeout_s: float) -> None:
        specs, self._timeout_s = tuple(specs), timeout_s
        self._workers = Children(lambda: RewardWorker(specs, timeout_s), num_workers, "reward workers", RewardError)
        self._is_stopped = False
        self.ran_programs = False

    def run(self, tasks: Sequence[Task], stop_when: StopWhen) -> Iterator[tuple[Task, Reply]]:
        """Each task with its reply, in order of completion; no task is begun after a reply for which `stop_when` holds.

        A reply lacks rewards that a killed worker had not reached, and rewards that a signal disturbed.

        Raises:
            RewardError: workers cannot start.
        """
        waiting = deque(tasks)
        self._workers.begin()
        while waiting or any(worker.is_busy for worker in self._workers.all):
            if self._is_stopped:
                raise RewardError("scoring was stopped: the run is ending")
            self._dispatch(waiting)
            for worker, message in self._workers.answers():
                task = worker.task
                assert task is not None, "a worker without a task says nothing"
                if isinstance(message, Ended):
                    self._workers.replace(worker)
                    if message.was_stopped:  # no reward is to blame
                        waiting.append(task)
                        continue
                    reply, self.ran_programs = self._failed(worker, task, message), False
                else:
                    reply, self.ran_programs = message
                if stop_when(reply):
                    waiting.clear()
                yield task, reply

    def stop(self) -> None:
        """Makes a `run` in another thread raise when it next checks the workers. Only `close` may follow."""
        self._is_stopped = True

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Safe to call twice."""
        self._workers.close()

    def _dispatch(self, waiting: deque[Task]) -> None:
        for worker in [worker for worker in self._workers.all if worker.is_ready and not worker.is_busy]:
            if not waiting:
                return
            task = waiting[0]
            if worker.send(packed_task(task), self._timeout_s * len(task.rewards) + GRACE_S):
                worker.task = waiting.popleft()
            else:  # it died while idle, not because of the task: the next worker gets the task
                self._workers.replace(worker)

    def _failed(self, worker: RewardWorker, task: Task, ended: Ended) -> Reply:
        """The reply for a worker that has died or is out of time: the failure of the reward that it was computing."""
        reward, completion = worker.progress[0], worker.progress[1]
        at = None if completion == NOWHERE else completion
        died = Failure(cause=Cause.died, problem=f"took its worker process with it, which {ended.how},", completion=at)
        return {task.rewards[max(0, reward)]: out_of_time(self._timeout_s, at) if ended.is_late else died}


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


def shared_memory(size: int) -> int:
    """The descriptor of memory that a process can share with one that inherits it."""
    if sys.platform == "linux":
        memory = os.memfd_create("rlft")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.write(memory, bytes(size))
    return memory


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
