"""How the policy writes calls of tools, and how they are read from its text: in a given syntax, or as templates do.

A template's form is inferred from calls that it is made to write, and is then read.

For example, Qwen2.5's template writes a turn that says "said" and calls add(argument1="mark1", argument2="mark2") as

    said
    <tool_call>
    {"name": "add", "arguments": {"argument1": "mark1", "argument2": "mark2"}}
    </tool_call>

An object there has the tool's name under "name" and the arguments under "arguments", and behind what is said stands
`<tool_call>`: this is TemplateCalls(marker="<tool_call>", name="name", arguments="arguments"). There are three forms,
each with a function that finds it in such a turn (`json_form`, `named_form`, `listed_form`):

    TemplateCalls   <tool_call>{"name": "add", "arguments": {"a": 1}}           Qwen, Hermes, Granite
    NamedCalls      [TOOL_CALLS]add[ARGS]{"a": 1}                               Mistral, DeepSeek, Kimi-K2, gpt-oss
    ListedCalls     <function=add><parameter=a>1</parameter></function>         Qwen3-Coder, GLM, MiniMax-M2

A form is used only if it reads what the template itself has written.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlft.environment.protocol import Call, is_text
from rlft.tokens.reasoning import search_outside, without_reasoning
from rlft.tokens.text import CALL_ID, RunTokenizer, num_common, rendered_if_taken, special_pattern, special_tokens
from rlft.types import NOTHING, Schema, Shown, UserError, well_formed

MAX_DEPTH = 64  # of the JSON that the policy may write; Python's pickle and json fail some hundred levels down
SAID = "said"
PAIR = {"argument1": "mark1", "argument2": "mark2"}
LISTED = re.compile(r"argument1(?P<separator>.*?)mark1(?P<between>.*?)argument2.*?mark2(?P<after>.*)", re.DOTALL)
"""`PAIR`, written as names with their values."""
NAME = r"(?P<name>[\w.-]+)"
CDATA = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)
MAX_BETWEEN = 200  # the most characters between a tool's name and its arguments
EXPLAINED = re.compile(r'(?P<marker>\S+)\s*\{"(?P<name>\w+)": <[\w-]+>, "(?P<arguments>\w+)": <[\w-]+>\}')
"""A call as templates explain it in the prompt, such as `<tool_call>{"name": <function-name>, "arguments": <args>}`."""
NOT_JSON = "this call is not valid JSON ({}); write it as {}"
KEYS_OF_CALLS = {"type", "id"}
_FENCED = re.compile(r"\A(`{3,}|~{3,})[A-Za-z_]*\s*(.*?)\s*\1\Z", re.DOTALL)
_OPENED_FENCE = re.compile(r"\s*(?:(?:`{3,}|~{3,})[A-Za-z_]*\s*)?")
_SEPARATORS = re.compile(r"[\s,;]*")


# -- forms -------------------------------------------------------------------------------------------------------------
class CallReader(ABC):
    """Reads the calls in a turn of the policy, but not in its reasoning.

    `text` is the turn with its special tokens, but without the one that ends it.
    """

    def calls(self, text: str) -> list[Call]:
        """The calls in order; those that cannot be made have a `problem`."""
        return [call for _, call in self.found(text)]

    def before(self, text: str) -> str:
        """The text before the first call."""
        return text[: next((start for start, _ in self.found(text)), len(text))]

    @abstractmethod
    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        """(where it begins, the call) for each call in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCalls(CallReader):
    """Calls as a chat template writes them: JSON objects with the tool's name and arguments under these keys."""

    marker: str  # before them, such as `<tool_call>` or `[TOOL_CALLS]`; "": a turn with a call holds nothing else
    name: str
    arguments: str
    tools: frozenset[str] = field(default=frozenset(), compare=False)  # the tools' names

    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        if not self.marker:
            bare = _FENCED.sub(r"\2", without_reasoning(text).strip())
            value, _, error = decoded(bare)
            is_call = is_call_of(value, self.name, self.arguments, self.tools)
            is_broken = error and re.match(rf'\{{\s*"(?:{self.name}|type)"\s*:', bare)
            yield from ((0, call) for call in (self._at(bare, 0)[0] if is_call or is_broken else ()))
            return
        position = 0
        while match := search_outside(re.compile(re.escape(self.marker)), text, position):
            calls, position = self._at(text, match.end())
            yield from ((match.start(), call) for call in calls)

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call in this form, where the template explains it and writes none."""
        end = f"\n</{self.marker[1:]}" if self.marker.startswith("<") else ""
        return f"{self.marker}\n{json.dumps({self.name: name, self.arguments: arguments}, ensure_ascii=False)}{end}"

    def _at(self, text: str, start: int) -> tuple[list[Call], int]:
        """(the calls of the objects or lists that stand here one after the other, where they end)."""
        example = f'{self.marker}{{"{self.name}": "<tool>", "{self.arguments}": {{..}}}}'
        calls: list[Call] = []
        position = _end_of(_OPENED_FENCE, text, start)
        while not calls or text.startswith("{", position):
            value, length, error = decoded(text[position:])
            if error:
                end = text.find(self.marker, position) if self.marker else -1
                written = text[position : end if end >= 0 else None]
                return [*calls, unreadable(written, NOT_JSON.format(error, example))], position
            values = value if isinstance(value, list) else [value]
            calls += [call_of(each, self.name, self.arguments, example) for each in values]
            position = _end_of(_SEPARATORS, text, position + length)
        return calls, position


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls(CallReader):
    """Calls as a tool's name, then its arguments as JSON."""

    prefix: str  # what stands before the name, such as `[TOOL_CALLS]`
    between: str  # a regular expression of what stands between name and arguments
    id: str = ""  # a regular expression whose first group is the call's id in the text from the prefix on; "": none

    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        start, position = re.compile(re.escape(self.prefix) + NAME + self.between), 0
        while match := search_outside(start, text, position):
            value, length, error = decoded(text[match.end() :])
            position = match.end() + length
            if error:
                example = f"{self.prefix}{match['name']}{text[match.end('name') : match.end()]}{{..}}"
                end = start.search(text, position)
                written = text[match.end() : end.start() if end else None]
                yield match.start(), unreadable(written, NOT_JSON.format(error, example), match["name"])
            else:
                call_id = re.match(self.id, match[0]) if self.id else None
                call = {"name": match["name"], "arguments": value, "id": call_id[1] if call_id else ""}
                yield match.start(), call_of(call, "name", "arguments", "an object")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCalls(CallReader):
    """Calls as a tool's name, then each argument with its value; values other than strings are JSON."""

    prefix: str  # what stands before the name, such as `<function=`
    opening: str  # what stands before an argument's name, such as `<parameter=`
    separator: str  # what stands between an argument's name and its value; a line break at its end is not the value's
    closing: str  # what stands after a value; a line break at its beginning is not the value's
    end: str  # what ends a call; "": nothing of its own
    properties: Mapping[str, Mapping[str, Mapping[str, Any]]]  # {tool: {argument: its schema}}

    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        starts = [*re.finditer(re.escape(self.prefix) + NAME + r"(?![\w.-])", without_reasoning(text))]
        for match, end in zip(starts, [*(match.start() for match in starts[1:]), len(text)], strict=bool(starts)):
            yield match.start(), self._call(match["name"], text[match.end() : end])

    def _call(self, name: str, body: str) -> Call:
        def bare(value: str) -> str:
            value = value.removeprefix("\n") if self.separator.endswith("\n") else value
            value = value.removesuffix("\n") if self.closing.startswith("\n") else value
            return cdata[1] if (cdata := CDATA.fullmatch(value)) else value

        arguments, rest = listed_arguments(body, self._argument(), self.properties.get(name, {}), bare)
        if self.opening in (rest.partition(self.end)[0] if self.end else rest):
            example = f"{self.opening}<argument>{self.separator}<value>{self.closing}".replace("\n", "")
            return unreadable(body, f"an argument of this call has no end; write it as {example}", name)
        written = body.partition(self.end)[0] if self.end else body
        return Call(name=well_formed(name), arguments=arguments, written=well_formed(written.strip()))

    def _argument(self) -> re.Pattern[str]:
        separator = _spaced(self.separator)
        if self.separator[:1] in "\"'":  # further attributes may tell the value's type: `name="a" string="true">`
            last = self.separator.rindex(self.separator[0])
            separator = re.escape(self.separator[0]) + r"[^<>\n]*?" + _spaced(self.separator[last + 1 :])
        key = r"(?P<key>[^\s<>\"'=]+)"
        closing = re.escape(self.closing.strip())
        return re.compile(f"{re.escape(self.opening)}{key}{separator}(?P<value>.*?){closing}", re.DOTALL)


