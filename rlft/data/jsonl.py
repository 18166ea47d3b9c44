"""JSONL files with one JSON object a line: their lines, the rows made of these, and prompts from such a file.

The rows of a large file are not held: each is read again whenever it is used. A first pass parses every row, so that a
bad one is refused at the start, as with small data. Memory holds the offset of each row, the number of its line,
64 bits of its question's identity and a checksum: 26 bytes per row.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple

import rlft
from rlft.config.bounds import PositiveFraction
from rlft.data.lazy import Lazy
from rlft.data.records import Made, Parse, RecordKeys, RecordRow, RowError, RowSource, number_of
from rlft.system.terminal import with_progress
from rlft.types import Split, UserError, lone_surrogate, require

logger = logging.getLogger(__name__)

EMBEDDED = "embedded:"
UNPACK = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
"""{suffix of a compressed file: command that unpacks it}."""
STREAMED_BYTES = 64 * 2**20
"""Files up to this size are held in memory, where they take about ten times as much; larger ones are streamed."""
FIX = "fix or remove that line"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True)
class JsonlFiles(RowSource):
    """The config keys with which a component names the JSONL files that it reads. A row's id is `<file>:<line>`.

    configs/data/jsonl.yaml explains them. Questions that are also in held_out_path are left out of training.
    """

    __slots__ = ()  # the component defines the slots, as it also inherits the keys of its rows

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
        require(
            not held_out_file.samefile(file),
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
    """Prompts in a JSONL file, in file order. The keys of RecordKeys say which field holds what."""


def existing_file(path: str, key: str) -> Path:
    """The JSONL file `path`, where `embedded:<name>` is one that ships with rlft. Raises UserError naming `key`."""
    if path.startswith(EMBEDDED):
        return _embedded(path, key)
    file = Path(path).expanduser()
    remedy = f"name the file in it, {key}=<folder>/<file>.jsonl"
    require(not file.is_dir(), key, "is a folder, not a JSONL file", got=path, remedy=remedy)
    require(file.is_file(), key, "there is no such file", got=path, remedy="give the path of a JSONL file")
    unpack = UNPACK.get(file.suffix)
    require(unpack is None, key, "is compressed", got=path, remedy=f"unpack it with {unpack} {file.name}")
    return file


def _embedded(path: str, key: str) -> Path:
    embedded_files = {f"{EMBEDDED}{f.stem}": f for f in sorted((Path(rlft.__file__).parent / "assets").glob("*.jsonl"))}
    remedy = f"use {', '.join(embedded_files)}, or the path of a JSONL file"
    require(path in embedded_files, key, "there is no such embedded file", got=path, remedy=remedy)
    return embedded_files[path]


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
        raise _unreadable(file, key, error) from None


def _unreadable(file: Path, key: str, error: OSError) -> UserError:
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


def _bad_line(file: Path, number: int, problem: str, key: str) -> UserError:
    return UserError(key, f"{file}:{number}: {problem}", remedy=FIX)


def rows(file: Path, parse: Parse[Made], key: str) -> Sequence[RecordRow[Made]]:
    """Every row of the JSONL file that config key `key` names, streamed where it is large.

    Raises:
        UserError: the file is unreadable, empty or malformed.
    """
    parsed_rows: Sequence[RecordRow[Made]]
    if (status := file.stat()).st_size > STREAMED_BYTES:
        index = _index_of(file, (status.st_ino, status.st_size, status.st_mtime_ns), parse, key)
        parsed_rows = StreamedRows(file, key, parse, index)
    else:
        parsed_rows = [row for line in lines(file, key) for row in _rows_of(line, file, parse, key)]
    require(len(parsed_rows), key, "holds no data", got=file, remedy="give a file with one JSON object a line")
    return parsed_rows


def _rows_of(line: Line, file: Path, parse: Parse[Made], key: str) -> Sequence[RecordRow[Made]]:
    """The rows that a line becomes. Raises UserError naming `file:line`."""
    try:
        return parse(parsed(line, file, key), f"{file.name}:{line.number}")
    except RowError as error:
        other_fields = f"{FIX}, or name other fields ({key.partition('.')[0]}.*_field)"
        raise UserError(key, f"{file}:{line.number}: {error}", remedy=error.remedy or other_fields) from None


class Index(NamedTuple):
    """Columns with one entry per row of a streamed file.

    Attributes:
        starts: offset of the first byte of the row's line.
        identities: first 64 bits of the row's identity.
        numbers: number of the line.
        checks: checksum of the line.
        parts: index of the row among those of its line.
    """

    starts: array[int]
    identities: array[int]
    numbers: array[int]
    checks: array[int]
    parts: array[int]


@lru_cache(maxsize=2)
def _index_of(file: Path, stamp: tuple[int, int, int], parse: Callable[..., Any], key: str) -> Index:
    """The index of a file, for which every line is parsed once for both splits. Raises UserError for the first bad one.

    `stamp` differs between versions of the file, so that a changed file is parsed again.
    """
    index = Index(array("Q"), array("Q"), array("I"), array("I"), array("H"))
    all_lines = with_progress(lines(file, key), f"{key}: reading {file}", stamp[1], lambda line: len(line.content))
    for line in all_lines:
        for part, row in enumerate(_rows_of(line, file, parse, key)):
            entry = (line.start, number_of(row.identity), line.number, zlib.crc32(line.content), part)
            for column, value in zip(index, entry, strict=True):
                column.append(value)
    return index


class StreamedRows(Lazy[RecordRow[Made]], Generic[Made]):
    """The rows that `parse` makes of a file's lines, in order; a line may become several rows, or none."""

    def __init__(self, file: Path, key: str, parse: Parse[Made], index: Index) -> None:
        self._file, self._key, self._parse, self._index = file, key, parse, index

    @property
    def identities(self) -> Sequence[int]:
        """The first 64 bits of each row's identity."""
        return self._index.identities

    def where(self, keep: Sequence[bool]) -> StreamedRows[Made]:
        """The rows for which `keep`, which has an entry for each row, is true."""
        index = Index(*(array(column.typecode, compress(column, keep)) for column in self._index))
        return StreamedRows(self._file, self._key, self._parse, index)

    def __len__(self) -> int:
        return len(self._index.starts)

    def at(self, index: int) -> RecordRow[Made]:
        return next(self.between(index, index + 1))

    def between(self, start: int, stop: int) -> Iterator[RecordRow[Made]]:
        try:
            with self._file.open("rb") as opened:
                for i in range(start, stop):
                    yield self._row(opened, i)
        except OSError as error:
            raise _unreadable(self._file, self._key, error) from None

    def _row(self, opened: BinaryIO, i: int) -> RecordRow[Made]:
        opened.seek(self._index.starts[i])
        line = Line(self._index.numbers[i], self._index.starts[i], opened.readline())
        if zlib.crc32(line.content) != self._index.checks[i]:  # it was valid when the run began
            remedy = "restore it and continue with rlft resume, or start a new run; give each run its own copy"
            raise UserError(self._key, "has changed while it was in use", got=self._file, remedy=remedy)
        return _rows_of(line, self._file, self._parse, self._key)[self._index.parts[i]]


