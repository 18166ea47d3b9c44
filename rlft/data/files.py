"""Files of rows, one or a folder of them, each read as a table of records: which files, which table, what comes first.

Sheets are tables of cells below a row with their names, as spreadsheets write them: CSV with any delimiter, and
workbooks. Blank rows are none, and neither are columns without a name whose cells are blank. Cells that a row lacks at
its end are blank.

The first rows are read before torch is imported: which fields they have, and whether they are right. Where the first
lacks a field that a key names by one of its usual names, and has just one of the others, the key is set to that one, so
that a file of questions and responses needs no keys. The guess is printed, and recorded in the run's config.yaml. A
name of the user's own is never replaced: one that the row lacks is refused if it cannot be read.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import shlex
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, time
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import rlft
from rlft.config.choices import closest
from rlft.config.instantiate import instantiate
from rlft.config.recipe_file import DATA_SUFFIXES, SHEET_SUFFIXES
from rlft.data.fields import RowError, has, value_of
from rlft.data.opened import (
    ARROW_FILE,
    ARROW_STREAM,
    PARQUET,
    ZIP,
    check_known,
    head,
    is_workbook,
    not_utf8,
    opened,
    suffix,
    unpacked_name,
)
from rlft.data.tables import (
    SPLITS,
    Arrow,
    FileTable,
    JsonDocument,
    JsonLines,
    Made,
    Parquet,
    Record,
    Table,
    are_columns,
    nested_rows,
    rows_of,
)
from rlft.data.templates import fields_in
from rlft.system.terminal import pip_install
from rlft.types import Mistakes, UserError, require

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
    def _rows(self) -> Iterator[tuple[int, Sequence[Any]]]:
        """(number, cells) of the rows that are not blank, that of the names first."""

    def records(self) -> Iterator[Record]:
        rows = self._rows()
        names = self._names(next(rows, (0, ()))[1])
        for number, cells in rows:
            if (needed := _length(cells)) > len(names):
                raise self.bad(number, f"has {needed} cells, the header {len(names)}")
            row = dict(zip_longest(names, cells[: len(names)], fillvalue=self.blank))
            row.pop("", None)
            yield Record(number, row, sum(len(str(cell).encode()) + 1 for cell in cells))

    def _names(self, cells: Sequence[Any]) -> Sequence[str]:
        names = ["" if cell is None else str(cell).strip() for cell in cells[: _length(cells)]]
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
        self._form = _form(begin.decode(errors="replace"), "\t" if suffix(file) in (".tsv", ".tab") else ",")

    def _rows(self) -> Iterator[tuple[int, Sequence[str]]]:
        csv.field_size_limit(MAX_CELL)
        reader = csv.reader(self._lines(), strict=True, **self._form)
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise self.bad(number, f"is not CSV ({error})") from None
            if cells is None:
                return
            if _length(cells):
                yield number, cells

    def _lines(self) -> Iterator[str]:
        with self.opened() as content:
            for number, line in enumerate((line for some in content for line in some.splitlines(keepends=True)), 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise self.bad(number, *not_utf8(line, self.file)) from None
                yield "\n" if number == 1 and _SEPARATOR.fullmatch(text) else text


class Workbook(Sheet):
    """The rows of a sheet of an Excel workbook: the only one with cells, or the one that `nested` names."""

    nested_in_records, blank = False, None

    def _rows(self) -> Iterator[tuple[int, Sequence[Any]]]:
        return ((number, cells) for number, cells in enumerate(self._cells(), 1) if _length(cells))

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


# -- sheets ------------------------------------------------------------------------------------------------------------
EMBEDDED = "embedded:"
HELD_OUT_SPLITS = SPLITS[1:]
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""The files that folders have which `datasets` saved (save_to_disk): of one split, and of several."""
_FIRST_WORD = re.compile(r"[A-Za-z]+")
_OPEN_OBJECT = re.compile(rb"\s*\{[^\S\n\r]*[\n\r]")
_OPEN_ARRAY = re.compile(rb"\s*\[\s*[\[{\]]")
NAMED: Mapping[str, type[FileTable]] = {
    **dict.fromkeys(SHEET_SUFFIXES, Csv), ".parquet": Parquet, ".arrow": Arrow, ".feather": Arrow, ".xlsx": Workbook
}  # fmt: skip
"""{suffix: kind of table} of files whose first bytes do not say what they are."""


