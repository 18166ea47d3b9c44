"""How the policy writes calls of tools, and how they are read from its text."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlft.environment.protocol import Call
from rlft.tokens.ends import num_common
from rlft.tokens.reasoning import search_outside, without_reasoning
from rlft.tokens.text import render
from rlft.types import Schema, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Syntax = Literal["template", "json", "xml"]

MAX_DEPTH = 64
"""The deepest nesting of JSON that the policy may write. Python's pickle and json fail some hundred levels down."""
SAID, ARGUMENT, MARK = "said", "argument", "mark"
CALL_ID = "000000000"

AS_JSON = """\
You can call tools. A call is a JSON object with the tool's name and its arguments:
{"name": "<tool>", "arguments": {"<argument>": <value>}}
End your turn after it; the answer is the next message. Tools:
"""
AS_XML = """\
You can call tools. A call is written as
<call tool="<tool>"><<argument>><value></<argument>></call>
End your turn after it; the answer is the next message. Tools:
"""
NOT_JSON = "this call is not valid JSON ({}); write it as {}"
KEYS_OF_CALLS = {"type", "id"}
_FENCED = re.compile(r"\A```[a-z_]*\s*(.*?)\s*```\Z", re.DOTALL)
_OPENED_FENCE = re.compile(r"\s*(?:```[a-z_]*\s*)?")
_SEPARATORS = re.compile(r"[\s,;]*")


class CallReader(ABC):
    """Reads the calls in a turn of the policy, which begin where `START` matches, but not in its reasoning."""

    START: ClassVar[re.Pattern[str]]

    @abstractmethod
    def calls(self, text: str) -> list[Call]:
        """The calls in order; those that cannot be made have a `problem`.

        Args:
            text: the turn with its special tokens, but without the one that ends it.
        """

    def before(self, text: str) -> str:
        """The text of such a turn before its first call."""
        return text[: match.start()] if (match := search_outside(self.START, text)) else text


def preamble(syntax: Syntax, schemas: Sequence[Schema]) -> str:
    """What a prompt says about the tools where the chat template does not."""
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in schemas]
    return {"json": AS_JSON, "xml": AS_XML}[syntax] + "\n".join(lines)


def reader_of(
    syntax: Syntax,
    tokenizer: PreTrainedTokenizerBase,
    schemas: Sequence[Schema],
    opening: Sequence[Mapping[str, Any]],
) -> CallReader:
    """A reader of calls in this syntax; how a template writes calls is found out by having it write one.

    Raises:
        UserError: the template's calls cannot be read.
    """
    if syntax == "json":
        return JsonCalls(schemas)
    if syntax == "xml":
        return XmlCalls(schemas)
    if getattr(tokenizer, "response_template", None) is not None:
        described = DescribedCalls(tokenizer, schemas)
        if not described.calls(""):  # otherwise the description itself cannot be used
            return described
    form = _written_by(tokenizer, schemas, opening)
    if form is None:
        raise UserError(
            "environment.syntax",
            "the chat template writes calls of tools in a form that is not known here",
            got="template",
            remedy="use environment.syntax=json or xml",
        )
    return form


