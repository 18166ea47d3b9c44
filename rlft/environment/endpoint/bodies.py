"""The bodies of requests and replies in OpenAI's API and vLLM's, and the error with which a request is refused.

A field that is used is a field of a model here. assets/endpoint_fields.yaml lists the fields that change no answer or
ask for nothing. All others are refused by name, at every level.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlft.config.choices import closest
from rlft.environment.protocol import Call
from rlft.system.files import asset
from rlft.system.seeds import derive
from rlft.tokens.messages import FIELDS
from rlft.tokens.text import THINKING_FIELDS, RunTokenizer
from rlft.types import Completion, Sampling, well_formed

NOT_USED: Mapping[str, Any] = asset("endpoint_fields.yaml")
"""{class: its `without_effect` and `neutral`}."""


class Fields(BaseModel):
    """An object of a request, whose fields are used; null stands for a field that is not given.

    `without_effect` are its fields that change no answer, `neutral` those that must ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    without_effect: ClassVar[Sequence[str]] = ()
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}  # {field: its values that ask for nothing, besides null}

    @classmethod
    def __pydantic_init_subclass__(cls, **keys: Any) -> None:
        of_class = NOT_USED.get(cls.__name__, {})
        cls.without_effect, cls.neutral = of_class.get("without_effect", ()), of_class.get("neutral", {})

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name, value in given.items():
            if name in cls.neutral:
                if value is not None and not any(_same(value, other) for other in cls.neutral[name]):
                    raise refused(name, "is not supported here; leave it out")
            elif name not in cls.model_fields and name not in cls.without_effect:
                meant = closest(name, (*cls.model_fields, *cls.neutral, *cls.without_effect))
                raise refused(name, f"is not known here; {f'did you mean {meant}?' if meant else 'leave it out'}")
        return {name: value for name, value in given.items() if name in cls.model_fields and value is not None}


def refused(field: str, problem: str) -> PydanticCustomError:
    """The error of a field of the object that is being validated; `problem` says what to do as well."""
    field, problem = (text.encode("utf-8", "backslashreplace").decode() for text in (field, problem))
    return PydanticCustomError("refused", "{problem}", {"field": field, "problem": problem})


def _same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


# -- messages ----------------------------------------------------------------------------------------------------------
class Part(Fields):
    """A part of a message's content."""

    type: Literal["text"] = "text"
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("type") not in (None, "text"):
            raise refused("type", "only text is understood here; leave images, sounds and files out")
        return given


class CalledFunction(Fields):
    """What a call of a tool calls; `arguments` are an object, or JSON in a text."""

    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] = ""


class Called(Fields):
    """A call of a tool in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        arguments: Any = self.function.arguments or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # then it stays as the policy wrote it
                arguments = json.loads(arguments)
        return {"type": "function", "id": self.id, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Fields):
    """A message; its thoughts may have any of the names that templates have for them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Called] = Field(default_factory=list)
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    @model_validator(mode="after")
    def _of_its_role(self) -> Message:
        known = {"role", "content", "name", *FIELDS[self.plain_role]}
        for field in type(self).model_fields:
            if field not in known and getattr(self, field):
                raise refused(field, f"a message of the role {self.role} has none; leave it out")
        if self.content is None and self.role != "assistant":
            raise refused("content", "is missing; send a text")
        if len({thoughts for field in THINKING_FIELDS if (thoughts := getattr(self, field))}) > 1:
            raise refused(THINKING_FIELDS[0], f"differs from {' or '.join(THINKING_FIELDS[1:])}; send one of them")
        return self

    @property
    def plain_role(self) -> str:
        return "system" if self.role == "developer" else self.role

    @property
    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it: content is a text, arguments of calls are objects if they are JSON."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        made: dict[str, Any] = {"role": self.plain_role, "content": well_formed(text)}
        if thoughts := next((value for field in THINKING_FIELDS if (value := getattr(self, field))), ""):
            made[THINKING_FIELDS[0]] = thoughts
        made |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        return made | ({"tool_calls": [call.plain for call in self.tool_calls]} if self.tool_calls else {})


