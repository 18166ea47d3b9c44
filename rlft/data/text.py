"""Texts from a JSONL file, such as the pretraining text that PPO-ptx mixes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlft.data.jsonl import existing_file
from rlft.data.lines import objects
from rlft.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to learn, and its context: the text before it that is not learned ("" where there is none)."""

    context: str
    text: str


def load_texts(path: str, field: str, given_field: str | None) -> list[Text]:
    """The texts of all lines, in file order and unchanged, white space included.

    Args:
        path: a JSONL file, or embedded:<name>, which ships with rlft.
        field: the key of the text.
        given_field: the key of its context; None: the texts have none.

    Raises:
        UserError: the file does not exist, cannot be read or is empty; a line is not a JSON object, one of its two
            fields is missing or of another type, or its text is empty; both keys are the same.
    """
    file = existing_file(path, "pretrain.path")
    if given_field == field:
        raise UserError(
            "pretrain.given_field",
            "is the key of the text itself (pretrain.field)",
            got=given_field,
            remedy="name the field of what stands before the text, or set it to null",
        )
    texts = []
    for number, fields in objects(file, "pretrain.path"):
        where = f"{file}:{number}"
        context = "" if given_field is None else _string(fields, "pretrain.given_field", given_field, where)
        text = _string(fields, "pretrain.field", field, where)
        if not text.strip():
            raise UserError("pretrain.path", f"{where}: the text is empty", remedy="fix or remove that line")
        texts.append(Text(context=context, text=text))
    if not texts:
        raise UserError("pretrain.path", "holds no texts", got=file, remedy="give a file with one JSON object a line")
    return texts


def _string(fields: Mapping[str, Any], key: str, field: str, where: str) -> str:
    """The text in `field`; key: the config key that names it."""
    content = "the text" if key == "pretrain.field" else "what stands before the text"
    if field not in fields:
        raise UserError(
            key,
            f"{where}: there is no such field, only {', '.join(map(repr, fields)) or 'none at all'}",
            got=field,
            remedy=f"name the field that holds {content}",
        )
    value = fields[field]
    if not isinstance(value, str):
        raise UserError(
            key,
            f"{where}: it must hold a string, it holds {type(value).__name__}",
            got=field,
            remedy=f"name the field that holds {content}, or fix that line",
        )
    return value