# -- forms -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCalls(CallReader):
    """Calls as a chat template writes them: JSON objects after a marker.

    Attributes:
        marker: what stands before them, such as `<tool_call>` or `[TOOL_CALLS]`; "": a turn with a call holds nothing
            else.
        name: key of the tool's name.
        arguments: key of the tool's arguments.
        tools: the tools' names.
    """

    marker: str
    name: str
    arguments: str
    tools: frozenset[str] = field(default=frozenset(), compare=False)

    def calls(self, text: str) -> list[Call]:
        if not self.marker:
            bare = _FENCED.sub(r"\1", without_reasoning(text).strip())
            value, _, error = decoded(bare)
            is_call = is_call_of(value, self.name, self.arguments, self.tools)
            is_broken = error and re.match(rf'\{{\s*"(?:{self.name}|type)"\s*:', bare)
            return self._at(bare, 0)[0] if is_call or is_broken else []
        calls: list[Call] = []
        position = 0
        while match := search_outside(re.compile(re.escape(self.marker)), text, position):
            found, position = self._at(text, match.end())
            calls += found
        return calls

    def before(self, text: str) -> str:
        if not self.marker:
            return "" if self.calls(text) else text
        match = search_outside(re.compile(re.escape(self.marker)), text)
        return text if match is None else text[: match.start()]

    def _at(self, text: str, start: int) -> tuple[list[Call], int]:
        """(the calls of the objects or lists that stand here one after the other, where they end)."""
        example = f'{self.marker}{{"{self.name}": "<tool>", "{self.arguments}": {{..}}}}'
        calls: list[Call] = []
        position = _OPENED_FENCE.match(text, start).end()  # type: ignore[union-attr]  # it matches everywhere
        while not calls or text.startswith("{", position):
            value, length, error = decoded(text[position:])
            if error:
                end = text.find(self.marker, position) if self.marker else -1
                written = text[position : end if end >= 0 else None]
                return [*calls, unreadable(written, NOT_JSON.format(error, example))], position
            values = value if isinstance(value, list) else [value]
            calls += [call_of(each, self.name, self.arguments, example) for each in values]
            position = _SEPARATORS.match(text, position + length).end()  # type: ignore[union-attr]  # as above
        return calls, position


class JsonCalls(CallReader):
    """Calls as JSON objects with a name and arguments, anywhere in the text; `schemas` are those of the tools."""

    START = re.compile(r'\{\s*"name"\s*:\s*(?:"([^"]*)")?')
    EXAMPLE = '{"name": "<tool>", "arguments": {..}}'

    def __init__(self, schemas: Sequence[Schema] = ()) -> None:
        self.tools = names_of(schemas)

    def calls(self, text: str) -> list[Call]:
        return [call for _, call in self._found(text)]

    def before(self, text: str) -> str:
        return text[: next((start for start, _ in self._found(text)), len(text))]

    def _found(self, text: str) -> Iterator[tuple[int, Call]]:
        """(where it stands, the call) for each call; an object that is none, with all that is in it, is skipped."""
        position, outside = 0, without_reasoning(text)
        while (start := outside.find("{", position)) >= 0:
            value, length, error = decoded(text[start:])
            broken = self.START.match(text, start) if error else None
            if broken is not None and (not self.tools or broken[1] in self.tools):
                yield start, unreadable(text[start:], NOT_JSON.format(error, self.EXAMPLE))
                return
            position = start + max(length, 1)
            if is_call_of(value, "name", "arguments", self.tools):
                yield start, call_of(value, "name", "arguments", self.EXAMPLE)
                outside = text[:position] + without_reasoning(text[position:])


class XmlCalls(CallReader):
    """Calls as `<call tool="name"><argument>value</argument></call>`; values other than strings are JSON."""

    START = re.compile(r'<call(?:\s+tool="(?P<name>[^"]*)")?[^>]*>(?P<body>.*?)(?P<end></call>|$)', re.DOTALL)
    EXAMPLE = '<call tool="<tool>"><argument>value</argument></call>'

    def __init__(self, schemas: Sequence[Schema]) -> None:
        self.properties = {
            schema["function"]["name"]: schema["function"]["parameters"].get("properties", {}) for schema in schemas
        }

    def calls(self, text: str) -> list[Call]:
        calls: list[Call] = []
        position = 0
        while match := search_outside(self.START, text, position):
            calls.append(self._call(match))
            position = match.end()
        return calls

    def _call(self, match: re.Match[str]) -> Call:
        name, body = match["name"], match["body"]
        if name is None or not match["end"]:
            problem = "names no tool" if name is None else "has no </call>"
            return unreadable(body, f"this call {problem}; write it as {self.EXAMPLE}", name or "")
        arguments, rest, properties = {}, body, self.properties.get(name, {})
        for argument in re.finditer(r"<(\w+)>(.*?)</\1>", body, re.DOTALL):
            kind = properties.get(argument[1], {}).get("type", "string")
            arguments[argument[1]] = argument[2] if kind == "string" else _json_or_text(argument[2])
            rest = rest.replace(argument[0], "", 1)
        if rest.strip():
            return unreadable(body, f"this call has text outside of arguments; write it as {self.EXAMPLE}", name)
        return Call(name=well_formed(name), arguments=arguments, written=well_formed(body))


