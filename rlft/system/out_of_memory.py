"""Explains a memory error: the stage in which it occurred, what is large there, and which key to lower."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

CPU_ALLOCATOR = "can't allocate memory"
BUDGET = ("activations of a micro-batch", "token_budget")
GROWS: Mapping[str, tuple[str, str]] = {
    "starting": ("the model's weights", "model.dtype"),
    "rehearse update": BUDGET,
    "credit": BUDGET,
    "update": BUDGET,
    "publish": ("the adapter that is published", "lora.rank"),
    "checkpoint": ("copies of adapters and optimizer", "lora.rank"),
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
"""{stage of a verb without a run folder: (what is largest in it, what to do)}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest allocation of an engine.

    Attributes:
        what: the allocation in words.
        key: the key that bounds it.
        value: the key's value.
        may_change: whether a resume may change the key.
    """

    what: str
    key: str
    value: object
    may_change: bool


class OutOfMemoryError(RuntimeError):
    """Memory ran out; the message says where, and what to lower."""


class StageAndSteps(Protocol):
    """The current stage and the number of finished steps."""

    @property
    def current(self) -> str: ...

    @property
    def finished(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Doing:
    """The stage and steps of a verb that has no loggers."""

    current: str = "starting"
    finished: int = 0


@contextmanager
def explained(
    work: StageAndSteps, config: Any, again: str | None = None, engine: Mapping[str, Largest] | None = None
) -> Iterator[None]:
    """Explains a memory error of torch or Python inside by its stage.

    Args:
        work: the current stage and steps.
        config: the typed config, which has the values of keys.
        again: the command that resumes from what is saved, if there is one.
        engine: {stage: the engine's largest allocation}; None if nothing is sampled.

    Raises:
        OutOfMemoryError: in place of that error. Checkpoints are written beside the last good one, so none is lost.
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
    """The message, in one line."""
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
        return what, f"go on with a lower {key} (now {value}): {again} {key}={max(1, value // 2)}"
    return what, f"lower {key} (now {value}); rlft plan with the same words shows what each part takes"


def _of_the_trainer(work: StageAndSteps, config: Any) -> Largest:
    what, key = GROWS.get(work.current, BUDGET)
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return Largest(what=what, key=key, value=value, may_change=key == BUDGET[1])
