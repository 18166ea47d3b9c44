"""Prompts from a local JSONL file, one JSON object a line; and what all components read such files with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import rlft
from rlft.data.records import Made, Parse, RecordKeys, Row, RowError, split_of, without
from rlft.fields import PositiveFraction
from rlft.types import Prompt, Split, UserError, lone_surrogate

MEND = "mend or remove that line"
EMBEDDED = "embedded:"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True)
class JsonlFiles:
    """The config keys that name JSONL files, of any component that reads them; the ids of rows are `<file>:<line>`.

    section: of the config, that the keys belong to.
    path: the file. held_out_path: a second file to evaluate on (questions it shares with `path` are left out of
    training), or None: the share `held_out_fraction` of `path`, chosen by a hash of the question.
    """

    __slots__ = ()  # the slots are the component's, which also inherits the keys of its rows

    section: ClassVar[str]
    path: str
    held_out_path: str | None
    held_out_fraction: PositiveFraction

    def check(self) -> None:
        """The files that are named are there. Raises UserError."""
        existing_file(self.path, f"{self.section}.path")
        if self.held_out_path is not None:
            existing_file(self.held_out_path, f"{self.section}.held_out_path")

    def read(self, split: Split, parse: Parse[Made]) -> list[Row[Made]]:
        """The split's rows in file order. Raises UserError naming `file:line` for the first bad line."""
        key, held_out_key = f"{self.section}.path", f"{self.section}.held_out_path"
        file = existing_file(self.path, key)
        if self.held_out_path is None:
            return hash_split(rows(file, parse, key), split, self.held_out_fraction, file, self.section)
        held_out_file = existing_file(self.held_out_path, held_out_key)
        if held_out_file.samefile(file):
            raise UserError(
                held_out_key,
                "is the training file itself",
                got=self.held_out_path,
                remedy=f"set it to null to hold out {self.section}.held_out_fraction of that file",
            )
        held_out = rows(held_out_file, parse, held_out_key)
        if split is Split.held_out:
            return held_out
        return training(rows(file, parse, key), held_out, file, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl(JsonlFiles, RecordKeys):
    """Prompts of a JSONL file. The keys of RecordKeys say which fields are what."""

    section: ClassVar[str] = "data"

    def load(self, split: Split) -> list[Prompt]:
        """The split's prompts in file order. Raises UserError naming `file:line` for the first bad line."""
        return self.prompts(self.read, split)


def existing_file(path: str, key: str) -> Path:
    """The JSONL file that config key `key` names; `embedded:<name>` ships with rlft."""
    if path.startswith(EMBEDDED):
        return _embedded(path, key)
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(
            key, "is a folder, not a JSONL file", got=path, remedy=f"name the file in it, {key}=<folder>/<file>.jsonl"
        )
    if not file.is_file():
        raise UserError(key, "there is no such file", got=path, remedy="give the path of a JSONL file")
    return file


def _embedded(path: str, key: str) -> Path:
    known = {f"{EMBEDDED}{f.stem}": f for f in sorted((Path(rlft.__file__).parent / "assets").glob("*.jsonl"))}
    if path not in known:
        remedy = f"use {', '.join(known)}, or the path of a JSONL file"
        raise UserError(key, "there is no such embedded file", got=path, remedy=remedy)
    return known[path]


def rows(file: Path, parse: Parse[Made], key: str) -> list[Row[Made]]:
    """Every row of the JSONL file that config key `key` names. Raises UserError: unreadable, empty, malformed."""
    other_fields = f"{MEND}, or name other fields ({key.partition('.')[0]}.*_field)"
    found: list[Row[Made]] = []
    for number, fields in objects(file, key):
        try:
            found += parse(fields, f"{file.name}:{number}")
        except RowError as error:
            raise UserError(key, f"{file}:{number}: {error}", remedy=error.remedy or other_fields) from None
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


def hash_split(
    rows: list[Row[Made]], split: Split, held_out_fraction: float, where: object, section: str
) -> list[Row[Made]]:
    """The rows of one split by the hash of their question, so that the two are disjoint by construction."""
    chosen = [row for row in rows if split_of(row.identity, held_out_fraction) is split]
    if not chosen:
        raise UserError(
            f"{section}.held_out_fraction",
            f"leaves no {split} prompts of the {len(rows)} in {where}",
            got=held_out_fraction,
            remedy="use another fraction, more data, or a file of its own to hold out",
        )
    return chosen


def training(rows: list[Row[Made]], held_out: list[Row[Made]], where: object, key: str) -> list[Row[Made]]:
    """The rows whose questions are not held out; key: the config key that names the data."""
    kept = without(rows, held_out, where)
    if not kept:
        raise UserError(
            key,
            "every training question is also held out, which leaves nothing to train on",
            got=where,
            remedy="give other data",
        )
    return kept


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
    if _SURROGATE.search(line) and (found := lone_surrogate(json.dumps(value, ensure_ascii=False))):
        raise _bad_line(file, number, f"holds half a character, the lone surrogate {found}, which is no text", key)
    return value
