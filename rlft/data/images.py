"""Images in rows of data: files, bytes, base64 and data URLs, in a field of their own or as parts of a chat.

They stay files or bytes here; they are decoded where prompts are tokenised, and again where a model reads them.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.data.fields import SPEAKERS, RowError, TypedRow, has, value_of
from rlft.tokens.messages import MessageError, kind, known, text_of
from rlft.types import IMAGE, Image, Message, counted

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
    if image_field is None and not isinstance(question, list | tuple):
        return fields, ()
    unplaced = [] if image_field is None else _listed(value_of(fields, image_field))
    placed: list[Any] = []
    if isinstance(question, list | tuple):
        waiting = iter(unplaced)
        question = [_with_texts(message, placed, waiting) for message in question]
        unplaced = list(waiting)
    if unplaced and placed:
        raise RowError(f"field {image_field!r} has {len(unplaced)} more than the chat has parts for")
    texts = _texts_of_user(question)
    numbers = [number for text in texts.values() for number in _MARKS.findall(text)]
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
    if unplaced:
        question = _placed(question, texts, 0 if marks else len(unplaced))
    row = {**fields, question_field: question}
    return TypedRow(row) if isinstance(fields, TypedRow) else row, images


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


def _texts_of_user(question: Any) -> dict[int, str]:
    """{number of a message: its text} of the user's messages; {0: the question} where it is a text."""
    if isinstance(question, str):
        return {0: question}
    found = {}
    for i, message in enumerate(question if isinstance(question, list | tuple) else ()):
        role = message.get("role") or message.get("from") if isinstance(message, Mapping) else None
        if role in ("user", *(name for name, known_role in SPEAKERS.items() if known_role == "user")):
            with contextlib.suppress(MessageError):  # the message is refused where it is read
                found[i] = text_of(message.get("value") if message.get("content") is None else message["content"])
    return found


def _placed(question: Any, texts: Mapping[int, str], number: int) -> Any:
    """The text or chat with IMAGE in place of each MARK, and this many of them before the user's last text."""
    if not texts and isinstance(question, list):
        raise RowError("the chat has no text of a user before which the images could stand")
    if not texts:
        raise RowError(f"the question is {kind(question)}, so there is no place for the images")
    new = {i: _MARKS.sub(IMAGE, text) if not number else text for i, text in texts.items()}
    new[max(new)] = IMAGE * number + new[max(new)]
    if isinstance(question, str):
        return new[0]
    return [
        {**{k: v for k, v in m.items() if k != "value"}, "content": new[i]} if i in new else m
        for i, m in enumerate(question)
    ]


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
