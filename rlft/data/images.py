"""Images in rows of data: files, bytes, base64 and data URLs, in a field of their own or as parts of a chat.

They stay files or bytes here; they are decoded where prompts are tokenised, and again where a model reads them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlft.data.fields import RowError, kind, value_of
from rlft.tokens.messages import MessageError, known
from rlft.types import IMAGE, Image

MARK = "<image>"
"""What data sets write in the place of an image in a text."""

IMAGE_PARTS = ("image", "image_url")
"""The types of parts that are images."""
IMAGE_FIELDS = ("image", "image_url", "url", "path", "base64", "bytes", "value")
"""The fields of such a part, of which one holds the image."""

FORMS = "a path, base64, a data URL, bytes or {bytes, path}"


def with_images(
    fields: Mapping[str, Any], question_field: str, image_field: str | None
) -> tuple[Mapping[str, Any], tuple[Image, ...]]:
    """(the row with IMAGE in its question for each image, the images in this order).

    `question_field` holds a text or a chat. In a chat, parts of the type `image` and `image_url` are images; a part
    without one stands for the next of `image_field`. Where neither parts nor MARK place these, they stand before the
    text of the last message of the user. Raises RowError.
    """
    unplaced = [] if image_field is None else _listed(value_of(fields, image_field))
    question = fields.get(question_field)
    placed: list[Any] = []
    if isinstance(question, list | tuple):
        waiting = iter(unplaced)
        question = [_with_texts(message, placed, waiting) for message in question]
        unplaced = list(waiting)
    if not unplaced and not placed:
        return fields, ()
    if unplaced and placed:
        raise RowError(f"field {image_field!r} has {len(unplaced)} more than the chat has parts for")
    images = tuple(image_of(value, image_field or question_field) for value in placed or unplaced)
    return {**fields, question_field: _placed(question, len(unplaced))}, images


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


def _placed(question: Any, number: int) -> Any:
    """The text or chat with IMAGE for this many images that have no place yet."""
    if not number:
        return question
    if isinstance(question, str):
        return question.replace(MARK, IMAGE) if question.count(MARK) == number else IMAGE * number + question
    if not isinstance(question, list):
        raise RowError(f"the question is {kind(question)}, so there is no place for the images")
    last = max((i for i, m in enumerate(question) if isinstance(m, Mapping) and m.get("role") == "user"), default=None)
    if last is None or not isinstance(question[last].get("content"), str):
        raise RowError("the chat has no text of a user before which the images could stand")
    placed = {**question[last], "content": _placed(question[last]["content"], number)}
    return [*question[:last], placed, *question[last + 1 :]]


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