def listed_arguments(
    body: str, pattern: re.Pattern[str], properties: Mapping[str, Any], bare: Callable[[str], str] = str
) -> tuple[dict[str, Any], str]:
    """(the arguments of a call, each with its `key` and `value` where the pattern matches; what else the body says).

    `bare` is what a value says of the text that stands for it; by its schema it is a text, or JSON.

    >>> listed_arguments("<a>1</a> <b>2</b>!", re.compile("<(?P<key>.)>(?P<value>.)</.>"), {"a": {"type": "integer"}})
    ({'a': 1, 'b': '2'}, ' !')
    """
    arguments, rest = {}, body
    for match in pattern.finditer(body):
        value = bare(match["value"])
        is_said = is_text(properties.get(match["key"], {}))
        arguments[match["key"]] = well_formed(value) if is_said else json_or_text(value)
        rest = rest.replace(match[0], "", 1)
    return arguments, rest


# -- finding the form --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CallTemplate:
    """A tokenizer's chat template with tools of these schemas, for conversations that begin like `opening`."""

    tokenizer: RunTokenizer
    schemas: Sequence[Schema]
    opening: Sequence[Mapping[str, Any]]

    @property
    def prompt(self) -> str | None:
        """What it shows before the first turn; None if it fails."""
        return rendered_if_taken(self.tokenizer, self.opening, tools=self.schemas, start=True)

    def form(self) -> CallReader | None:
        """The form in which it writes calls; None if it is not known."""
        tool = self.schemas[0]["function"]["name"]
        turn, of_two = self.turn((tool, PAIR)), self.turn((tool, PAIR), (tool, PAIR))
        if tool not in turn:
            return self.explained()
        special = special_pattern(special_tokens(self.tokenizer))
        before_first = turn.partition(next(iter(PAIR)))[0].rpartition(tool)[0]
        before_second = of_two.rpartition(tool)[0]
        prefix = prefix_of_calls(before_first, before_second, special, self.prompt or "")
        for form in (
            json_form(turn, tool),
            named_form(turn, tool, prefix, special),
            listed_form(turn, tool, prefix, properties_of(self.schemas)),
        ):
            if form is not None and [(c.name, c.arguments, c.problem) for c in form.calls(turn)] == [(tool, PAIR, "")]:
                return replace(form, tools=names_of(self.schemas)) if isinstance(form, TemplateCalls) else form
        return None

    def writes_without_showing(self) -> bool:
        """Whether it writes calls of tools in a known form, but no schemas, which DeepSeek-V3.1 has in a text."""
        name = self.schemas[0]["function"]["name"]
        return self.prompt is not None and name not in self.prompt and self.form() is not None

    def explained(self) -> TemplateCalls | None:
        """The form that it explains in the prompt, where it writes no calls itself; None if there is none."""
        match = EXPLAINED.search(self.prompt or "")
        return None if match is None else TemplateCalls(**match.groupdict(), tools=names_of(self.schemas))

    def turn(self, *calls: tuple[str, Mapping[str, Any]]) -> str:
        """The turn with these calls, (name, arguments), as the template writes it; "" if it fails."""
        made = [
            {"type": "function", "id": f"{number:09d}", "function": {"name": name, "arguments": dict(arguments)}}
            for number, (name, arguments) in enumerate(calls)
        ]
        turn = {"role": "assistant", "content": SAID, "tool_calls": made}
        prompt, text = self.prompt, rendered_if_taken(self.tokenizer, [*self.opening, turn], tools=self.schemas)
        return "" if prompt is None or text is None else text[num_common(prompt, text) :]


