"""The bytes that a run writes to disk, by part, compared with the free space on the disk of its folder.

Checkpoints are counted from shapes, and completions as if every one had full length.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlft.config.schema import SamplingRoot
from rlft.config.trainer import CheckpointConfig
from rlft.plan.memory_parts import FLOAT32
from rlft.system.disk import room, size_text
from rlft.system.files import size_of

MOMENTS = 2
"""AdamW's averages, each as large as the trained parameters."""

CHECKPOINT = 64 * 2**10
"""Bytes of a checkpoint besides its tensors: their names, state.json, MANIFEST."""

TEXT = 4
"""Bytes of a token's text, an upper bound of the average."""
TOKEN_ID = 8
"""Bytes of a token id: digits and a comma."""
LOGPROB = 24
"""Bytes of a log-prob: digits and a comma."""
LINE = 2048
"""Bytes of a line of metrics, or of a completion's line besides its text and tokens."""


LOWERED_BY = {
    "checkpoints": "lower checkpoint.keep",
    "rollouts": "set rollouts.keep or a larger rollouts.every",
    "metrics": "raise eval.every",
    "samples": "lower num_prompts or n",
}
"""{part: how to make it smaller}, for the parts whose size depends on a key."""


def checkpoint_bytes(settings: CheckpointConfig, num_steps: int, trainable: int, beside: int = 0) -> int:
    """The most bytes that the checkpoints of a run take at a time.

    Args:
        settings: how often a checkpoint is saved, and how many are kept.
        num_steps: number of steps of the whole run.
        trainable: number of trained parameters, which are saved with AdamW's averages.
        beside: number of parameters of adapters that change without being trained, such as a moving reference.
    """
    bytes_of_one = FLOAT32 * (trainable * (1 + MOMENTS) + beside) + CHECKPOINT
    number = 1 + (num_steps - 1) // settings.every if settings.every else 1
    return bytes_of_one * min(settings.keep + 1, number)  # the next one is complete before the oldest is deleted


def metrics_bytes(num_steps: int, eval_every: int, examples: int = 0) -> int:
    """Bytes of the lines of steps and evaluations, with `examples` bytes of completions in an evaluation's line."""
    evaluations = 0 if not eval_every else 2 + num_steps // eval_every
    return LINE * (num_steps + evaluations) + evaluations * examples


def completion_bytes(config: SamplingRoot) -> int:
    """Bytes of the line with a completion of full length and its prompt."""
    return LINE + TEXT * config.generation.max_tokens + TEXT * config.prompts.max_tokens


def note(parts: Mapping[str, int], folder: Path) -> str | None:
    """A warning if the run may write more than is free on the disk of its folder; None if the space suffices.

    Files already in the folder, for instance after an interruption, do not count.
    """
    needed = sum(parts.values()) - (size_of(folder) if folder.is_dir() else 0)
    free, _ = room(folder)
    if free is None or needed <= free:
        return None
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)
    remedies = [LOWERED_BY[name] for name, size in parts.items() if size and name in LOWERED_BY]
    problem = f"the run may write up to {size_text(needed)} ({listed}), and {size_text(free)} are free on the disk"
    return f"{problem} of {folder}: {', '.join(['free some', *remedies])}, or choose another folder (hydra.run.dir)"
