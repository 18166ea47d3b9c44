"""Files of rows, one or a folder of them: JSONL, JSON, CSV and Parquet, each read as a table of records.

A record knows where it starts in its table, so that the rows of large files need not be held: they are read again
whenever they are used. Compressed files and JSON arrays cannot be read from the middle, so they are held.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import json
import lzma
import re
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

import rlft
from rlft.data.fields import kind
from rlft.types import UserError, lone_surrogate, require

EMBEDDED = "embedded:"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
OPENERS: Mapping[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
UNPACK = {".zst": "unzstd", ".zip": "unzip"}
"""{suffix of a file compressed in another way: command that unpacks it}."""
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Names with which files say that they are one split of a set."""
HELD_OUT_SPLITS = SPLITS[1:]
MAX_CELL = 2**31 - 1
ROWS_AT_A_TIME = 1000
_FIRST_WORD = re.compile(r"[A-Za-z]+")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Record(NamedTuple):
    """A row as it stands in its table.

    Attributes:
        number: of its line, from 1, or of the row, from 0.
        start: where it is read again: the offset of its first byte, or the number of the row.
        size: its bytes, or 1 for a row.
        content: the bytes of a line, the cells of a row of CSV, or the row itself.
    """

    number: int
    start: int
    size: int
    content: Any

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.content if isinstance(self.content, bytes) else repr(self.content).encode())


class Table(ABC):
    """Records in a fixed order.

    Attributes:
        name: begins the ids of its rows.
        where: the file or set, for messages.
        streams: whether records can be read again without those before them.
        unit: what is numbered, line or row.
    """

    name: str
    where: str
    streams: bool = True
    unit: str = "row"

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """How much of memory its rows would take, about a tenth of it."""

    @property
    @abstractmethod
    def extent(self) -> int:
        """Where no record starts, nor later."""

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """All records, without blank lines. UserError: the table cannot be read."""

    @abstractmethod
    def again(self, starts: Iterable[int]) -> Iterator[Record]:
        """The records that start there. UserError: the table cannot be read."""

    @abstractmethod
    def fields(self, record: Record) -> Mapping[str, Any]:
        """The fields of a record. UserError: it is no row."""

    def place(self, number: int) -> str:
        """Where the record with this number is, for messages."""
        return f"{self.where}:{number}" if self.unit == "line" else f"{self.where}, row {number}"


class FileTable(Table):
    """The rows of the file that the config key `key` names; another version of the file is another table."""

    def __init__(self, file: Path, key: str) -> None:
        status = file.stat()
        self.file, self.key, self.name, self.where = file, key, file.name, str(file)
        self.streams = type(self).streams and file.suffix not in OPENERS
        self._size, self._version = status.st_size, (type(self), file, key, status.st_ino, status.st_mtime_ns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileTable) and (self._version, self._size) == (other._version, other._size)

    def __hash__(self) -> int:
        return hash(self._version)

    @property
    def num_bytes(self) -> int:
        return self._size

    @property
    def extent(self) -> int:
        return self._size

    def bad(self, number: int, problem: str) -> UserError:
        return UserError(self.key, f"{self.place(number)}: {problem}", remedy=f"fix or remove that {self.unit}")

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The file's bytes, unpacked. UserError for what it cannot be read for."""
        try:
            with OPENERS.get(self.file.suffix, open)(self.file, "rb") as opened:
                yield opened
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = getattr(error, "strerror", None) or error
            remedy = "give a readable file"
            raise UserError(self.key, f"cannot be read ({reason})", got=self.file, remedy=remedy) from None

    def checked(self, row: Any, number: int) -> Mapping[str, Any]:
        """The row, unless it is no object. UserError."""
        if not isinstance(row, dict):
            raise self.bad(number, f"must be a JSON object, it is {type(row).__name__}")
        return row

    def check_characters(self, row: Any, number: int) -> None:
        """Refuses half a character, which JSON can write."""
        if surrogate := lone_surrogate(json.dumps(row, ensure_ascii=False)):
            raise self.bad(number, f"holds half a character, the lone surrogate {surrogate}, which is not text")


class JsonLines(FileTable):
    """A JSON object on each line."""

    unit = "line"

    def records(self) -> Iterator[Record]:
        start = 0
        with self.opened() as lines:
            for number, content in enumerate(lines, 1):
                if content.strip():
                    yield Record(number, start, len(content), content)
                start += len(content)

    def again(self, starts: Iterable[int]) -> Iterator[Record]:
        with self.opened() as opened:
            for start in starts:
                opened.seek(start)
                content = opened.readline()
                yield Record(0, start, len(content), content)

    def fields(self, record: Record) -> Mapping[str, Any]:
        try:
            row = json.loads(record.content.decode("utf-8-sig" if record.start == 0 else "utf-8"))
        except UnicodeDecodeError:
            raise self.bad(record.number, "is not UTF-8 text") from None
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise self.bad(record.number, f"is not JSON ({reason})") from None
        row = self.checked(row, record.number)
        if _SURROGATE.search(record.content):
            self.check_characters(row, record.number)
        return row