def json_form(turn: str, tool: str) -> TemplateCalls | None:
    """The form of a turn in which an object has the tool's name and the arguments of `PAIR`.

    >>> json_form('said<call>{"name": "add", "args": {"argument1": "mark1", "argument2": "mark2"}}', "add")
    TemplateCalls(marker='<call>', name='name', arguments='args', tools=frozenset())
    """
    for start, value in _objects_in(turn):
        names = [key for key, each in value.items() if each == tool]
        arguments = [key for key, each in value.items() if each in (PAIR, json.dumps(PAIR))]
        if names and arguments:
            marker = turn[:start].rpartition(SAID)[2].strip()
            return TemplateCalls(marker=marker.removesuffix("[").strip(), name=names[0], arguments=arguments[0])
    return None


def named_form(turn: str, tool: str, prefix: str, special: re.Pattern[str]) -> NamedCalls | None:
    """The form of a turn in which the tool's name stands before an object, `PAIR`.

    >>> turn = '[CALL]add[ARGS]{"argument1": "mark1", "argument2": "mark2"}'
    >>> named_form(turn, "add", "[CALL]", re.compile(r"\\[CALL\\]|\\[ARGS\\]")).between
    '[^{}]{0,200}?\\\\[ARGS\\\\]'
    """
    for start in (start for start, value in _objects_in(turn) if value == PAIR):
        _, found, between = turn[:start].rpartition(tool)
        if found:
            pattern = re.sub(r"\d+", r"\\d+", _spaced(between))  # of a number of the call
            if tokens := [*special.finditer(between)]:  # as models write it, other words may stand before the last one
                pattern = rf"[^{{}}]{{0,{MAX_BETWEEN}}}?{re.escape(between[tokens[-1].start() :].rstrip())}"
            form = NamedCalls(prefix=prefix, between=pattern, id=id_pattern(between, special))
            return form if prefix and between else None
    return None


