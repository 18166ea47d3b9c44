"""Temporary folders that outlive no owner: a lock says that the owner lives, and the next start removes the others.

A process that is killed removes nothing. The kernel frees its locks, though, in whatever container it ran.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rlft.system import locks

PREFIX = "rlft-sandbox-"
OWNED = f"{PREFIX}owned-"
ABANDONED_S = 3600.0  # of a folder whose owner says nothing by a lock, as older versions made them
ABANDONED_WITHOUT_LOCKS_S = 7 * 24 * ABANDONED_S


@contextlib.contextmanager
def owned_folder() -> Iterator[Path]:
    """A folder in the system's temporary folder, removed at the end of the block, or by the next `sweep`."""
    with contextlib.ExitStack() as stack:
        while True:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=OWNED, ignore_cleanup_errors=True)))
            descriptor, taken = _lock(folder)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                if folder.is_dir() and taken is not locks.Taken.no:
                    break  # else another process swept it before it was locked, or is about to
        yield folder


def sweep() -> None:
    """Removes this user's folders whose owner is dead."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            age = time.time() - status.st_mtime
            if status.st_uid != os.geteuid() or not (folder.name.startswith(OWNED) or age > ABANDONED_S):
                continue
            descriptor, taken = _lock(folder)
            if descriptor is None:
                continue
            # Where there are no locks, only the age says that nobody will miss it.
            if taken is locks.Taken.yes or (taken is locks.Taken.unsupported and age > ABANDONED_WITHOUT_LOCKS_S):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _lock(folder: Path) -> tuple[int | None, locks.Taken]:
    """(the descriptor of the folder, what came of asking for its lock); no descriptor where the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None, locks.Taken.no
    try:
        return descriptor, locks.take(descriptor)
    except OSError:
        os.close(descriptor)
        raise
