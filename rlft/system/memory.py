"""The memory of this process: measures it, keeps freed blocks, and explains an error when it runs out."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from rlft.system.lazy import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's mallopt
LARGE_BYTES, LEAN_BYTES = 32 * 2**20, 4 * 2**20
LARGE_MICRO_BATCH = 4096  # tokens
KEPT_BYTES = 2**30
UNLIMITED = 2**63


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
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far, in bytes.

    From /proc if possible: getrusage starts with the resident set of the parent process.
    """
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Makes Python's garbage collector skip what exists already: about a million objects of modules, model and data."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# -- when memory runs out ----------------------------------------------------------------------------------------------
CPU_ALLOCATOR = "can't allocate memory"
BUDGET = ("activations of a micro-batch", "token_budget")
GROWS: Mapping[str, tuple[str, str]] = {
    "starting": ("the model's weights", "model.dtype"),
    "rehearse update": BUDGET,
    "credit": BUDGET,
    "update": BUDGET,
    "publish": ("the adapter that is published", "lora.rank"),
    **dict.fromkeys(("seal", "checkpoint"), ("copies of adapters and optimizer", "lora.rank")),
}
"""{stage: (what is largest in it, the key that bounds it)}. In other stages a micro-batch is largest."""

ENGINE_STAGES: Mapping[str, str] = {
    "rehearse sampling": "sample",
    "sample": "sample",
    "evaluate": "sample",
    "publish": "publish",
}
"""{stage: its name in `Engine.grows`}: in these stages the engine's allocation is largest, if the engine names one."""

ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "answer": (
        "keys and values of the conversation",
        "start a new conversation with /new, or restart with a lower generation.max_tokens",
    ),
    "merge": ("the base's weights in float32", "use as=adapter, which loads no base"),
    "change dtype": ("the model's weights in float32", "leave dtype out, which copies them as they are"),
}
"""{stage of a command without a run folder: (what is largest in it, what to do)}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest allocation of an engine, in words; the key that bounds it; whether a resume may change that."""

    what: str
    key: str
    value: object
    may_change: bool


class OutOfMemoryError(RuntimeError):
    """Memory ran out; the message says where, and what to lower. Checkpoints are written next to the last good one."""


class StageAndSteps(Protocol):
    """The current stage and the number of finished steps."""

    @property
    def current(self) -> str: ...

    @property
    def finished(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Doing:
    """The stage and steps of a command that has no loggers."""

    current: str = "starting"
    finished: int = 0


@contextmanager
def explained(
    work: StageAndSteps, config: Any, again: str | None = None, engine: Mapping[str, Largest] | None = None
) -> Iterator[None]:
    """Turns a memory error of torch or Python inside into an OutOfMemoryError that explains it by its stage.

    Args:
        config: the typed config, which has the values of keys.
        again: the command that resumes from what is saved, if there is one.
        engine: {stage: the engine's largest allocation}; None if nothing is sampled.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        raise OutOfMemoryError(explanation(error, work, config, again, engine or {})) from error


def is_memory_error(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)


def explanation(
    error: BaseException, work: StageAndSteps, config: Any, again: str | None, engine: Mapping[str, Largest]
) -> str:
    match = re.search(r"tried to allocate ([\d.,]+ \w+)", str(error), re.IGNORECASE)
    requested = f", {match[1].removesuffix('. Error')} more were wanted" if match else ""
    after_step = "" if again is None else f" after step {work.finished}"
    what, remedy = ELSEWHERE.get(work.current) or _lower(work, config, again, engine)
    return f"memory ran out in {work.current}{after_step}{requested}: what grows there is {what}; {remedy}"


def _lower(work: StageAndSteps, config: Any, again: str | None, engine: Mapping[str, Largest]) -> tuple[str, str]:
    largest = engine.get(ENGINE_STAGES.get(work.current, "")) or _of_the_trainer(work, config)
    what, key, value = largest.what, largest.key, largest.value
    if again is None:
        return what, f"lower {key} (now {value})"
    if largest.may_change and isinstance(value, int):
        return what, f"resume with a lower {key} (now {value}): {again} {key}={max(1, value // 2)}"
    return what, f"lower {key} (now {value}); rlft plan with the same words shows what each part takes"


def _of_the_trainer(work: StageAndSteps, config: Any) -> Largest:
    what, key = GROWS.get(work.current, BUDGET)
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return Largest(what=what, key=key, value=value, may_change=key == BUDGET[1])
