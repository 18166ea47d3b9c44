"""Temporary folders that outlive no owner: a lock says that the owner lives, and the next start removes the others.

A process that is killed removes nothing. The kernel frees its locks, though, in whatever container it ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "rlft-sandbox-"
OWNED = f"{PREFIX}owned-"
ABANDONED_S = 3600.0  # of a folder whose owner says nothing by a lock, as older versions made them


@contextlib.contextmanager
def owned_folder() -> Iterator[Path]:
    """A folder in the system's temporary folder, removed at the end of the block, or by the next `sweep`."""
    with contextlib.ExitStack() as stack:
        while True:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=OWNED, ignore_cleanup_errors=True)))
            descriptor = _lock(folder)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                if folder.is_dir():  # else another process swept it before it was locked
                    break
        yield folder


def sweep() -> None:
    """Removes this user's folders whose owner is dead."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            age = time.time() - status.st_mtime
            if status.st_uid != os.geteuid() or not (folder.name.startswith(OWNED) or age > ABANDONED_S):
                continue
            descriptor = _lock(folder)
            if descriptor is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """The descriptor that holds the folder's lock, or None where another process has it or the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