class Csv(FileTable):
    """Rows of cells below a header, all of them texts; a cell in quotes may hold line breaks."""

    unit = "line"

    def records(self) -> Iterator[Record]:
        rows = self._rows()
        next(rows, None)
        yield from rows

    def again(self, starts: Iterable[int]) -> Iterator[Record]:
        with self.opened() as opened:
            for start in starts:
                opened.seek(start)
                yield next(self._cells(opened, start), Record(0, start, 0, ()))

    def fields(self, record: Record) -> Mapping[str, Any]:
        if len(record.content) != len(self._header):
            problem = f"has {len(record.content)} cells, the header {len(self._header)}"
            raise self.bad(record.number, problem)
        return dict(zip(self._header, record.content, strict=True))

    @cached_property
    def _header(self) -> Sequence[str]:
        names = next(self._rows()).content
        problem = f"two columns have the same name, only {', '.join(map(repr, names))}"
        require(len(set(names)) == len(names), self.key, problem, got=self.file, remedy="rename one")
        return names

    def _rows(self) -> Iterator[Record]:
        with self.opened() as opened:
            yield from self._cells(opened, 0)

    def _cells(self, lines: Iterable[bytes], start: int) -> Iterator[Record]:
        """The rows in these lines of the file, of which the first starts at this offset."""
        number = 0

        def texts() -> Iterator[str]:
            nonlocal number, start
            for line in lines:
                encoding = "utf-8-sig" if start == 0 else "utf-8"
                number, start = number + 1, start + len(line)
                yield line.decode(encoding)

        csv.field_size_limit(MAX_CELL)
        reader = csv.reader(texts(), delimiter="\t" if _suffix(self.file) == ".tsv" else ",", strict=True)
        while True:
            first, begin = number + 1, start
            try:
                cells = next(reader, None)
            except UnicodeDecodeError:
                raise self.bad(number, "is not UTF-8 text") from None
            except csv.Error as error:
                raise self.bad(first, f"is not CSV ({error})") from None
            if cells is None:
                return
            if cells:
                yield Record(first, begin, start - begin, cells)


class JsonArray(FileTable):
    """One JSON array of objects, or an object whose `data` is one."""

    streams = False

    def records(self) -> Iterator[Record]:
        for number, row in enumerate(self._rows):
            yield Record(number, number, 1, row)

    def again(self, starts: Iterable[int]) -> Iterator[Record]:
        for start in starts:
            yield Record(start, start, 1, self._rows[start])

    def fields(self, record: Record) -> Mapping[str, Any]:
        row = self.checked(record.content, record.number)
        if self._may_hold_half_characters:
            self.check_characters(row, record.number)
        return row

    @cached_property
    def _content(self) -> bytes:
        with self.opened() as opened:
            return opened.read()

    @cached_property
    def _may_hold_half_characters(self) -> bool:
        return _SURROGATE.search(self._content) is not None

    @cached_property
    def _rows(self) -> list[Any]:
        remedy = 'write an array of objects, {"data": [...]}, or one object a line'
        try:
            rows = json.loads(self._content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(self.key, f"is not JSON ({error})", got=self.file, remedy=remedy) from None
        rows = rows.get("data") if isinstance(rows, dict) else rows
        if not isinstance(rows, list):
            raise UserError(self.key, f"holds no rows, it is {kind(rows)}", got=self.file, remedy=remedy)
        return rows


class Parquet(FileTable):
    """The rows of a Parquet file; of a large one, one row group is held."""

    _group: tuple[int, Any] = (-1, None)

    @property
    def num_bytes(self) -> int:
        with self._parquet() as file:
            return sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))

    @property
    def extent(self) -> int:
        return self._starts[-1]

    def records(self) -> Iterator[Record]:
        number = 0
        with self._parquet() as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME):
                for row in batch.to_pylist():
                    yield Record(number, number, 1, row)
                    number += 1

    def again(self, starts: Iterable[int]) -> Iterator[Record]:
        for start in starts:
            group = bisect_right(self._starts, start) - 1
            if self._group[0] != group:
                with self._parquet() as file:
                    self._group = group, file.read_row_group(group)
            [row] = self._group[1].slice(start - self._starts[group], 1).to_pylist()
            yield Record(0, start, 1, row)

    def fields(self, record: Record) -> Mapping[str, Any]:
        return record.content

    @cached_property
    def _starts(self) -> Sequence[int]:
        """The number of the first row of each row group, and of all rows."""
        with self._parquet() as file:
            numbers = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        return [0, *accumulate(numbers)]

    @contextmanager
    def _parquet(self) -> Iterator[Any]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.file) as file:
                yield file
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            problem = f"cannot be read ({str(error).splitlines()[0]})"
            raise UserError(self.key, problem, got=self.file, remedy="fetch or write that file again") from None


