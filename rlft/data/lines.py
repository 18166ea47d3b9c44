"""The lines of a JSONL file, and the errors of those that cannot be used."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rlft.data.records import RowError
from rlft.types import UserError, lone_surrogate

FIX = "fix or remove that line"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Line(NamedTuple):
    """A line that is not blank.

    Attributes:
        number: number of the line, from 1.
        start: offset of its first byte in the file.
        content: its bytes, line end included.
    """

    number: int
    start: int
    content: bytes


def lines(file: Path, key: str) -> Iterator[Line]:
    """Every line that is not blank of the file that config key `key` names.

    Raises:
        UserError: the file cannot be read, or is an array instead of lines.
    """
    try:
        with file.open("rb") as opened:
            yield from _lines(opened, file, key)
    except OSError as error:
        raise unreadable(file, key, error) from None


def unreadable(file: Path, key: str, error: OSError) -> UserError:
    return UserError(key, f"cannot be read ({error.strerror})", got=file, remedy="give a readable JSONL file")


def _lines(opened: BinaryIO, file: Path, key: str) -> Iterator[Line]:
    start = 0
    for number, content in enumerate(opened, 1):
        if number == 1 and content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            remedy = "write one object a line, without the brackets and the commas between them"
            raise UserError(key, "is a JSON array", got=file, remedy=remedy)
        if content.strip():
            yield Line(number, start, content)
        start += len(content)


def objects(file: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not blank."""
    for line in lines(file, key):
        yield line.number, parsed(line, file, key)


def parsed(line: Line, file: Path, key: str) -> dict[str, Any]:
    """The object on the line.

    Raises:
        UserError: the line is not UTF-8, not JSON, not an object, or holds a lone surrogate; it names `file:line`.
    """
    number, _, content = line
    try:
        value = json.loads(content.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError:
        raise _bad_line(file, number, "is not UTF-8 text", key) from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise _bad_line(file, number, f"is not JSON ({reason})", key) from None
    if not isinstance(value, dict):
        raise _bad_line(file, number, f"must be a JSON object, it is {type(value).__name__}", key)
    if _SURROGATE.search(content) and (surrogate := lone_surrogate(json.dumps(value, ensure_ascii=False))):
        raise _bad_line(file, number, f"holds half a character, the lone surrogate {surrogate}, which is not text", key)
    return value


def bad_row(file: Path, number: int, error: RowError, key: str) -> UserError:
    """The error of a line whose row cannot be used."""
    other_fields = f"{FIX}, or name other fields ({key.partition('.')[0]}.*_field)"
    return UserError(key, f"{file}:{number}: {error}", remedy=error.remedy or other_fields)


def _bad_line(file: Path, number: int, problem: str, key: str) -> UserError:
    return UserError(key, f"{file}:{number}: {problem}", remedy=FIX)
