"""Plain texts from a JSONL file, such as the pretraining text that PPO-ptx mixes in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rlft
from rlft.data.jsonl import existing_file, objects
from rlft.types import UserError

EMBEDDED = "embedded:"


def load_texts(path: str, field: str) -> list[str]:
    """The texts in `field` of every line, in file order and as they stand, white space included.

    path: a JSONL file, or embedded:<name>, which ships with rlft.

    Raises:
        UserError: the file is not there, cannot be read or is empty; a line is no JSON object, or its text is missing,
            of another type or empty.
    """
    file = resolve_file(path)
    texts = [_text(fields, field, f"{file}:{number}") for number, fields in objects(file, "pretrain.path")]
    if not texts:
        raise UserError("pretrain.path", "holds no texts", got=file, remedy="give a file with one JSON object a line")
    return texts


def resolve_file(path: str) -> Path:
    """The JSONL file that `pretrain.path` names."""
    if not path.startswith(EMBEDDED):
        return existing_file(path, "pretrain.path")
    assets = Path(rlft.__file__).parent / "assets"
    known = {f"{EMBEDDED}{file.stem}": file for file in sorted(assets.glob("*.jsonl"))}
    if path not in known:
        raise UserError(
            "pretrain.path",
            "there is no such embedded text",
            got=path,
            remedy=f"use {', '.join(known)}, or the path of a JSONL file",
        )
    return known[path]


def _text(fields: Mapping[str, Any], field: str, where: str) -> str:
    if field not in fields:
        raise UserError(
            "pretrain.field",
            f"{where}: there is no such field, only {', '.join(map(repr, fields)) or 'none at all'}",
            got=field,
            remedy="name the field that holds the text",
        )
    value = fields[field]
    if not isinstance(value, str):
        raise UserError(
            "pretrain.field",
            f"{where}: it must hold a text, it holds {type(value).__name__}",
            got=field,
            remedy="name the field that holds the text, or mend that line",
        )
    if not value.strip():
        raise UserError("pretrain.path", f"{where}: the text is empty", remedy="mend or remove that line")
    return value
