"""Prompts from a local JSONL file with one JSON object per line, and the functions that read such files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import ClassVar

import rlft
from rlft.config.bounds import PositiveFraction
from rlft.data import streamed
from rlft.data.lines import bad_row, objects
from rlft.data.records import Made, Parse, RecordKeys, RecordRow, RowError, split_of, warn_of_held_out, without
from rlft.data.streamed import StreamedRows
from rlft.types import Prompt, Split, UserError

EMBEDDED = "embedded:"
UNPACK = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
"""{suffix of a compressed file: command that unpacks it}."""


@dataclass(frozen=True, kw_only=True)
class JsonlFiles:
    """The config keys with which a component names the JSONL files that it reads. A row's id is `<file>:<line>`.

    Attributes:
        section: the section of the config that the keys belong to.
        path: the file.
        held_out_path: a second file to evaluate on. Questions that are also in it are left out of training. None: a
            share of `path` is held out.
        held_out_fraction: that share, chosen by a hash of the question.
    """

    __slots__ = ()  # the component defines the slots, as it also inherits the keys of its rows

    section: ClassVar[str]
    path: str
    held_out_path: str | None
    held_out_fraction: PositiveFraction

    def check(self) -> None:
        """Checks that the files exist. Raises UserError."""
        existing_file(self.path, f"{self.section}.path")
        if self.held_out_path is not None:
            existing_file(self.held_out_path, f"{self.section}.held_out_path")

    def read(self, split: Split, parse: Parse[Made]) -> Sequence[RecordRow[Made]]:
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
    """Prompts in a JSONL file. The keys of RecordKeys say which field holds what."""

    section: ClassVar[str] = "data"

    def load(self, split: Split) -> Sequence[Prompt]:
        """The split's prompts in file order. Raises UserError naming `file:line` for the first bad line."""
        return self.prompts(self.read, split)


def existing_file(path: str, key: str) -> Path:
    """The JSONL file `path`, where `embedded:<name>` is one that ships with rlft. Raises UserError naming `key`."""
    if path.startswith(EMBEDDED):
        return _embedded(path, key)
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(
            key, "is a folder, not a JSONL file", got=path, remedy=f"name the file in it, {key}=<folder>/<file>.jsonl"
        )
    if not file.is_file():
        raise UserError(key, "there is no such file", got=path, remedy="give the path of a JSONL file")
    if unpack := UNPACK.get(file.suffix):
        raise UserError(key, "is compressed", got=path, remedy=f"unpack it with {unpack} {file.name}")
    return file


def _embedded(path: str, key: str) -> Path:
    embedded_files = {f"{EMBEDDED}{f.stem}": f for f in sorted((Path(rlft.__file__).parent / "assets").glob("*.jsonl"))}
    if path not in embedded_files:
        remedy = f"use {', '.join(embedded_files)}, or the path of a JSONL file"
        raise UserError(key, "there is no such embedded file", got=path, remedy=remedy)
    return embedded_files[path]


def rows(file: Path, parse: Parse[Made], key: str) -> Sequence[RecordRow[Made]]:
    """Every row of the JSONL file that config key `key` names, streamed where it is large (rlft/data/streamed.py).

    Raises:
        UserError: the file is unreadable, empty or malformed.
    """
    parsed_rows: Sequence[RecordRow[Made]]
    if file.stat().st_size > streamed.STREAMED_BYTES:
        parsed_rows = streamed.streamed_file(file, parse, key)
    else:
        parsed_rows = held_rows(file, parse, key)
    if not len(parsed_rows):
        raise UserError(key, "holds no data", got=file, remedy="give a file with one JSON object a line")
    return parsed_rows


def held_rows(file: Path, parse: Parse[Made], key: str) -> list[RecordRow[Made]]:
    """Every row, held in memory. Raises UserError if the file is unreadable or malformed."""
    parsed_rows: list[RecordRow[Made]] = []
    for number, fields in objects(file, key):
        try:
            parsed_rows += parse(fields, f"{file.name}:{number}")
        except RowError as error:
            raise bad_row(file, number, error, key) from None
    return parsed_rows


def hash_split(
    rows: Sequence[RecordRow[Made]], split: Split, held_out_fraction: float, where: object, section: str
) -> Sequence[RecordRow[Made]]:
    """The rows of one split, chosen by a hash of the question, so that the two splits are disjoint by construction.

    Args:
        rows: the rows of both splits.
        split: the split to return.
        held_out_fraction: share of the questions that is held out.
        where: the file or data set, for the error message.
        section: the section of the config that names the data.
    """
    chosen: Sequence[RecordRow[Made]]
    if isinstance(rows, StreamedRows):
        limit, held_out = held_out_fraction * 2**64, split is Split.held_out  # as in split_of
        chosen = rows.where([(identity < limit) is held_out for identity in rows.identities])
    else:
        chosen = [row for row in rows if split_of(row.identity, held_out_fraction) is split]
    if not len(chosen):
        raise UserError(
            f"{section}.held_out_fraction",
            f"leaves no {split} prompts of the {len(rows)} in {where}",
            got=held_out_fraction,
            remedy="use another fraction, more data, or a file of its own to hold out",
        )
    return chosen


def training(
    rows: Sequence[RecordRow[Made]], held_out: Sequence[RecordRow[Made]], where: object, key: str
) -> Sequence[RecordRow[Made]]:
    """The rows whose questions are not held out.

    Args:
        rows: the rows of the training data.
        held_out: the held-out rows.
        where: the training file or data set, for messages.
        key: the config key that names the data.
    """
    kept: Sequence[RecordRow[Made]]
    if isinstance(rows, StreamedRows) or isinstance(held_out, StreamedRows):
        held_out_identities = set(streamed.identities_of(held_out))
        is_kept = [identity not in held_out_identities for identity in streamed.identities_of(rows)]
        kept = rows.where(is_kept) if isinstance(rows, StreamedRows) else list(compress(rows, is_kept))
        warn_of_held_out(where, len(rows) - len(kept))
    else:
        kept = without(rows, held_out, where)
    if not len(kept):
        raise UserError(
            key,
            "every training question is also held out, which leaves nothing to train on",
            got=where,
            remedy="give other data",
        )
    return kept
