"""Where environments run: worker processes that may hang, crash or be killed, without harm to other conversations.

A conversation whose environment keeps state stays with one worker. Where that worker has to be replaced, the
conversation's earlier orders are repeated in the new one: an environment is a function of its orders and their seeds.
Make and use a pool in the thread that samples.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlft.environment.protocol import Cause, Environment
from rlft.environment.worker import Order, Reply, out_of_time
from rlft.system.process.child import GRACE_S, Beside, Child, Children, Ended
from rlft.types import EnvironmentFailure

SPENT = "Error: the time for all calls is used up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Orders of one conversation, which are carried out one after the other.

    Attributes:
        key: the conversation.
        orders: its orders.
        left_s: seconds that they may take together.
    """

    key: int
    orders: Sequence[Order]
    left_s: float


@dataclass(slots=True, eq=False, kw_only=True)
class Running:
    """The progress of a job.

    Attributes:
        index: number of the job in its run.
        job: the job.
        left_s: seconds that its orders may still take.
        again: earlier orders of the conversation that a new worker has to repeat first.
        replies: the replies so far.
    """

    index: int
    job: Job
    left_s: float
    again: deque[Order] = field(default_factory=deque)
    replies: list[Reply] = field(default_factory=list)

    @property
    def order(self) -> Order | None:
        """The next order; None at the end."""
        if self.again:
            return self.again[0]
        return self.job.orders[len(self.replies)] if len(self.replies) < len(self.job.orders) else None


class EnvironmentWorker(Child):
    """A worker process.

    Its hash seed is fixed: sets of strings keep their order, so that a resumed run replays. A PYTHONHASHSEED that the
    user has set is kept.

    Attributes:
        limit_s: seconds that its order may take.
        running: its job.
        knows: the conversations whose state it has.
    """

    def __init__(self, environment: Environment) -> None:
        seed = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        super().__init__("rlft-environment-worker", "rlft.environment.worker:serve", (environment,), environment=seed)
        self.limit_s = 0.0
        self.running: Running | None = None
        self.knows: set[int] = set()


class EnvironmentPool:
    """Runs jobs in `environment.workers` processes, which start in the background."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._past_orders: dict[int, list[Order]] = {}  # {conversation: the orders that its state comes from}
        self._workers = Children(
            lambda: EnvironmentWorker(environment),
            environment.workers,
            "workers",
            lambda text: EnvironmentFailure(f"environment: {text}"),
        )

    def run(self, jobs: Sequence[Job], beside: Beside | None = None) -> list[list[Reply]]:
        """The replies to each job's orders, in their order; meanwhile `beside` is attended to.

        Raises:
            EnvironmentFailure: workers cannot start.
        """
        for worker in list(self._workers.all):  # left by a run that was interrupted
            if worker.running is not None:
                self._workers.replace(worker)
        self._workers.begin()
        waiting = deque(Running(index=index, job=job, left_s=job.left_s) for index, job in enumerate(jobs))
        finished: dict[int, list[Reply]] = {}
        while len(finished) < len(jobs):
            for number in range(len(self._workers.all)):
                while self._has_begun(number, waiting):
                    self._send_next(self._workers.all[number], finished)
            for worker, answer in self._workers.answers(beside):
                self._receive(worker, answer)
        return [finished[index] for index in range(len(jobs))]

    def forget(self, keys: Iterable[int]) -> None:
        """Drops the state of these conversations, which are over."""
        keys = list(keys)
        for key in keys:
            self._past_orders.pop(key, None)
        for worker in self._workers.all:
            known = [key for key in keys if key in worker.knows]
            worker.knows.difference_update(known)
            if known and worker.running is None:
                with contextlib.suppress(OSError):  # one that has died is replaced when it is next used
                    worker.connection.send(known)

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Safe to call twice."""
        self._workers.close()

    # -- one worker ----------------------------------------------------------------------------------------------------
    def _has_begun(self, number: int, waiting: deque[Running]) -> bool:
        """Whether the worker waits for an order of its job; one without a job gets the first that it may take."""
        worker, size, keeps_state = self._workers.all[number], len(self._workers.all), self._environment.keeps_state
        if not worker.is_ready or worker.is_busy:
            return False
        if worker.running is not None:
            return True
        job = next((job for job in waiting if not keeps_state or job.job.key % size == number), None)
        if job is None:
            return False
        waiting.remove(job)
        self._begin(worker, job)
        return True

    def _begin(self, worker: EnvironmentWorker, job: Running) -> None:
        """Gives a worker a job, and the earlier orders of the conversation if it does not know it."""
        worker.running = job
        key = job.job.key
        if self._environment.keeps_state and key not in worker.knows:
            job.again = deque(self._past_orders.get(key, ()))
            worker.knows.add(key)

    def _send_next(self, worker: EnvironmentWorker, finished: dict[int, list[Reply]]) -> None:
        """Sends the next order of the worker's job, or finishes the job if there is none."""
        running = worker.running
        assert running is not None, "a worker without a job gets no order"
        while not running.again and running.order is not None and running.left_s <= 0:
            running.replies.append(Reply(text=SPENT, cause=Cause.time))
        order = running.order
        if order is None:
            finished[running.index] = running.replies
            worker.running = None
            return
        worker.limit_s = self._environment.call_timeout
        if not running.again:
            worker.limit_s = min(worker.limit_s, running.left_s)
        if not worker.send(pickle.dumps((running.job.key, order, worker.limit_s)), worker.limit_s + GRACE_S):
            # It died while idle, not because of the order: another worker gets the order.
            self._begin(self._workers.replace(worker), running)

    def _receive(self, worker: EnvironmentWorker, reply: Reply | Ended) -> None:
        """Adds a reply to the worker's job; a reply to a repeated order is dropped.

        A worker that has died or is out of time is replaced, and the reply to its order says what happened.
        """
        running = worker.running
        assert running is not None, "a busy worker has a job"
        if isinstance(reply, Ended):
            self._replace(worker, running, reply)
            return
        order = running.order
        assert order is not None, "a reply is to an order"
        if running.again:
            running.again.popleft()
            return
        if self._environment.keeps_state and reply.cause is not Cause.time:
            self._past_orders.setdefault(running.job.key, []).append(order)
        running.replies.append(reply)
        running.left_s -= reply.seconds

    def _replace(self, worker: EnvironmentWorker, running: Running, ended: Ended) -> None:
        was_repeating = bool(running.again)
        self._begin(self._workers.replace(worker), running)
        if ended.was_stopped:  # somebody has stopped it, so that no tool is to blame
            return
        if was_repeating:  # an order that succeeded before fails now: the state of the environment is lost
            running.again.clear()
            self._past_orders.pop(running.job.key, None)
        text = out_of_time(worker.limit_s) if ended.is_late else f"Error: the tool's process {ended.how}"
        cause = Cause.time if ended.is_late else Cause.died
        running.replies.append(Reply(text=text, cause=cause, seconds=worker.limit_s if ended.is_late else 0.0))
        running.left_s -= running.replies[-1].seconds
