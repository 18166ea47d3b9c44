"""Rows of files, and prompts from them: JSONL, JSON, CSV or Parquet files (files.py), and folders of these.

The rows of large files are not held in memory: what is made of them is written to a temporary file, and read from there
whenever it is used. So a file that changes while a run uses it changes nothing of that run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rlft.config.bounds import PositiveFraction
from rlft.config.keys import Key
from rlft.data.files import HELD_OUT_SPLITS, check_first_rows, files_at, files_of_split, tables
from rlft.data.records import LearnedKeys, Made, Parse, RecordKeys, RecordRow, RowSource, Stored, number_of
from rlft.data.tables import Table, rows_of
from rlft.system.terminal import with_progress
from rlft.types import Split, are, counted, require

logger = logging.getLogger(__name__)

STREAMED_BYTES = 64 * 2**20
"""Data up to this size are held in memory, where they take about ten times as much; larger ones are stored."""


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
        found = tables(files, key, self.rows)
        if held_out_files is None:
            if split is Split.train:
                self._warn_of_unused()
            return hash_split(found, parse, split, self.held_out_fraction, self.path, self.section)
        held_out, _ = rows(tables(held_out_files, held_out_key, self.rows), parse, held_out_key)
        return held_out if split is Split.held_out else training(found, parse, held_out, self.path, key)

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


def rows(
    found: Sequence[Table], parse: Parse[Made], key: str, keep: Callable[[int], bool] = lambda number: True
) -> tuple[Sequence[RecordRow[Made]], int]:
    """(the rows of the tables that `key` names, the number of all of them); those of large tables are stored.

    `keep` says by the first 64 bits of a row's identity whether it is one of those that are wanted. UserError: there
    is no row, a bad one, or no room for them.
    """
    number = 0

    def wanted() -> Iterator[RecordRow[Made]]:
        nonlocal number
        for table in found:
            what = f"{key}: reading {table.name}"
            records = with_progress(table.records(), what, table.extent, lambda record: record.size)
            for row in (row for record in records for row in rows_of(record, table, parse, key)):
                number += 1
                if keep(number_of(row.identity)):
                    yield row

    is_held = isinstance(getattr(parse, "__self__", None), LearnedKeys)  # which makes a list of the rows in any case
    is_large = not is_held and sum(table.num_bytes for table in found) > STREAMED_BYTES
    kept: Sequence[RecordRow[Made]] = Stored.of(wanted(), key) if is_large else list(wanted())
    remedy = "give data with rows, such as one object a line"
    require(number, key, "holds no data", got=found[0].where, remedy=remedy)
    return kept, number


def hash_split(
    found: Sequence[Table], parse: Parse[Made], split: Split, held_out_fraction: float, where: object, section: str
) -> Sequence[RecordRow[Made]]:
    """The rows of one split, chosen by a hash of the question; `where` is for the error message."""
    limit, held_out = held_out_fraction * 2**64, split is Split.held_out  # as in split_of
    chosen, number = rows(found, parse, f"{section}.path", lambda identity: (identity < limit) is held_out)
    key, problem = f"{section}.held_out_fraction", f"leaves no {split} prompts of the {number} in {where}"
    remedy = "use another fraction, more data, or a file of its own to hold out"
    require(len(chosen), key, problem, got=held_out_fraction, remedy=remedy)
    return chosen


def training(
    found: Sequence[Table], parse: Parse[Made], held_out: Sequence[RecordRow[Made]], where: object, key: str
) -> Sequence[RecordRow[Made]]:
    """The rows whose questions are not held out, with a warning about the number of the others."""
    held_out_identities = {number_of(row.identity) for row in held_out}
    kept, number = rows(found, parse, key, lambda identity: identity not in held_out_identities)
    if left_out := number - len(kept):
        what = counted(left_out, "training question")
        logger.warning("%s: %s %s also held out, and left out of training", where, what, are(left_out))
    problem = "every training question is also held out, which leaves nothing to train on"
    require(len(kept), key, problem, got=where, remedy="give other data")
    return kept
