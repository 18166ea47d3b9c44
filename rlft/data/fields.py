"""The fields of a row of data by their names, or as `a.b` within one of them: texts, numbers, messages, and images.

Images are files, bytes, base64 and data URLs, in a field of their own or as parts of a chat. They stay files or bytes
here; they are decoded where prompts are tokenised, and again where a model reads them.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from rlft.tokens.messages import FIELDS, MessageError, kind, known, message_of
from rlft.types import IMAGE, Image, Message, Schema, counted

TOOLS = "tools"  # the field of a row that has the schemas of its tools
HISTORY = "history"  # the field of a row that has earlier turns, as in Alpaca's format: [[question, answer], ..]
CALL = "function_call"  # the speaker of messages that are calls of tools, JSON in a text
SPEAKERS = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", CALL), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "ipython"), "tool"),
    "developer": "system",
}
"""{other name of a role, in `role` or ShareGPT's `from`: role}; upper and lower case are the same."""
MOST_NAMES = 20  # of fields, in a message


class RowError(Exception):
    """An error in one row, which the reader of the rows turns into a UserError; remedy None: name another field.

    `key` is the last part of the config key that it is about, in the section that reads the rows.
    """

    def __init__(self, problem: str, *, remedy: str | None = None, key: str = "path") -> None:
        self.remedy, self.key = remedy, key
        super().__init__(problem)


class MissingField(RowError):
    """An error of a row that lacks a field, whose name may be known, and which may be in rows that are nested in it."""

    field: str | None = None


class UselessRow(RowError):
    """A row of the right form from which nothing can be learned: such rows are left out and counted, not refused."""


class TypedRow(dict[str, Any]):
    """A row of a table with types, such as Parquet: each object of a column has all fields of that column's type.

    Those that an object does not have are null there, so that null in a chat or a schema of such a row is no value.
    """


def _shown(fields: Mapping[str, Any], value: Any) -> Any:
    """A value of the row as its author wrote it, without the fillers of its table."""
    if not isinstance(fields, TypedRow):
        return value
    if isinstance(value, Mapping):
        return {key: _shown(fields, each) for key, each in value.items() if each is not None}
    return [_shown(fields, each) for each in value] if isinstance(value, list | tuple) else value


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
        missing = MissingField(f"there is no field {name!r}, {only(fields)}")
        missing.field = name
        raise missing
    inner = fields[first]
    if dot and isinstance(inner, list | tuple):
        inner = {str(i): item for i, item in enumerate(inner)}
        if rest.partition(".")[0] == "*":
            below = rest.partition(".")[2]
            return [value_of(inner, f"{i}.{below}" if below else i) for i in inner]
    if not dot or not isinstance(inner, Mapping):
        raise MissingField(f"there is no field {name!r}, {only(fields)}, and {first!r} is {kind(inner)}")
    try:
        return value_of(inner, rest)
    except RowError as error:
        raise MissingField(f"in {first!r} {error}") from None


def values_of(fields: Mapping[str, Any], name: str | Sequence[str]) -> Any:
    """The value of a field, or a list of those of several fields. Raises RowError."""
    return value_of(fields, name) if isinstance(name, str) else [value_of(fields, each) for each in name]


def has(fields: Mapping[str, Any], *names: str | Sequence[str]) -> bool:
    """Whether a row has values in all these fields (in a table, null means that a row has no value)."""
    try:
        return all(values_of(fields, name) is not None for name in names)
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
    """The text in a field; with `numbers` also a number, as text, with `blank` also a blank text. Raises RowError."""
    return as_text(value_of(fields, name), name, numbers=numbers, blank=blank)


def as_text(value: Any, name: str, *, numbers: bool = False, blank: bool = False) -> str:
    """The value of the field `name` as text, see `text_of`. Numbers have no exponent, whole ones no decimals.

    >>> [as_text(value, "a", numbers=True) for value in (1e-05, 18.0, True)]
    ['0.00001', '18', 'true']
    """
    if numbers and isinstance(value, bool):
        return str(value).lower()
    if numbers and isinstance(value, int | float | Decimal):
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
    value = _shown(fields, value_of(fields, name))
    if not isinstance(value, list | tuple) or not value:
        raise RowError(f"field {name!r} must be a list of messages, it is {kind(value)}")
    messages: list[Message] = []
    for i, message in enumerate(value):
        where = f"message {i} of field {name!r}"
        given = message if isinstance(message, Mapping) else {}  # without the fields of a table that say nothing:
        message = _with_role({key: value for key, value in given.items() if value is not None})
        role = message.get("role")
        if not isinstance(role, str) or role not in FIELDS:
            got = f", its role is {role!r}" if role is not None else ""
            form = f'{{"role": {" | ".join(FIELDS)}, "content": text}}'
            raise RowError(f'{where} must be {form} or {{"from": system | human | gpt, "value": text}}{got}')
        if role == "system" and i > 0:
            raise RowError(f"{where} is a system message; only the first may be")
        try:
            messages.append(message_of(message))
        except MessageError as error:
            raise RowError(f"{where} {error}", remedy=error.remedy) from None
    return tuple(messages)


def _with_role(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the role that its speaker has; a call of tools in a text is `tool_calls`."""
    if "role" not in message and isinstance(message.get("from"), str):
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": message["from"], "content": message.get("value"), **others}
    if not isinstance(speaker := message.get("role"), str):
        return message
    calls = None
    if speaker.lower() == CALL and isinstance(message.get("content"), str):
        with contextlib.suppress(ValueError, RecursionError):
            calls = json.loads(message["content"])
        form = '{"name": text, "arguments": object}'
        if not isinstance(calls, dict | list):
            raise RowError(f"a message of {speaker} must be JSON, {form} or a list of these", remedy="fix it")
        message = {**message, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return {**message, "role": SPEAKERS.get(speaker.lower(), speaker.lower())}


def tools_of(fields: Mapping[str, Any]) -> tuple[Schema, ...]:
    """The schemas of tools in the row's field `tools`, a list or JSON in a text; () without it. Raises RowError."""
    value = _shown(fields, fields.get(TOOLS))
    if isinstance(value, str) and value.strip():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    value = value or []
    if not isinstance(value, list | tuple):
        raise RowError(f"field {TOOLS!r} must be a list, it is {kind(value)}", remedy="fix it")
    tools = [tool for tool in value if isinstance(tool, Mapping)]
    schemas = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    if len(schemas) < len(value) or not all(isinstance(s["function"].get("name"), str) for s in schemas):
        raise RowError(f"field {TOOLS!r} must be a list of schemas of functions with a name", remedy="fix it")
    return tuple(schemas)


def earlier_turns(fields: Mapping[str, Any]) -> tuple[Message, ...]:
    """The turns in the row's history, a list of pairs of texts or a chat; none where it is something else."""
    pairs = fields.get(HISTORY) or ()
    if not isinstance(pairs, list | tuple):
        return ()
    if pairs and all(isinstance(pair, Mapping) for pair in pairs):
        return messages_of(fields, HISTORY)
    if not all(isinstance(pair, list | tuple) and [type(text) for text in pair] == [str, str] for pair in pairs):
        raise RowError(f"field {HISTORY!r} must be a list of pairs of texts, [[question, answer], ..]", remedy="fix it")
    return tuple({"role": ("user", "assistant")[i], "content": pair[i]} for pair in pairs for i in (0, 1))


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


def only(fields: Mapping[str, Any]) -> str:
    """'only ' and the names of all fields, for messages about a missing field."""
    more = f" and {len(fields) - MOST_NAMES} more" if len(fields) > MOST_NAMES else ""
    return f"only {', '.join(map(repr, list(fields)[:MOST_NAMES])) or 'none at all'}{more}"


# -- images ------------------------------------------------------------------------------------------------------------
MARK = "<image>"  # what data sets write in the place of an image in a text, also with its number, <image 1>
_MARKS = re.compile(r"<image[ _]?(\d*)>")

IMAGE_PARTS = ("image", "image_url")  # types of parts of a chat
IMAGE_FIELDS = ("image", "image_url", "url", "path", "base64", "bytes", "value")  # of such a part: one has the image

_NAME_OF_IMAGES = re.compile(r"(?:image|img|picture|photo)s?(?:_?(?:path|file|url|byte)s?)?(?:_?\d+)?", re.IGNORECASE)
FORMS = "a path, base64, a data URL, bytes or {bytes, path}"


def with_images(
    fields: Mapping[str, Any], question_field: str, image_field: str | None
) -> tuple[Mapping[str, Any], tuple[Image, ...]]:
    """(the row with IMAGE in its question for each image, the images in this order).

    `question_field` holds a text or a chat. In a chat, parts of the type `image` and `image_url` are images; a part
    without one stands for the next of `image_field`. The others stand where the texts of the user have a MARK for each
    of them, and without a MARK before the last text of the user. Raises RowError.
    """
    question = value_of(fields, question_field) if has(fields, question_field) else None
    is_chat = isinstance(question, list | tuple)
    placed, waiting = list[Any](), iter([] if image_field is None else _listed(value_of(fields, image_field)))
    row = {question_field: [_with_texts(message, placed, waiting) for message in (question if is_chat else ())]}
    if image_field is None and not placed:
        return fields, ()
    turns: list[Message] = [{"role": "user", "content": question}] if isinstance(question, str) else []
    if is_chat:
        turns = [*messages_of(TypedRow(row) if isinstance(fields, TypedRow) else row, question_field)]
    unplaced = list(waiting)
    if unplaced and placed:
        raise RowError(f"field {image_field!r} has {len(unplaced)} more than the chat has parts for")
    users = [i for i, turn in enumerate(turns) if turn["role"] == "user"]
    numbers = [number for i in users for number in _MARKS.findall(turns[i]["content"])]
    marks = len(numbers)
    if image_field is not None and marks and marks != len(unplaced):
        places, found = counted(marks, "place"), counted(len(unplaced), "image")
        problem = f"its question has {MARK} in {places}, and field {image_field!r} holds {found} for them"
        raise RowError(problem, key="image_field", remedy=f"write {MARK} once for each image, or nowhere")
    if image_field is not None and any(numbers) and marks > 1:
        if sorted(numbers, key=lambda number: int(number or 0)) != [str(i + 1) for i in range(marks)]:
            problem = f"its question numbers {counted(marks, 'image')} {', '.join(numbers)}"
            raise RowError(problem, key="image_field", remedy="number them from 1 on, or write <image> in their order")
        unplaced = [unplaced[int(number) - 1] for number in numbers]
    if not unplaced and not placed:
        return fields, ()
    images = tuple(image_of(value, image_field or question_field) for value in placed or unplaced)
    if unplaced and not users:
        problem = "the chat has no text of a user" if is_chat else f"the question is {kind(question)}"
        raise RowError(f"{problem}, so there is no place for the images")
    for i in users if unplaced else ():
        before = IMAGE * len(unplaced) if not marks and i == users[-1] else ""
        turns[i] = {**turns[i], "content": before + _MARKS.sub(IMAGE, turns[i]["content"])}
    changed = {**fields, question_field: turns if is_chat else turns[0]["content"]}
    return TypedRow(changed) if isinstance(fields, TypedRow) else changed, images


def check_none_unread(fields: Mapping[str, Any], turns: Sequence[Message], remedy: str | None = None) -> None:
    """Refuses a row without images whose texts have places for some, which it holds in a field that no key names."""
    mark = next(filter(None, (_MARKS.search(turn["content"]) for turn in turns)), None)
    if mark is None:
        return
    if names := [name for name, value in fields.items() if _has_images(name, value)]:
        problem = f"its text has {mark[0]}, and no key names its field {names[0]!r}, which has images"
        key, way = "image_field", f"set data.image_field={names[0]}"
        if len(names) > 1 and all(name[-1:].isdigit() for name in names):
            way = f"write {', '.join(names)} as one field, a list, and name it"
        raise RowError(problem, key="path" if remedy else key, remedy=remedy or way)


def _has_images(name: str, value: Any) -> bool:
    first = next(iter(_listed(value)), None)
    is_image = isinstance(first, bytes) or (isinstance(first, Mapping) and {"bytes", "path"} <= first.keys())
    return is_image or (bool(first) and isinstance(first, str | Mapping) and bool(_NAME_OF_IMAGES.fullmatch(name)))


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [*value] if isinstance(value, list | tuple) else [value]


def _with_texts(message: Any, placed: list[Any], waiting: Any) -> Any:
    """The message with IMAGE in place of its images, which are added to `placed`."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
            placed.append(_value_of_part(part, waiting))
            part = {"type": "text", "text": IMAGE}
        parts.append(part)
    return {**message, "content": parts}


def _value_of_part(part: Mapping[str, Any], waiting: Any) -> Any:
    try:
        given = known({k: v for k, v in part.items() if v != ""}, ("type", *IMAGE_FIELDS), "a part of the type image")
    except MessageError as error:
        raise RowError(f"a part of the type {part['type']} {error}", remedy=error.remedy) from None
    values = [given[name] for name in IMAGE_FIELDS if name in given]
    if len(values) > 1:
        raise RowError("a part of the type image has several images", remedy="give each image a part")
    if not values:
        try:
            return next(waiting)
        except StopIteration:
            raise RowError("a part of the type image has no image, and data.image_field has none for it") from None
    [value] = values
    return value["url"] if isinstance(value, Mapping) and value.get("url") is not None else value


def image_of(value: Any, name: str) -> Image:
    """The image in a field. RowError if it is none, or its file cannot be read."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value:
        return Image(digest=_digest(value), data=value)
    if not isinstance(value, str) or not value:
        raise RowError(f"field {name!r} must be an image ({FORMS}), it is {kind(value)}", key="image_field")
    if value.startswith(("http://", "https://")):
        raise RowError(f"field {name!r} is an address, and images are not fetched: {value[:60]}", key="image_field")
    if value.startswith("data:"):
        return image_of(_decoded(value.partition(",")[2], name), name)
    try:
        path = Path(value).expanduser()
        return Image(digest=_digest(path.read_bytes()), path=str(path.resolve()))
    except (OSError, ValueError):
        return image_of(_decoded(value, name), name)


def _decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        problem = f"field {name!r} names no file that can be read, and is no base64: {text[:60]!r}"
        raise RowError(problem, key="image_field") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
