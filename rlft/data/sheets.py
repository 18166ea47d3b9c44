"""Tables of cells below a row with their names, as spreadsheets write them: CSV with any delimiter, and workbooks.

Blank rows are none, and neither are columns without a name whose cells are blank. Cells that a row lacks at its end are
blank.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from rlft.data.opened import head, not_utf8, suffix
from rlft.data.tables import FileTable, Record
from rlft.system.terminal import pip_install
from rlft.types import UserError, require

MAX_CELL = 2**31 - 1
DELIMITERS = ",;\t|"
_SEPARATOR = re.compile(r"[\"']?sep=(.)[\"']?,*\r?\n?", re.IGNORECASE)  # as Excel names the delimiter
_MARKDOWN = re.compile(rb"[^\r\n]*\|[^\r\n]*\r?\n[ \t]*\|?(?:[ \t]*:?--+:?[ \t]*\|)+(?:[ \t]*:?--+:?[ \t]*)?\r?\n")
"""The first two lines of a table of Markdown."""


class Sheet(FileTable):
    """Rows of cells below their names."""

    hint = ", or write a first row with the names of the columns, if it has none"
    blank: Any = ""  # what a cell holds that a row lacks

    @abstractmethod
    def _rows(self) -> Iterator[Record]:
        """The rows that are not blank, that of the names first."""

    def records(self) -> Iterator[Record]:
        return islice(self._rows(), 1, None)

    def fields(self, record: Record) -> Mapping[str, Any]:
        names, cells = self._names, record.content
        if len(cells) != len(names):
            needed = _length(cells)
            if needed > len(names):
                raise self.bad(record.number, f"has {needed} cells, the header {len(names)}")
            cells = [*cells[: len(names)], *[self.blank] * (len(names) - len(cells))]
        row = dict(zip(names, cells, strict=True))
        row.pop("", None)
        return row

    @cached_property
    def _names(self) -> Sequence[str]:
        first = next(self._rows(), None)
        cells = [] if first is None else first.content[: _length(first.content)]
        names = ["" if cell is None else str(cell).strip() for cell in cells]
        named = list(filter(None, names))
        problem = f"two columns have the same name, only {', '.join(map(repr, names))}"
        require(len(set(named)) == len(named), self.key, problem, got=self.file, remedy=f"rename one{self.hint}")
        return names


class Csv(Sheet):
    """Rows of texts; a cell in quotes may hold line breaks."""

    unit = "line"

    def __init__(self, file: Path, key: str, nested: str | None = None) -> None:
        super().__init__(file, key, nested)
        begin = head(file, key)
        remedy = f"write it as CSV: sed -e 2d -e 's/^ *| *//; s/ *| *$//; s/ *| */|/g' {shlex.quote(str(file))}"
        require(not _MARKDOWN.match(begin), key, "is a table of Markdown", got=file, remedy=remedy)
        self.streams = self.streams and b"\n" in begin  # a file without is one line to the reader of lines
        self._form = _form(begin.decode(errors="replace"), "\t" if suffix(file) in (".tsv", ".tab") else ",")

    def again(self, starts: Iterable[int]) -> Iterator[Record]:
        with self.opened() as opened:
            for start in starts:
                opened.seek(start)
                yield next(self._cells(opened, start), Record(0, start, 0, ()))

    def _rows(self) -> Iterator[Record]:
        with self.opened() as opened:
            yield from self._cells(opened, 0)

    def _cells(self, lines: Iterable[bytes], start: int) -> Iterator[Record]:
        """The rows in these lines of the file, of which the first starts at this offset."""
        number, last = 0, b""

        def texts() -> Iterator[str]:
            nonlocal number, start, last
            for last in (part for line in lines for part in line.splitlines(keepends=True)):
                encoding = "utf-8-sig" if start == 0 else "utf-8"
                is_separator = start == 0 and _SEPARATOR.fullmatch(last.decode(encoding, "replace"))
                number, start = number + 1, start + len(last)
                yield "\n" if is_separator else last.decode(encoding)

        csv.field_size_limit(MAX_CELL)
        reader = csv.reader(texts(), strict=True, **self._form)
        while True:
            first, begin = number + 1, start
            try:
                cells = next(reader, None)
            except UnicodeDecodeError:
                raise self.bad(number, *not_utf8(last, self.file)) from None
            except csv.Error as error:
                raise self.bad(first, f"is not CSV ({error})") from None
            if cells is None:
                return
            if _length(cells):
                yield Record(first, begin, start - begin, cells)


class Workbook(Sheet):
    """The rows of a sheet of an Excel workbook: the only one with cells, or the one that `nested` names."""

    streams, nested_in_records, blank = False, False, None

    def _rows(self) -> Iterator[Record]:
        for number, cells in enumerate(self._cells):
            if _length(cells):
                yield Record(number + 1, number, 1, cells)

    @cached_property
    def _cells(self) -> Sequence[Sequence[Any]]:
        values, formulas = (self._sheets(values=values) for values in (True, False))
        named = list(values) if self.nested is None else [self.nested]
        if len(named) != 1 or named[0] not in values:
            problem = f"the workbook has {'the sheets' if values else 'no sheet with cells,'} {', '.join(values)}"
            raise UserError(f"{self.key.partition('.')[0]}.rows", problem, got=self.nested, remedy="name one of them")
        for number, (row, written) in enumerate(zip(values[named[0]], formulas[named[0]], strict=True), 1):
            if any(a is None and isinstance(b, str) and b.startswith("=") for a, b in zip(row, written, strict=True)):
                remedy = "open the workbook in a spreadsheet and save it"
                raise self.bad(number, "has a formula that was never computed", remedy)
        # Dates and times become texts in ISO 8601.
        return [[c.isoformat() if isinstance(c, date | time) else c for c in row] for row in values[named[0]]]

    def _sheets(self, *, values: bool) -> dict[str, list[tuple[Any, ...]]]:
        """{name: rows} of the sheets with cells."""
        try:
            import openpyxl
        except ImportError:
            problem, remedy = "is not installed", f"{pip_install('rlft[xlsx]')}, or save it as CSV"
            raise UserError(
                self.key, f"openpyxl, which reads workbooks, {problem}", got=self.file, remedy=remedy
            ) from None
        try:
            with self.opened() as opened:
                book = openpyxl.load_workbook(io.BytesIO(opened.read()), data_only=values)
        except Exception as error:  # openpyxl raises what the parts of a torn archive happen to raise
            problem = f"cannot be read ({error})"
            raise UserError(self.key, problem, got=self.file, remedy="save that workbook again") from None
        sheets = {sheet.title: list(sheet.iter_rows(values_only=True)) for sheet in book.worksheets}
        return {name: rows for name, rows in sheets.items() if any(map(_length, rows))}


def _form(sample: str, default: str) -> dict[str, Any]:
    """The delimiter of a CSV file that begins like this, and whether a space follows it, for csv.reader.

    It is the one by which the most rows have as many cells as the names above them.
    """
    if match := _SEPARATOR.match(sample):
        return {"delimiter": match[1]}
    best: tuple[Any, ...] = ()
    form: dict[str, Any] = {"delimiter": default}
    for delimiter in dict.fromkeys((default, *DELIMITERS)):
        try:
            rows = [row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter) if _length(row)]
        except csv.Error:
            continue
        names, *others = [*rows[: max(2, len(rows) - 1)]] or [[]]  # the last row may be cut
        number = _length(names)
        if number < 2:
            continue
        fitting = sum(_length(row) == number for row in others) / max(1, len(others))
        score = fitting, delimiter == default, number
        if not best or score > best:
            best = score
            spaced = all(name[:1] == " " for name in names[1:number])
            form = {"delimiter": delimiter, "skipinitialspace": spaced}
    return form


def _length(cells: Sequence[Any]) -> int:
    """The number of cells up to the last that is not blank."""
    return next((i for i in range(len(cells), 0, -1) if cells[i - 1] is not None and str(cells[i - 1]).strip()), 0)
