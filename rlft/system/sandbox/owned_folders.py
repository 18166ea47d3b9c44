"""Temporary folders of processes: a lock shows that the owner lives, and the next start removes abandoned ones.

A process that is killed removes nothing, but the kernel frees its locks, in whatever container it ran.
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

OWNED = "rlft-sandbox-owned-"
ABANDONED_WITHOUT_LOCKS_S = 7 * 24 * 3600.0


@contextlib.contextmanager
def owned_folder() -> Iterator[Path]:
    """A folder in the system's temporary folder, which is removed at the end of the block or by the next `sweep`."""
    with contextlib.ExitStack() as stack:
        while True:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=OWNED, ignore_cleanup_errors=True)))
            descriptor, taken = _lock(folder)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                if folder.is_dir() and taken is not locks.Taken.no:
                    break  # otherwise another process has swept it before it was locked, or is about to
        yield folder


def sweep() -> None:
    """Removes this user's folders whose owner is dead."""
    for folder in Path(tempfile.gettempdir()).glob(f"{OWNED}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            age = time.time() - status.st_mtime
            if status.st_uid != os.geteuid():
                continue
            descriptor, taken = _lock(folder)
            if descriptor is None:
                continue
            # Without support for locks, only its age shows that a folder is abandoned.
            if taken is locks.Taken.yes or (taken is locks.Taken.unsupported and age > ABANDONED_WITHOUT_LOCKS_S):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _lock(folder: Path) -> tuple[int | None, locks.Taken]:
    """(descriptor of the folder, whether its lock was taken); no descriptor if the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None, locks.Taken.no
    try:
        return descriptor, locks.take(descriptor)
    except OSError:
        os.close(descriptor)
        raise