class Function(Fields):
    """A tool's name, and what a chat template shows of it."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    """A tool of a request."""

    type: Literal["function"] = "function"
    function: Function
    _given: Mapping[str, Any] = PrivateAttr({})

    @model_validator(mode="wrap")
    @classmethod
    def _as_given(cls, given: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        made = handler(given)
        made._given = given["function"]
        return made

    @property
    def plain(self) -> dict[str, Any]:
        """The tool in the client's order of fields, completed with what OpenAI's API lets clients leave out."""
        function = dict(self._given)
        function["description"] = function.get("description") or ""
        function["parameters"] = dict(function.get("parameters") or {})
        function["parameters"].setdefault("type", "object")
        function["parameters"].setdefault("properties", {})
        return {"type": "function", "function": function}


class StreamOptions(Fields):
    """What a stream has besides its answer."""

    include_usage: bool = False


# -- bodies ------------------------------------------------------------------------------------------------------------
VARIABLES = "chat_template_kwargs."
LEAST_LOGPROB = -9999.0  # what stands for minus infinity in JSON, as in vLLM
OPENING = {"role": "assistant", "content": ""}  # what a stream begins with
Scored = tuple[str, float | None, dict[str, float] | None]
"""A token, its log-prob (None: nothing stands before it), and those that are known of its place, by text."""


class Refusal(Exception):
    """A request that is not served, with its HTTP status; `message` says what is wrong, and what to do.

    `code` is OpenAI's `error.code`, `param` the field that it is about; `again` says whether the same request may be
    served later, which OpenAI's client tries by itself.
    """

    def __init__(self, status: int, message: str, code: str, *, param: str | None = None, again: bool = False) -> None:
        self.status, self.message, self.code, self.param, self.again = status, message, code, param, again
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response, as OpenAI's API has it."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unfit(field: str, problem: str, code: str = "invalid_value") -> Refusal:
    """The refusal of a field of the request."""
    return Refusal(400, f"{field}: {problem}", code, param=field)


class Body(Fields):
    """What all requests have."""

    model: str | None = None


class Drawn(Fields):
    """How an answer is sampled; None: by the server's own setting."""

    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    seed: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stops if text)

    def sampling(self, usual: Sampling, max_tokens: int) -> Sampling:
        """The server's sampling, changed by what this request says; its stops are added to the server's."""
        given = {
            name: value for name in ("temperature", "top_p", "min_p") if (value := getattr(self, name)) is not None
        }
        given |= {} if self.top_k is None else {"top_k": max(0, self.top_k)}
        include_stop = self.include_stop_str_in_output or usual.include_stop_str_in_output
        return replace(self.with_stops(usual, max_tokens), **given, include_stop_str_in_output=include_stop)

    def with_stops(self, usual: Sampling, max_tokens: int) -> Sampling:
        """The server's sampling with this request's stops as well."""
        stop = tuple(dict.fromkeys((*usual.stop, *self.stops)))
        stop_ids = tuple(dict.fromkeys((*usual.stop_token_ids, *(self.stop_token_ids or ()))))
        return replace(usual, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_ids)


class Shows(Body):
    """What a request shows of tools, and the variables of its chat template."""

    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [tool.plain for tool in self.tools or []]

    @property
    def variables(self) -> dict[str, dict[str, Any]]:
        """Variables of the chat template, by the beginning of their fields in the request."""
        return {VARIABLES: self.chat_template_kwargs} if self.chat_template_kwargs else {}


class Chat(Shows, Drawn):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    tool_choice: Literal["auto", "none"] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=1)
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Chat:
        effort, by_name = self.reasoning_effort, self.chat_template_kwargs.get("reasoning_effort")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise refused("max_tokens", "differs from max_completion_tokens; send one of them")
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "needs logprobs=true; send it, or leave this out")
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "needs stream=true; send it, or leave this out")
        if self.stream and self.n > 1:
            raise refused("stream", "one answer is streamed; set n to 1")
        if effort is not None and by_name not in (None, effort):
            raise refused("reasoning_effort", "differs from that of chat_template_kwargs; send one of them")
        return self

    @property
    def drawn(self) -> Drawn:
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else super().shown_tools

    @property
    def variables(self) -> dict[str, dict[str, Any]]:
        effort = {} if self.reasoning_effort is None else {"": {"reasoning_effort": self.reasoning_effort}}
        return super().variables | effort


class DrawnTokens(Drawn):
    """`sampling_params` of a `Generate`; replies have no texts."""

    logprobs: int | None = Field(default=None, ge=0, le=1)


