"""How freed memory is kept: blocks of tensors are used again, so that a step does not pay for their pages anew."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's mallopt
LARGE_BYTES = 32 * 2**20
KEPT_BYTES = 2**30


def keep_blocks() -> bool:
    """Freed blocks up to 32 MiB stay with the process, up to 1 GiB at the end of its heap; larger ones go back at once.

    By itself glibc gives back what lies at the end of the heap beyond a few MB, and each page of a new tensor costs a
    fault (5 us on a virtual machine): element-wise passes took ten times as long as the passes themselves. False where
    this C library has no such setting.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return mallopt(MMAP_THRESHOLD, LARGE_BYTES) == 1 and mallopt(TRIM_THRESHOLD, KEPT_BYTES) == 1


@contextmanager
def collector_passes_over_what_is_there() -> Iterator[None]:
    """Inside, Python's garbage collector does not look through the objects that existed before: modules, model, data.

    There are a million of them, looked through again and again while a step makes and drops its own.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
