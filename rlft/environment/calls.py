"""How the policy writes calls of tools, and how they are read from its text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from rlft.environment import template_calls
from rlft.environment.protocol import Call
from rlft.tokens.answers import search_outside, without_reasoning
from rlft.tokens.text import RunTokenizer
from rlft.types import NOTHING, Schema, Shown, UserError, well_formed

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


def shown_by(syntax: Syntax, template: template_calls.CallTemplate) -> Shown:
    """What prompts show of the tools: the chat template shows them, or else a text before the first question does."""
    if not template.schemas:
        return NOTHING
    lines = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in template.schemas)
    if syntax != "template":
        return Shown(preamble={"json": AS_JSON, "xml": AS_XML}[syntax] + lines)
    if template.writes_without_showing():
        return Shown(preamble=AS_TEMPLATE + lines)
    return Shown(tools=tuple(template.schemas))


def reader_of(syntax: Syntax, template: template_calls.CallTemplate) -> template_calls.CallReader:
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
class JsonCalls(template_calls.CallReader):
    """Calls as JSON objects with a name and arguments, anywhere in the text; `schemas` are those of the tools."""

    START = re.compile(r'\{\s*"name"\s*:\s*(?:"([^"]*)")?')
    EXAMPLE = '{"name": "<tool>", "arguments": {..}}'

    def __init__(self, schemas: Sequence[Schema] = ()) -> None:
        self.tools = template_calls.names_of(schemas)

    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        """As in `CallReader`; an object that is no call is skipped, with all that is in it."""
        position, outside = 0, without_reasoning(text)
        while (start := outside.find("{", position)) >= 0:
            value, length, error = template_calls.decoded(text[start:])
            broken = self.START.match(text, start) if error else None
            if broken is not None and (not self.tools or broken[1] in self.tools):
                yield (
                    start,
                    template_calls.unreadable(text[start:], template_calls.NOT_JSON.format(error, self.EXAMPLE)),
                )
                return
            position = start + max(length, 1)
            if template_calls.is_call_of(value, "name", "arguments", self.tools):
                yield start, template_calls.call_of(value, "name", "arguments", self.EXAMPLE)
                outside = text[:position] + without_reasoning(text[position:])


class XmlCalls(template_calls.CallReader):
    """Calls as `<call tool="name"><argument>value</argument></call>`; values other than strings are JSON."""

    START = re.compile(r'<call(?:\s+tool="(?P<name>[^"]*)")?[^>]*>(?P<body>.*?)(?P<end></call>|$)', re.DOTALL)
    ARGUMENT = re.compile(r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>", re.DOTALL)
    EXAMPLE = '<call tool="<tool>"><argument>value</argument></call>'

    def __init__(self, schemas: Sequence[Schema]) -> None:
        self.properties = template_calls.properties_of(schemas)

    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        position = 0
        while match := search_outside(self.START, text, position):
            yield match.start(), self._call(match)
            position = match.end()

    def _call(self, match: re.Match[str]) -> Call:
        name, body = match["name"], match["body"]
        if name is None or not match["end"]:
            problem = "names no tool" if name is None else "has no </call>"
            return template_calls.unreadable(body, f"this call {problem}; write it as {self.EXAMPLE}", name or "")
        arguments, rest = template_calls.listed_arguments(body, self.ARGUMENT, self.properties.get(name, {}))
        if rest.strip():
            return template_calls.unreadable(
                body, f"this call has text outside of arguments; write it as {self.EXAMPLE}", name
            )
        return Call(name=well_formed(name), arguments=arguments, written=well_formed(body))


class DescribedCalls(template_calls.CallReader):
    """Calls that transformers reads, for a tokenizer whose `response_template` says how its model answers."""

    def __init__(self, tokenizer: RunTokenizer, schemas: Sequence[Schema]) -> None:
        self.tokenizer, self.schemas = tokenizer, [dict(schema) for schema in schemas]

    def found(self, text: str) -> Iterator[tuple[int, Call]]:
        try:
            message = self.tokenizer.parse_response(text, prefix="", tools=self.schemas)
            calls = [each.get("function", each) for each in message.get("tool_calls") or []]
        except Exception as error:  # the parser follows a description, and may raise anything
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield 0, template_calls.unreadable(text, f"this call cannot be read ({first_line[:200]})")
            return
        for each in calls:
            yield 0, template_calls.call_of(each, "name", "arguments", "the template does")

    def before(self, text: str) -> str:
        try:
            return str(self.tokenizer.parse_response(text, prefix="", tools=self.schemas).get("content") or "")
        except Exception:  # as in `found`
            return text


# -- writing -----------------------------------------------------------------------------------------------------------
def written(syntax: Syntax, template: template_calls.CallTemplate, name: str, arguments: Mapping[str, Any]) -> str:
    """A turn with this call, as the policy has to write it; a template's turn includes the tokens that end it."""
    if syntax == "json":
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    if syntax == "xml":
        values = (
            f"<{key}>{value if isinstance(value, str) else json.dumps(value)}</{key}>"
            for key, value in arguments.items()
        )
        return f'<call tool="{name}">{"".join(values)}</call>'
    turn = template.turn((name, arguments)).replace(template_calls.SAID, "", 1).strip()
    if name not in turn and (form := template.explained()) is not None:
        return form.written(name, arguments)
    return turn
