"""A digest of the weights that transformers loads from a model's folder, by tensor, so that shards do not count.

Weights of up to 512 MiB are read whole; of more, each tensor's first and last 16 KiB and blocks between them, 4096 in
all and at least 2 of a tensor: training changes every block; an edit of single numbers between them is not seen. Of a
safetensors file the header has names, dtypes, shapes and places. A pytorch_model.bin is a zip archive, whose pickle is
compared as bytes and never loaded: the same numbers in other shards of this form, or in both forms, count as others.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlft.system import digests

WHOLE = 2**29  # weights of up to so many bytes are read whole, at about 1 GB/s
BLOCK = 2**14
BLOCKS = 4096  # blocks that are read of larger weights
FORMS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files that transformers looks for, in its order: the first that is there is loaded, and nothing else."""
LOCAL_HEADER = 30  # bytes of a zip entry's header before its name


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one tensor. label: what they are, wherever they lie."""

    label: str
    file: Path
    start: int
    length: int


def digest_of_weights(folder: Path, named: str | None = None) -> str | None:
    """16 hex digits for the weights in this folder; None if they are not all there.

    `named` is the file that config.json names as `transformers_weights`. OSError or ValueError: a file is unreadable.
    """
    files = files_of_weights(folder, named)
    if files is None:
        return None
    pieces = [piece for file in files for piece in pieces_of(file)]
    is_whole = sum(piece.length for piece in pieces) <= WHOLE
    blocks = None if is_whole else max(2, BLOCKS // len(pieces))
    return digests.of_json(sorted([piece.label, piece.length, _content(piece, blocks)] for piece in pieces))[:16]


def files_of_weights(folder: Path, named: str | None = None) -> list[Path] | None:
    """The files that transformers loads; None if one of them is missing."""
    first = next((folder / name for name in (named, *FORMS) if name and (folder / name).is_file()), None)
    if first is None:
        return None
    files = [first]
    if first.name.endswith(".index.json"):
        files = [folder / name for name in sorted(set(json.loads(first.read_text())["weight_map"].values()))]
    return files if all(file.is_file() for file in files) else None


def pieces_of(file: Path) -> list[Piece]:
    if file.suffix == ".safetensors":
        return list(_tensors(file))
    if zipfile.is_zipfile(file):
        return list(_entries(file))
    return [Piece(file.suffix, file, 0, file.stat().st_size)]  # such as what torch wrote before 1.6


def _tensors(file: Path) -> Iterator[Piece]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > file.stat().st_size:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(stream.read(size))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            yield Piece(f"{name} {tensor['dtype']} {tensor['shape']}", file, 8 + size + start, end - start)


def _entries(file: Path) -> Iterator[Piece]:
    """The archive's pickle, and the numbers that it places; without the archive's name, which begins each entry's."""
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        pickled = digests.of_bytes(archive.read(entries["data.pkl"])) if "data.pkl" in entries else ""
        for name, entry in entries.items():
            if name.startswith("data"):  # the others are the version, and a number of this very file
                stream.seek(entry.header_offset)
                header = stream.read(LOCAL_HEADER)
                start = LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                yield Piece(f"{pickled} {name}", file, entry.header_offset + start, entry.compress_size)


def _content(piece: Piece, blocks: int | None) -> str:
    """The digest of the piece, or of as many blocks of it."""
    whole = blocks is None or piece.length <= blocks * BLOCK
    places: Sequence[int] = range(0, piece.length, 2**24) if whole else _spread(piece.length, blocks or 0)
    digest = hashlib.sha256()
    with piece.file.open("rb") as stream:
        for place in places:
            stream.seek(piece.start + place)
            digest.update(stream.read(min(2**24 if whole else BLOCK, piece.length - place)))
    return digest.hexdigest()


def _spread(length: int, blocks: int) -> list[int]:
    return [(length - BLOCK) * i // (blocks - 1) for i in range(blocks)]
