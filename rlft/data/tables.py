"""Tables of records: files of JSON objects and of columns, each read by a library; files.py has those of cells.

Rows may lie within an object: `data.*.paragraphs.*.qas` leads to the questions in a file of SQuAD. A part of such a
path is the name of a field, the number of an item of a list, or `*` for each item of a list or each value of an object.
What it leads to is a row, or a list of rows; `*` may be left out before the items of a list.
"""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlft.data.fields import MissingField, RowError, TypedRow, kind, only
from rlft.data.opened import ARROW_FILE, is_plain, not_utf8, opened
from rlft.types import UserError, lone_surrogate, require

ROWS_AT_A_TIME = 1000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_JSON_TYPE = "arrow.json"  # Arrow's type of texts that are JSON

EACH = "*"
KEY = "key"  # the field of a row with its name, where an object holds the rows by name
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")  # names of files, and of lists in them

Made = TypeVar("Made")


class Record(NamedTuple):
    """A row as it stands in its table."""

    number: int  # of its line, from 1, or of the row, from 0
    fields: Mapping[str, Any]
    size: int = 1  # how much it is of the table's extent


class Table(ABC):
    """Records in a fixed order."""

    name: str  # begins the ids of its rows
    where: str  # the file or set, for messages
    nested: str | None = None  # the path to the rows; None: a record is a row
    nested_in_records: bool = True  # whether that path begins in each record, not in the table as a whole
    unit: str = "row"  # what is numbered, line or row
    has_types: bool = False  # whether its columns have types: an object's fields that are not set are null
    hint: str = ""  # what a message about a missing field should say of the names of this table's fields

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """How much of memory its rows would take, about a tenth of it."""

    @property
    @abstractmethod
    def extent(self) -> int | None:
        """The sum of the sizes of its records, or somewhat more; None: it is known only after they were read."""

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """All records, without blank lines. UserError: the table cannot be read, or a record is no row."""

    def rows(self, record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(id, fields) of each row of a record. RowError: there is none where `nested` leads."""
        name, is_nested = f"{self.name}:{record.number}", self.nested is not None and self.nested_in_records
        found = rows_at(record.fields, self.nested or "") if is_nested else [("", record.fields)]
        yield from ((f"{name}{place}", TypedRow(row) if self.has_types else row) for place, row in found)

    def top(self, record: Record) -> Any:
        """The object that a path to rows begins at."""
        return record.fields

    def place(self, number: int) -> str:
        """Where the record with this number is, for messages."""
        return f"{self.where}:{number}" if self.unit == "line" else f"{self.where}, row {number}"


def rows_of(
    record: Record, table: Table, parse: Callable[[Mapping[str, Any], str], Iterable[Made]], key: str
) -> list[Made]:
    """What `parse` makes of the fields and the id of each row of a record; `key` names the table in the config.

    Raises UserError naming its place; where a field is missing, with the path to rows that have it.
    """
    try:
        return [made for row_id, fields in table.rows(record) for made in parse(fields, row_id)]
    except RowError as error:
        section = key.partition(".")[0]
        where, remedy = table.place(record.number), error.remedy
        is_missing = isinstance(error, MissingField)
        if is_missing and (found := nested_rows(table, record, parse, others=remedy is None)):
            remedy = f"set {section}.rows to the path to the rows: {found}"
        named = _key_of_field(parse, getattr(error, "field", None))
        others = f"set {section}.{named} to another" if named else f"name other fields ({section}.*field)"
        other_fields = f"fix or remove that {table.unit}, or {others}{table.hint}"
        key = key if error.key == "path" else f"{section}.{error.key}"
        raise UserError(key, f"{where}: {error}", remedy=remedy or other_fields) from None


def _key_of_field(parse: Callable[..., Any], field: str | None) -> str | None:
    """The key that names this field, of the component whose method `parse` is; None if several do, or none."""
    owner = getattr(parse, "__self__", None)
    keys = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) and field is not None else ()
    named = [key.name for key in keys if key.name.endswith("field") and getattr(owner, key.name) == field]
    return named[0] if len(named) == 1 else None


def nested_rows(table: Table, record: Record, parse: Callable[[Mapping[str, Any], str], Any], *, others: bool) -> str:
    """The path to rows that can be parsed, or else with `others` those to objects, with their fields; or ""."""
    top, found = table.top(record), []
    for path in paths_to_rows(top):
        if path == table.nested:
            continue
        try:
            fields = next((fields for _, fields in rows_at(top, path)), None)
        except RowError:
            continue
        if fields is None:
            continue
        try:
            parse(fields, "")
        except RowError:
            found.append(f"{path} ({only(fields).removeprefix('only ')})")
        else:
            return path
    return " or ".join(found[:3]) if others else ""


class FileTable(Table):
    """The rows of the file that the config key `key` names."""

    def __init__(self, file: Path, key: str, nested: str | None = None) -> None:
        self.file, self.key, self.nested, self.name, self.where = file, key, nested, file.name, str(file)

    @property
    def num_bytes(self) -> int:
        return self.file.stat().st_size

    @property
    def extent(self) -> int | None:
        return self.num_bytes if self.unit == "line" and is_plain(self.file) else None

    def bad(self, number: int, problem: str, remedy: str | None = None) -> UserError:
        remedy = remedy or f"fix or remove that {self.unit}"
        return UserError(self.key, f"{self.place(number)}: {problem}", remedy=remedy)

    def opened(self) -> Any:
        """A context with the file's bytes, unpacked and as UTF-8. UserError for what it cannot be read for."""
        return opened(self.file, self.key)

    def checked(self, row: Any, number: int, *, may_hold_surrogates: bool) -> Mapping[str, Any]:
        """The row. UserError: it is no object, or holds half of a character in UTF-16, which JSON can write."""
        if not isinstance(row, dict):
            raise self.bad(number, f"must be a JSON object, it is {kind(row)}")
        if may_hold_surrogates and (surrogate := lone_surrogate(json.dumps(row, ensure_ascii=False))):
            raise self.bad(number, f"holds the lone surrogate {surrogate}, which is not text")
        return row


class JsonLines(FileTable):
    """A JSON object on each line."""

    unit = "line"

    def records(self) -> Iterator[Record]:
        with self.opened() as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield Record(number, self._fields(line, number), len(line))

    def _fields(self, line: bytes, number: int) -> Mapping[str, Any]:
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            raise self.bad(number, *not_utf8(line, self.file)) from None
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise self.bad(number, f"is not JSON ({reason})") from None
        return self.checked(row, number, may_hold_surrogates=_SURROGATE.search(line) is not None)


class JsonDocument(FileTable):
    """An array of objects, an object with one in `data` or with rows where `nested` leads, or objects of many lines."""

    nested_in_records = False

    def records(self) -> Iterator[Record]:
        may_hold_surrogates = _SURROGATE.search(self._content) is not None
        for number, row in enumerate(self._rows):
            yield Record(number, self.checked(row, number, may_hold_surrogates=may_hold_surrogates))

    def top(self, record: Record) -> Any:
        return self._document

    @cached_property
    def _content(self) -> bytes:
        with self.opened() as opened:
            return opened.read()

    @cached_property
    def _document(self) -> Any:
        try:
            return _values(self._content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            before, bad = self._content[: error.start].split(b"\n"), self._content[error.start :].partition(b"\n")[0]
            problem, remedy = not_utf8(before[-1] + bad, self.file)
            raise UserError(self.key, f"{self.file}:{len(before)}: {problem}", remedy=remedy) from None
        except (ValueError, RecursionError) as error:
            remedy = 'write an array of objects, {"data": [...]}, or one object a line'
            raise UserError(self.key, f"is not JSON ({error})", got=self.file, remedy=remedy) from None

    @cached_property
    def _rows(self) -> Sequence[Any]:
        document = self._document
        if self.nested is None:
            in_data = document.get("data") if isinstance(document, dict) else document
            remedy = "write rows: pandas.DataFrame(..).to_json(.., orient='records', lines=True)"
            require(not are_columns(document), self.key, "holds columns, not rows", got=self.file, remedy=remedy)
            return in_data if isinstance(in_data, list) else [document]
        try:
            return [row for _, row in rows_at(document, self.nested)]
        except RowError as error:
            key = f"{self.key.partition('.')[0]}.rows"
            paths = " or ".join(islice(paths_to_rows(document), 3)) or "null"
            raise UserError(key, f"{self.file}: {error}", got=self.nested, remedy=f"set it to {paths}") from None


class Parquet(FileTable):
    """The rows of a Parquet file."""

    has_types = True

    @property
    def num_bytes(self) -> int:
        with self._parquet() as file:
            return sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))

    @property
    def extent(self) -> int:
        with self._parquet() as file:
            return file.metadata.num_rows

    def records(self) -> Iterator[Record]:
        with self._parquet() as file:
            yield from numbered(map(with_short_numbers, file.iter_batches(batch_size=ROWS_AT_A_TIME)))

    @contextmanager
    def _parquet(self) -> Iterator[Any]:
        import pyarrow.parquet

        with self._readable(), self.opened() as content:
            source = content if is_plain(self.file) else BytesIO(content.read())
            with pyarrow.parquet.ParquetFile(source) as file:
                yield file

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """A context in which pyarrow reads. UserError: it cannot."""
        import pyarrow

        try:
            yield
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            problem = f"cannot be read ({str(error).splitlines()[0]})"
            raise UserError(self.key, problem, got=self.file, remedy="fetch or write that file again") from None


