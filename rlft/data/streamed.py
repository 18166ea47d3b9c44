"""Rows of data that are too large for memory: each row is read again whenever it is used.

A first pass parses every row, so that a bad one is refused at the start, as with small data. Memory holds the offset
of each row, the number of its line, 64 bits of its question's identity and a checksum: 26 bytes per row.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol

from rlft.data.lazy import CHUNK, Lazy
from rlft.data.lines import Line, bad_row, lines, parsed, unreadable
from rlft.data.records import Made, Parse, RecordRow, RowError
from rlft.system.terminal import with_progress
from rlft.types import UserError

STREAMED_BYTES = 64 * 2**20
"""Files up to this size are held in memory, where they take about ten times as much; larger ones are streamed."""

IDENTITY_DIGITS = 16  # hexadecimal: 64 bits


class Record(NamedTuple):
    """A record of a source, from which rows are parsed.

    Attributes:
        position: its position, by which the source can read it again.
        number: its number in messages, such as that of its line.
        fields: its fields.
        check: a checksum of its content.
    """

    position: int
    number: int
    fields: Mapping[str, Any]
    check: int


class Source(Protocol):
    """A sequence of records, any of which can be read again by its position."""

    def all(self) -> Iterator[Record]: ...

    def read(self, positions: Iterable[tuple[int, int]]) -> Iterator[Record]:
        """The records at these (position, number)."""
        ...

    def row_id(self, number: int) -> str: ...

    def refused(self, number: int, error: RowError) -> UserError: ...

    def changed(self) -> UserError: ...


class JsonlSource:
    """The lines of the JSONL file that config key `key` names."""

    def __init__(self, file: Path, key: str) -> None:
        self.file, self.key = file, key

    def all(self) -> Iterator[Record]:
        all_lines, size = lines(self.file, self.key), self.file.stat().st_size
        for line in with_progress(all_lines, f"{self.key}: reading {self.file}", size, lambda line: len(line.content)):
            yield Record(line.start, line.number, parsed(line, self.file, self.key), zlib.crc32(line.content))

    def read(self, positions: Iterable[tuple[int, int]]) -> Iterator[Record]:
        try:
            with self.file.open("rb") as opened:
                for start, number in positions:
                    opened.seek(start)
                    line = Line(number, start, opened.readline())
                    try:
                        fields = parsed(line, self.file, self.key)
                    except UserError:  # the line was valid when the run began
                        raise self.changed() from None
                    yield Record(start, number, fields, zlib.crc32(line.content))
        except OSError as error:
            raise unreadable(self.file, self.key, error) from None

    def row_id(self, number: int) -> str:
        return f"{self.file.name}:{number}"

    def refused(self, number: int, error: RowError) -> UserError:
        return bad_row(self.file, number, error, self.key)

    def changed(self) -> UserError:
        remedy = "restore it and continue with rlft resume, or start a new run; give each run its own copy"
        return UserError(self.key, "has changed while it was in use", got=self.file, remedy=remedy)


class Index(NamedTuple):
    """Columns with one entry per row.

    Attributes:
        positions: position of the row's record.
        identities: first 64 bits of the row's identity.
        numbers: number of the record.
        checks: checksum of the record.
        parts: index of the row within its record.
    """

    positions: array[int]
    identities: array[int]
    numbers: array[int]
    checks: array[int]
    parts: array[int]

    @classmethod
    def empty(cls) -> Index:
        return cls(array("Q"), array("Q"), array("I"), array("I"), array("H"))

    def where(self, keep: Sequence[bool]) -> Index:
        return Index(*(array(column.typecode, compress(column, keep)) for column in self))


class StreamedRows(Lazy[RecordRow[Made]], Generic[Made]):
    """The rows that `parse` makes of a source's records, in order; a record may become several rows, or none."""

    def __init__(self, source: Source, parse: Parse[Made], index: Index) -> None:
        self._source, self._parse, self._index = source, parse, index

    @property
    def identities(self) -> Sequence[int]:
        """The first 64 bits of each row's identity."""
        return self._index.identities

    def where(self, keep: Sequence[bool]) -> StreamedRows[Made]:
        """The rows for which `keep`, which has an entry for each row, is true."""
        return StreamedRows(self._source, self._parse, self._index.where(keep))

    def __len__(self) -> int:
        return len(self._index.positions)

    def at(self, index: int) -> RecordRow[Made]:
        return next(self.between(index, index + 1))

    def between(self, start: int, stop: int) -> Iterator[RecordRow[Made]]:
        for begin in range(start, stop, CHUNK):
            chunk = slice(begin, min(stop, begin + CHUNK))
            index = Index(*(column[chunk] for column in self._index))
            records = self._source.read(zip(index.positions, index.numbers, strict=True))
            for record, check, part in zip(records, index.checks, index.parts, strict=True):
                if record.check != check:
                    raise self._source.changed()
                yield self._parse(record.fields, self._source.row_id(record.number))[part]


def index_of(source: Source, parse: Parse[Any]) -> Index:
    """The index of a source, for which every record is parsed once. Raises UserError for the first bad record."""
    index = Index.empty()
    for record in source.all():
        try:
            rows = parse(record.fields, source.row_id(record.number))
        except RowError as error:
            raise source.refused(record.number, error) from None
        for part, row in enumerate(rows):
            index.positions.append(record.position)
            index.identities.append(number_of(row.identity))
            index.numbers.append(record.number)
            index.checks.append(record.check)
            index.parts.append(part)
    return index


def streamed_file(file: Path, parse: Parse[Made], key: str) -> StreamedRows[Made]:
    """The rows of a JSONL file, which is parsed only once for both splits.

    Raises:
        UserError: a line is bad, or the file cannot be read.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise unreadable(file, key, error) from None
    index = _index_of_file(file, (status.st_ino, status.st_size, status.st_mtime_ns), parse, key)
    return StreamedRows(JsonlSource(file, key), parse, index)


@lru_cache(maxsize=2)
def _index_of_file(file: Path, stamp: tuple[int, int, int], parse: Callable[..., Any], key: str) -> Index:
    """The index of a file; `stamp` differs between versions of the file, so that a changed file is parsed again."""
    return index_of(JsonlSource(file, key), parse)


def identities_of(rows: Sequence[RecordRow[Any]]) -> Sequence[int]:
    """The first 64 bits of each row's identity, whether the rows are streamed or not."""
    return rows.identities if isinstance(rows, StreamedRows) else [number_of(row.identity) for row in rows]


def number_of(identity: str) -> int:
    """The 64 bits of an identity by which its split is chosen."""
    return int(identity[:IDENTITY_DIGITS], 16)
