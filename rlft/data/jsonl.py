"""Rows of files, and prompts from them: JSONL, JSON, CSV or Parquet files (files.py), and folders of these.

The rows of large files are not held: each is read again whenever it is used. A first pass parses every row, so that a
bad one is refused at the start, as with small data. Memory holds where each row starts, the number of its line,
64 bits of its question's identity and a checksum: 32 bytes per row.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple

from rlft.config.bounds import PositiveFraction
from rlft.config.keys import Key
from rlft.data.files import HELD_OUT_SPLITS, check_first_rows, files_at, files_of_split, tables
from rlft.data.records import Lazy, Made, Parse, RecordKeys, RecordRow, RowSource, identities, number_of
from rlft.data.tables import Record, Table, rows_of
from rlft.system.terminal import with_progress
from rlft.types import Split, UserError, are, counted, require

logger = logging.getLogger(__name__)

STREAMED_BYTES = 64 * 2**20
"""Data up to this size are held in memory, where they take about ten times as much; larger ones are streamed."""


@dataclass(frozen=True, kw_only=True)
class JsonlFiles(RowSource):
    """The config keys with which a component names the files that it reads. A row's id is `<file>:<line or row>`.

    Questions that are also in held_out_path are left out of training.
    """

    __slots__ = ()  # the component defines the slots, as it also inherits the keys of its rows

    path: str
    held_out_path: str | None
    rows: Annotated[str | None, Key(before=None)]
    held_out_fraction: PositiveFraction

    def check(self) -> None:
        """Checks that the files exist, and their first rows. Raises UserError."""
        files, held_out = self._files()
        for key, found in ((f"{self.section}.path", files), (f"{self.section}.held_out_path", held_out or [])):
            check_first_rows(tables(found, key, self.rows), self.parse, key)

    def read(self, split: Split, parse: Parse[Made]) -> Sequence[RecordRow[Made]]:
        """The split's rows in file order. Raises UserError naming file and row for the first bad one."""
        key, held_out_key = f"{self.section}.path", f"{self.section}.held_out_path"
        files, held_out_files = self._files()
        if held_out_files is None:
            if split is Split.train:
                self._warn_of_unused()
            found = rows(tables(files, key, self.rows), parse, key)
            return hash_split(found, split, self.held_out_fraction, self.path, self.section)
        held_out = rows(tables(held_out_files, held_out_key, self.rows), parse, held_out_key)
        if split is Split.held_out:
            return held_out
        return training(rows(tables(files, key, self.rows), parse, key), held_out, self.path, key)

    def _files(self) -> tuple[list[Path], list[Path] | None]:
        """(the files to train on, those that are held out or None). UserError where there are none."""
        key = f"{self.section}.held_out_path"
        files = files_at(self.path, f"{self.section}.path")
        if self.held_out_path is None:
            return files, None
        held_out = files_at(self.held_out_path, key, HELD_OUT_SPLITS)
        are_others = {file.resolve() for file in files}.isdisjoint(file.resolve() for file in held_out)
        remedy = f"set it to null to hold out {self.section}.held_out_fraction of that file"
        require(are_others, key, "is the training file itself", got=self.held_out_path, remedy=remedy)
        return files, held_out

    def _warn_of_unused(self) -> None:
        folder = Path(self.path).expanduser()
        if others := [name for name in HELD_OUT_SPLITS if folder.is_dir() and files_of_split(folder, name)]:
            unused, remedy = " and ".join(others), f"{self.section}.held_out_path={self.path} holds them out"
            logger.warning("%s.path: the folder's files of the split %s are not used; %s", self.section, unused, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl(JsonlFiles, RecordKeys):
    """Prompts in files, in their order."""


def rows(found: Sequence[Table], parse: Parse[Made], key: str) -> Sequence[RecordRow[Made]]:
    """Every row of the tables that `key` names, streamed if they are large. UserError: there is none, or a bad one."""
    parsed: Sequence[RecordRow[Made]]
    if sum(table.num_bytes for table in found) > STREAMED_BYTES and all(table.streams for table in found):
        parsed = StreamedRows(found, key, parse, _index_of(tuple(found), parse, key))
    else:
        parsed = [row for table in found for record in table.records() for row in rows_of(record, table, parse, key)]
    remedy = "give data with rows, such as one object a line"
    require(len(parsed), key, "holds no data", got=found[0].where, remedy=remedy)
    return parsed


class Index(NamedTuple):
    """Columns with one entry per row of streamed tables."""

    tables: array[int]  # number of the row's table
    starts: array[int]  # where the row's record starts in its table
    identities: array[int]  # the first 64 bits
    numbers: array[int]  # of the records
    checks: array[int]  # checksums of the records
    parts: array[int]  # index of the row among those of its record


@lru_cache(maxsize=2)
def _index_of(found: tuple[Table, ...], parse: Callable[..., Any], key: str) -> Index:
    """The index of tables, all of which is parsed once for both splits. Raises UserError for the first bad row."""
    index = Index(array("I"), array("Q"), array("Q"), array("I"), array("I"), array("I"))
    for table_number, table in enumerate(found):
        what = f"{key}: reading {table.name}"
        for record in with_progress(table.records(), what, table.extent, lambda record: record.size):
            for part, row in enumerate(rows_of(record, table, parse, key)):
                of_record = record.number, record.checksum, part
                entry = (table_number, record.start, number_of(row.identity), *of_record)
                for column, value in zip(index, entry, strict=True):
                    column.append(value)
    return index


class StreamedRows(Lazy[RecordRow[Made]], Generic[Made]):
    """The rows that `parse` makes of tables' records, in order; a record may become several rows, or none."""

    def __init__(self, found: Sequence[Table], key: str, parse: Parse[Made], index: Index) -> None:
        self._tables, self._key, self._parse, self._index = found, key, parse, index

    @property
    def identities(self) -> Sequence[int]:
        """The first 64 bits of each row's identity."""
        return self._index.identities

    def where(self, keep: Sequence[bool]) -> StreamedRows[Made]:
        """The rows for which `keep`, which has an entry for each row, is true."""
        index = Index(*(array(column.typecode, compress(column, keep)) for column in self._index))
        return StreamedRows(self._tables, self._key, self._parse, index)

    def __len__(self) -> int:
        return len(self._index.starts)

    def between(self, start: int, stop: int) -> Iterator[RecordRow[Made]]:
        while start < stop:
            number = self._index.tables[start]
            positions = range(start, bisect_right(self._index.tables, number, start, stop))
            table = self._tables[number]
            for i, record in zip(positions, table.again(self._index.starts[j] for j in positions), strict=True):
                yield self._row(table, i, record)
            start = positions.stop

    def _row(self, table: Table, i: int, record: Record) -> RecordRow[Made]:
        if record.checksum != self._index.checks[i]:  # it was valid when the run began
            got = table.place(self._index.numbers[i])
            remedy = "restore it and continue with rlft resume, or start a new run; give each run its own copy"
            raise UserError(self._key, "has changed while it was in use", got=got, remedy=remedy)
        numbered = record._replace(number=self._index.numbers[i])
        return rows_of(numbered, table, self._parse, self._key)[self._index.parts[i]]


def hash_split(
    rows: Sequence[RecordRow[Made]], split: Split, held_out_fraction: float, where: object, section: str
) -> Sequence[RecordRow[Made]]:
    """The rows of one split, chosen by a hash of the question; `where` and `section` are for the error message."""
    limit, held_out = held_out_fraction * 2**64, split is Split.held_out  # as in split_of
    chosen = _where(rows, [(identity < limit) is held_out for identity in identities(rows)])
    key, problem = f"{section}.held_out_fraction", f"leaves no {split} prompts of the {len(rows)} in {where}"
    remedy = "use another fraction, more data, or a file of its own to hold out"
    require(len(chosen), key, problem, got=held_out_fraction, remedy=remedy)
    return chosen


def training(
    rows: Sequence[RecordRow[Made]], held_out: Sequence[RecordRow[Made]], where: object, key: str
) -> Sequence[RecordRow[Made]]:
    """The rows whose questions are not held out, with a warning about the number of the others."""
    held_out_identities = set(identities(held_out))
    kept = _where(rows, [identity not in held_out_identities for identity in identities(rows)])
    if number := len(rows) - len(kept):
        what = counted(number, "training question")
        logger.warning("%s: %s %s also held out, and left out of training", where, what, are(number))
    problem = "every training question is also held out, which leaves nothing to train on"
    require(len(kept), key, problem, got=where, remedy="give other data")
    return kept


def _where(rows: Sequence[RecordRow[Made]], keep: Sequence[bool]) -> Sequence[RecordRow[Made]]:
    return rows.where(keep) if isinstance(rows, StreamedRows) else list(compress(rows, keep))
