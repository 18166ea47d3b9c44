"""The fields of a row of data: texts, numbers and messages, by their names, or as `a.b` within one of them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from rlft.tokens.text import THINKING_FIELDS
from rlft.types import Message, Schema

FIELDS = {
    "system": (),
    "user": (),
    "assistant": ("tool_calls", "weight", *THINKING_FIELDS),
    "tool": ("tool_call_id", "name"),
}
"""{role: the fields of its messages beside role and content}; others are refused."""
TOOLS = "tools"
"""The field of a row that has the schemas of its tools."""
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""{speaker in the `from` of ShareGPT's messages: role}, beside the roles themselves."""


class RowError(Exception):
    """An error in one row, which the reader of the rows turns into a UserError; remedy None: name another field.

    `key` is the last part of the config key that it is about, in the section that reads the rows.
    """

    def __init__(self, problem: str, *, remedy: str | None = None, key: str = "path") -> None:
        self.remedy, self.key = remedy, key
        super().__init__(problem)


class UselessRow(RowError):
    """A row of the right form from which nothing can be learned: such rows are left out and counted, not refused."""


def value_of(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field: `a.b` is b of the object in a, `a.0` the first of a list, `a.*.b` b of each object in it.

    >>> value_of({"a.b": 1, "a": {"c": [{"d": 2}, {"d": 3}]}}, "a.b")
    1
    >>> value_of({"a": {"c": [{"d": 2}, {"d": 3}]}}, "a.c.*.d")
    [2, 3]
    """
    if name in fields:
        return fields[name]
    first, dot, rest = name.partition(".")
    if first not in fields:
        raise RowError(f"there is no field {name!r}, {only(fields)}")
    inner = fields[first]
    if dot and isinstance(inner, list | tuple):
        inner = {str(i): item for i, item in enumerate(inner)}
        if rest.partition(".")[0] == "*":
            below = rest.partition(".")[2]
            return [value_of(inner, f"{i}.{below}" if below else i) for i in inner]
    if not dot or not isinstance(inner, Mapping):
        raise RowError(f"there is no field {name!r}, {only(fields)}, and {first!r} is {kind(inner)}")
    try:
        return value_of(inner, rest)
    except RowError as error:
        raise RowError(f"in {first!r} {error}") from None


def has(fields: Mapping[str, Any], *names: str) -> bool:
    """Whether a row has values in all these fields (in a table, null means that a row has no value)."""
    try:
        return all(value_of(fields, name) is not None for name in names)
    except RowError:
        return False


def is_empty(fields: Mapping[str, Any], name: str) -> bool:
    """Whether a row has this field, and no value in it: null, blank text, or NaN (a missing value in a table)."""
    try:
        value = value_of(fields, name)
    except RowError:
        return False
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def text_of(fields: Mapping[str, Any], name: str, *, numbers: bool = False, blank: bool = False) -> str:
    """The text in a field.

    With `numbers` it may be a number, which is returned as text; with `blank` the text may be blank. RowError if the
    field is missing, has another type, or is blank.
    """
    return as_text(value_of(fields, name), name, numbers=numbers, blank=blank)


def as_text(value: Any, name: str, *, numbers: bool = False, blank: bool = False) -> str:
    """The value of the field `name` as text, see `text_of`. Numbers have no exponent, whole ones no decimals.

    >>> as_text(1e-05, "a", numbers=True), as_text(18.0, "a", numbers=True)
    ('0.00001', '18')
    """
    if numbers and isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        if not math.isfinite(value):  # tables use NaN for a missing value
            raise RowError(f"field {name!r} holds no number, it is {value}")
        return format(Decimal(str(value)), "f").removesuffix(".0")
    if not isinstance(value, str):
        raise RowError(f"field {name!r} must be a string{' or number' if numbers else ''}, it is {kind(value)}")
    if not blank and not value.strip():
        raise RowError(f"field {name!r} is empty")
    return value


def messages_of(fields: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """The chat in a field; only its first message may be a system message. Raises RowError.

    Messages are {"role", "content"}, or {"from", "value"} as in ShareGPT.
    """
    value = value_of(fields, name)
    if not isinstance(value, list | tuple) or not value:
        raise RowError(f"field {name!r} must be a list of messages, it is {kind(value)}")
    messages: list[Message] = []
    for i, message in enumerate(value):
        where = f"message {i} of field {name!r}"
        if isinstance(message, Mapping) and "role" not in message and isinstance(speaker := message.get("from"), str):
            others = {key: value for key, value in message.items() if key not in ("from", "value")}
            message = {"role": SPEAKERS.get(speaker, speaker), "content": message.get("value"), **others}
        if not isinstance(message, Mapping) or message.get("role") not in FIELDS:
            raise RowError(
                f'{where} must be {{"role": {" | ".join(FIELDS)}, "content": text}} or '
                '{"from": system | human | gpt, "value": text}'
            )
        if message["role"] == "system" and i > 0:
            raise RowError(f"{where} is a system message; only the first may be")
        messages.append(_message(message, where))
    return tuple(messages)


def _message(message: Mapping[str, Any], where: str) -> Message:
    """The message with its role, its content and what else is known of its role. RowError names any other field."""
    role, remedy = message["role"], "use it under a name that is known, or leave it out"
    given = {key: value for key, value in message.items() if value is not None and value != []}
    for key in given:
        if key not in ("role", "content", *FIELDS[role]):
            known = ", ".join(("role", "content", *FIELDS[role]))
            raise RowError(f"{where} has the field {key!r}; a message of the role {role} has {known}", remedy=remedy)
    content = _joined(given.get("content", "" if "tool_calls" in given else None))
    made = {**given, "role": role, "content": content}
    if not isinstance(content, str):
        raise RowError(f"{where} must have a text as its content, it is {kind(content)}")
    if given.get("weight", 1) not in (0, 1):
        raise RowError(f"{where} has the weight {given['weight']!r}; it must be 0 (read) or 1 (learned)", remedy=remedy)
    for key in (*THINKING_FIELDS, "tool_call_id", "name"):
        if not isinstance(given.get(key, ""), str):
            raise RowError(f"{where} must have a text as its {key}, it is {kind(given[key])}")
    if "tool_calls" in given:
        made["tool_calls"] = [_call(call, where) for call in _listed(given["tool_calls"], f"the tool_calls of {where}")]
    return made


def _joined(content: Any) -> Any:
    """The content of a message, of which a list of parts that are all texts is one text, as in OpenAI's format."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return "".join(map(str, texts)) if texts and len(texts) == len(parts) else content


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call of a tool, whose arguments are an object."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        form = '{"function": {"name": text, "arguments": object}}'
        raise RowError(f"a call of {where} must be {form}, its arguments may be JSON in a text", remedy="fix it")
    own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **own, "function": {"name": name, "arguments": dict(arguments)}}