class Generate(Body):
    """`POST /inference/v1/generate`: tokens in, tokens out."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: DrawnTokens = Field(default_factory=DrawnTokens)
    request_id: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"

    @property
    def drawn(self) -> Drawn:
        return self.sampling_params

    @property
    def most_tokens(self) -> int | None:
        return self.sampling_params.max_tokens


class Complete(Body, Drawn):
    """`POST /v1/completions`: a text or tokens, or several of either, are continued as they are, without a template.

    With `echo` the prompt stands before the continuation, and with `logprobs` its log-probs before the others.
    """

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(default=16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=1)
    add_special_tokens: bool = True

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [each for each in self.prompt if not isinstance(each, int)]
        return several or [[token for token in self.prompt if isinstance(token, int)]]


class Tokenize(Shows):
    """`POST /tokenize`: the tokens of a text, or of messages."""

    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Tokenize:
        if self.prompt is None and self.messages is None:
            raise refused("prompt", "is missing; send a text, or messages")
        if self.prompt is not None and self.messages is not None:
            raise refused("prompt", "stands next to messages; send one of them")
        for field in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if self.messages is None and getattr(self, field):
                raise refused(field, "goes with messages; leave it out")
        if self.messages is not None and self.add_special_tokens:
            raise refused("add_special_tokens", "goes with a text, since the chat template writes them; leave it out")
        return self


AnyBody = TypeVar("AnyBody", bound=Body)


def read(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """The body of a request. Refusal: no JSON object, a missing or unknown field, or an unsupported value."""
    try:
        value = json.loads(raw, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON ({error}); send a JSON object", "invalid_json") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body is no JSON object; send one", "invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        # Of the alternatives of a field it names the one that fits best.
        found = max(error.errors(), key=lambda each: len(_place(value, each["loc"])))
        place, field = _place(value, found["loc"]), found.get("ctx", {}).get("field")
        if found["type"] == "missing":
            place, field = _place(value, found["loc"][:-1]), found["loc"][-1]
        where = ".".join(map(str, (*place, *([field] if field else []))))
        problem = f"{found['msg'][:1].lower()}{found['msg'][1:]}"
        raise unfit(where, problem, "unsupported_value" if found["type"] == "refused" else "invalid_value") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply; send less", "invalid_value") from None


def _place(value: Any, loc: Sequence[int | str]) -> list[int | str]:
    """Where in a JSON value an error is, without pydantic's names of alternatives."""
    place: list[int | str] = []
    for step in loc:
        if (isinstance(value, list) and isinstance(step, int)) or (isinstance(value, Mapping) and step in value):
            value = value[step]  # type: ignore[index]
            place.append(step)
    return place


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object; ValueError if it has a field twice, of which parsers keep either."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"the field {twice!r} is there twice")
    return made


# -- replies -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A turn of the policy as a message: text before the first call, and the calls that have a name."""

    content: str
    calls: tuple[Call, ...]


def list_of_models(name: str, most_tokens: int) -> dict[str, Any]:
    """The list of the only model. Its `max_model_len` is, as in vLLM, that of a prompt and its completion together."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rlft", "max_model_len": most_tokens}],
    }


def chat_reply(
    body: Chat,
    model: str,
    prompt: Sequence[int],
    completions: Sequence[Completion],
    said: Sequence[Said],
    seed: int,
    tokenizer: RunTokenizer,
) -> dict[str, Any]:
    """The reply to a `Chat`; the ids of calls derive from `seed`, the seed of the first completion."""
    choices = [
        {
            "index": index,
            "message": as_message(message, seed + index),
            "finish_reason": "tool_calls" if message.calls else finish_of(completion),
            "logprobs": _chat_logprobs(body, completion, tokenizer),
            **({"token_ids": list(completion.token_ids)} if body.return_token_ids else {}),
        }
        for index, (completion, message) in enumerate(zip(completions, said, strict=True))
    ]
    return {
        **head("chatcmpl", "chat.completion", model),
        "choices": choices,
        "usage": usage(len(prompt), completions),
        **({"prompt_token_ids": list(prompt)} if body.return_token_ids else {}),
    }


def as_message(said: Said, seed: int) -> dict[str, Any]:
    """A turn of the policy as a message of OpenAI's API. Ids of calls have the nine digits of Mistral's."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.calls:
        message["content"] = said.content or None
        message["tool_calls"] = [
            {
                "id": f"{derive(seed, number, 'call') % 10**9:09d}",
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call)},
            }
            for number, call in enumerate(said.calls)
        ]
    return message


def arguments_of(call: Call) -> str:
    """The arguments as JSON, or as the policy wrote them if they cannot be read."""
    return call.written if call.problem else json.dumps(call.arguments, ensure_ascii=False)


class Stream:
    """The reply to a `Chat` as server-sent events: pieces of its text, then the rest of the reply."""

    def __init__(self, model: str) -> None:
        self._common, self.sent = head("chatcmpl", "chat.completion.chunk", model), ""

    def piece(self, text: str) -> bytes:
        start = b"" if self.sent else self._delta(OPENING)
        self.sent += text
        return start + self._delta({"content": text})

    def end(self, reply: Mapping[str, Any], *, with_usage: bool) -> Iterator[bytes]:
        """The rest of the text, calls, log-probs, and the reason of the end."""
        if not self.sent:
            yield self._delta(OPENING)
        [choice] = reply["choices"]
        message = choice["message"]
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
        content = message["content"]
        rest = content if content is None else content.removeprefix(self.sent)
        if rest != "" or calls or choice["logprobs"] or not self.sent:
            delta = {"content": rest, **({"tool_calls": calls} if calls else {})}
            yield self._delta(delta, logprobs=choice["logprobs"])
        ids = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
        yield self._delta({}, finish_reason=choice["finish_reason"], **ids)
        if with_usage:
            yield _event({**self._common, "choices": [], "usage": reply["usage"]})
        yield b"data: [DONE]\n\n"

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        """The events of a refusal, once the stream has begun."""
        yield _event(refusal.body)
        yield b"data: [DONE]\n\n"

    def _delta(self, delta: Mapping[str, Any], **further: Any) -> bytes:
        return _event({**self._common, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **further}]})


