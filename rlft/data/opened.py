"""The bytes of a file of rows: unpacked, and as UTF-8, by what its first bytes are and not by its name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import shlex
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rlft.config.recipe_file import PACKED_SUFFIXES
from rlft.types import UserError

HEAD = 2**16  # bytes that decide what a file is
ARROW_FILE, ARROW_STREAM, PARQUET, ZIP = b"ARROW1", b"\xff\xff\xff\xff", b"PAR1", b"PK\x03\x04"

FOREIGN: Mapping[bytes, tuple[str, str]] = {
    b"\xd0\xcf\x11\xe0": ("is a workbook of Excel 97 to 2003", "save it as .xlsx or CSV"),
    b"SQLite format 3": ("is an SQLite database", "write a table as CSV: sqlite3 -header -csv {file} 'select * ..'"),
    b"version https://git-lfs": ("is a pointer of Git LFS in place of the file", "fetch the file: git lfs pull"),
    **dict.fromkeys((b"<!DOCTYPE", b"<!doctype", b"<html"),
                    ("is a web page", "download the file itself (on the hub from /resolve/, not /blob/)")),
    **dict.fromkeys((b"\x80\x04", b"\x80\x05"),
                    ("is a pickle", "write it as Parquet: pandas.read_pickle(..).to_parquet(..)")),
    b"\x89HDF": ("is an HDF5 file", "write it as Parquet: pandas.read_hdf(..).to_parquet(..)"),
    b"\x93NUMPY": ("is an array of numpy", "write rows with named fields, such as one JSON object a line"),
    b"Obj\x01": ("is an Avro file", "write it as Parquet or as one JSON object a line"),
    b"ORC": ("is an ORC file", "write it as Parquet: pandas.read_orc(..).to_parquet(..)"),
    b"FEA1": ("is a Feather file of version 1", "write it as Parquet: pandas.read_feather(..).to_parquet(..)"),
}  # fmt: skip
"""{first bytes: (what such a file is, how its rows can be read)}."""


def _arrow(name: str) -> Any:
    """A function that opens a file packed by an algorithm that pyarrow has."""

    def unpacked(file: IO[bytes]) -> IO[bytes]:
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file, name))  # type: ignore[arg-type]

    return unpacked


def _only_file(file: IO[bytes]) -> IO[bytes]:
    archive = zipfile.ZipFile(file)
    [name] = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
    return archive.open(name)


UNPACK: Mapping[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _arrow("zstd"),
    b"\x50\x2a\x4d\x18": _arrow("zstd"),  # as pzstd begins
    b"\x04\x22\x4d\x18": _arrow("lz4"),
    ZIP: _only_file,
}
"""{first bytes of a packed file: what unpacks it}."""


def head(file: Path, key: str) -> bytes:
    """The first bytes of what is read of the file, without a byte order mark. Raises UserError."""
    with opened(file, key) as content:
        return content.read(HEAD).removeprefix(b"\xef\xbb\xbf")


def unpacked_name(file: Path) -> str:
    """The file's name, without that of what packed it."""
    return file.stem if file.suffix.lower() in PACKED_SUFFIXES else file.name


def suffix(file: Path) -> str:
    """The suffix that says what kind of rows a file has."""
    return Path(unpacked_name(file)).suffix.lower()


def is_plain(file: Path) -> bool:
    """Whether what is read of the file are its bytes as they stand on disk."""
    with file.open("rb") as raw:
        begin = raw.read(8)
    return _unpack(begin, file) is None and _encoding(begin) is None


@contextmanager
def opened(file: Path, key: str) -> Iterator[IO[bytes]]:
    """The file's content, unpacked, texts as UTF-8. UserError of the config key `key`, where that cannot be had."""
    try:
        with file.open("rb") as raw:
            unpack = _unpack(raw.read(8), file)
            raw.seek(0)
            with raw if unpack is None else unpack(raw) as content:
                encoding = _encoding(content.peek(4))
                yield content if encoding is None else io.BytesIO(content.read().decode(encoding).encode())
    except UnicodeDecodeError as error:
        raise UserError(key, f"is not {error.encoding} text", got=file, remedy="write it again as UTF-8") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(key, f"cannot be read ({reason})", got=file, remedy="give a readable file") from None


def is_workbook(file: Path) -> bool:
    """Whether an archive is a workbook of Excel."""
    try:
        with zipfile.ZipFile(file) as archive:
            return "xl/workbook.xml" in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def check_known(begin: bytes, file: Path, key: str) -> None:
    """Refuses what is known not to be read, by the first bytes of its content; the message says how it can be."""
    known = next((known for magic, known in FOREIGN.items() if begin.startswith(magic)), None)
    if begin[257:262] == b"ustar":
        known = "is an archive of several files", "unpack it with tar -xf {file}, and give the file or folder in it"
    if begin.startswith(ZIP):
        known = "is an archive of several files", "unpack it with unzip {file}, and give the file or folder in it"
    if known is not None:
        raise UserError(key, known[0], got=file, remedy=known[1].format(file=shlex.quote(str(file))))


def not_utf8(line: bytes, file: Path) -> tuple[str, str]:
    """(what is wrong with a line that is not UTF-8, what to do)."""
    try:
        seen = f", as Windows-1252 it is {line.decode('cp1252').strip()[:60]!r}"
    except UnicodeDecodeError:
        seen = ""
    name = shlex.quote(str(file))
    remedy = "write the file again as UTF-8: iconv -f <its encoding> -t UTF-8"
    return f"is not UTF-8 text{seen}", f"{remedy.replace('<its encoding>', 'WINDOWS-1252') if seen else remedy} {name}"


def _unpack(begin: bytes, file: Path) -> Any:
    """What unpacks a file that begins with these bytes; None if it is not packed, as workbooks are for us."""
    if begin.startswith(ZIP):
        try:
            with zipfile.ZipFile(file) as archive:
                entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        except (OSError, zipfile.BadZipFile):
            return _only_file
        return _only_file if len(entries) == 1 else None
    return next((unpack for magic, unpack in UNPACK.items() if begin.startswith(magic)), None)


def _encoding(begin: bytes) -> str | None:
    """The encoding of a text that begins with these bytes, if it is neither UTF-8 nor of one byte a character."""
    encoding = json.detect_encoding(begin[:4])
    return None if encoding.startswith("utf-8") else encoding
