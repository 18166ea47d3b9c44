"""Locks on files and folders, which the kernel releases with their process, even by `kill -9`.

A process that is killed does not remove its temporary folders. Their locks show that it is gone, in whatever container
it ran, and the next start removes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""EBADF: NFS locks only files that are open for writing, and so no folders."""

HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
TRIES = 5
PAUSE_S = 0.05


class Taken(StrEnum):
    """The result of requesting a lock."""

    yes = "yes"
    no = "no"  # another process holds it
    unsupported = "unsupported"


def take(handle: int, *, shared: bool = False, tries: int = 1) -> Taken:
    """Takes the lock of an open file or folder, which is held until the handle is closed. OSError: the disk failed.

    shared: whether others may hold it, too, which suffices to see whether a process holds it alone.
    tries: number of attempts, because a process that only checks the lock holds it for a moment.
    """
    for attempt in range(tries):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in UNSUPPORTED:
                return Taken.unsupported
            if error.errno not in HELD:
                raise
        else:
            return Taken.yes
    return Taken.no


def is_held(file: Path) -> bool | None:
    """Whether a process holds this lock file alone; None if the file system has no locks or the file cannot be read."""
    try:
        handle = os.open(file, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    try:
        attempt = take(handle, shared=True)
    except OSError:
        return None
    finally:
        os.close(handle)
    return None if attempt is Taken.unsupported else attempt is Taken.no


# -- temporary folders of processes ------------------------------------------------------------------------------------
OWNED = "rlft-sandbox-owned-"
ABANDONED_WITHOUT_LOCKS_S = 7 * 24 * 3600.0


@contextlib.contextmanager
def owned_folder(prefix: str = OWNED, parent: Path | None = None) -> Iterator[Path]:
    """A folder in `parent`, by default the system's for temporary files; the end of the block or a `sweep` removes it.

    A process that was forked inside the block leaves it alone.
    """
    owner = os.getpid()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        descriptor, taken = _lock(folder)
        if descriptor is not None and folder.is_dir() and taken is not Taken.no:
            break
        if descriptor is not None:  # another process has swept it before it was locked, or is about to
            os.close(descriptor)
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            # Also what a program has made unreadable there.
            cast(Any, tempfile.TemporaryDirectory)._rmtree(str(folder), ignore_errors=True)
            os.close(descriptor)


def sweep(prefix: str = OWNED, parent: Path | None = None) -> None:
    """Removes this user's folders whose owner is dead."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            age = time.time() - status.st_mtime
            if status.st_uid != os.geteuid():
                continue
            descriptor, taken = _lock(folder)
            if descriptor is None:
                continue
            # Without support for locks, only its age shows that a folder is abandoned.
            if taken is Taken.yes or (taken is Taken.unsupported and age > ABANDONED_WITHOUT_LOCKS_S):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _lock(folder: Path) -> tuple[int | None, Taken]:
    """(descriptor of the folder, whether its lock was taken); no descriptor if the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None, Taken.no
    try:
        return descriptor, take(descriptor)
    except OSError:
        os.close(descriptor)
        raise
