"""Where environments run: worker processes that may hang, crash or be killed, without harm to other conversations.

A conversation whose environment keeps state stays with one worker. Where that worker has to be replaced, the
conversation's earlier orders are repeated in the new one: an environment is a function of its orders and their seeds.
Make and use a pool in the thread that samples. A worker does not import torch, and sets a time limit for each order. It
dies with its parent, whatever ends the parent, and so does what tools have started.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

from rlft.environment.protocol import Cause, Checker, Environment, Malformed, Play
from rlft.reward.workers.worker import Alarm, OutOfTime, place_of
from rlft.system.process.child import GRACE_S, READY, Child, Children, Ended, Meanwhile, Work
from rlft.types import EnvironmentFailure, Schema, counted, well_formed

SPENT = "Error: the time for all calls is used up"
MAX_ERROR = 500  # the most characters of an error that the policy reads


Kind = Literal["reset", "call", "step", "reward", "play"]  # what a conversation's `Play` is to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a conversation needs from its environment."""

    kind: Kind
    seed: int  # seed of `random` (and of numpy, where it is loaded) meanwhile
    name: str = ""  # name of the tool that is called
    values: Mapping[str, Any] | None = None  # the tool's arguments, the row of a reset, or what an agent plays with
    text: str = ""  # text of the turn that a game answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to an order."""

    text: str = ""  # for the policy; if there is a cause, it is that of an error
    cause: Cause | None = None
    reward: float | None = None  # of a turn or of the conversation
    done: bool = False  # whether the game is over
    seconds: float = 0.0  # that it took


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """Orders of the conversation `key`, which are carried out one after the other, and the replies so far."""

    key: int
    orders: Sequence[Order]
    left_s: float  # seconds that they may still take together
    replies: list[Reply] = field(default_factory=list)


class EnvironmentWorker(Child):
    """A worker process; `knows` are the conversations whose state it has.

    Its hash seed is fixed: sets of strings keep their order, so that a resumed run replays. A PYTHONHASHSEED that the
    user has set is kept.
    """

    def __init__(self, environment: Environment, schemas: Sequence[Schema]) -> None:
        seed = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        super().__init__("rlft-environment-worker", f"{__name__}:serve", (environment, schemas), environment=seed)
        self.knows: set[int] = set()