def generate_reply(body: Generate, model: str, completions: Sequence[Completion]) -> dict[str, Any]:
    """The reply to a `Generate`. Log-probs name tokens by number, and as `token_id:<number>` for old clients."""
    choices = []
    for index, completion in enumerate(completions):
        ids, logprobs = list(completion.token_ids), None
        if body.sampling_params.logprobs is not None:
            values = [max(LEAST_LOGPROB, value) for value in completion.logprobs]
            others = {"rank": None, "top_logprobs": []}
            content = [
                {"token": f"token_id:{token}", "token_id": token, "logprob": value, **others}
                for token, value in zip(ids, values, strict=True)
            ]
            logprobs = {"content": content}
        choice = {"index": index, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish_of(completion)}
        choices.append({**choice, "stop_reason": None})
    return {
        "request_id": body.request_id or uuid.uuid4().hex,
        "output_mode": "tokens",
        "model": model,
        "created": int(time.time()),
        "choices": choices,
        "usage": usage(len(body.token_ids), completions),
        "prompt_token_ids": list(body.token_ids) if body.return_token_ids else None,
    }


def complete_reply(
    body: Complete,
    model: str,
    prompts: Sequence[tuple[str, Sequence[int]]],  # (text, token ids) of each
    echoes: Sequence[Sequence[Scored]],  # the scored tokens of each, where a client asks for them; else empty
    answers: Sequence[Sequence[Completion]],  # the completions of each; a prompt that is only scored has none of them
    tokenizer: RunTokenizer,
) -> dict[str, Any]:
    """The reply to a `Complete`, whose texts are continued as they are: choices by prompt, `n` of each."""
    choices = []
    for (text, _), echo, completions in zip(prompts, echoes, answers, strict=True):
        for completion in completions or [None]:
            text_after, finish, tokens = "", "length", list(echo)
            if completion is not None:
                text_after, finish = completion.text, finish_of(completion)
                pairs = zip(completion.token_ids, completion.logprobs, strict=True)
                tokens += [scored(tokenizer, token, logprob) for token, logprob in pairs]
            choices.append(
                {
                    "index": len(choices),
                    "text": (text if body.echo else "") + text_after,
                    "finish_reason": finish,
                    "logprobs": None if body.logprobs is None else _text_logprobs(tokens),
                }
            )
    return {
        **head("cmpl", "text_completion", model),
        "choices": choices,
        "usage": usage(sum(len(ids) for _, ids in prompts), [each for some in answers for each in some]),
    }


# -- details -----------------------------------------------------------------------------------------------------------
def head(name: str, kind: str, model: str) -> dict[str, Any]:
    """The beginning of replies of OpenAI's API, with an id of its own."""
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def finish_of(completion: Completion) -> str:
    return "length" if completion.finish_reason.is_limit else "stop"


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, int]:
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}


def _chat_logprobs(body: Chat, completion: Completion, tokenizer: RunTokenizer) -> dict[str, Any] | None:
    """Log-probs as engines give them: of the sampled token alone, with temperature applied."""
    if not body.logprobs:
        return None
    content = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        text = str(tokenizer.decode([token]))
        entry = {"token": text, "logprob": max(LEAST_LOGPROB, logprob), "bytes": list(text.encode("utf-8", "replace"))}
        content.append({**entry, "top_logprobs": [entry] if body.top_logprobs else []})
    return {"content": content}


def scored(tokenizer: RunTokenizer, token: int, logprob: float, best: tuple[int, float] | None = None) -> Scored:
    """The token next to the most likely one of its place; if both have the same text, the larger log-prob is known."""
    text, value = str(tokenizer.decode([token])), max(LEAST_LOGPROB, logprob)
    others = {} if best is None or best[0] == token else {str(tokenizer.decode([best[0]])): best[1]}
    return text, value, {**others, text: max(value, others.get(text, value))}


def _text_logprobs(tokens: Sequence[Scored]) -> dict[str, Any]:
    return {
        "tokens": [text for text, _, _ in tokens],
        "token_logprobs": [logprob for _, logprob, _ in tokens],
        "top_logprobs": [top for _, _, top in tokens],
        "text_offset": list(accumulate((len(text) for text, _, _ in tokens[:-1]), initial=0)),
    }


def _event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
