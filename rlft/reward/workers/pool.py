"""Where rewards run: worker processes that may hang, crash or be killed, without the run hanging or crashing with them.

The workers of this machine end with the thread that made their pool: make it where the loop runs. With
`cluster.scoring`, each process of the cluster has a pool of one worker, so that the limits of time and memory, and how
failures are attributed, are the same there.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import IO, Any, NamedTuple

from rlft.reward.workers import worker as workers
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.system.process.child import GRACE_S, MAX_FAILED_STARTS, START_LIMIT_S, Child, Children, Ended, Work
from rlft.system.process.running_time import TICK_S, RunningTime
from rlft.system.process.worker import Launcher, Worker, WorkerError, WorkerSpec, where_it_wrote

StopWhen = Callable[[workers.Reply], bool]


class RewardError(RuntimeError):
    """A reward failed and the run must not go on without it; the message says which one, where, and what to do."""


class Pool(ABC):
    """Runs tasks in workers; `ran_programs` says whether the rewards of the last reply have run programs."""

    ran_programs = False
    _is_stopped = False

    @abstractmethod
    def run(self, tasks: Sequence[workers.Task], stop_when: StopWhen) -> Iterator[tuple[workers.Task, workers.Reply]]:
        """Each task with its reply, in order of completion; no task is begun after a reply for which `stop_when` holds.

        A reply lacks rewards that a killed worker had not reached, and rewards that a signal disturbed. RewardError:
        workers cannot start, or are lost again and again.
        """

    def stop(self) -> None:
        """Makes a `run` in another thread raise when it next checks the workers. Only `close` may follow."""
        self._is_stopped = True

    def _check_goes_on(self) -> None:
        if self._is_stopped:
            raise RewardError("scoring was stopped: the run is ending")

    @abstractmethod
    def close(self) -> None:
        """Ends the workers, whatever they are doing. Safe to call twice."""


class RewardWorker(Child):
    """A worker process; `progress` is what it is doing, in shared memory."""

    def __init__(self, specs: Sequence[RewardSpec], timeout_s: float) -> None:
        with _shared_memory() as file:  # which both processes map
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            memory = file.fileno()
            self.progress: workers.Progress = workers.progress_in(memory)
            arguments = (specs, timeout_s, memory)
            super().__init__("rlft-reward-worker", "rlft.reward.workers.worker:serve", arguments, descriptors=(memory,))


class WorkerPool(Pool):
    """Runs tasks in worker processes of this machine, which start in the background.

    A reward may take `timeout_s` seconds for a group.
    """

    def __init__(self, specs: Sequence[RewardSpec], num_workers: int, timeout_s: float) -> None:
        specs, self._timeout_s = tuple(specs), timeout_s
        self._workers = Children(lambda: RewardWorker(specs, timeout_s), num_workers, "reward workers", RewardError)

    def run(self, tasks: Sequence[workers.Task], stop_when: StopWhen) -> Iterator[tuple[workers.Task, workers.Reply]]:
        waiting, answered = deque(tasks), deque[tuple[workers.Task, workers.Answer]]()

        def work(task: workers.Task, number: int) -> Work:
            answer = yield packed_task(task), self._timeout_s * len(task.rewards) + GRACE_S
            if answer is None:
                waiting.appendleft(task)
            else:
                answer = (self._failed(number, task, answer), False) if isinstance(answer, Ended) else answer
                answered.append((task, answer))

        for _ in self._workers.run(waiting, work):
            self._check_goes_on()
            while answered:
                task, (reply, self.ran_programs) = answered.popleft()
                if stop_when(reply):
                    waiting.clear()
                yield task, reply

    def close(self) -> None:
        self._workers.close()

    def _failed(self, number: int, task: workers.Task, ended: Ended) -> workers.Reply:
        """The reply for a worker that has died or is out of time: the failure of the reward that it was computing."""
        progress = self._workers.all[number].progress
        at = workers.last_read(progress)
        died = workers.Failure(
            cause=workers.Cause.died, problem=f"took its worker process with it, which {ended.how},", completion=at
        )
        return {task.rewards[max(0, progress[0])]: workers.out_of_time(self._timeout_s, at) if ended.is_late else died}


# -- without workers ---------------------------------------------------------------------------------------------------
class InProcess(Pool):
    """A pool without workers, for debugging a reward and for tiny tests. Nothing is isolated."""

    def __init__(self, specs: Sequence[RewardSpec], timeout_s: float) -> None:
        self._rewards, self._timeout_s = workers.load(specs), timeout_s

    def run(self, tasks: Sequence[workers.Task], stop_when: StopWhen) -> Iterator[tuple[workers.Task, workers.Reply]]:
        for task in tasks:
            reply, self.ran_programs = workers.answer(
                task, self._rewards, self._timeout_s, [workers.NOWHERE, workers.NOWHERE]
            )
            yield task, reply
            if stop_when(reply):
                return

    def close(self) -> None:
        """Does nothing: there is nothing to end."""


# -- on a cluster ------------------------------------------------------------------------------------------------------
class RewardHost:
    """What a process there holds: a reward worker on its machine, which is called in the thread that made it."""

    def __init__(self, *, specs: Sequence[RewardSpec], timeout_s: float) -> None:
        self._pool = WorkerPool(specs, 1, timeout_s)

    def answer(self, packed: bytes) -> workers.Answer:
        [(_, reply)] = self._pool.run([pickle.loads(packed)], lambda reply: False)
        return reply, self._pool.ran_programs


class Scoring(NamedTuple):
    """What a worker does on a task: it may take `limit_s` seconds, up to `end_s` by the pool's clock."""

    task: workers.Task
    future: Future[Any]
    limit_s: float
    end_s: float