class EnvironmentPool:
    """Runs jobs in `environment.workers` processes, which start in the background."""

    def __init__(self, environment: Environment, schemas: Sequence[Schema] | None = None) -> None:
        schemas = environment.schemas() if schemas is None else schemas
        Checker(schemas)  # refuses schemas that are none
        self._environment = environment
        self._past_orders: dict[int, list[Order]] = {}  # {conversation: the orders that its state comes from}
        self._workers = Children(
            lambda: EnvironmentWorker(environment, schemas),
            environment.workers,
            "workers",
            lambda text: EnvironmentFailure(f"environment: {text}"),
        )

    def run(self, jobs: Sequence[Job], meanwhile: Meanwhile | None = None) -> list[list[Reply]]:
        """The replies to each job's orders; `meanwhile` is done too. EnvironmentFailure: no worker starts."""
        for _ in self._workers.run(deque(jobs), self._carried_out, meanwhile, self._fits):
            pass
        return [job.replies for job in jobs]

    def _fits(self, job: Job, number: int) -> bool:
        return not self._environment.keeps_state or job.key % len(self._workers.all) == number

    def forget(self, keys: Iterable[int]) -> None:
        """Drops the state of these conversations, which are over."""
        keys = list(keys)
        for key in keys:
            self._past_orders.pop(key, None)
        for worker in self._workers.all:
            known = [key for key in keys if key in worker.knows]
            worker.knows.difference_update(known)
            if known and not worker.is_busy:
                with contextlib.suppress(OSError):  # one that has died is replaced when it is next used
                    worker.connection.send(known)

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Safe to call twice."""
        self._workers.close()

    def _carried_out(self, job: Job, number: int) -> Work:
        """Has a worker carry out a job; one that does not know the conversation first repeats its earlier orders."""
        keeps_state, is_known = self._environment.keeps_state, job.key in self._workers.all[number].knows
        again = deque[Order]() if is_known else self._past(job)
        while len(job.replies) < len(job.orders):
            if not again and job.left_s <= 0:
                job.replies.append(Reply(text=SPENT, cause=Cause.time))
                continue
            order, limit_s = job.orders[len(job.replies)], self._environment.call_timeout
            order, limit_s = (again[0], limit_s) if again else (order, min(limit_s, job.left_s))
            reply = yield pickle.dumps((job.key, order, limit_s)), limit_s + GRACE_S
            if reply is None:
                again = self._past(job)
                continue
            if isinstance(reply, Ended):
                if again:  # an order that succeeded before fails now: the state of the environment is lost
                    self._past_orders.pop(job.key, None)
                text = out_of_time(limit_s) if reply.is_late else f"Error: the tool's process {reply.how}"
                cause, seconds = (Cause.time, limit_s) if reply.is_late else (Cause.died, 0.0)
                reply, again = Reply(text=text, cause=cause, seconds=seconds), self._past(job)
            else:
                self._workers.all[number].knows.add(job.key)
                if again:
                    again.popleft()
                    continue
                if keeps_state and reply.cause is not Cause.time:
                    self._past_orders.setdefault(job.key, []).append(order)
            job.replies.append(reply)
            job.left_s -= reply.seconds

    def _past(self, job: Job) -> deque[Order]:
        """The earlier orders of the conversation."""
        return deque(self._past_orders.get(job.key, ()))


def first_reply(environment: Environment, kind: Kind, name: str = "") -> Reply:
    """The reply to an order in a worker of its own, or why none starts: how an environment is tried before a run.

    Its tools are not known yet, so no schema is checked.
    """
    pool = EnvironmentPool(replace(environment, workers=1), schemas=())
    try:
        order = Order(kind=kind, seed=0, name=name, values={})
        [[reply]] = pool.run([Job(key=0, orders=[order], left_s=environment.timeout)])
        return reply
    except EnvironmentFailure as failure:
        return Reply(text=str(failure), cause=Cause.died)
    finally:
        pool.close()


# -- in a worker -------------------------------------------------------------------------------------------------------
def serve(connection: Connection, environment: Environment, schemas: Sequence[Schema]) -> None:
    """Runs in a worker process: obeys orders until the parent closes its end of the connection or dies.

    A message is (conversation, order, seconds), or a list of conversations that are over, which gets no reply.
    """
    own_pid = os.getpid()
    plays: dict[int, Play] = {}
    checker = None
    try:
        checker = Checker(schemas) if schemas else None
        environment.start()
        connection.send(READY)
    except Exception as error:  # raised by the user's modules: the pool reports it, so the worker must not die of it
        connection.send(f"{type(error).__name__}: {error}{place_of(error)}")
    while True:
        message = connection.recv()
        if isinstance(message, list):
            for play in (plays.pop(key) for key in message if key in plays):
                play.close()
            continue
        key, order, limit_s = message
        reply = obeyed(plays, key, order, environment, limit_s, checker)
        if os.getpid() != own_pid:  # a tool has forked, and this is its child
            os._exit(0)
        connection.send(reply)


def obeyed(
    plays: dict[int, Play],
    key: int,
    order: Order,
    environment: Environment,
    limit_s: float,
    checker: Checker | None = None,
) -> Reply:
    """The reply to an order; whatever the environment's code does, the reply has a text for the policy."""
    start, alarm = time.monotonic(), Alarm()
    late = reply = Reply(text=out_of_time(limit_s), cause=Cause.time)
    try:
        with alarm.set(limit_s):
            seeded(order.seed)
            if order.kind == "reset" or key not in plays:
                plays[key] = environment.make()
            if checker is not None and order.kind == "call":
                order = replace(order, values=checker.checked(order.name, order.values or {}))
            reply = _done(plays[key], order, environment.max_answer)
    except OutOfTime:
        pass
    except Malformed as error:
        reply = Reply(text=f"Error: {error}"[:MAX_ERROR], cause=Cause.malformed)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, which a tool may raise
        reply = Reply(text=_error_text(error), cause=Cause.raised)
    return replace(late if alarm.rang else reply, seconds=time.monotonic() - start)


def _done(play: Play, order: Order, max_answer: int) -> Reply:
    values = order.values or {}
    match order.kind:
        case "reset":
            return Reply(text=answered(play.reset(values, order.seed), max_answer))
        case "call":
            return Reply(text=answered(play.call(order.name, values), max_answer))
        case "step":
            step = play.step(order.text)
            text = answered(step.observation, max_answer)
            return Reply(text=text, reward=finite(step.reward), done=step.done)
        case "play":
            return Reply(reward=finite(play.play(**values)))
        case "reward":
            return Reply(reward=finite(play.reward()))


def answered(value: Any, max_answer: int) -> str:
    """What a tool returned, as text of at most `max_answer` characters, with a note if it was cut.

    >>> answered({"sum": 5}, 100), answered("abcdef", 4), answered(None, 4)
    ('{"sum": 5}', 'abcd [cut: 2 more characters]', '')
    """
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    more = len(text) - max_answer
    text = text if more <= 0 else f"{text[:max_answer]} [cut: {counted(more, 'more character')}]"
    return well_formed(text)


def finite(reward: Any) -> float | None:
    """The reward as a float. Raises ValueError unless it is a finite number."""
    if reward is None:
        return None
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}, and no finite number")
    return value


def seeded(seed: int) -> None:
    """Seeds the global generators of random numbers, those of numpy only if it is loaded."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def out_of_time(limit_s: float) -> str:
    return f"Error: no answer within {limit_s:.3g} s"


def _error_text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # an exception whose text cannot be made
        text = ""
    return well_formed(f"Error: {type(error).__name__}: {text}"[:MAX_ERROR])
