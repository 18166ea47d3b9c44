"""What a memory error means: which stage it was in, what grows there, and which key to lower."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

CPU_ALLOCATOR = "can't allocate memory"
BATCH_SIZE = ("keys and values of the completions", "generation.transformers.batch_size")
BUDGET = ("activations of a micro-batch", "token_budget")
GROWS: Mapping[str, tuple[str, str]] = {
    "starting": ("the model's weights", "model.dtype"),
    "rehearse sampling": BATCH_SIZE,
    "rehearse update": BUDGET,
    "sample": BATCH_SIZE,
    "evaluate": BATCH_SIZE,
    "credit": BUDGET,
    "update": BUDGET,
    "publish": ("the engine's sum of base and adapter", "generation.transformers.weights"),
    "checkpoint": ("copies of adapters and optimizer", "lora.rank"),
}
"""By stage: what is largest in it, and the key that bounds it."""

ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "answer": (
        "keys and values of the conversation",
        "begin anew with /new, or start again with a lower generation.max_tokens",
    ),
    "merge": ("the base's weights in float32", "use as=adapter, which loads no base"),
    "change dtype": ("the model's weights in float32", "leave dtype out, which copies them as they are"),
}
"""By what a verb without a run folder is at: what is largest in it, and what to do."""


class OutOfMemoryError(RuntimeError):
    """The message says where memory ran out, and what to lower."""


class Work(Protocol):
    """What is being done. finished: how many steps are."""

    @property
    def current(self) -> str: ...

    @property
    def finished(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Doing:
    """The work of a verb that has no loggers."""

    current: str = "starting"
    finished: int = 0


@contextmanager
def explained(work: Work, config: Any, again: str | None = None) -> Iterator[None]:
    """Inside, a memory error of torch or Python is told by the stage that it came in.

    config: where the value of a key is looked up. again: the command that goes on from what is saved, if there is one.

    Raises:
        OutOfMemoryError: in its place. Checkpoints are written beside the last good one, so none is lost.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        raise OutOfMemoryError(explanation(error, work, config, again)) from error


def is_memory_error(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)


def explanation(error: BaseException, work: Work, config: Any, again: str | None) -> str:
    """One line."""
    wanted = re.search(r"tried to allocate ([\d.,]+ \w+)", str(error), re.IGNORECASE)
    more = f", {wanted[1].removesuffix('. Error')} more were wanted" if wanted else ""
    after = "" if again is None else f" after step {work.finished}"
    what, remedy = ELSEWHERE.get(work.current) or _lower(work, config, again)
    return f"memory ran out in {work.current}{after}{more}: what grows there is {what}; {remedy}"


def _lower(work: Work, config: Any, again: str | None) -> tuple[str, str]:
    what, key = GROWS.get(work.current, BUDGET)
    if key == BATCH_SIZE[1]:
        if not (hasattr(config, "generation") and getattr(config, "data", None)):
            what, key = BUDGET  # an evaluation of losses alone
        elif "vllm" in config.generation.engine:
            key = "generation.vllm.max_num_seqs"
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    if again is None:
        return what, f"lower {key} (now {value})"
    if key in ("token_budget", BATCH_SIZE[1]):  # a run may go on with another one
        return what, f"go on with a lower {key} (now {value}): {again} {key}={max(1, int(value) // 2)}"
    return what, f"lower {key} (now {value}); rlft plan with the same words shows what each part takes"
