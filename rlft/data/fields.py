"""The fields of a row of data: texts, numbers and messages, by their names, or as `a.b` within one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from rlft.types import Message

ROLES = ("system", "user", "assistant")
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
        role = content = None
        if isinstance(message, Mapping):
            role, content = message.get("role"), _joined(message.get("content"))
            if role is None and isinstance(speaker := message.get("from"), str):
                role, content = SPEAKERS.get(speaker, speaker), message.get("value")
        if role not in ROLES or not isinstance(content, str):
            raise RowError(
                f'message {i} of field {name!r} must be {{"role": {" | ".join(ROLES)}, "content": text}} or '
                '{"from": system | human | gpt, "value": text}'
            )
        if role == "system" and i > 0:
            raise RowError(f"message {i} of field {name!r} is a system message; only the first may be")
        messages.append({"role": role, "content": content})
    return tuple(messages)


def _joined(content: Any) -> Any:
    """The content of a message, of which a list of parts that are all texts is one text, as in OpenAI's format."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return "".join(map(str, texts)) if texts and len(texts) == len(parts) else content


def turns_of(fields: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """The turns of a prompt, which is a text or a chat that ends with a user message. Raises RowError."""
    if not isinstance(value_of(fields, name), list | tuple):
        return ({"role": "user", "content": text_of(fields, name)},)
    turns = messages_of(fields, name)
    if turns[-1]["role"] != "user":
        raise RowError(f"the last message of field {name!r} is not a user message")
    return turns


def completion_of(fields: Mapping[str, Any], name: str) -> str:
    """A completion, which is a text, possibly empty, or one assistant message. Raises RowError."""
    if not isinstance(value_of(fields, name), list | tuple):
        return text_of(fields, name, blank=True)
    turns = messages_of(fields, name)
    if [turn["role"] for turn in turns] != ["assistant"]:
        raise RowError(f"field {name!r} must be a string or one assistant message")
    return turns[0]["content"]


def kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    if value == []:
        return "an empty list"
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def only(fields: Mapping[str, Any]) -> str:
    """'only ' and the names of all fields, for messages about a missing field."""
    return f"only {', '.join(map(repr, fields)) or 'none at all'}"