def tables(files: Sequence[Path], key: str, nested: str | None = None) -> tuple[Table, ...]:
    """The tables of these files, where `nested` is the path to their rows. UserError: one cannot be read."""
    return tuple(_table(file, key, nested)(file, key, nested) for file in files)


def parsed(
    path: str, key: str, nested: str | None, parse: Callable[[Mapping[str, Any], str], Iterable[Made]]
) -> Iterator[tuple[str, Made]]:
    """(place, what `parse` makes of the fields and the id) of each row of the file or folder at `path`. UserError."""
    for table in tables(files_at(path, key), key, nested):
        for record in table.records():
            yield from ((table.place(record.number), made) for made in rows_of(record, table, parse, key))


def files_at(path: str, key: str, splits: Sequence[str] = SPLITS[:1]) -> list[Path]:
    """The file `path`, or the files in this folder: those of one of the splits, or all if none is named for a split.

    `embedded:<name>` ships with rlft. Raises UserError naming `key`.
    """
    if path.startswith(EMBEDDED):
        files = sorted((Path(rlft.__file__).parent / "assets").glob("*.jsonl"))
        embedded = {f"{EMBEDDED}{file.stem}": file for file in files}
        remedy = f"use {', '.join(embedded)}, or the path of a file"
        require(path in embedded, key, "there is no such embedded file", got=path, remedy=remedy)
        return [embedded[path]]
    file = Path(path).expanduser()
    if file.is_dir():
        return _files_in_folder(file, key, splits)
    if not file.is_file():
        remedy = "give the path of a file or folder (a set of the hub: choose hub in place of jsonl)"
        raise UserError(key, "there is no such file", got=path, remedy=remedy)
    return [file]


def files_of_split(folder: Path, split: str, subset: str | None = None) -> list[Path]:
    """A split's files where hub repositories keep them: <split>.* or <split>-*.*, in <subset>/, data/ or the top.

    Where a folder has the split in several kinds of files, these are of one kind, the first of DATA_SUFFIXES.
    """
    for place in dict.fromkeys((folder / (subset or "."), folder / "data", folder)):
        named = [file for file in _data_files(place) if re.split(r"[-.]", file.name, maxsplit=1)[0] == split]
        if files := named or _data_files(place / split):
            kind_of_rows = min(map(suffix, files), key=DATA_SUFFIXES.index)
            return [file for file in files if suffix(file) == kind_of_rows]
    return []


