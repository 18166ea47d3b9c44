"""Reward workers as members of the cluster (`cluster.scoring`).

Each member holds a pool of one worker process on its own machine, so that the limits of time and memory, and how
failures are attributed, are those of `pool.py`. This module deals out the tasks, and replaces members that are lost
with their machine, for which no reward is to blame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from rlft.reward.workers.pool import RewardError, StopWhen, WorkerPool, packed_task
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.reward.workers.worker import Reply, Task, unpack
from rlft.system.process.child import GRACE_S, MAX_FAILED_STARTS, START_LIMIT_S
from rlft.system.process.member import Launcher, Member, MemberError, MemberSpec, where_it_wrote
from rlft.system.process.running_time import TICK_S, RunningTime

FACTORY = "rlft.reward.workers.reward_members:RewardHost"


class RewardHost:
    """The object of a member: a reward worker on its machine. Its methods are called in the thread that made it."""

    def __init__(self, *, specs: Sequence[RewardSpec], timeout_s: float) -> None:
        self._pool = WorkerPool(specs, 1, timeout_s)

    def answer(self, packed: bytes) -> tuple[Reply, bool]:
        """(the reply to a task, whether its rewards have run programs meanwhile)."""
        [(_, reply)] = self._pool.run([unpack(packed)], lambda reply: False)
        return reply, self._pool.ran_programs


def reward_specs(rewards: Sequence[RewardSpec], workers: int, timeout_s: float) -> list[MemberSpec]:
    """What the members are; a reward may take `timeout_s` seconds for a group."""
    arguments = {"specs": tuple(rewards), "timeout_s": timeout_s}
    return [MemberSpec(name=f"scorer-{i}", factory=FACTORY, arguments=arguments) for i in range(workers)]


@dataclass(slots=True, eq=False, kw_only=True)
class Scoring:
    """A member's work on a task.

    Attributes:
        number: number of the member.
        task: the task.
        future: its answer.
        limit_s: seconds that it may take.
        left_s: seconds that it may still take.
    """

    number: int
    task: Task
    future: Future[Any]
    limit_s: float
    left_s: float


class RewardMembers:
    """Does what `WorkerPool` does, with its workers in members.

    Args:
        launcher: starts them; whoever opened it closes it.
        specs: what each member is.
        timeout_s: seconds that a reward may take for a group; the member itself enforces it.
        answer_s: further seconds that a member may take before it is replaced.
        note: takes a line for the person watching when a member is replaced.
    """

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[MemberSpec],
        *,
        timeout_s: float,
        answer_s: float,
        note: Callable[[str], None],
    ) -> None:
        self._launcher, self._specs = launcher, specs
        self._timeout_s, self._answer_s, self.note = timeout_s, answer_s, note
        self._members: list[Member] = [launcher.start(spec) for spec in specs]
        self._answered: set[Member] = set()
        self._busy: list[Scoring] = []
        self._failures_in_a_row = 0
        self._is_stopped = False
        self._clock = RunningTime()
        self.ran_programs = False

    def run(self, tasks: Sequence[Task], stop_when: StopWhen) -> Iterator[tuple[Task, Reply]]:
        """Does what `WorkerPool.run` does.

        Raises:
            RewardError: workers cannot start, or members are lost again and again.
        """
        for unfinished in self._busy:  # they were left by a call that was interrupted
            self._replace(unfinished.number)
        self._busy, waiting = [], deque(tasks)
        self._clock.since_last()  # the time before is not counted
        while waiting or self._busy:
            if self._is_stopped:
                raise RewardError("scoring was stopped: the run is ending")
            self._dispatch(waiting)
            for scoring in self._over():
                self._busy.remove(scoring)
                answer = self._answer(scoring)
                if answer is None:
                    waiting.appendleft(scoring.task)
                    continue
                reply, self.ran_programs = answer
                if stop_when(reply):
                    waiting.clear()
                yield scoring.task, reply

    def stop(self) -> None:
        """Does what `WorkerPool.stop` does."""
        self._is_stopped = True

    def close(self) -> None:
        """Ends the members, whatever they are doing. Safe to call twice."""
        for member in self._members:
            member.kill()

    def _dispatch(self, waiting: deque[Task]) -> None:
        busy_members = {scoring.number for scoring in self._busy}
        for number in [number for number in range(len(self._members)) if number not in busy_members]:
            if not waiting:
                return
            task, member = waiting.popleft(), self._members[number]
            limit_s = self._answer_s + self._timeout_s * len(task.rewards) + GRACE_S
            if member not in self._answered:
                limit_s += MAX_FAILED_STARTS * START_LIMIT_S
            future = member.call("answer", packed_task(task))
            self._busy.append(Scoring(number=number, task=task, future=future, limit_s=limit_s, left_s=limit_s))

    def _over(self) -> list[Scoring]:
        """Tasks that are answered or out of time; waits a moment for the first."""
        wait([scoring.future for scoring in self._busy], timeout=TICK_S, return_when=FIRST_COMPLETED)
        passed = self._clock.since_last()
        for scoring in self._busy:
            scoring.left_s -= passed
        return [scoring for scoring in self._busy if scoring.future.done() or scoring.left_s <= 0]

    def _answer(self, scoring: Scoring) -> tuple[Reply, bool] | None:
        """The member's answer; None if the member is lost, and another one has taken its place."""
        member = self._members[scoring.number]
        if scoring.future.done():
            try:
                answer: tuple[Reply, bool] = scoring.future.result()
            except MemberError as error:
                problem = str(error)
            else:
                self._answered.add(member)
                self._failures_in_a_row = 0
                return answer
        else:
            late = f"has not answered for {scoring.limit_s:g} s (cluster.timeout)"
            problem = f"{member.name} {late}; {where_it_wrote(member.log)}"
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILED_STARTS:
            raise RewardError(f"reward workers were lost {MAX_FAILED_STARTS} times in a row; the last time {problem}")
        self._replace(scoring.number)
        self.note(f"{member.name} is replaced: {problem.splitlines()[0]}")
        return None

    def _replace(self, number: int) -> None:
        self._answered.discard(self._members[number])
        self._members[number].kill()
        self._members[number] = self._launcher.start(self._specs[number])