def hash_split(
    rows: Sequence[RecordRow[Made]], split: Split, held_out_fraction: float, where: object, section: str
) -> Sequence[RecordRow[Made]]:
    """The rows of one split, chosen by a hash of the question, so that the two splits are disjoint by construction.

    `where`, the file or data set, and `section`, which names it in the config, are for the error message.
    """
    limit, held_out = held_out_fraction * 2**64, split is Split.held_out  # as in split_of
    chosen = _where(rows, [(identity < limit) is held_out for identity in _identities(rows)])
    require(
        len(chosen),
        f"{section}.held_out_fraction",
        f"leaves no {split} prompts of the {len(rows)} in {where}",
        got=held_out_fraction,
        remedy="use another fraction, more data, or a file of its own to hold out",
    )
    return chosen


def training(
    rows: Sequence[RecordRow[Made]], held_out: Sequence[RecordRow[Made]], where: object, key: str
) -> Sequence[RecordRow[Made]]:
    """The rows whose questions are not held out, with a warning about the number of the others.

    `where`, the training file or data set, and `key`, which names it in the config, are for messages.
    """
    held_out_identities = set(_identities(held_out))
    kept = _where(rows, [identity not in held_out_identities for identity in _identities(rows)])
    if number := len(rows) - len(kept):
        logger.warning("%s: %d training questions are also held out; they are left out of training", where, number)
    problem = "every training question is also held out, which leaves nothing to train on"
    require(len(kept), key, problem, got=where, remedy="give other data")
    return kept


def _identities(rows: Sequence[RecordRow[Any]]) -> Sequence[int]:
    """The first 64 bits of each row's identity."""
    return rows.identities if isinstance(rows, StreamedRows) else [number_of(row.identity) for row in rows]


def _where(rows: Sequence[RecordRow[Made]], keep: Sequence[bool]) -> Sequence[RecordRow[Made]]:
    return rows.where(keep) if isinstance(rows, StreamedRows) else list(compress(rows, keep))
