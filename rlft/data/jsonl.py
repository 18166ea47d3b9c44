"""Prompts from a local JSONL file: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlft.data.records import RecordKeys, Row, RowError, split_of, without
from rlft.fields import PositiveFraction
from rlft.types import Prompt, Split, UserError

MEND = "mend or remove that line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl(RecordKeys):
    """Prompts of a JSONL file; ids are `<file>:<line>`. The keys of RecordKeys say which fields are what.

    path: the file. held_out_path: a second file to evaluate on (questions it shares with `path` are left out of
    training), or None: the share `held_out_fraction` of `path`, chosen by a hash of the question.
    """

    path: str
    held_out_path: str | None
    held_out_fraction: PositiveFraction

    def load(self, split: Split) -> list[Prompt]:
        """The split's prompts in file order. Raises UserError naming `file:line` for the first bad line."""
        file = existing_file(self.path, "data.path")
        if self.held_out_path is None:
            return hash_split(rows(file, self, "data.path"), split, self.held_out_fraction, file)
        held_out_file = existing_file(self.held_out_path, "data.held_out_path")
        if held_out_file.samefile(file):
            raise UserError(
                "data.held_out_path",
                "is the training file itself",
                got=self.held_out_path,
                remedy="set it to null to hold out data.held_out_fraction of that file",
            )
        held_out = rows(held_out_file, self, "data.held_out_path")
        if split is Split.held_out:
            return [row.prompt for row in held_out]
        return training(rows(file, self, "data.path"), held_out, file)


def existing_file(path: str, key: str) -> Path:
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(
            key, "is a folder, not a JSONL file", got=path, remedy=f"name the file in it, {key}=<folder>/<file>.jsonl"
        )
    if not file.is_file():
        raise UserError(key, "there is no such file", got=path, remedy="give the path of a JSONL file")
    return file


def rows(file: Path, keys: RecordKeys, key: str) -> list[Row]:
    """Every row of the JSONL file that config key `key` names. Raises UserError: unreadable, empty, malformed."""
    found = []
    for number, fields in objects(file, key):
        try:
            found.append(keys.row(fields, f"{file.name}:{number}"))
        except RowError as error:
            raise UserError(
                key, f"{file}:{number}: {error}", remedy=f"{MEND}, or name other fields (data.*_field)"
            ) from None
    if not found:
        raise UserError(key, "holds no data", got=file, remedy="give a file with one JSON object a line")
    return found


def objects(file: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not blank."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _object(line, file, number, key)
    except OSError as error:
        raise UserError(
            key, f"cannot be read ({error.strerror})", got=file, remedy="give a readable JSONL file"
        ) from None


def hash_split(rows: list[Row], split: Split, held_out_fraction: float, where: object) -> list[Prompt]:
    """The rows of one split by the hash of their question, so that the two are disjoint by construction."""
    chosen = [row.prompt for row in rows if split_of(row.identity, held_out_fraction) is split]
    if not chosen:
        raise UserError(
            "data.held_out_fraction",
            f"leaves no {split} prompts of the {len(rows)} in {where}",
            got=held_out_fraction,
            remedy="use another fraction, more data, or a file of its own to hold out",
        )
    return chosen


def training(rows: list[Row], held_out: list[Row], where: object) -> list[Prompt]:
    """The prompts whose questions are not held out."""
    kept = without(rows, held_out, where)
    if not kept:
        raise UserError(
            "data.path",
            "every training question is also held out, which leaves nothing to train on",
            got=where,
            remedy="give other data",
        )
    return [row.prompt for row in kept]


def _bad_line(file: Path, number: int, problem: str, key: str) -> UserError:
    return UserError(key, f"{file}:{number}: {problem}", remedy=MEND)


def _object(line: bytes, file: Path, number: int, key: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError:
        raise _bad_line(file, number, "is not UTF-8 text", key) from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise _bad_line(file, number, f"is not JSON ({reason})", key) from None
    if not isinstance(value, dict):
        raise _bad_line(file, number, f"must be a JSON object, it is {type(value).__name__}", key)
    return value