class Arrow(Parquet):
    """The rows of an Arrow file or stream, as in folders that `datasets` saves; what is not packed stays on disk."""

    @property
    def num_bytes(self) -> int:
        return self._all.nbytes

    @property
    def extent(self) -> int:
        return self._all.num_rows

    def records(self) -> Iterator[Record]:
        return numbered(map(with_short_numbers, self._all.to_batches(ROWS_AT_A_TIME)))

    @cached_property
    def _all(self) -> Any:
        import pyarrow
        import pyarrow.ipc

        with self._readable(), self.opened() as content:
            is_on_disk = is_plain(self.file)
            source = pyarrow.memory_map(str(self.file)) if is_on_disk else pyarrow.BufferReader(content.read())
            is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
            source.seek(0)
            with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source) as reader:
                return reader.read_all()


def numbered(batches: Iterable[Any]) -> Iterator[Record]:
    """The records of batches or tables of pyarrow."""
    for number, row in enumerate(row for batch in batches for row in _as_python(batch)):
        yield Record(number, row)


def _as_python(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch or table of pyarrow, with the objects of texts that are JSON by their type."""
    rows = batch.to_pylist()
    for column in batch.schema:
        if _JSON_TYPE in str(column.type):
            for row in rows:
                row[column.name] = _parsed(row[column.name], column.type)
    return rows


def with_short_numbers(batch: Any) -> Any:
    """The batch with, in columns of float32, the shortest number that is the same: 0.1, not 0.10000000149011612."""
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pyarrow.compute  # which makes its functions when it is imported

    for i, column in enumerate(batch.schema):
        if column.type == pa.float32():
            exact, short = batch.column(i).cast(pa.float64()), batch.column(i).cast(pa.string()).cast(pa.float64())
            is_small = compute.less(compute.abs(exact), 2.0**24)  # larger ones are whole
            batch = batch.set_column(i, column.name, compute.if_else(is_small, short, exact))
    return batch


def _parsed(value: Any, kind_of_value: Any) -> Any:
    """A value of Arrow with the JSON texts in it parsed."""
    import pyarrow.types as of

    if value is None or _JSON_TYPE not in str(kind_of_value):
        return value
    if of.is_struct(kind_of_value):
        return {field.name: _parsed(value[field.name], field.type) for field in kind_of_value}
    if hasattr(kind_of_value, "value_type") and isinstance(value, list):
        return [_parsed(item, kind_of_value.value_type) for item in value]
    return json.loads(value) if isinstance(value, str) else value


def _values(text: str) -> Any:
    """The value that a text is in JSON, or the values if it is several, one after the other. Raises ValueError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
    values, end, decoder = [], 0, json.JSONDecoder()
    while text := text[end:].lstrip():
        value, end = decoder.raw_decode(text)
        values.append(value)
    return values


def are_columns(document: Any) -> bool:
    """Whether an object has columns in place of rows: lists, or objects by number, of the same length."""
    columns = list(document.values()) if isinstance(document, dict) else []
    if len(columns) < 2 or not all(isinstance(column, list | dict) and len(column) > 1 for column in columns):
        return False
    if not all(key.isdecimal() for column in columns if isinstance(column, dict) for key in column):
        return False
    values = [list(column.values() if isinstance(column, dict) else column) for column in columns]
    plain = all(not isinstance(value, list | dict) for column in values for value in column[:2])
    return plain and len(set(map(len, values))) == len({type(column) for column in columns}) == 1


# -- rows that lie within an object ------------------------------------------------------------------------------------
def rows_at(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where below `value`, fields) of each row to which the path leads, with the fields of what encloses it.

    A row's own field stands for an enclosing one of the same name. RowError: the path leads nowhere.

    >>> list(rows_at({"v": 2, "data": [{"title": "A", "qas": [{"q": "1?"}, {"q": "2?"}]}]}, "data.*.qas"))[1]
    ('.0.1', {'v': 2, 'title': 'A', 'q': '2?'})
    """
    return _walk(value, path.split("."), {}, "")


def _walk(
    value: Any, parts: Sequence[str], around: Mapping[str, Any], place: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, list | tuple):
        numbers: Sequence[int] = range(len(value))
        if parts and parts[0].isdecimal():
            numbers = [int(parts[0])] if int(parts[0]) in numbers else []
        parts = parts[1:] if parts and (parts[0] == EACH or parts[0].isdecimal()) else parts
        for i in numbers:
            yield from _walk(value[i], parts, around, f"{place}.{i}")
    elif not isinstance(value, Mapping):
        problem = f"there is {kind(value)} at {place.strip('.') or 'the top'}, not a row"
        raise MissingField(problem, key="rows", remedy="")
    elif not parts:
        yield place, {**around, **value}
    elif parts[0] == EACH and EACH not in value:
        held = {name: item for name, item in value.items() if item is None or isinstance(item, Mapping | list | tuple)}
        around = {**around, **{name: item for name, item in value.items() if name not in held}}
        for name, item in held.items():
            yield from _walk(item, parts[1:], {**around, KEY: name}, f"{place}.{name}")
    else:
        length = next((n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in value), None)
        if length is None:
            raise MissingField(f"there is no {parts[0]!r}, {only(value)}", key="rows", remedy="")
        name = ".".join(parts[:length])
        if value[name] is not None:  # null: no rows
            others = {other: item for other, item in value.items() if other != name}
            yield from _walk(value[name], parts[length:], {**around, **others}, place)


def paths_to_rows(value: Any, deepest: int = 8) -> Iterator[str]:
    """The paths below `value` that lead to rows, the nearest first; of each list only the first item is looked at."""
    waiting: deque[tuple[Any, tuple[str, ...]]] = deque([(value, ())])
    while waiting:
        inner, parts = waiting.popleft()
        if len(parts) >= deepest:
            continue
        if isinstance(inner, list | tuple):
            waiting.extend((item, (*parts, EACH)) for item in inner[:1])
        elif isinstance(inner, Mapping):
            named = _is_keyed(inner)
            items = {EACH: next(filter(_holds_rows, inner.values()))} if named else inner
            for name, item in items.items():
                if _holds_rows(item) and (named or isinstance(item, list | tuple)):
                    yield ".".join((*parts, name))
                waiting.append((item, (*parts, name)))


def _is_keyed(value: Mapping[str, Any]) -> bool:
    """Whether an object has rows, or lists of rows, by their names: they have fields in common."""
    held = [item for item in value.values() if isinstance(item, Mapping | list | tuple)]
    if not held or not all(map(_holds_rows, held)) or any(name in SPLITS for name in value):
        return False
    first, other = (set(item[0] if isinstance(item, list | tuple) else item) for item in (held[0], held[-1]))
    return len(held) > 1 and bool(first & other) and type(held[0]) is type(held[-1])


def _holds_rows(value: Any) -> bool:
    """Whether this is an object, or a list of them, and no chat."""
    if not isinstance(value, list | tuple):
        return isinstance(value, Mapping)
    return bool(value) and isinstance(value[0], Mapping) and not {"role", "from"} & value[0].keys()