def tables(files: Sequence[Path], key: str) -> tuple[Table, ...]:
    """The tables of these files. UserError: one cannot be read."""
    return tuple(_table(file, key) for file in files)


def objects(path: str, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, fields) of each row of the file or folder at `path`, which the config key names. UserError."""
    for table in tables(files_at(path, key), key):
        for record in table.records():
            yield table.place(record.number), table.fields(record)


def files_at(path: str, key: str, splits: Sequence[str] = SPLITS[:1]) -> list[Path]:
    """The file `path`, or the files in this folder: those of one of the splits, or all if none is named for a split.

    `embedded:<name>` ships with rlft. Raises UserError naming `key`.
    """
    if path.startswith(EMBEDDED):
        return [_embedded(path, key)]
    file = Path(path).expanduser()
    if file.is_dir():
        return _files_in_folder(file, key, splits)
    if not file.is_file():
        remedy = "give the path of a file or folder (a set of the hub: choose hub in place of jsonl)"
        raise UserError(key, "there is no such file", got=path, remedy=remedy)
    unpack = UNPACK.get(file.suffix)
    require(unpack is None, key, "is compressed", got=path, remedy=f"unpack it with {unpack} {file.name}")
    return [file]


def files_of_split(folder: Path, split: str, subset: str | None = None) -> list[Path]:
    """A split's files where hub repositories keep them: <split>.* or <split>-*.*, in <subset>/, data/ or the top.

    Where a folder has the split in several kinds of files, these are of one kind, the first of SUFFIXES.
    """
    for place in dict.fromkeys((folder / (subset or "."), folder / "data", folder)):
        named = [file for file in _data_files(place) if re.split(r"[-.]", file.name, maxsplit=1)[0] == split]
        if files := named or _data_files(place / split):
            kind_of_rows = min(map(_suffix, files), key=SUFFIXES.index)
            return [file for file in files if _suffix(file) == kind_of_rows]
    return []


def _files_in_folder(folder: Path, key: str, splits: Sequence[str]) -> list[Path]:
    for split in splits:
        if files := files_of_split(folder, split):
            return files
    files = _data_files(folder) or _data_files(folder / "data")
    others = [file.name for file in files if (word := _FIRST_WORD.match(file.name)) and word[0].lower() in SPLITS]
    problem = f"the folder has no files of the split {splits[0]!r}, only {', '.join(others[:5])}"
    require(not others, key, problem, got=folder, remedy=f"name the file in it, {key}=<folder>/<file>")
    suffixes = sorted({_suffix(file) for file in files})
    problem = f"the folder has files of several kinds ({', '.join(suffixes)})" if suffixes else "the folder has no data"
    remedy = f"name the file in it, {key}=<folder>/<file>, one of {', '.join(SUFFIXES)}"
    require(len(suffixes) == 1, key, problem, got=folder, remedy=remedy)
    return files


def is_data_file(name: str) -> bool:
    """Whether a file with this name is one of rows.

    >>> is_data_file("a/train.jsonl.gz"), is_data_file("openai/gsm8k")
    (True, False)
    """
    return _suffix(Path(name)) in SUFFIXES


def _data_files(folder: Path) -> list[Path]:
    """The files of rows in a folder, of a file and its compressed copy the file."""
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_data_file(file.name) and file.is_file() and not file.name.startswith("."):
            found.setdefault(_unpacked(file), file)
    return list(found.values())


def _suffix(file: Path) -> str:
    return Path(_unpacked(file)).suffix.lower()


def _unpacked(file: Path) -> str:
    return file.stem if file.suffix in OPENERS else file.name


def _embedded(path: str, key: str) -> Path:
    embedded_files = {f"{EMBEDDED}{f.stem}": f for f in sorted((Path(rlft.__file__).parent / "assets").glob("*.jsonl"))}
    remedy = f"use {', '.join(embedded_files)}, or the path of a file"
    require(path in embedded_files, key, "there is no such embedded file", got=path, remedy=remedy)
    return embedded_files[path]


def _table(file: Path, key: str) -> Table:
    """The file's table, by its suffix, and where its first bytes say otherwise, by these."""
    lines, suffix = JsonLines(file, key), _suffix(file)
    if suffix in (".csv", ".tsv"):
        return Csv(file, key)
    with lines.opened() as opened:
        begin = opened.read(1024)
        if suffix == ".parquet" or begin.startswith(b"PAR1"):
            return Parquet(file, key)
        opened.seek(0)
        is_array = begin.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        return JsonArray(file, key) if is_array or (suffix == ".json" and _is_document(opened)) else lines


def _is_document(lines: IO[bytes]) -> bool:
    """Whether these lines are one JSON object, and not an object each."""
    first = next((line for line in lines if line.strip()), b"{}")
    try:
        row = json.loads(first.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return True
    return isinstance(row, dict) and isinstance(row.get("data"), list)