def _files_in_folder(folder: Path, key: str, splits: Sequence[str]) -> list[Path]:
    for split in splits:
        if files := files_of_split(folder, split):
            return files
    if (folder / SAVED_SPLITS).is_file():
        names = json.loads((folder / SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]
        problem = f"the folder has no split {splits[0]!r}, only {', '.join(names)}"
        raise UserError(key, problem, got=folder, remedy=f"name one, {key}=<folder>/<split>")
    files = _data_files(folder) or _data_files(folder / "data")
    others = [file.name for file in files if (word := _FIRST_WORD.match(file.name)) and word[0].lower() in SPLITS]
    problem = f"the folder has no files of the split {splits[0]!r}, only {', '.join(others[:5])}"
    require(not others, key, problem, got=folder, remedy=f"name the file in it, {key}=<folder>/<file>")
    suffixes = sorted({suffix(file) for file in files})
    problem = f"the folder has files of several kinds ({', '.join(suffixes)})" if suffixes else "the folder has no data"
    remedy = f"name the file in it, {key}=<folder>/<file>, one of {', '.join(DATA_SUFFIXES)}"
    require(len(suffixes) == 1, key, problem, got=folder, remedy=remedy)
    return files


def is_data_file(name: str) -> bool:
    """Whether a file with this name is one of rows.

    >>> is_data_file("a/train.jsonl.gz"), is_data_file("openai/gsm8k")
    (True, False)
    """
    return suffix(Path(name)) in DATA_SUFFIXES


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved one split in this folder."""
    return (folder / SAVED).is_file()


def _data_files(folder: Path) -> list[Path]:
    """The files of rows in a folder, of a file and its compressed copy the file."""
    found: dict[str, Path] = {}
    if is_saved(folder):
        state = json.loads((folder / SAVED).read_text(encoding="utf-8"))
        return [folder / part["filename"] for part in state.get("_data_files", ())]
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_data_file(file.name) and file.is_file() and not file.name.startswith("."):
            found.setdefault(unpacked_name(file), file)
    return list(found.values())


def _table(file: Path, key: str, nested: str | None) -> type[FileTable]:
    """The kind of table that the file is, by its first bytes, and where these say nothing by its name."""
    begin, name = head(file, key), suffix(file)
    if begin.startswith(PARQUET):
        return Parquet
    if begin.startswith((ARROW_FILE, ARROW_STREAM)):
        return Arrow
    if begin.startswith(ZIP) and is_workbook(file):
        return Workbook
    check_known(begin, file, key)
    if begin.lstrip()[:1] in (b"{", b"[") and (kind_of_json := _json(begin, file, key, nested)):
        return kind_of_json
    if name in NAMED:
        return NAMED[name]
    first, *others = begin.lstrip(b"\r\n").splitlines()[:50] or [b""]
    has_cells = any(delimiter.encode() in first for delimiter in DELIMITERS)
    return Csv if has_cells and all(_object(line) is None for line in others) else JsonLines


def _json(begin: bytes, file: Path, key: str, nested: str | None) -> type[FileTable] | None:
    """The kind of JSON that the file is; None: its name says a table of cells, and its first line is no JSON."""
    name = suffix(file)
    if begin.lstrip().startswith(b"["):
        return None if name in SHEET_SUFFIXES and not _OPEN_ARRAY.match(begin) else JsonDocument
    with opened(file, key) as content:
        lines = (line for line in content if line.strip())
        first, second = _object(next(lines, b"")), _object(next(lines, b""))
        alone = second is None and next(lines, None) is None
    if first is not None:  # the first line, or all of the document
        in_data = name == ".json" and isinstance(first.get("data"), list)
        return JsonDocument if alone and (in_data or nested is not None or are_columns(first)) else JsonLines
    if name in SHEET_SUFFIXES and not _OPEN_OBJECT.match(begin):
        return None
    is_line = second is not None or (name in (".jsonl", ".ndjson") and not _OPEN_OBJECT.match(begin))
    return JsonLines if is_line else JsonDocument


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is; None if it is none."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# -- the first rows ----------------------------------------------------------------------------------------------------
logger = logging.getLogger(__name__)

PROMPTS = ("prompt", "question", "problem", "instruction", "query")
ANSWERS = ("answer", "response", "output", "solution", "completion", "target", "reference", "ground_truth")
CHATS = ("messages", "conversations", "conversation")
NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "data": {"prompt_field": PROMPTS, "answer_field": ANSWERS},
    "demonstrations": {"prompt_field": PROMPTS, "completion_field": ANSWERS},
    "preferences": {
        "prompt_field": PROMPTS,
        "chosen_field": ("chosen", "accepted", "preferred", "winner", "better"),
        "rejected_field": ("rejected", "dispreferred", "loser", "worse"),
    },
}
"""{section: {key: names of the field that it names, of which files have one}}."""
SMALL_BYTES = 2**20


def check_first_rows(
    files: Iterable[Table], parse: Callable[[Mapping[str, Any], str], Iterable[Any]], key: str
) -> None:
    """Refuses files with a row that cannot be parsed, as reading them does: of the first MiB all, then the first ones.

    Raises UserError.
    """
    left = SMALL_BYTES
    for table in files:
        if is_whole := table.num_bytes < left:
            left -= table.num_bytes
        for record, _ in _first_records([table], None if is_whole else 1):
            rows_of(record, table, parse, key)


def _first_records(files: Iterable[Table], number: int | None = 1) -> Iterator[tuple[Record, Table]]:
    """The first records (None: all) of each file, but of no large one that is parsed as a whole. Raises UserError."""
    for table in files:
        if table.num_bytes < SMALL_BYTES or not isinstance(table, JsonDocument | Workbook):
            yield from ((record, table) for record in islice(table.records(), number))


def with_guessed_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The composed config, in which keys of fields that the first row lacks name the fields that it has instead.

    Raises UserError: the row cannot be read, because it lacks fields of the user's own names.
    """
    guessed = {section: _guessed(plain.get(section) or {}, section) for section in NAMES}
    return {**plain, **{section: {**plain[section], **fields} for section, fields in guessed.items() if fields}}


def _guessed(values: Mapping[str, Any], section: str) -> dict[str, str | None]:
    """{key: the field that is meant}; empty where the first row can be read, or has no field like a missing one."""
    path, key = values.get("path"), f"{section}.path"
    is_ours = str(values.get("_target_")).startswith("rlft.data.") and NAMES[section].keys() <= values.keys()
    if not is_ours or not isinstance(path, str) or not Path(path).expanduser().exists():
        return {}
    try:
        component: Any = instantiate(values, section)
        first = next(_first_records(tables(files_at(path, key), key, values.get("rows"))), None)
        row_id, fields = next(first[1].rows(first[0]), ("", {})) if first is not None else ("", {})
        if first is None or not fields or _can_be_read(component, row_id, fields):
            return {}
        guessed = _names_in(fields, values, section)
        with_guess: Any = instantiate({**values, **guessed}, section)
    except (UserError, RowError):  # reading the data says what is wrong
        return {}
    if _can_be_read(with_guess, row_id, fields):
        words = " ".join(f"{section}.{key}={'null' if name is None else name}" for key, name in guessed.items())
        logger.warning("%s.path: its rows lack fields that the keys name, and are read with %s", section, words)
    elif not nested_rows(first[1], first[0], component.parse, others=False):
        _refuse_own_names(fields, values, section, first[1].place(first[0].number))
    return guessed


def _can_be_read(component: Any, row_id: str, fields: Mapping[str, Any]) -> bool:
    with suppress(RowError):
        return bool(component.parse(fields, row_id))
    return False


def _is_usual(values: Mapping[str, Any], section: str, key: str) -> bool:
    """Whether the key names a field by one of its usual names, or none, and not by a name of the user's own."""
    return values.get(key) in (None, *NAMES[section].get(key, CHATS))


def _refuse_own_names(fields: Mapping[str, Any], values: Mapping[str, Any], section: str, place: str) -> None:
    """Refuses the user's own names of fields that this row lacks."""
    mistakes = Mistakes()
    for key in ("messages_field", *NAMES[section]):
        for name in [] if _is_usual(values, section, key) else fields_in(values[key]) or [values[key]]:
            with mistakes:
                try:
                    value_of(fields, name)
                except RowError as error:
                    remedy = f"did you mean {close}?" if (close := closest(name, fields)) else "name one of these"
                    raise UserError(f"{section}.{key}", f"{place}: {error}", remedy=remedy) from None
    mistakes.refuse()


def _names_in(fields: Mapping[str, Any], values: Mapping[str, Any], section: str) -> dict[str, str | None]:
    chats = [name for name in CHATS if has(fields, name)]
    is_usual = {key: _is_usual(values, section, key) for key in ("messages_field", *NAMES[section])}
    lacks = {key: (name := values[key]) is not None and not has(fields, name) for key in NAMES[section]}  # null: none
    if len(chats) == 1 and lacks["prompt_field"] and is_usual["prompt_field"] and is_usual["messages_field"]:
        guessed: dict[str, str | None] = {"messages_field": chats[0]}
        if section == "data" and is_usual["answer_field"] and lacks["answer_field"]:
            guessed["answer_field"] = None  # the chat's last message
        return guessed
    guessed = {}
    for key, others in NAMES[section].items():
        found = [name for name in others if has(fields, name)]
        needs_input = found == ["instruction"] and has(fields, "input")  # Alpaca's second half of the question
        if len(found) == 1 and is_usual[key] and not needs_input and lacks[key]:
            guessed[key] = found[0]
    return guessed