def tools_of(fields: Mapping[str, Any]) -> tuple[Schema, ...]:
    """The schemas of tools in the row's field `tools`, a list or JSON in a text; () without it. Raises RowError."""
    value = fields.get(TOOLS)
    if isinstance(value, str) and value.strip():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    schemas = [tool if "function" in tool else {"type": "function", "function": tool}
               for tool in _listed(value or [], f"field {TOOLS!r}") if isinstance(tool, Mapping)]  # fmt: skip
    if len(schemas) < len(value or []) or not all(isinstance(s["function"].get("name"), str) for s in schemas):
        raise RowError(f"field {TOOLS!r} must be a list of schemas of functions with a name", remedy="fix it")
    return tuple(schemas)


def _listed(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise RowError(f"{what} must be a list, it is {kind(value)}", remedy="fix it")
    return value


def turns_of(fields: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """The turns of a prompt, which is a text or a chat that ends with a user message. Raises RowError."""
    if not isinstance(value_of(fields, name), list | tuple):
        return ({"role": "user", "content": text_of(fields, name)},)
    turns = messages_of(fields, name)
    if turns[-1]["role"] not in ("user", "tool"):
        raise RowError(f"the last message of field {name!r} is not a user message")
    return turns


def completion_of(fields: Mapping[str, Any], name: str) -> Message:
    """A completion, which is a text, possibly empty, or one assistant message. Raises RowError."""
    if not isinstance(value_of(fields, name), list | tuple):
        return {"role": "assistant", "content": text_of(fields, name, blank=True)}
    turns = messages_of(fields, name)
    if [turn["role"] for turn in turns] != ["assistant"]:
        raise RowError(f"field {name!r} must be a string or one assistant message")
    return turns[0]


def only_text(turn: Message, where: str) -> str:
    """The text of an assistant's message that is compared as a text. RowError if it has more than that."""
    more = [key for key in turn if key not in ("role", "content", "weight")]
    if more:
        raise RowError(f"{where} has {more[0]}, and only texts are ranked", remedy="leave it out of the data")
    return turn["content"]


def kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    if value == []:
        return "an empty list"
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def only(fields: Mapping[str, Any]) -> str:
    """'only ' and the names of all fields, for messages about a missing field."""
    return f"only {', '.join(map(repr, fields)) or 'none at all'}"
