"""Makes tokens of the messages of requests, and messages of the policy's turns, with the tools of each request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, Literal

from rlft.environment.calls import Syntax, reader_of, shown_by, written
from rlft.environment.endpoint.bodies import Chat, Refusal, Said, Tokenize, unfit
from rlft.environment.template_calls import CallTemplate
from rlft.environment.turn_template import OPENING, TurnTemplate
from rlft.tokens.messages import unread
from rlft.tokens.text import RunTokenizer
from rlft.types import UserError

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