class DescribedCalls(CallReader):
    """Calls that transformers reads, for a tokenizer whose `response_template` says how its model answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Schema]) -> None:
        self.tokenizer, self.schemas = tokenizer, [dict(schema) for schema in schemas]

    def calls(self, text: str) -> list[Call]:
        tokenizer: Any = self.tokenizer  # whose type does not say that it has parse_response
        try:
            message = tokenizer.parse_response(text, prefix="", tools=self.schemas)
            calls = [each.get("function", each) for each in message.get("tool_calls") or []]
        except Exception as error:  # the parser follows a description, and may raise anything
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            return [unreadable(text, f"this call cannot be read ({first_line[:200]})")]
        return [call_of(each, "name", "arguments", "the template does") for each in calls]

    def before(self, text: str) -> str:
        tokenizer: Any = self.tokenizer
        try:
            return str(tokenizer.parse_response(text, prefix="", tools=self.schemas).get("content") or "")
        except Exception:  # as in `calls`
            return text


# -- writing -----------------------------------------------------------------------------------------------------------
def written(
    syntax: Syntax,
    tokenizer: PreTrainedTokenizerBase,
    schemas: Sequence[Schema],
    opening: Sequence[Mapping[str, Any]],
    name: str,
    arguments: Mapping[str, Any],
) -> str:
    """A turn with this call, as the policy has to write it; a template's turn includes the tokens that end it."""
    if syntax == "json":
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    if syntax == "xml":
        values = (
            f"<{key}>{value if isinstance(value, str) else json.dumps(value)}</{key}>"
            for key, value in arguments.items()
        )
        return f'<call tool="{name}">{"".join(values)}</call>'
    texts = _written_turns(tokenizer, schemas, opening, name, arguments)
    return next(texts, "").replace(SAID, "", 1).strip()


# -- details -----------------------------------------------------------------------------------------------------------
def decoded(text: str) -> tuple[Any, int, str]:
    """(the JSON value that the text begins with, the characters that it takes, "") or (None, 0, what is wrong with it).

    The policy may have written anything: line breaks inside strings are accepted, and values that are nested too deeply
    to be written or sent are refused.

    >>> decoded(' {"a": 1} and more'), decoded("[1,")[2]
    (({'a': 1}, 9, ''), 'Expecting value')
    """
    bare = text.lstrip()
    try:
        value, length = json.JSONDecoder(strict=False).raw_decode(bare)
    except json.JSONDecodeError as error:
        return None, 0, error.msg
    except ValueError:
        return None, 0, "a number has too many digits"
    except RecursionError:
        return None, 0, "too deep"
    if depth(value) > MAX_DEPTH:
        return None, 0, "too deep"
    return value, len(text) - len(bare) + length, ""


