"""Passes requests from the server's thread to the one that samples, and samples those of a tick in few engine calls.

Everything that uses the tokenizer or the engine happens in the thread that samples: neither may be used by two threads.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rlft.environment.endpoint.bodies import Body, Refusal
from rlft.generation.engine import Generator, TokenCallback
from rlft.types import Group, NextTurn, Prompt, Sampling

TICK_S = 0.01
"""How long a request waits for others to be sampled with it: short in comparison with sampling."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """A waiting request.

    Attributes:
        key: the secret with which it came, which says whose request it is.
        body: its body.
        on_text: called by the thread that samples with pieces of the reply's text, before the reply.
        reply: becomes the body of the reply, or a Refusal. The server cancels it when the client has disconnected.
    """

    key: str
    body: Body
    on_text: Callable[[str], None] | None = None
    reply: Future[dict[str, Any]] = field(default_factory=Future)


class Inbox:
    """Requests that wait for the thread that samples. `fileno` can be read as long as requests wait."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._bell, self._button = os.pipe()  # the bell can be read once the button was written to
        os.set_blocking(self._bell, False)
        os.set_blocking(self._button, False)
        self._closed = False
        self._lock = threading.Lock()  # else a late request could write to another file of the same number

    def fileno(self) -> int:
        return self._bell

    def put(self, request: Request) -> None:
        """Adds a request; any thread may call it."""
        with self._lock:
            if self._closed:
                request.reply.set_exception(ending())
                return
            self._waiting.put(request)
            self._ring()

    def take(self, *, wait_s: float = 0.0, most: int | None = None) -> list[Request]:
        """The requests of a tick whose clients still wait; empty if none came within `wait_s` seconds.

        Args:
            wait_s: seconds to wait for the first request.
            most: the number of requests that can come at all: after that many it does not wait for more.
        """
        taken: list[Request] = []
        patience = wait_s
        while most is None or len(taken) < most:
            try:
                taken.append(self._waiting.get(timeout=patience) if patience > 0 else self._waiting.get_nowait())
            except queue.Empty:
                break
            patience = TICK_S
        with contextlib.suppress(BlockingIOError):  # once it is empty
            while os.read(self._bell, 4096):
                pass
        if not self._waiting.empty():
            self._ring()
        return [request for request in taken if request.reply.set_running_or_notify_cancel()]

    def close(self) -> None:
        """Refuses all waiting and later requests: nobody samples any more. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request in self.take():
                request.reply.set_exception(ending())
            os.close(self._button)
            os.close(self._bell)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the bell can be read
            os.write(self._button, b".")


def ending() -> Refusal:
    return Refusal(503, "the server is ending; ask another one", "ending")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a request needs from the engine.

    Attributes:
        prompt: the prompt.
        n: number of completions.
        seed: seed of the first completion.
        sampling: how they are sampled, and how many tokens they may have.
        turn: number of the turn in its conversation (`NextTurn`).
        first_seed: seed of the conversation's first turn (`NextTurn`).
    """

    prompt: Prompt
    n: int
    seed: int
    sampling: Sampling
    turn: int = 0
    first_seed: int = 0


def drawn(
    generator: Generator, draws: Sequence[Draw], on_token: Mapping[int, Callable[[int], None]] | None = None
) -> list[Group]:
    """The completions of each draw, with one call of the engine for all draws that are sampled alike.

    Args:
        generator: the engine's.
        draws: what to sample.
        on_token: {index of a draw of one completion: called with each of its tokens}, if the engine reports tokens.
    """
    alike: dict[tuple[int, Sampling], list[int]] = {}
    for index, draw in enumerate(draws):
        alike.setdefault((draw.n, replace(draw.sampling, max_tokens=0)), []).append(index)
    groups: dict[int, Group] = {}
    for (n, sampling), indices in alike.items():
        prompts = [
            replace(
                draws[i].prompt,
                next_turn=NextTurn(
                    turn=draws[i].turn, seed=draws[i].first_seed, max_tokens=draws[i].sampling.max_tokens
                ),
            )
            for i in indices
        ]
        longest = max(draws[i].sampling.max_tokens for i in indices)
        if n == 1 and on_token:
            generator.token_callback = _teller([on_token.get(i) for i in indices])
        try:
            seeds = [draws[i].seed for i in indices]
            answers = generator.sample(prompts, n, seeds, replace(sampling, max_tokens=longest))
        finally:
            generator.token_callback = None
        groups |= dict(zip(indices, answers, strict=True))
    return [groups[index] for index in range(len(draws))]


def _teller(listeners: Sequence[Callable[[int], None] | None]) -> TokenCallback:
    """Calls the listener of the row, if it has one."""

    def tell(row: int, token: int) -> None:
        if (listener := listeners[row]) is not None:
            listener(token)

    return tell
