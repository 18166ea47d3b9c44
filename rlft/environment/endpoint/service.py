"""From requests to the engine: tokens of their messages, the `Inbox` in which they wait, and what answers them.

Everything that uses the tokenizer or the engine happens in the thread that samples: neither may be used by two threads.
`Service` answers the requests of `rlft serve`, which are independent: each holds its whole conversation.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from multiprocessing.connection import wait
from typing import Any, Literal

from rlft.environment.calls import CallTemplate, Syntax, reader_of, shown_by, written
from rlft.environment.endpoint import bodies
from rlft.environment.endpoint.bodies import Chat, Refusal, Said, Tokenize, unfit
from rlft.environment.turn_template import OPENING, TurnTemplate
from rlft.generation.engine import Generator
from rlft.generation.stops import ShownText, plain_decoder
from rlft.system.seeds import derive
from rlft.tokens.messages import unread
from rlft.tokens.text import RunTokenizer
from rlft.types import Completion, Group, NextTurn, Prompt, Sampling, UserError, counted, well_formed

REMEMBERED = 64
"""Number of tool sets that are cached: finding out how a template writes their calls takes a dozen renderings."""

Message = dict[str, Any]


class Speech:
    """What conversations look like to one model; used by one thread only.

    The policy writes calls in this syntax (configs/environment/base/limits.yaml); `key` is its key, for refusals.
    """

    def __init__(self, tokenizer: RunTokenizer, syntax: Syntax, key: str) -> None:
        self.tokenizer, self._key = tokenizer, key
        self._syntax: Syntax = syntax
        self._cached = lru_cache(maxsize=REMEMBERED)(self._make)

    def of(self, body: Chat | Tokenize) -> Spoken:
        """The speech with this request's tools and template variables. Refusal: the template does not take them."""
        return self._cached(json.dumps([body.shown_tools, body.variables]))

    def _make(self, shown: str) -> Spoken:
        tools, variables = json.loads(shown)
        tokenizer = self.tokenizer
        for section, named in variables.items():
            try:
                tokenizer = tokenizer.with_variables(named, section)
            except UserError as error:
                raise unfit(error.key, f"{error.problem}; {error.remedy}", "unsupported_value") from None
        try:
            return Spoken(tokenizer, self._syntax, tools, self._key)
        except UserError as error:
            remedy = error.remedy
            if tools and self._syntax == "template":
                remedy = f"set {self._key}=json or xml, or {remedy}"
            raise Refusal(400, f"{error.key}: {error.problem}; {remedy}", "unsupported_template") from None


