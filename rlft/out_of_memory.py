"""What a memory error means: which stage it was in, what grows there, and which key to lower."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlft.logger.loggers import Loggers

CPU_ALLOCATOR = "can't allocate memory"
BATCH_SIZE = ("keys and values of the completions", "generation.transformers.batch_size")
BUDGET = ("activations of a micro-batch", "token_budget")
GROWS: Mapping[str, tuple[str, str]] = {
    "starting": ("the model's weights", "model.dtype"),
    "rehearse": BUDGET,
    "sample": BATCH_SIZE,
    "evaluate": BATCH_SIZE,
    "credit": BUDGET,
    "update": BUDGET,
    "publish": ("the engine's sum of base and adapter", "generation.transformers.weights"),
    "checkpoint": ("copies of adapters and optimizer", "lora.rank"),
}
"""By stage: what is largest in it, and the key that bounds it."""


class OutOfMemoryError(RuntimeError):
    """The message says where memory ran out, and what to lower."""


@contextmanager
def explained(logger: Loggers, config: Any, folder: Path) -> Iterator[None]:
    """Inside, a memory error of torch or Python is told by the stage that it came in.

    Raises:
        OutOfMemoryError: in its place. Checkpoints are written beside the last good one, so none is lost.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        raise OutOfMemoryError(explanation(error, logger.current, finished_steps(logger), config, folder)) from error


def finished_steps(logger: Loggers) -> int:
    newest = logger.last or logger.run
    return 0 if newest is None else newest.step


def is_memory_error(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)


def explanation(error: BaseException, stage: str, step: int, config: Any, folder: Path) -> str:
    """One line; step: how many are finished."""
    what, key = GROWS.get(stage, BUDGET)
    if key == BATCH_SIZE[1] and "vllm" in config.generation.engine:
        key = "generation.vllm.max_num_seqs"
    wanted = re.search(r"tried to allocate ([\d.,]+ \w+)", str(error), re.IGNORECASE)
    more = f", {wanted[1].removesuffix('. Error')} more were wanted" if wanted else ""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    remedy = f"lower {key} (now {value}); rlft plan with the same words shows what each part takes"
    if key in ("token_budget", BATCH_SIZE[1]):  # a run may go on with another one
        remedy = f"go on with a lower {key} (now {value}): rlft resume {folder} {key}={max(1, int(value) // 2)}"
    return f"memory ran out in {stage} after step {step}{more}: what grows there is {what}; {remedy}"