class ClusterPool(Pool):
    """Runs tasks in reward workers on the cluster, and replaces those that are lost with their machine."""

    def __init__(
        self,
        launcher: Launcher,  # starts them; whoever opened it closes it
        rewards: Sequence[RewardSpec],
        num_workers: int,
        *,
        timeout_s: float,  # seconds that a reward may take for a group; the worker itself enforces it
        answer_s: float,  # further seconds that a worker may take before it is replaced
        note: Callable[[str], None],  # takes a line for the person watching when a worker is replaced
    ) -> None:
        factory, arguments = f"{__name__}:{RewardHost.__name__}", {"specs": tuple(rewards), "timeout_s": timeout_s}
        self._specs = [WorkerSpec(name=f"scorer-{i}", factory=factory, arguments=arguments) for i in range(num_workers)]
        self._launcher, self._timeout_s, self._answer_s, self._note = launcher, timeout_s, answer_s, note
        self._workers: list[Worker] = [launcher.start(spec) for spec in self._specs]
        self._answered: set[Worker] = set()
        self._busy: dict[int, Scoring] = {}  # by the worker's number
        self._failures_in_a_row = 0
        self._clock = RunningTime()

    def run(self, tasks: Sequence[workers.Task], stop_when: StopWhen) -> Iterator[tuple[workers.Task, workers.Reply]]:
        waiting = deque(tasks)
        for number in self._busy:  # left by an interrupted call
            self._replace(number)
        self._busy = {}
        while waiting or self._busy:
            self._check_goes_on()
            self._dispatch(waiting)
            wait([scoring.future for scoring in self._busy.values()], timeout=TICK_S, return_when=FIRST_COMPLETED)
            now = self._clock()
            for number in [n for n, scoring in self._busy.items() if scoring.future.done() or scoring.end_s <= now]:
                scoring = self._busy.pop(number)
                answered = self._answer(number, scoring)
                if answered is None:
                    waiting.appendleft(scoring.task)
                    continue
                reply, self.ran_programs = answered
                if stop_when(reply):
                    waiting.clear()
                yield scoring.task, reply

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _dispatch(self, waiting: deque[workers.Task]) -> None:
        """Gives tasks to workers that have none."""
        for number, worker in enumerate(self._workers):
            if not waiting:
                return
            if number in self._busy:
                continue
            task = waiting.popleft()
            limit_s = self._answer_s + self._timeout_s * len(task.rewards) + GRACE_S
            if worker not in self._answered:
                limit_s += MAX_FAILED_STARTS * START_LIMIT_S
            future = worker.call("answer", packed_task(task))
            self._busy[number] = Scoring(task, future, limit_s, self._clock() + limit_s)

    def _answer(self, number: int, scoring: Scoring) -> workers.Answer | None:
        """The worker's answer; None if the worker is lost, and another one has taken its place."""
        worker = self._workers[number]
        if scoring.future.done():
            try:
                answered: workers.Answer = scoring.future.result()
            except WorkerError as error:
                problem = str(error)
            else:
                self._answered.add(worker)
                self._failures_in_a_row = 0
                return answered
        else:
            late = f"has not answered for {scoring.limit_s:g} s (cluster.timeout)"
            problem = f"{worker.name} {late}; {where_it_wrote(worker.log)}"
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILED_STARTS:
            raise RewardError(f"reward workers were lost {MAX_FAILED_STARTS} times in a row; the last time {problem}")
        self._replace(number)
        self._note(f"{worker.name} is replaced: {problem.splitlines()[0]}")
        return None

    def _replace(self, number: int) -> None:
        self._answered.discard(self._workers[number])
        self._workers[number].kill()
        self._workers[number] = self._launcher.start(self._specs[number])


# -- details -----------------------------------------------------------------------------------------------------------
def _shared_memory() -> IO[bytes]:
    """An empty file that needs no disk where the system has such files."""
    return os.fdopen(os.memfd_create("rlft"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def packed_task(task: workers.Task) -> bytes:
    """The task as it is sent to a worker, without experts. Raises RewardError if its prompt cannot be sent."""
    bare = tuple(replace(r, completion=replace(r.completion, experts=None)) for r in task.group.rollouts)
    try:
        return pickle.dumps(replace(task, group=replace(task.group, rollouts=bare)))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        prompt = task.group.prompt.id
        raise RewardError(
            f"prompt {prompt!r} cannot be sent to a reward worker ({error}); keep its metadata to plain data, "
            "or score in the trainer's process with scoring.workers=0"
        ) from error
