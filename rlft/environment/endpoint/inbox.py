"""Requests on their way from the server's thread to the one that samples, and all of a tick as few calls of an engine.

Everything that touches the tokenizer or the engine happens in the thread that samples: neither may be used by two.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rlft.environment.endpoint.bodies import Body, Refusal
from rlft.types import Generator, Group, Ongoing, Prompt, Sampling, SaysTokens

TICK_S = 0.01
"""How long a request waits for others that are sampled with it: little beside what sampling takes."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """A request that waits.

    Args:
        key: the secret by which it came: whose it is.
        reply: becomes the body of the reply, or a Refusal. Cancelled by the server where the client has gone.
        heard: called with the text of the reply in pieces, before the reply; by whom, is up to the one that samples.
    """

    key: str
    body: Body
    heard: Callable[[str], None] | None = None
    reply: Future[dict[str, Any]] = field(default_factory=Future)


class Inbox:
    """Requests that wait for the thread that samples. `fileno` is of a bell that rings as long as some do."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._bell, self._button = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._button, False)
        self._closed = False
        self._lock = threading.Lock()  # else a late request could ring a bell that is by now another file

    def fileno(self) -> int:
        return self._bell

    def put(self, request: Request) -> None:
        """From any thread."""
        with self._lock:
            if self._closed:
                request.reply.set_exception(ending())
                return
            self._waiting.put(request)
            self._ring()

    def take(self, *, wait_s: float = 0.0, most: int | None = None) -> list[Request]:
        """The requests of a tick that somebody still waits for; empty if none came within `wait_s` seconds.

        most: so many can come at all, and nobody is waited for behind the last of them.
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
        """Refuses what waits: nobody samples any more. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request in self.take():
                request.reply.set_exception(ending())
            os.close(self._button)
            os.close(self._bell)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it rings
            os.write(self._button, b".")


def ending() -> Refusal:
    return Refusal(503, "the server is ending; ask another one", "ending")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a request asks of the engine: n completions of a prompt, the first by `seed`, at most `sampling.max_tokens`.

    turn, first_seed: where the conversation stands (`Ongoing`).
    """

    prompt: Prompt
    n: int
    seed: int
    sampling: Sampling
    turn: int = 0
    first_seed: int = 0


def drawn(
    generator: Generator, draws: Sequence[Draw], heard: Mapping[int, Callable[[int], None]] | None = None
) -> list[Group]:
    """The completions of each, with one call of the engine for all that are drawn alike.

    heard: {index of a draw of one completion: called with its tokens as they are sampled}, where the engine says them.
    """
    alike: dict[tuple[int, Sampling], list[int]] = {}
    for index, draw in enumerate(draws):
        alike.setdefault((draw.n, replace(draw.sampling, max_tokens=0)), []).append(index)
    groups: dict[int, Group] = {}
    for (n, sampling), indices in alike.items():
        prompts = [
            replace(
                draws[i].prompt,
                ongoing=Ongoing(turn=draws[i].turn, seed=draws[i].first_seed, max_tokens=draws[i].sampling.max_tokens),
            )
            for i in indices
        ]
        longest = max(draws[i].sampling.max_tokens for i in indices)
        with _listening(generator, [(heard or {}).get(i) for i in indices] if n == 1 else ()):
            seeds = [draws[i].seed for i in indices]
            answers = generator.sample(prompts, n, seeds, replace(sampling, max_tokens=longest))
        groups |= dict(zip(indices, answers, strict=True))
    return [groups[index] for index in range(len(draws))]


@contextlib.contextmanager
def _listening(generator: Generator, heard: Sequence[Callable[[int], None] | None]) -> Iterator[None]:
    """Inside, an engine that says tokens calls these functions, one for each prompt."""
    if not any(heard) or not isinstance(generator, SaysTokens):
        yield
        return

    def say(row: int, token: int) -> None:
        if (listener := heard[row]) is not None:
            listener(token)

    generator.heard = say
    try:
        yield
    finally:
        generator.heard = None