def id_pattern(between: str, special: re.Pattern[str]) -> str:
    r"""A regular expression of where a call's id stands, by what is between name and arguments; "" if it has none.

    It stands between two tokens (Mistral), or it is the name with what is around it (Kimi-K2: `functions.add:0`).

    >>> id_pattern("[ID]000000000[ARGS]", re.compile(r"\[ID\]|\[ARGS\]"))
    '.*?\\[ID\\](.*?)\\[ARGS\\]'
    >>> id_pattern(":0<arguments>", re.compile("<id>|<arguments>"))
    '(?:<id>|<arguments>)(.*?)(?:<id>|<arguments>)'
    """
    before, found, after = between.partition(CALL_ID)
    if found:
        return rf".*?{re.escape(before)}(.*?){re.escape(after.strip())}"
    own = between[: match.start()] if (match := special.search(between)) else ""
    return rf"(?:{special.pattern})(.*?)(?:{special.pattern})" if re.search(r"\d", own) else ""


def listed_form(turn: str, tool: str, prefix: str, properties: Mapping[str, Mapping[str, Any]]) -> ListedCalls | None:
    r"""The form of a turn in which the names and values of `PAIR` stand one after the other behind the tool's name.

    >>> turn = "<f=add><p=argument1>\nmark1\n</p>\n<p=argument2>\nmark2\n</p>\n</f>"
    >>> listed_form(turn, "add", "<f=", {})
    ListedCalls(prefix='<f=', opening='<p=', separator='>\n', closing='\n</p>', end='</f>', properties={})
    """
    found = LISTED.search(turn)
    if found is None or tool not in turn[: found.start()] or "<" not in found["between"]:
        return None
    closing, bracket, name = found["between"].rpartition("<")
    if not (prefix and closing.strip() and found["separator"].strip()):
        return None
    end = re.match(r"\s*(</[^<>\n]+>)", found["after"][num_common(closing, found["after"]) :])
    return ListedCalls(
        prefix=prefix,
        opening=bracket + name,
        separator=found["separator"],
        closing=closing.rstrip(),
        end=end[1] if end else "",
        properties=properties,
    )


def prefix_of_calls(before_first: str, before_second: str, special: re.Pattern[str], prompt: str) -> str:
    """What stands before the tool's name in every call, from the last token or line break on.

    Args:
        before_first, before_second: a turn up to the name in its first call, and in its second.
        special: finds special tokens.
        prompt: its end, the header of a turn, is no part of a call.

    >>> prefix_of_calls("said[CALL]", "said[CALL]add{}[CALL]", re.compile(r"\\[CALL\\]"), "")
    '[CALL]'
    """
    before = before_first
    if before_second.startswith(before) and len(before_second) > len(before):
        before = before[len(before) - num_common(before[::-1], before_second[::-1]) :]  # what both end with
    before, header = _from_last_token(before, special), _from_last_token(prompt, special)
    return before.removeprefix(header).strip("\n").rpartition("\n")[2].rpartition(SAID)[2]


def _from_last_token(text: str, special: re.Pattern[str]) -> str:
    """The text from its last special token on; all of it if it has none."""
    return text[[0, *(match.start() for match in special.finditer(text))][-1] :]


