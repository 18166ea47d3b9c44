"""What runs in a worker process: the environment's side of conversations, with a time limit for each order.

A worker does not import torch. It dies with its parent, whatever ends the parent, and so does what tools have started.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any, cast

from rlft.environment.protocol import Calls, Cause, Environment, Malformed, Moves, Play
from rlft.reward.workers.worker import Alarm, OutOfTime, place_of
from rlft.system.process.child import READY

MAX_ERROR = 500
"""The most characters of an error that the policy reads."""


class Kind(StrEnum):
    reset = "reset"
    call = "call"
    step = "step"
    reward = "reward"
    play = "play"  # a whole conversation, which an agent holds by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a conversation needs from its environment.

    Attributes:
        kind: what to do.
        seed: seed of `random` (and of numpy, where it is loaded) meanwhile.
        name: name of the tool that is called.
        values: the tool's arguments, the row of a reset, or what an agent plays with.
        text: text of the turn that a game answers.
    """

    kind: Kind
    seed: int
    name: str = ""
    values: Mapping[str, Any] | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to an order.

    Attributes:
        text: text for the policy; if there is a cause, that of an error.
        cause: why the order failed; None if it did not.
        reward: reward of a turn or of the conversation.
        done: whether the game is over.
        seconds: how long it took.
    """

    text: str = ""
    cause: Cause | None = None
    reward: float | None = None
    done: bool = False
    seconds: float = 0.0


def serve(connection: Connection, environment: Environment) -> None:
    """Runs in a worker process: obeys orders until the parent closes its end of the connection or dies.

    A message is (conversation, order, seconds), or a list of conversations that are over, which gets no reply.
    """
    own_pid = os.getpid()
    plays: dict[int, Play] = {}
    try:
        environment.start()
        connection.send(READY)
    except Exception as error:  # raised by the user's modules: the pool reports it, so the worker must not die of it
        connection.send(f"{type(error).__name__}: {error}{place_of(error)}")
    while True:
        message = connection.recv()
        if isinstance(message, list):
            for key in message:
                plays.pop(key, None)
            continue
        key, order, limit_s = message
        reply = obeyed(plays, key, order, environment, limit_s)
        if os.getpid() != own_pid:  # a tool has forked, and this is its child
            os._exit(0)
        connection.send(reply)


def obeyed(plays: dict[int, Play], key: int, order: Order, environment: Environment, limit_s: float) -> Reply:
    """The reply to an order; whatever the environment's code does, the reply has a text for the policy."""
    start, alarm = time.monotonic(), Alarm()
    reply: Reply | None = None
    try:
        with alarm.set(limit_s):
            seeded(order.seed)
            if order.kind is Kind.reset or key not in plays:
                plays[key] = environment.make()
            reply = _done(plays[key], order, environment.max_answer)
    except OutOfTime:
        pass
    except Malformed as error:
        reply = Reply(text=f"Error: {error}"[:MAX_ERROR], cause=Cause.malformed)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, which a tool may raise
        reply = Reply(text=_error_text(error), cause=Cause.raised)
    if alarm.rang or reply is None:
        reply = Reply(text=out_of_time(limit_s), cause=Cause.time)
    return Reply(
        text=reply.text,
        cause=reply.cause,
        reward=reply.reward,
        done=reply.done,
        seconds=time.monotonic() - start,
    )


def _done(play: Play, order: Order, max_answer: int) -> Reply:
    values = order.values or {}
    match order.kind:
        case Kind.reset:
            text = play.reset(values, order.seed)
            return Reply(text="" if text is None else answered(text, max_answer))
        case Kind.call:
            return Reply(text=answered(cast(Calls, play).call(order.name, values), max_answer))
        case Kind.step:
            step = cast(Moves, play).step(order.text)
            text = answered(step.observation, max_answer)
            return Reply(text=text, reward=finite(step.reward), done=step.done)
        case Kind.play:
            return Reply(reward=finite(play.play(**values)))  # type: ignore[attr-defined]  # endpoint.agents.Agent
        case Kind.reward:
            return Reply(reward=finite(cast(Calls, play).reward()))


def answered(value: Any, max_answer: int) -> str:
    """What a tool returned, as text of at most `max_answer` characters, with a note if it was cut.

    >>> answered({"sum": 5}, 100), answered("abcdef", 4), answered(None, 4)
    ('{"sum": 5}', 'abcd [cut: 2 more characters]', '')
    """
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    more = len(text) - max_answer
    text = text if more <= 0 else f"{text[:max_answer]} [cut: {more} more characters]"
    return text.encode("utf-8", "replace").decode()


def finite(reward: Any) -> float | None:
    """The reward as a float.

    Raises:
        ValueError: it is not a finite number.
    """
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
    return f"Error: {type(error).__name__}: {text}"[:MAX_ERROR].encode("utf-8", "replace").decode()