class Spoken:
    """What conversations with these tools look like to one model. UserError: its chat template cannot hold them."""

    def __init__(self, tokenizer: RunTokenizer, syntax: Syntax, tools: Sequence[Mapping[str, Any]], key: str) -> None:
        self._tokenizer, self._key, self._calls = tokenizer, key, CallTemplate(tokenizer, tools, OPENING)
        self._syntax: Syntax = syntax
        self._by_template = syntax == "template"
        self._shown = shown_by(syntax, self._calls)
        roles: set[Literal["tool", "user"]] = {"user", "tool"} if tools and self._by_template else {"user"}
        self._template = TurnTemplate(tokenizer, roles, tools=self._shown.tools, may_rewrite=roles)
        self._reader = reader_of(syntax, self._calls) if tools else None

    def prompt(self, messages: Sequence[Message], *, start: bool = True) -> tuple[int, ...]:
        """The tokens of a whole conversation; with `start`, up to the start of the policy's next turn.

        Refusal: the chat template does not accept these messages, or leaves out a part of what they say.
        """
        shown = self._shown.messages(list(self._plain(messages)))
        return self._taken(self._template.prompt, shown, start=start, check=partial(self._check, shown))

    def has_suffix(self, messages: Sequence[Message]) -> bool:
        """Whether earlier turns stay as they were when these messages follow; else the policy reads it all again."""
        roles = {message["role"] for message in self._plain(messages)}
        return roles in ({"user"}, {"tool"}) and not roles & self._template.rewriting

    def suffix(self, sampled: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between two turns of the policy, where `has_suffix` holds. Refusal: as in `prompt`."""
        answers = list(self._plain(messages))
        calls = [{"id": each.get("tool_call_id"), "function": {"name": "tool"}} for each in answers]
        by_tools = {"tool_calls": calls} if answers[0]["role"] == "tool" else {}
        whole = [*OPENING, {"role": "assistant", "content": "answer", **by_tools}, *answers]
        said = self._template.spoken(sampled)  # it has the names of the tools that answer
        check = partial(self._check, whole, before=said, start=2)
        return self._taken(self._template.suffix, sampled, answers, check=check)

    def _taken(self, made: Callable[..., tuple[int, ...]], *what: Any, **more: Any) -> tuple[int, ...]:
        """What the chat template makes of messages. Refusal: it does not take them."""
        try:
            return made(*what, **more)
        except Refusal:
            raise
        except Exception as error:  # a template is a program of somebody else's: it may raise anything
            problem = f"messages: the chat template does not take them ({error})"
            raise Refusal(400, problem, "invalid_messages", param="messages") from None

    def _check(self, messages: Sequence[Message], text: str, *, before: str = "", start: int = 0) -> None:
        for missing in unread(self._tokenizer, messages, before + text, self._shown.tools, start=start):
            by_hand = f"leave it out, or serve with {self._key}=json or xml"
            is_calls = missing.index is None or messages[missing.index].get("tool_calls")
            remedy = by_hand if is_calls else "leave it out, or say it in a user's message"
            got = f" ({missing.said[:60]!r})" if missing.said else ""
            problem = f"the model's chat template leaves out {missing.what}{got}, so the policy would never read it"
            raise unfit("tools" if missing.index is None else "messages", f"{problem}; {remedy}", "left_out")

    def said(self, ids: Sequence[int], text: str) -> Said:
        """A turn as a message; `text` is the engine's text of it. Calls without a name stay text."""
        if self._reader is None:
            return Said(content=text, calls=())
        spoken = self._template.spoken(ids)
        calls = tuple(call for call in self._reader.calls(spoken) if call.name)
        return Said(content=self._reader.before(spoken).strip() if calls else text, calls=calls)

    def _plain(self, messages: Sequence[Message]) -> Iterator[Message]:
        """The messages as the template takes them: without messages of tools where it cannot show tools."""
        if self._by_template:
            yield from messages
            return
        for are_answers, neighbours in groupby(messages, lambda message: message["role"] == "tool"):
            if are_answers:
                yield {"role": "user", "content": "\n".join(message["content"] for message in neighbours)}
                continue
            for message in neighbours:
                others = {field: value for field, value in message.items() if field != "tool_calls"}
                yield {**others, "content": self._with_calls(message)} if message.get("tool_calls") else message

    def _with_calls(self, message: Message) -> str:
        texts = [message["content"]] if message["content"] else []
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            call_arguments = arguments if isinstance(arguments, dict) else {"": arguments}
            texts.append(written(self._syntax, self._calls, name, call_arguments))
        return "\n".join(texts)


TICK_S = 0.01  # how long a request waits for others to be sampled with it: short in comparison with sampling
ID = "endpoint"  # the id of prompts that come with requests


# -- waiting -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """A waiting request."""

    key: str  # the secret that says whose it is
    body: bodies.Body
    on_text: Callable[[str], None] | None = None  # the sampling thread calls it with pieces of the text, then replies
    # Becomes the body of the reply, or a Refusal; the server cancels it when the client has disconnected.
    reply: Future[dict[str, Any]] = field(default_factory=Future)


class Inbox:
    """Requests that wait for the thread that samples. `fileno` can be read as long as requests wait."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._reading, self._writing = os.pipe()  # which holds a byte for each of them
        os.set_blocking(self._writing, False)
        self._closed = False
        self._lock = threading.Lock()  # else a late request could write to another file of the same number

    def fileno(self) -> int:
        return self._reading

    def put(self, request: Request) -> None:
        """Adds a request; any thread may call it."""
        with self._lock:
            if self._closed:
                request.reply.set_exception(_ending())
                return
            self._waiting.append(request)
            try:
                os.write(self._writing, b".")
            except BlockingIOError:  # the pipe is full; what waits has a byte each, so the last is this request
                problem = f"{counted(len(self._waiting) - 1, 'request')} wait; ask again later"
                self._waiting.pop().reply.set_exception(Refusal(429, problem, "too_many_requests", again=True))

    def take(self, *, wait_s: float = 0.0, most: int | None = None) -> list[Request]:
        """The requests of a tick whose clients still wait, after at most `wait_s` seconds, or `most` requests."""
        taken: list[Request] = []
        while len(taken) != most and wait([self._reading], TICK_S if taken else wait_s):
            os.read(self._reading, 1)
            taken.append(self._waiting.popleft())
        return [request for request in taken if request.reply.set_running_or_notify_cancel()]

    def close(self) -> None:
        """Refuses all waiting and later requests: nobody samples any more. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request in self.take():
                request.reply.set_exception(_ending())
            os.close(self._writing)
            os.close(self._reading)


def _ending() -> bodies.Refusal:
    return bodies.Refusal(503, "the server is ending; ask another one", "ending")


# -- sampling ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a request needs from the engine: n completions of a prompt with its `next_turn`; the first has this seed."""

    prompt: Prompt
    n: int
    seed: int
    sampling: Sampling


def drawn(
    generator: Generator, draws: Sequence[Draw], on_token: Mapping[int, Callable[[int], None]] | None = None
) -> list[Group]:
    """The completions of each draw, with one call of the engine for all draws that are sampled alike.

    `on_token` is {index of a draw of one completion: called with each of its tokens}, if the engine reports tokens.
    """
    alike: dict[tuple[int, Sampling], list[int]] = {}
    for index, draw in enumerate(draws):
        alike.setdefault((draw.n, replace(draw.sampling, max_tokens=0)), []).append(index)
    groups: dict[int, Group] = {}
    for (n, sampling), indices in alike.items():
        if n == 1 and on_token:
            generator.token_callback = partial(_tell, [on_token.get(i) for i in indices])
        try:
            prompts, seeds = [draws[i].prompt for i in indices], [draws[i].seed for i in indices]
            longest = max(draws[i].sampling.max_tokens for i in indices)
            answers = generator.sample(prompts, n, seeds, replace(sampling, max_tokens=longest))
        finally:
            generator.token_callback = None
        groups |= dict(zip(indices, answers, strict=True))
    return [groups[index] for index in range(len(draws))]


def _tell(listeners: Sequence[Callable[[int], None] | None], row: int, token: int) -> None:
    if (listener := listeners[row]) is not None:
        listener(token)


# -- answering ---------------------------------------------------------------------------------------------------------
@dataclass
class Service:
    """Answers requests with an engine. Made and used in the thread that samples."""

    generator: Generator
    speech: Speech
    sampling: Sampling  # how answers are sampled where a request does not say so
    _: KW_ONLY
    model: str
    most_tokens: int  # of a prompt and its completion together
    vocabulary: int  # token ids are below this
    seed: int  # seeds of requests that have none derive from it and the number of the request
    ends: Collection[int] = ()  # the tokens that end a turn, which are not shown
    num_requests: int = field(default=0, init=False)

    def answer(self, requests: Sequence[Request], failed: Callable[[Exception], None]) -> None:
        """Answers all requests of a tick; those that are sampled alike are sampled together.

        `failed` is called with an error of the engine, which also becomes the reply to all requests that needed it.
        """
        asked: list[tuple[Request, list[Draw]]] = []
        for request in requests:
            try:
                if isinstance(request.body, bodies.Tokenize):
                    request.reply.set_result(tokenized(request.body, self.speech, self.most_tokens))
                else:
                    asked.append((request, list(self._draws(request.body))))
            except bodies.Refusal as refusal:
                request.reply.set_exception(refusal)
        if not asked:
            return
        try:
            self._answer(asked)
        except Exception as error:  # whatever the engine raises is reported to the clients and to the caller
            failed(error)
            problem = f"the engine has failed ({type(error).__name__}: {error})"
            for request, _ in asked:
                if not request.reply.done():
                    request.reply.set_exception(bodies.Refusal(500, problem, "engine_failed"))

    def _answer(self, asked: Sequence[tuple[Request, list[Draw]]]) -> None:
        """Samples all draws together, then replies. Raises whatever the engine raises."""
        draws = [(request, draw) for request, some in asked for draw in some if draw.sampling.max_tokens]
        pieces = ((i, self._pieces(*each)) for i, each in enumerate(draws))
        on_token = {i: add for i, add in pieces if add is not None}
        groups = iter(drawn(self.generator, [draw for _, draw in draws], on_token))
        for request, some in asked:
            answers = [
                [rollout.completion for rollout in next(groups).rollouts] if draw.sampling.max_tokens else []
                for draw in some
            ]
            try:
                request.reply.set_result(self._reply(request.body, some, answers))
            except bodies.Refusal as refusal:
                request.reply.set_exception(refusal)

    def _reply(self, body: bodies.Body, draws: Sequence[Draw], answers: Sequence[list[Completion]]) -> dict[str, Any]:
        if not isinstance(body, bodies.Complete):
            return reply_of(body, self.model, self.speech, draws[0], answers[0])[0]
        tokenizer, ids = self.speech.tokenizer, [draw.prompt.token_ids for draw in draws]
        texts = [given if isinstance(given, str) else str(tokenizer.decode(given)) for given in body.prompts]
        is_scored = body.echo and body.logprobs is not None
        echoes = [scored_prompt(self.generator, tokenizer, each) if is_scored else [] for each in ids]
        return bodies.complete_reply(body, self.model, list(zip(texts, ids, strict=True)), echoes, answers, tokenizer)

    def _draws(self, body: bodies.Body) -> Iterator[Draw]:
        """What a request needs from the engine. Raises Refusal if it cannot be answered."""
        if isinstance(body, bodies.Chat):
            messages = [message.plain for message in body.messages]
            yield self._draw(body.drawn, self.speech.of(body).prompt(messages), body.most_tokens, messages)
        elif isinstance(body, bodies.Generate):
            yield self._draw(body.drawn, check_ids(body.token_ids, self.vocabulary), body.most_tokens)
        else:
            assert isinstance(body, bodies.Complete), "there are four kinds of requests"
            if body.max_tokens == 0 and not body.echo:
                raise bodies.unfit("max_tokens", "0 needs echo; ask for tokens, or for the prompt")
            for given in body.prompts:
                special = body.add_special_tokens
                ids = ids_of_text(given, self.speech, with_special=special) if isinstance(given, str) else given
                if not ids:
                    raise bodies.unfit("prompt", "has no token; send one that has")
                yield self._draw(body, check_ids(ids, self.vocabulary, "prompt"), body.max_tokens)

    def _draw(
        self, asked: bodies.Drawn, ids: tuple[int, ...], limit: int | None, messages: Sequence[dict[str, Any]] = ()
    ) -> Draw:
        room = self.most_tokens - len(ids)
        if room < 1:
            most = f"prompt and answer may have {self.most_tokens} together"
            problem = f"the prompt has {counted(len(ids), 'token')}, and {most}"
            remedy = "send less, or raise prompts.max_tokens"
            raise bodies.Refusal(400, f"{problem}; {remedy}", "context_length_exceeded")
        if limit is not None and limit > room:
            number = counted(limit, "token")
            problem = f"{number} and the prompt's {len(ids)} are more than {self.most_tokens}"
            remedy = "ask for fewer, or raise generation.max_tokens"
            raise bodies.unfit("max_tokens", f"{problem}; {remedy}", "context_length_exceeded")
        check_ids(asked.stop_token_ids or (), self.vocabulary, "stop_token_ids")
        self.num_requests += 1
        seed = asked.seed
        seed = derive(self.seed, self.num_requests, "endpoint") if seed is None else seed % 2**63
        longest = min(room, self.sampling.max_tokens) if limit is None else limit
        sampling = asked.sampling(self.sampling, longest)
        turn = NextTurn(turn=0, seed=seed, max_tokens=sampling.max_tokens)
        prompt = Prompt(id=ID, messages=tuple(messages), answer="", token_ids=ids, next_turn=turn)
        return Draw(prompt=prompt, n=asked.n, seed=seed, sampling=sampling)

    def _pieces(self, request: Request, draw: Draw) -> Callable[[int], None] | None:
        """Passes the tokens of a reply on as text; None if nobody listens, or the reply can only be sent as a whole.

        It is sent as a whole where calls of tools have to be told from text, and where it includes log-probs.
        """
        body, on_text = request.body, request.on_text
        if on_text is None or not isinstance(body, bodies.Chat) or body.shown_tools or body.logprobs:
            return None
        text = ShownText(plain_decoder(self.speech.tokenizer), draw.sampling, self.ends)

        def add(token: int) -> None:
            if piece := text.add(token):
                on_text(piece)

        return add


def reply_of(
    body: bodies.Body, model: str, speech: Speech, draw: Draw, completions: Sequence[Completion]
) -> tuple[dict[str, Any], list[bodies.Said]]:
    """(the body of the reply, the completions as messages if the request was a chat)."""
    if isinstance(body, bodies.Generate):
        return bodies.generate_reply(body, model, completions), []
    assert isinstance(body, bodies.Chat), "others are answered without the engine"
    spoken = speech.of(body)
    said = [spoken.said(completion.token_ids, completion.text) for completion in completions]
    return bodies.chat_reply(body, model, draw.prompt.token_ids, completions, said, draw.seed, speech.tokenizer), said


def tokenized(body: bodies.Tokenize, speech: Speech, most_tokens: int) -> dict[str, Any]:
    """The reply to a request for tokens."""
    if body.messages is not None:
        messages = [message.plain for message in body.messages]
        ids = speech.of(body).prompt(messages, start=body.add_generation_prompt is not False)
    else:
        ids = ids_of_text(body.prompt or "", speech, with_special=body.add_special_tokens is not False)
    strings = speech.tokenizer.convert_ids_to_tokens(list(ids)) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": most_tokens, "tokens": list(ids), "token_strs": strings}


def scored_prompt(generator: Generator, tokenizer: RunTokenizer, ids: Sequence[int]) -> list[bodies.Scored]:
    """The tokens of a prompt with their log-probs at temperature 1, and those of the most likely tokens.

    Raises Refusal: the engine does not say which they are.
    """
    first: bodies.Scored = (str(tokenizer.decode([ids[0]])), None, None)
    if len(ids) == 1:
        return [first]
    [best] = generator.best_tokens([list(ids)]) or [None]
    if best is None:
        problem = "echo: with logprobs it needs an engine that gives the most likely tokens of a prompt"
        raise bodies.Refusal(400, f"{problem}; serve with generation=transformers", "unsupported_value")
    [logprobs] = generator.score([list(ids)])
    tokens = zip(ids[1:], logprobs, best, strict=True)
    return [first, *(bodies.scored(tokenizer, token, logprob, best=most) for token, logprob, most in tokens)]


def ids_of_text(text: str, speech: Speech, *, with_special: bool = True) -> list[int]:
    """The tokens of a text of a request, which may hold a lone surrogate."""
    return speech.tokenizer(well_formed(text), add_special_tokens=with_special)["input_ids"]


def check_ids(ids: Sequence[int], vocabulary: int, field: str = "token_ids") -> tuple[int, ...]:
    """The token ids of a request. Raises Refusal for one that the model does not have."""
    unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise bodies.unfit(field, f"the model has no token {unknown}; its tokens are 0 .. {vocabulary - 1}")
    return tuple(ids)
