"""Files of rows, one or a folder of them, each read as a table of records: which files, and which table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rlft
from rlft.config.recipe_file import DATA_SUFFIXES, SHEET_SUFFIXES
from rlft.data import opened as opening
from rlft.data.sheets import DELIMITERS, Csv, Workbook
from rlft.data.tables import (
    SPLITS,
    Arrow,
    FileTable,
    JsonDocument,
    JsonLines,
    Made,
    Parquet,
    Table,
    are_columns,
    rows_of,
)
from rlft.types import UserError, require

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
            kind_of_rows = min(map(opening.suffix, files), key=DATA_SUFFIXES.index)
            return [file for file in files if opening.suffix(file) == kind_of_rows]
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
    suffixes = sorted({opening.suffix(file) for file in files})
    problem = f"the folder has files of several kinds ({', '.join(suffixes)})" if suffixes else "the folder has no data"
    remedy = f"name the file in it, {key}=<folder>/<file>, one of {', '.join(DATA_SUFFIXES)}"
    require(len(suffixes) == 1, key, problem, got=folder, remedy=remedy)
    return files


def is_data_file(name: str) -> bool:
    """Whether a file with this name is one of rows.

    >>> is_data_file("a/train.jsonl.gz"), is_data_file("openai/gsm8k")
    (True, False)
    """
    return opening.suffix(Path(name)) in DATA_SUFFIXES


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
            found.setdefault(opening.unpacked_name(file), file)
    return list(found.values())


def _table(file: Path, key: str, nested: str | None) -> type[FileTable]:
    """The kind of table that the file is, by its first bytes, and where these say nothing by its name."""
    begin, name = opening.head(file, key), opening.suffix(file)
    if begin.startswith(opening.PARQUET):
        return Parquet
    if begin.startswith((opening.ARROW_FILE, opening.ARROW_STREAM)):
        return Arrow
    if begin.startswith(opening.ZIP) and opening.is_workbook(file):
        return Workbook
    opening.check_known(begin, file, key)
    if begin.lstrip()[:1] in (b"{", b"[") and (kind_of_json := _json(begin, file, key, nested)):
        return kind_of_json
    if name in NAMED:
        return NAMED[name]
    first, *others = begin.lstrip(b"\r\n").splitlines()[:50] or [b""]
    has_cells = any(delimiter.encode() in first for delimiter in DELIMITERS)
    return Csv if has_cells and all(_object(line) is None for line in others) else JsonLines


def _json(begin: bytes, file: Path, key: str, nested: str | None) -> type[FileTable] | None:
    """The kind of JSON that the file is; None: its name says a table of cells, and its first line is no JSON."""
    name = opening.suffix(file)
    if begin.lstrip().startswith(b"["):
        return None if name in SHEET_SUFFIXES and not _OPEN_ARRAY.match(begin) else JsonDocument
    with opening.opened(file, key) as content:
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
