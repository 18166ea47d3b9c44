"""The memory of this process: measures it, and keeps freed blocks; and what the processor can multiply in."""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's mallopt
LARGE_BYTES, LEAN_BYTES = 32 * 2**20, 4 * 2**20
LARGE_MICRO_BATCH = 4096  # tokens
KEPT_BYTES = 2**30
UNLIMITED = 2**63

INSTRUCTIONS: Mapping[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
"""{dtype: names, in Linux's list, of instructions that multiply in it, of x86 and ARM processors}."""

CPUINFO = Path("/proc/cpuinfo")


def keep_blocks(token_budget: int) -> bool:
    """Makes freed blocks up to 32 MiB stay with the process, up to 1 GiB at the end of its heap.

    By default glibc returns the end of the heap beyond a few MB, and each page of a new tensor costs a page fault (5 us
    on a virtual machine): with them, element-wise passes took ten times as long.

    With micro-batches of more than 4,096 tokens the limit is 4 MiB: larger blocks would stay as holes too small for a
    second network's pass (a critic's pass turned a peak of 2.6 GB into 3.5). Returns False if this C library has
    no such settings.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    limit = LARGE_BYTES if token_budget <= LARGE_MICRO_BATCH else LEAN_BYTES
    return mallopt(MMAP_THRESHOLD, limit) == 1 and mallopt(TRIM_THRESHOLD, KEPT_BYTES) == 1


def free_memory() -> int:
    """The bytes of the machine's memory that this process can still take."""
    return min(psutil.virtual_memory().available, _control_group_room())


def _control_group_room() -> int:
    """The bytes that a container's limit leaves; UNLIMITED without one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text()
    except OSError:
        return UNLIMITED
    return UNLIMITED if limit == "max" else int(limit) - int(used)


def resident_bytes() -> int:
    """The resident set of this process, in bytes."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far, in bytes.

    It is read from /proc if possible, because getrusage starts with the resident set of the parent process.
    """
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Makes Python's garbage collector skip the objects that exist already: modules, model, data.

    There are about a million of them, which it would traverse again and again as steps create and drop objects.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def multiplies_in(dtype: str) -> bool:
    """Whether the processor has instructions for products in this dtype; True where the system does not tell.

    Args:
        dtype: such as "bfloat16".
    """
    known = _known_instructions(CPUINFO)
    return dtype not in INSTRUCTIONS or not known or bool(known & INSTRUCTIONS[dtype])


@functools.cache
def _known_instructions(cpuinfo: Path) -> frozenset[str]:
    """The instructions that Linux lists for the first processor; none on other systems."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").split())
