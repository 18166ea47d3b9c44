"""Locks on files and folders, which the kernel releases with their process, even by `kill -9`.

They are not a library's because looking must not create a lock file, temporary folders are locked themselves, and a
file system without locks (NFS without its lock service, Lustre, some FUSE) must be told apart from a held lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from enum import StrEnum
from pathlib import Path

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""EBADF: NFS locks only what is opened for writing, and so no folder."""

HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
TRIES = 5
PAUSE_S = 0.05


class Taken(StrEnum):
    """The result of asking for a lock."""

    yes = "yes"
    no = "no"  # another process holds it
    unsupported = "unsupported"


def take(handle: int, *, shared: bool = False, tries: int = 1) -> Taken:
    """Takes the lock of an open file or folder, which is held until the handle is closed.

    Args:
        handle: the open file or folder.
        shared: whether others may hold it, too; enough to see whether a process holds it alone.
        tries: attempts, because a process that only looks holds it for a moment.

    Raises:
        OSError: the disk failed.
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
    """Whether a process holds this lock file alone; None if the file system has no locks or it cannot be read."""
    try:
        handle = os.open(file, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    try:
        taken = take(handle, shared=True)
    except OSError:
        return None
    finally:
        os.close(handle)
    return None if taken is Taken.unsupported else taken is Taken.no