def depth(value: Any) -> int:
    """How deeply a JSON value is nested; 0 for one that is neither a list nor an object.

    >>> depth(5), depth([]), depth({"a": [1]})
    (0, 1, 2)
    """
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        outer, level = waiting.pop()
        if isinstance(outer, dict | list):
            deepest = max(deepest, level)
            waiting += [(inner, level + 1) for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return deepest


def well_formed(text: str) -> str:
    """The text with `?` for lone surrogates, which JSON can express but no tokenizer or file accepts."""
    return text.encode("utf-8", "replace").decode()


def call_of(value: Any, name_key: str, arguments_key: str, example: str) -> Call:
    """The call that a JSON value describes."""
    if not isinstance(value, Mapping) or not isinstance(value.get(name_key), str):
        return unreadable(json.dumps(value, ensure_ascii=False), f"this call names no tool; write it as {example}")
    name, arguments = value[name_key], value.get(arguments_key, {})
    if isinstance(arguments, str):  # JSON in a string, as OpenAI's API has it
        arguments = _json_or_text(arguments)
    written = well_formed(json.dumps(arguments, ensure_ascii=False))
    if not isinstance(arguments, Mapping):
        problem = f"the {arguments_key} of this call are no JSON object; write it as {example}"
        return unreadable(written, problem, name)
    return Call(name=well_formed(name), arguments={str(k): each for k, each in arguments.items()}, written=written)


def is_call_of(value: Any, name_key: str, arguments_key: str, tools: Collection[str]) -> bool:
    """Whether a JSON value without a marker is a call: an object that names a tool, or that is nothing but a call.

    >>> is_call_of({"name": "Bob", "age": 3}, "name", "arguments", ["add"])
    False
    """
    if not isinstance(value, Mapping) or not isinstance(value.get(name_key), str):
        return False
    is_bare = arguments_key in value and set(value) <= {name_key, arguments_key} | KEYS_OF_CALLS
    return value[name_key] in tools or is_bare


def names_of(schemas: Sequence[Schema]) -> frozenset[str]:
    return frozenset(schema["function"]["name"] for schema in schemas)


def unreadable(written: str, problem: str, name: str = "") -> Call:
    """A call that cannot be made, as the policy wrote it; `problem` says why, as a sentence for the policy."""
    return Call(name=well_formed(name), arguments={}, written=well_formed(written), problem=well_formed(problem))


def _json_or_text(text: str) -> Any:
    value, length, problem = decoded(text)
    return text if problem or text[length:].strip() else value


def _written_by(
    tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Schema], opening: Sequence[Mapping[str, Any]]
) -> TemplateCalls | None:
    """The form in which the tokenizer's template writes a call; None if it does not write JSON objects."""
    tool = schemas[0]["function"]["name"]
    for turn_text in _written_turns(tokenizer, schemas, opening, tool, {ARGUMENT: MARK}):
        for match in re.finditer(r"\{", turn_text):
            value, _, error = decoded(turn_text[match.start() :])
            if not error and (keys := _keys(value, tool)) is not None:
                marker = turn_text[: match.start()].rpartition(SAID)[2].strip()
                return TemplateCalls(
                    marker=marker.removesuffix("[").strip(), name=keys[0], arguments=keys[1], tools=names_of(schemas)
                )
    return None


def _written_turns(
    tokenizer: PreTrainedTokenizerBase,
    schemas: Sequence[Schema],
    opening: Sequence[Mapping[str, Any]],
    name: str,
    arguments: Mapping[str, Any],
) -> Iterator[str]:
    """The turn of a call as the template writes it: once for arguments given as an object, once as text."""
    for form in (dict(arguments), json.dumps(arguments)):
        call = {"type": "function", "id": CALL_ID, "function": {"name": name, "arguments": form}}
        turn = {"role": "assistant", "content": SAID, "tool_calls": [call]}
        try:
            prompt_text = render(tokenizer, opening, tools=schemas, start=True)
            text = render(tokenizer, [*opening, turn], tools=schemas)
        except Exception:  # a template may raise anything; both forms of arguments are tried
            continue
        yield text[len(prompt_text) :] if text.startswith(prompt_text) else text[num_common(prompt_text, text) :]


def _keys(value: Any, tool: str) -> tuple[str, str] | None:
    """The keys of name and arguments in a call as a template has written it."""
    if not isinstance(value, dict):
        return None
    names = [key for key, each in value.items() if each == tool]
    arguments = [k for k, each in value.items() if each == {ARGUMENT: MARK} or each == json.dumps({ARGUMENT: MARK})]
    return (names[0], arguments[0]) if names and arguments else None
