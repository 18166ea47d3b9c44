"""The score that a reward server gives: a model or a sandbox that runs elsewhere, requested over HTTP.

Each request is about completions of one prompt; its lists have an entry for each completion, in order:

    POST <url>
    {"ids": ["gsm8k-17", ...],                                              the prompt's id
     "prompts": [[{"role": "user", "content": "What is 8 + 10?"}], ...],    its chat messages
     "answers": ["18", ...],                                                its reference answer, or ""
     "completions": ["It is 18.", ...],                                     what the model said
     "metadata": [{...}, ...]}                                              with send_metadata=true only

    200 {"scores": [1.0, ...]}      a finite number for each completion

A server may answer 429 or 503 with `Retry-After: <seconds>` to get the request again later.

The reward `judge` sends its requests as this one does (ServerKeys). They run on an event loop in a thread of its own,
one loop in a process. So time limits hold exactly, whatever the server does (a library's own limits are for each read,
and a slowly sending server never exceeds them), connections are kept from group to group, and the scorer's alarm, which
rings in the main thread, interrupts only the waiting caller.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlft.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlft.system.process.running_time import TICK_S, RunningTime
from rlft.types import Group, Unscored, UserError, counted, require

if TYPE_CHECKING:
    from httpx2 import AsyncClient

SHARE_FOR_REQUESTS = 0.9  # of a group's time; the rest is for reporting before the scorer's limit ends the reward
MAX_SHOWN_CHARS = 200
TRY_AGAIN = (408, 429)

Read = Callable[[Any, int], list[float]]
"""(a server's answer as JSON, number of completions) -> scores; ValueError says what is wrong with the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is posted, and the indices, in their group, of the completions to which the answer's scores belong."""

    body: Mapping[str, Any]
    completions: Sequence[int]


class NoScores(Exception):
    """An attempt failed; another would fail too if `final`, and is to wait for `wait_s` seconds."""

    def __init__(self, problem: str, *, final: bool = False, wait_s: float = 0.0) -> None:
        self.final, self.wait_s = final, wait_s
        super().__init__(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """The config keys of every reward that sends requests to a server.

    The pause before another attempt is shortened by up to a half at random; a longer Retry-After has priority.
    """

    url: str
    token_variable: str | None
    headers: Mapping[str, str]
    timeout: PositiveFloat
    group_timeout: PositiveFloat
    retries: NonNegativeInt
    backoff: NonNegativeFloat
    concurrency: PositiveInt
    try_first: bool = True

    def __post_init__(self) -> None:
        check_url(self.url)
        if self.token_variable is not None:
            read_token(self.token_variable)
        has_token = any(name.lower() == "authorization" for name in self.headers)
        problem = "must not hold Authorization: configs are saved with every run"
        remedy = "put the token in an environment variable and name it in token_variable"
        require(not has_token, "headers", problem, remedy=remedy)
        limit = f"{self.group_timeout:g} s a group"
        problem = f"exceeds the {self.deadline_s:g} s for requests that scoring.timeout leaves ({limit})"
        remedy = f"set scoring.timeout={math.ceil(self.timeout / SHARE_FOR_REQUESTS)} or more, or a shorter timeout"
        require(self.timeout <= self.deadline_s, "timeout", problem, got=f"{self.timeout:g}", remedy=remedy)

    @property
    def deadline_s(self) -> float:
        """Seconds after which the group's scores have come or are given up."""
        return SHARE_FOR_REQUESTS * self.group_timeout

    def start(self) -> None:
        """Loads the HTTP library and the certificates before any time limit runs."""
        self._client()

    def ask(self, requests: Sequence[Request], read: Read) -> list[float]:
        """The scores of the group's completions, each in one of the requests. Unscored: some completions got none."""
        answers = asyncio.run_coroutine_threadsafe(self._ask_all(requests, read), _event_loop()).result()
        scores: dict[int, float | None] = {}
        for request, answer in zip(requests, answers, strict=True):
            received = [None] * len(request.completions) if isinstance(answer, str) else answer
            scores |= zip(request.completions, received, strict=True)
        problems = [answer for answer in answers if isinstance(answer, str)]
        ordered = tuple(scores[index] for index in sorted(scores))
        if problems:
            whole = len(problems) == len(requests)
            raise Unscored(f"got no scores from {shown_url(self.url)}: {problems[0]},", None if whole else ordered)
        return [score for score in ordered if score is not None]

    async def _ask_all(self, requests: Sequence[Request], read: Read) -> list[list[float] | str]:
        deadline = asyncio.get_running_loop().time() + self.deadline_s
        gate = asyncio.Semaphore(self.concurrency)
        ticking = asyncio.create_task(_tick())
        try:
            return await asyncio.gather(*(self._ask(request, read, gate, deadline) for request in requests))
        finally:
            ticking.cancel()

    async def _ask(self, request: Request, read: Read, gate: asyncio.Semaphore, end: float) -> list[float] | str:
        """The scores of one request, or why there are none; at the loop's time `end` at the latest."""
        clock = asyncio.get_running_loop().time
        async with gate:
            if clock() >= end:
                return f"its turn did not come within {self.deadline_s:g} s (concurrency={self.concurrency})"
            for attempt in range(1, self.retries + 2):
                limit = min(self.timeout, end - clock())
                try:
                    async with asyncio.timeout(limit):
                        return await self._attempt(request, read)
                except TimeoutError:
                    failure = NoScores(f"no answer within {limit:.3g} s")
                except NoScores as error:
                    failure = error
                pause = max(failure.wait_s, self.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
                if failure.final or attempt > self.retries:
                    return f"{failure} (attempt {attempt} of {self.retries + 1})"
                if clock() + pause >= end:
                    spent = f"{self.deadline_s:g} s that a group's requests may take leave no time for another"
                    return f"{failure} (attempt {attempt} of {self.retries + 1}; the {spent})"
                await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns")

    async def _attempt(self, request: Request, read: Read) -> list[float]:
        import httpx2

        try:
            response = await self._client().post(self.url, content=json.dumps(request.body, allow_nan=False))
        except httpx2.RequestError as error:
            raise NoScores(f"{type(error).__name__}: {error}") from error
        text = self._shown(response.text)
        status = response.status_code
        if not response.is_success:
            final = status < 500 and status not in TRY_AGAIN
            problem = f"it answered {status} {response.reason_phrase} {text}"
            # A date, which a server may give as well, is not heeded.
            wait = response.headers.get("Retry-After", "")
            raise NoScores(problem, final=final, wait_s=float(wait) if wait.isascii() and wait.isdigit() else 0.0)
        try:
            return read(response.json(), len(request.completions))
        except ValueError as error:
            what = "its answer is not JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
            raise NoScores(f"{what}, got {text}") from error

    def _client(self) -> AsyncClient:
        token = {} if self.token_variable is None else {"Authorization": f"Bearer {read_token(self.token_variable)}"}
        return _client((*self.headers.items(), *token.items()))

    def _shown(self, text: str) -> str:
        """The beginning of a server's answer, without the token, which some servers repeat."""
        if self.token_variable is not None:
            text = text.replace(read_token(self.token_variable), "...")
        return f"{text!r:.{MAX_SHOWN_CHARS}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Http(ServerKeys):
    """The server's score of each completion, unchanged."""

    batch_size: PositiveInt | None
    send_metadata: bool

    def __call__(self, group: Group) -> list[float]:
        indices = range(len(group.rollouts))
        size = self.batch_size or len(indices)
        batches = [indices[first : first + size] for first in indices[::size]]
        return self.ask([self._request(group, batch) for batch in batches], scores_in)

    def _request(self, group: Group, batch: Sequence[int]) -> Request:
        prompt, num = group.prompt, len(batch)
        body: dict[str, Any] = {
            "ids": [prompt.id] * num,
            "prompts": [[dict(message) for message in prompt.messages]] * num,
            "answers": [prompt.answer] * num,
            "completions": [group.rollouts[index].completion.text for index in batch],
        }
        if self.send_metadata:
            body["metadata"] = [dict(prompt.metadata)] * num
        return Request(body=body, completions=batch)


def check_url(url: str) -> None:
    """Refuses what is not an http(s) address, and an address that holds a password. Raises UserError."""
    example = "try http://localhost:8000/score"
    try:
        parts = urlsplit(url)
        printable = url.isprintable() and " " not in url
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and printable
    except ValueError:
        raise UserError("url", "is no address", got=url, remedy=example) from None
    problem = "must not hold a user name or password: configs are saved with every run"
    remedy = "put a token in an environment variable and name it in token_variable"
    require(parts.username is None and parts.password is None, "url", problem, remedy=remedy)
    require(is_valid, "url", "is no http:// or https:// address", got=url, remedy=example)


def shown_url(url: str) -> str:
    """The address without its query, which may hold a key.

    >>> shown_url("http://localhost:8000/score?key=1234")
    'http://localhost:8000/score'
    """
    return urlsplit(url)._replace(query="", fragment="").geturl()


def read_token(variable: str) -> str:
    """The token in an environment variable. UserError, without the token, if there is none that can be sent."""
    token = os.environ.get(variable, "").strip()
    if not token or not token.isascii() or not token.isprintable():
        problem = "names an environment variable that is not set" if not token else "holds no token in plain ASCII"
        raise UserError("token_variable", problem, got=variable, remedy=f"export {variable}=<the server's token>")
    return token


def scores_in(answer: Any, num_completions: int) -> list[float]:
    """The scores of `{"scores": [...]}`. ValueError unless it holds just a finite number for each completion."""
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        raise ValueError('its answer is not {"scores": [...]}')
    if len(scores) != num_completions:
        raise ValueError(f"it answered {counted(len(scores), 'score')} for {counted(num_completions, 'completion')}")
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
            raise ValueError(f"it answered {score!r:.80}, which is not a finite number")
    return [float(score) for score in scores]


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock runs only while the process runs, so that a SIGSTOP does not use up limits."""

    def __init__(self) -> None:
        self._running_time = RunningTime()
        super().__init__()

    def time(self) -> float:
        return self._running_time()


async def _tick() -> None:
    """Makes the loop read its clock regularly, which does not count long waits."""
    while True:
        await asyncio.sleep(TICK_S)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = _Loop()
    threading.Thread(target=loop.run_forever, name="rlft-reward-requests", daemon=True).start()
    return loop


@functools.cache
def _client(headers: tuple[tuple[str, str], ...]) -> AsyncClient:
    """The process's connections to all servers that get these headers; `concurrency` limits how many are open."""
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0)
    return httpx2.AsyncClient(headers={"Content-Type": "application/json"} | dict(headers), timeout=None, limits=limits)
