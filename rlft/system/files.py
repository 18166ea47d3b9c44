"""Writes files and folders completely or not at all, flushes them to disk, and has digests of what is in them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlft.system.disk import BLOCK, writing

if TYPE_CHECKING:
    from torch import Tensor

NOT_FLUSHED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM)
"""The errors of file systems of networks and programs (NFS, CIFS, FUSE) that cannot flush a file or a folder."""


PIECE_BYTES = 4 * 2**20  # the number of bytes written at once of content that comes in parts


def asset(name: str) -> Any:
    """The content of a YAML file of this name in rlft/assets."""
    import yaml

    return yaml.load((Path(__file__).parents[1] / "assets" / name).read_text(encoding="utf-8"), yaml.CSafeLoader)


def write_atomically(
    file: Path, content: str | bytes | Iterable[bytes], *, temporary: Path | None = None, durable: bool = True
) -> None:
    """Writes a file so that it holds either its previous content or all of the new one.

    Args:
        content: the content, in parts if it may be large: about PIECE_BYTES are held in memory at a time.
        temporary: the file's name until it is complete, in the same folder.
        durable: whether to wait until the file is on disk.

    Raises DiskError: the file cannot be written; nothing of it is left.
    """
    content = content.encode() if isinstance(content, str) else content
    temporary = temporary or file.with_name(f".{file.name}.writing")
    with writing(file, len(content) + BLOCK if isinstance(content, bytes) else None):
        try:
            if isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                with temporary.open("wb", buffering=PIECE_BYTES) as stream:
                    stream.writelines(content)
            if durable:
                flush(temporary)
            temporary.replace(file)
        except BaseException:  # an interruption, or a full disk
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if durable:
            flush(file.parent)


def append(stream: BinaryIO, data: bytes, *, durable: bool = False) -> None:
    """Appends to a file that was opened unbuffered. DiskError: it cannot be written, and is unchanged."""
    with writing(Path(stream.name), len(data) + BLOCK):
        old_size = os.fstat(stream.fileno()).st_size
        try:
            rest = memoryview(data)
            while rest:  # on an almost full disk a write is partial, and only the next one fails
                rest = rest[stream.write(rest) or 0 :]
            if durable:
                os.fsync(stream.fileno())
        except BaseException:
            with suppress(OSError):
                os.ftruncate(stream.fileno(), old_size)
            raise


@contextmanager
def atomic_folder(final: Path, temporary: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Makes the folder `temporary`, and renames it to `final`, in the same folder, when all its files are on disk.

    A failure or an interruption inside removes it. With `replaces`, an existing `final` is removed first. DiskError:
    the folder cannot be made, flushed or renamed.
    """
    try:
        with writing(final):
            temporary.mkdir(parents=True, exist_ok=True)
        yield temporary
        with writing(final):
            for path in [*temporary.rglob("*"), temporary]:
                flush(path)
            if replaces and final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    with writing(final):
        flush(final.parent)


def flush(path: Path) -> None:
    """Waits until the file, or the names in the folder, are on disk, if the file system supports that."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        if path.is_dir() and error.errno in NOT_FLUSHED:
            return
        raise
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NOT_FLUSHED:
            raise
    finally:
        os.close(handle)


def size_of(folder: Path) -> int:
    """The bytes that the files in this folder take, in whole blocks."""
    files = (path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return sum(-(-size // BLOCK) * BLOCK for size in files)


# -- SHA-256, as hex digits --------------------------------------------------------------------------------------------
def digest_of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of_json(value: Any) -> str:
    """Of a value as JSON gives it back: tuples are lists and keys are text, whatever their order."""
    plain = json.loads(json.dumps(value, default=str))
    return digest_of_bytes(json.dumps(plain, sort_keys=True).encode())


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and bits, in the order of the names."""
    import torch

    from rlft.system.device import to_cpu

    digest = hashlib.sha256()
    for name, tensor in sorted(to_cpu(tensors).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_each(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """{part: the digest of its tensors}."""
    return {part: digest_of_tensors(tensors) for part, tensors in parts.items()}
