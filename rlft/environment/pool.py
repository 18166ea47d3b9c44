"""Where environments run: worker processes that may hang, crash or be killed, without harm to other conversations.

As in `rlft.reward.workers.pool` there are no threads: the calling thread sends orders over a pipe to each worker and
waits with deadlines. A conversation whose environment keeps state stays with one worker. Where that worker has to be
replaced, the conversation's earlier orders are repeated in the new one: an environment is a function of its orders and
their seeds. Make and use a pool in the thread that samples.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from rlft.environment.protocol import Cause, Environment
from rlft.environment.worker import READY, Order, Reply, out_of_time, serve
from rlft.reward.workers.pool import GRACE_S, MAX_FAILED_STARTS, START_LIMIT_S, STOPPED_LIMIT_S
from rlft.system.process.children import how_it_ended, kill, spawned
from rlft.system.process.running_time import TICK_S, RunningTime, is_stopped
from rlft.types import EnvironmentFailure

HASH_SEED = "PYTHONHASHSEED"
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


class Beside(Protocol):
    """What else the thread does while workers carry out their orders."""

    def fileno(self) -> int:
        """A file descriptor that can be read when there is something to do."""
        ...

    def attend(self) -> None:
        """Does it, while the time of the orders goes on."""
        ...


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


@dataclass(slots=True, eq=False, kw_only=True)
class Seat:
    """A worker process and its current job.

    Attributes:
        process: the worker process.
        pipe: the pipe to it.
        left_s: seconds until it is given up, counted while both processes run.
        stopped_s: seconds for which only the worker has been stopped.
        limit_s: seconds that the order may take.
        ready: whether it has started.
        is_busy: whether it has an order that it has not answered.
        running: its job.
        knows: the conversations whose state it has.
    """

    process: BaseProcess
    pipe: connection.Connection
    left_s: float = START_LIMIT_S
    stopped_s: float = 0.0
    limit_s: float = 0.0
    ready: bool = False
    is_busy: bool = False
    running: Running | None = None
    knows: set[int] = field(default_factory=set)


@contextlib.contextmanager
def fixed_hash_seed() -> Iterator[None]:
    """Inside, processes start with a fixed hash seed: sets of strings keep their order, so that a resumed run replays.

    A PYTHONHASHSEED that the user has set is kept.
    """
    if HASH_SEED in os.environ:
        yield
        return
    os.environ[HASH_SEED] = "0"
    try:
        yield
    finally:
        del os.environ[HASH_SEED]


class EnvironmentPool:
    """Runs jobs in `environment.workers` processes, which start in the background."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._failed_starts = 0
        self._clock = RunningTime()
        self._past_orders: dict[int, list[Order]] = {}  # {conversation: the orders that its state comes from}
        self._seats = [self._started() for _ in range(environment.workers)]
        atexit.register(self.close)  # before multiprocessing's own exit, which would wait for the workers

    def run(self, jobs: Sequence[Job], beside: Beside | None = None) -> list[list[Reply]]:
        """The replies to each job's orders, in their order; meanwhile `beside` is attended to.

        Raises:
            EnvironmentFailure: workers cannot start.
        """
        for number, seat in enumerate(self._seats):  # left by a run that was interrupted
            if seat.running is not None:
                self._replace(number)
        waiting = deque(Running(index=index, job=job, left_s=job.left_s) for index, job in enumerate(jobs))
        finished: dict[int, list[Reply]] = {}
        self._clock.since_last()  # the time before is not counted
        while len(finished) < len(jobs):
            for number in range(len(self._seats)):
                while self._has_begun(number, waiting):
                    self._send_next(number, finished)
            for number in self._awake(beside):
                self._receive(number)
        return [finished[index] for index in range(len(jobs))]

    def forget(self, keys: Iterable[int]) -> None:
        """Drops the state of these conversations, which are over."""
        keys = list(keys)
        for key in keys:
            self._past_orders.pop(key, None)
        for seat in self._seats:
            known = [key for key in keys if key in seat.knows]
            seat.knows.difference_update(known)
            if known and seat.running is None:
                with contextlib.suppress(OSError):  # one that has died is replaced when it is next used
                    seat.pipe.send(known)

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Safe to call twice."""
        atexit.unregister(self.close)
        for seat in self._seats:
            kill(seat.process)
            seat.pipe.close()
        self._seats = []

    # -- one worker ----------------------------------------------------------------------------------------------------
    def _started(self) -> Seat:
        with fixed_hash_seed():
            process, pipe = spawned(serve, self._environment, os.getpid(), name="rlft-environment-worker")
        return Seat(process=process, pipe=pipe)

    def _has_begun(self, number: int, waiting: deque[Running]) -> bool:
        """Whether the worker waits for an order of its job; one without a job gets the first that it may take."""
        seat, size, keeps_state = self._seats[number], len(self._seats), self._environment.keeps_state
        if not seat.ready or seat.is_busy:
            return False
        if seat.running is not None:
            return True
        job = next((job for job in waiting if not keeps_state or job.job.key % size == number), None)
        if job is None:
            return False
        waiting.remove(job)
        seat.running = job
        key = job.job.key
        if keeps_state and key not in seat.knows:
            job.again = deque(self._past_orders.get(key, ()))
            seat.knows.add(key)
        return True

    def _send_next(self, number: int, finished: dict[int, list[Reply]]) -> None:
        """Sends the next order of the worker's job, or finishes the job if there is none."""
        seat = self._seats[number]
        running = seat.running
        assert running is not None, "a worker without a job gets no order"
        while not running.again and running.order is not None and running.left_s <= 0:
            running.replies.append(Reply(text=SPENT, cause=Cause.time))
        order = running.order
        if order is None:
            finished[running.index] = running.replies
            seat.running = None
            return
        seat.limit_s = self._environment.call_timeout
        if not running.again:
            seat.limit_s = min(seat.limit_s, running.left_s)
        seat.left_s, seat.stopped_s = seat.limit_s + GRACE_S, 0.0
        try:
            seat.pipe.send((running.job.key, order, seat.limit_s))
            seat.is_busy = True
        except OSError:  # it died while idle, not because of the order: another worker gets the order
            self._replace(number, running)

    def _awake(self, beside: Beside | None) -> list[int]:
        """Waits for workers that have sent a message, have died or are out of time; returns their numbers."""
        active = [n for n, seat in enumerate(self._seats) if seat.is_busy or not seat.ready]
        if not active:
            return []
        seats = [self._seats[n] for n in active]
        left_s = min(seat.left_s for seat in seats)
        waited: list[Any] = [*(seat.pipe for seat in seats), *(seat.process.sentinel for seat in seats)]
        waited += [] if beside is None else [beside]
        readable = connection.wait(waited, timeout=max(0.0, min(left_s, TICK_S)))
        passed = self._clock.since_last()
        for seat in seats:
            if is_stopped(seat.process.pid or 0):
                seat.stopped_s += passed
            else:
                seat.left_s -= passed
                seat.stopped_s = 0.0
        if beside is not None and beside in readable:
            beside.attend()
        return [
            n
            for n, seat in zip(active, seats, strict=True)
            if seat.pipe in readable
            or seat.left_s <= 0
            or seat.stopped_s > STOPPED_LIMIT_S
            or not seat.process.is_alive()
        ]

    def _receive(self, number: int) -> None:
        seat = self._seats[number]
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            if seat.pipe.poll():
                message = seat.pipe.recv()
                if seat.ready:
                    seat.is_busy = False
                    self._take(seat, message)
                elif message == READY:
                    seat.ready, self._failed_starts = True, 0
                else:
                    raise EnvironmentFailure(f"environment: cannot be started in its workers ({message}); repair it")
                return
        self._bury(number)

    def _take(self, seat: Seat, reply: Reply) -> None:
        """Adds a reply to the worker's job; a reply to a repeated order is dropped."""
        running = seat.running
        assert running is not None, "a busy worker has a job"
        order = running.order
        assert order is not None, "a reply is to an order"
        if running.again:
            running.again.popleft()
            return
        if self._environment.keeps_state and reply.cause is not Cause.time:
            self._past_orders.setdefault(running.job.key, []).append(order)
        running.replies.append(reply)
        running.left_s -= reply.seconds

    def _bury(self, number: int) -> None:
        """Replaces a worker that has died or is out of time; the reply to its order says what happened."""
        seat = self._seats[number]
        late = seat.process.is_alive()
        running = seat.running
        was_repeating = running is not None and bool(running.again)
        self._replace(number, running)
        if running is None:
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                what = "took too long to start" if late else f"{how_it_ended(seat.process.exitcode)} before they began"
                raise EnvironmentFailure(f"environment: {MAX_FAILED_STARTS} workers in a row {what}; see their output")
            return
        if late and seat.stopped_s > STOPPED_LIMIT_S:  # somebody has stopped it, so that no tool is to blame
            return
        text = out_of_time(seat.limit_s) if late else f"Error: the tool's process {how_it_ended(seat.process.exitcode)}"
        cause = Cause.time if late else Cause.died
        if was_repeating:  # an order that succeeded before fails now: the state of the environment is lost
            running.again.clear()
            self._past_orders.pop(running.job.key, None)
        running.replies.append(Reply(text=text, cause=cause, seconds=seat.limit_s if late else 0.0))
        running.left_s -= running.replies[-1].seconds

    def _replace(self, number: int, running: Running | None = None) -> None:
        """Puts a new worker in the place of this one; it continues the job."""
        old = self._seats[number]
        kill(old.process)
        old.pipe.close()
        self._seats[number] = seat = self._started()
        if running is not None:
            seat.running = running
            if self._environment.keeps_state:
                running.again = deque(self._past_orders.get(running.job.key, ()))
                seat.knows.add(running.job.key)