def _objects_in(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where it begins, the object) of each JSON object in a text, those in others too."""
    for match in re.finditer(r"\{", text):
        value = decoded(text[match.start() :])[0]
        if isinstance(value, dict):
            yield match.start(), value


def _spaced(text: str) -> str:
    """A regular expression of this text, in which white space may differ."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))


# -- reading -----------------------------------------------------------------------------------------------------------
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
    if is_too_deep(value):
        return None, 0, "too deep"
    return value, len(text) - len(bare) + length, ""


def is_too_deep(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and objects are nested more deeply in a JSON value."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(is_too_deep(each, most - 1) for each in inner)


def call_of(value: Any, name_key: str, arguments_key: str, example: str) -> Call:
    if not isinstance(value, Mapping) or not isinstance(value.get(name_key), str):
        return unreadable(json.dumps(value, ensure_ascii=False), f"this call names no tool; write it as {example}")
    name, arguments = value[name_key], value.get(arguments_key, {})
    if isinstance(arguments, str):  # JSON in a string, as OpenAI's API has it
        arguments = json_or_text(arguments)
    written = well_formed(json.dumps(arguments, ensure_ascii=False))
    if not isinstance(arguments, Mapping):
        problem = f"the {arguments_key} of this call are no JSON object; write it as {example}"
        return unreadable(written, problem, name)
    call_id = well_formed(value["id"]) if isinstance(value.get("id"), str) else ""
    named = {str(key): each for key, each in arguments.items()}
    return Call(name=well_formed(name), arguments=named, written=written, id=call_id)


def is_call_of(value: Any, name_key: str, arguments_key: str, tools: Collection[str]) -> bool:
    """Whether a JSON value without a marker is a call: an object that names a tool, or that is nothing but a call.

    >>> is_call_of({"name": "Bob", "age": 3}, "name", "arguments", ["add"])
    False
    """
    if not isinstance(value, Mapping) or not isinstance(value.get(name_key), str):
        return False
    is_bare = arguments_key in value and set(value) <= {name_key, arguments_key} | KEYS_OF_CALLS
    return value[name_key] in tools or is_bare


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Where what the pattern matches at this position ends; the position itself if it matches nothing there."""
    match = pattern.match(text, position)
    return match.end() if match else position


def names_of(schemas: Sequence[Schema]) -> frozenset[str]:
    return frozenset(schema["function"]["name"] for schema in schemas)


def properties_of(schemas: Sequence[Schema]) -> dict[str, Mapping[str, Any]]:
    """{tool: {argument: its schema}}."""
    return {each["function"]["name"]: each["function"]["parameters"].get("properties", {}) for each in schemas}


def unreadable(written: str, problem: str, name: str = "") -> Call:
    """A call that cannot be made, as the policy wrote it; `problem` says why, as a sentence for the policy."""
    return Call(name=well_formed(name), arguments={}, written=well_formed(written), problem=well_formed(problem))


def json_or_text(text: str) -> Any:
    """The JSON value, or else the Python value, that the text is; or else the text."""
    value, length, problem = decoded(text)
    if not problem and not text[length:].strip():
        return value
    try:  # as templates that print values write them: ['a'], True
        literal = ast.literal_eval(text.strip())
        return literal if isinstance(literal, list | dict | bool) and not is_too_deep(literal) else text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


# -- calls in any syntax -----------------------------------------------------------------------------------------------
Syntax = Literal["template", "json", "xml"]


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
AS_TEMPLATE = """\
You can call tools. Tools:
"""


def shown_by(syntax: Syntax, template: CallTemplate) -> Shown:
    """What prompts show of the tools: the chat template shows them, or else a text before the first question does."""
    if not template.schemas:
        return NOTHING
    lines = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in template.schemas)
    if syntax != "template":
        return Shown(preamble={"json": AS_JSON, "xml": AS_XML}[syntax] + lines)
    if template.writes_without_showing():
        return Shown(preamble=AS_TEMPLATE + lines)
    return Shown(tools=tuple(template.schemas))


def reader_of(syntax: Syntax, template: CallTemplate) -> CallReader:
    """A reader of calls in this syntax, learnt by having the template write one. UserError: these cannot be read."""
    if syntax == "json":
        return JsonCalls(template.schemas)
    if syntax == "xml":
        return XmlCalls(template.schemas)
    if getattr(template.tokenizer, "response_template", None) is not None:
        described = DescribedCalls(template.tokenizer, template.schemas)
        if not described.calls(""):  # otherwise the description itself cannot be used
            return described
    form = template.form()
    if form is None:
        problem = "the chat template writes calls of tools in a form that is not known here"
        remedy = "use environment.syntax=json or xml"
        raise UserError("environment.syntax", problem, got="template", remedy=remedy)
    return form


# -- forms -------------------------------------------------------------------------------------------------------------
class JsonCalls(CallReader):
    """Calls as JSON objects with a name and arguments, anywhere in the text; `schemas` are those of the tools."""

    START = re.compile(r'\{\s*"name"\s*:\s*(?:"([^"]*)")?')
    EXAMPLE = '{"name": "<tool>", "arguments": {..}}'

    def __init__(self, schemas: Sequence[Schema] = ()) -> None:
        self.tools = names_of(schemas)

    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        """As in `CallReader`; an object that is no call is skipped, with all that is in it."""
        position, outside = 0, without_reasoning(text)
        while (start := outside.find("{", position)) >= 0:
            value, length, error = decoded(text[start:])
            broken = self.START.match(text, start) if error else None
            if broken is not None and (not self.tools or broken[1] in self.tools):
                yield (
                    start,
                    unreadable(text[start:], NOT_JSON.format(error, self.EXAMPLE)),
                )
                return
            position = start + max(length, 1)
            if is_call_of(value, "name", "arguments", self.tools):
                yield start, call_of(value, "name", "arguments", self.EXAMPLE)
                outside = text[:position] + without_reasoning(text[position:])


class XmlCalls(CallReader):
    """Calls as `<call tool="name"><argument>value</argument></call>`; values other than strings are JSON."""

    START = re.compile(r'<call(?:\s+tool="(?P<name>[^"]*)")?[^>]*>(?P<body>.*?)(?P<end></call>|$)', re.DOTALL)
    ARGUMENT = re.compile(r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>", re.DOTALL)
    EXAMPLE = '<call tool="<tool>"><argument>value</argument></call>'

    def __init__(self, schemas: Sequence[Schema]) -> None:
        self.properties = properties_of(schemas)

    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        position = 0
        while match := search_outside(self.START, text, position):
            yield match.start(), self._call(match)
            position = match.end()

    def _call(self, match: re.Match[str]) -> Call:
        name, body = match["name"], match["body"]
        if name is None or not match["end"]:
            problem = "names no tool" if name is None else "has no </call>"
            return unreadable(body, f"this call {problem}; write it as {self.EXAMPLE}", name or "")
        arguments, rest = listed_arguments(body, self.ARGUMENT, self.properties.get(name, {}))
        if rest.strip():
            return unreadable(body, f"this call has text outside of arguments; write it as {self.EXAMPLE}", name)
        return Call(name=well_formed(name), arguments=arguments, written=well_formed(body))


class DescribedCalls(CallReader):
    """Calls that transformers reads, for a tokenizer whose `response_template` says how its model answers."""

    def __init__(self, tokenizer: RunTokenizer, schemas: Sequence[Schema]) -> None:
        self.tokenizer, self.schemas = tokenizer, [dict(schema) for schema in schemas]

    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        try:
            message = self.tokenizer.parse_response(text, prefix="", tools=self.schemas)
            calls = [each.get("function", each) for each in message.get("tool_calls") or []]
        except Exception as error:  # the parser follows a description, and may raise anything
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield 0, unreadable(text, f"this call cannot be read ({first_line[:200]})")
            return
        for each in calls:
            yield 0, call_of(each, "name", "arguments", "the template does")

    def before(self, text: str) -> str:
        try:
            return str(self.tokenizer.parse_response(text, prefix="", tools=self.schemas).get("content") or "")
        except Exception:  # as in `found`
            return text


# -- writing -----------------------------------------------------------------------------------------------------------
def written(syntax: Syntax, template: CallTemplate, name: str, arguments: Mapping[str, Any]) -> str:
    """A turn with this call, as the policy has to write it; a template's turn includes the tokens that end it."""
    if syntax == "json":
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    if syntax == "xml":
        values = (
            f"<{key}>{value if isinstance(value, str) else json.dumps(value)}</{key}>"
            for key, value in arguments.items()
        )
        return f'<call tool="{name}">{"".join(values)}</call>'
    turn = template.turn((name, arguments)).replace(SAID, "", 1).strip()
    if name not in turn and (form := template.explained()) is not None:
        return form.written(name, arguments)
    return turn
