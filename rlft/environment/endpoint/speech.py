"""Makes tokens of the messages of requests, and messages of the policy's turns, with the tools of each request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from rlft.environment.calls import Syntax, reader_of, shown_by, written
from rlft.environment.endpoint.bodies import Refusal, Said
from rlft.environment.turn_template import OPENING, TurnTemplate
from rlft.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEMBERED = 64
"""Number of tool sets that are cached: finding out how a template writes their calls takes a dozen renderings."""

Message = dict[str, Any]


class Speech:
    """What conversations look like to one model; used by one thread only.

    The policy writes calls in this syntax (configs/environment/base/limits.yaml); `key` is its key, for refusals.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, syntax: Syntax, key: str) -> None:
        self.tokenizer, self._key = tokenizer, key
        self._syntax: Syntax = syntax
        self._cached = lru_cache(maxsize=REMEMBERED)(self._make)

    def of(self, tools: Sequence[Mapping[str, Any]]) -> Spoken:
        """The speech with these tools. Refusal: the chat template cannot show tools, or they are no functions with
        schemas.
        """
        for number, tool in enumerate(tools):
            function = tool.get("function")
            if tool.get("type", "function") != "function" or not isinstance(function, dict) or not function.get("name"):
                raise Refusal(400, f"tools.{number}: is no function with a name", "invalid_value")
        return self._cached(json.dumps(tools))

    def _make(self, tools: str) -> Spoken:
        try:
            return Spoken(self.tokenizer, self._syntax, [_schema(tool) for tool in json.loads(tools)])
        except UserError as error:
            remedy = error.remedy
            if tools != "[]" and self._syntax == "template":
                remedy = f"set {self._key}=json or xml, or {remedy}"
            raise Refusal(400, f"{error.key}: {error.problem}; {remedy}", "unsupported_template") from None


class Spoken:
    """What conversations with these tools look like to one model. UserError: its chat template cannot hold them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, syntax: Syntax, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        self._syntax: Syntax = syntax
        self._by_template = syntax == "template"
        self._shown = shown_by(syntax, tokenizer, tools, OPENING)
        roles: set[Literal["tool", "user"]] = {"user", "tool"} if tools and self._by_template else {"user"}
        self._template = TurnTemplate(tokenizer, roles, tools=self._shown.tools, may_rewrite=roles)
        self._reader = reader_of(syntax, tokenizer, tools, OPENING) if tools else None

    def prompt(self, messages: Sequence[Message], *, start: bool = True) -> tuple[int, ...]:
        """The tokens of a whole conversation; with `start`, up to the start of the policy's next turn.

        Refusal: the chat template does not accept these messages.
        """
        shown = self._shown.messages(list(self._plain(messages)))
        try:
            return self._template.prompt(shown, start=start)
        except Exception as error:  # a template is a program of somebody else's: it may raise anything
            raise _not_taken(error) from None

    def has_suffix(self, messages: Sequence[Message]) -> bool:
        """Whether earlier turns stay as they were when these messages follow; else the policy reads it all again."""
        roles = {message["role"] for message in self._plain(messages)}
        return roles in ({"user"}, {"tool"}) and not roles & self._template.rewriting

    def suffix(self, sampled: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between a turn of the policy and its next one, where `has_suffix` holds.

        Refusal: as in `prompt`.
        """
        try:
            return self._template.suffix(sampled, list(self._plain(messages)))
        except Exception as error:  # as above
            raise _not_taken(error) from None

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
        answers: list[str] = []
        for message in messages:
            if message["role"] == "tool":
                answers.append(message["content"])
                continue
            if answers:
                yield {"role": "user", "content": "\n".join(answers)}
                answers = []
            yield {**message, "content": self._with_calls(message)} if message.get("tool_calls") else message
        if answers:
            yield {"role": "user", "content": "\n".join(answers)}

    def _with_calls(self, message: Message) -> str:
        texts = [message["content"]] if message["content"] else []
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            call_arguments = arguments if isinstance(arguments, dict) else {"": arguments}
            texts.append(written(self._syntax, self._tokenizer, self._tools, OPENING, name, call_arguments))
        return "\n".join(texts)


def _not_taken(problem: Exception) -> Refusal:
    return Refusal(400, f"messages: the chat template does not take them ({problem})", "invalid_messages")


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of a request, completed with what OpenAI's API lets clients leave out."""
    function = dict(tool["function"])
    function.setdefault("description", "")
    function["parameters"] = dict(function.get("parameters") or {})
    function["parameters"].setdefault("type", "object")
    function["parameters"].setdefault("properties", {})
    return {"type": "function", "function": function}
