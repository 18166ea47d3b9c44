"""Explains a disk error in one line: which folder, the bytes that it needs and has, and what to do.

Code that writes uses `writing` to add what is written and where; a command uses `explained` to add how to continue.
So a disk error needs no other handling where it occurs.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlft.types import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
OF_SPACE = (*FULL, errno.EFBIG)
GONE = (errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.EREMOTEIO)
"""The errors of a network file system, or of one that a program provides (FUSE), that cannot be reached."""

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
FAILING = (*OF_SPACE, *GONE, *REFUSED, errno.EIO)
"""Errors that are always the disk's; others, such as a missing file, are only so during a write."""

CAUSES = {
    errno.ENOSPC: ("the disk is full", "free {missing} there"),
    errno.EDQUOT: ("your disk quota is used up", "free {missing} of it"),
    errno.EFBIG: ("no file may become that large here", "raise the limit (ulimit -f unlimited)"),
    errno.EIO: ("the disk failed", "check that disk (dmesg shows more)"),
    errno.EROFS: ("the file system can only be read", "mount it so that it can be written"),
    errno.EACCES: ("writing is not permitted", "permit it"),
    errno.EPERM: ("writing is not permitted", "permit it"),
    errno.ENOENT: ("the folder is gone", "put it back"),
    errno.EXDEV: ("its file system cannot rename within a folder", "use a folder on another one"),
    **dict.fromkeys(GONE, ("the file system is gone", "mount it again")),
}
"""{errno: (what has happened, what to do)}."""

ERRNO_IN_TEXT = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
"""The errno in messages of safetensors, tokenizers and shutil.Error, whose exceptions have no errno."""

BLOCK = 4096  # the smallest number of bytes that a file takes on most file systems


class DiskError(RuntimeError):
    """Something could not be written. The message says in one line what, where, and what to do.

    Args:
        code: the errno.
        target: the file or folder that was being written; None if unknown.
        needed: the bytes that it needs in total; None if unknown.
        again: the command that resumes from what is saved; None if the same command has to be repeated.
    """

    def __init__(self, code: int, target: Path | None, needed: int | None = None, again: str | None = None) -> None:
        self.code, self.target, self.needed, self.again = code, target, needed, again
        self.free, self.has_inodes = room(target)
        super().__init__(self._message())

    @property
    def is_of_the_name(self) -> bool:
        """Whether another name or folder would help, such as one that may be written to."""
        return self.code in REFUSED or self.code not in FAILING

    def _message(self) -> str:
        cause, remedy = CAUSES.get(self.code, ("it cannot be written", "check that folder"))
        if self.code == errno.ENOSPC and not self.has_inodes:
            cause, remedy = "the disk has room for no more files (inodes)", "remove files there"
        missing = "some space"
        if self.needed is not None:
            missing = f"{size_text(max(BLOCK, self.needed - (self._free or 0)))} or more"
        then = "repeat the command" if self.again is None else f"resume with: {self.again}"
        return f"{cause} ({os.strerror(self.code)}): {self._facts()}; {remedy.format(missing=missing)}, then {then}"

    @property
    def _free(self) -> int | None:
        """Bytes that are free, of an error that they explain: a quota or a limit leaves others free."""
        return self.free if self.code == errno.ENOSPC and self.has_inodes else None

    def _facts(self) -> str:
        if self.target is None:
            return "the file is not known"
        free = "" if self._free is None else f"has {size_text(self._free)} free"
        if self.needed is not None and self.code in OF_SPACE and self.has_inodes:
            needs = f"{self.target.parent} needs {size_text(self.needed)} for {self.target.name}"
            return f"{needs} and {free}" if free else needs
        place = self.target.parent if self.code == errno.ENOENT else self.target
        return f"{place} {free or 'could not be written'}"


@contextmanager
def writing(target: Path, needed: int | None = None) -> Iterator[None]:
    """Turns any system error inside into a DiskError about writing this file or folder, which needs `needed` bytes."""
    try:
        yield
    except DiskError as error:  # about a file inside the folder
        if error.needed is not None or needed is None:
            raise
        raise DiskError(error.code, target, needed) from error
    except Exception as error:
        code = errno_of(error)
        if code is None:
            raise
        raise DiskError(code, target, needed) from error


@contextmanager
def blame_key(key: str) -> Iterator[None]:
    """Turns a DiskError inside into a UserError of `key`, with which the user has named the file or folder.

    A disk that is full or fails stays a DiskError: another name would not help.
    """
    try:
        yield
    except DiskError as error:
        if not error.is_of_the_name:
            raise
        problem = f"cannot be written ({os.strerror(error.code)})"
        raise UserError(key, problem, got=error.target, remedy="choose another name or folder") from None


@contextmanager
def explained(again: str | None, folder: Path | None = None) -> Iterator[None]:
    """Adds to a disk error inside the command `again`, which resumes.

    `folder` is named if the file is unknown, for instance because a library wrote it.
    """
    try:
        yield
    except Exception as error:
        failure = failure_of(error, folder)
        if failure is None or failure.again is not None:
            raise
        raise DiskError(failure.code, failure.target, failure.needed, again) from error


def failure_of(error: BaseException, folder: Path | None = None) -> DiskError | None:
    """The error as a disk error; None if it is something else."""
    if isinstance(error, DiskError):
        return error
    code, filename = errno_of(error), getattr(error, "filename", None)
    if code not in FAILING or (code in REFUSED and filename is None):
        return None
    if filename is not None and not isinstance(filename, str | os.PathLike):
        return None
    return DiskError(code, Path(filename) if filename else _full_output() or folder)


def errno_of(error: BaseException) -> int | None:
    """The errno of an error; None if it is not about files."""
    if isinstance(error, ConnectionError | BlockingIOError | ChildProcessError | InterruptedError):
        return None
    code = getattr(error, "errno", None)
    if isinstance(error, OSError) and isinstance(code, int):
        return code
    match = ERRNO_IN_TEXT.search(str(error)) if isinstance(error, Exception) else None
    return int(match[1] or match[2]) if match else None


def room(target: Path | None) -> tuple[int | None, bool]:
    """(bytes free for this user or None if unknown, whether more files can be created) on the target's disk."""
    if target is None:
        return None, True
    for folder in (target, *target.absolute().parents):
        with suppress(OSError):
            usage = os.statvfs(folder)
            return usage.f_bavail * usage.f_frsize, not (usage.f_files and usage.f_favail == 0)
    return None, True


def size_text(size: int) -> str:
    if size >= 10**9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 10**6 else f"{-(-size // 1000)} kB"


def _full_output() -> Path | None:
    """The file to which standard output or error is redirected, if its disk is full."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stat = os.fstatvfs(stream.fileno())
            if os.isatty(stream.fileno()) or stat.f_bavail * stat.f_frsize >= BLOCK:
                continue
            return Path(f"/proc/self/fd/{stream.fileno()}").readlink()
    return None
