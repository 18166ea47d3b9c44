"""Memory of this process: what is free, and how freed blocks are kept, so that steps do not pay for pages anew."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's mallopt
LARGE_BYTES, LEAN_BYTES = 32 * 2**20, 4 * 2**20
LARGE_MICRO_BATCH = 4096  # tokens
KEPT_BYTES = 2**30
UNLIMITED = 2**63  # where a system does not say


def keep_blocks(token_budget: int) -> bool:
    """Freed blocks up to 32 MiB stay with the process, up to 1 GiB at the end of its heap; larger ones go back at once.

    By itself glibc gives back what lies at the end of the heap beyond a few MB, and each page of a new tensor costs a
    fault (5 us on a virtual machine): element-wise passes took ten times as long as the passes themselves.

    With micro-batches of more than 4,096 tokens the limit is 4 MiB: blocks as large as theirs stay as holes in which a
    second network's pass finds no room (a critic's made a peak of 2.6 GB into 3.5). False where this C library has no
    such settings.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    limit = LARGE_BYTES if token_budget <= LARGE_MICRO_BATCH else LEAN_BYTES
    return mallopt(MMAP_THRESHOLD, limit) == 1 and mallopt(TRIM_THRESHOLD, KEPT_BYTES) == 1


def free_memory() -> int:
    """Bytes of the machine's memory that this process could still take."""
    return min(_available(), _control_group_room())


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return UNLIMITED
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), UNLIMITED)


def _control_group_room() -> int:
    """What a container's limit leaves; far more than there is where there is none."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text()
    except OSError:
        return UNLIMITED
    return UNLIMITED if limit == "max" else int(limit) - int(used)


def status_bytes(field: str) -> int | None:
    """What Linux says of this process (`VmRSS`: its resident set now; `VmHWM`: at most so far); None elsewhere."""
    if sys.platform != "linux":
        return None
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


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
