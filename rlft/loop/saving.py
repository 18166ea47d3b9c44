"""Saves a training run every `checkpoint.every` steps, after the last step, and after a signal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlft.config.trainer import CheckpointConfig
from rlft.runs import checkpoint
from rlft.runs.checkpoint import Checkpoint
from rlft.system.interrupt import Interrupt

if TYPE_CHECKING:
    from torch import Tensor


class Saver:
    """Writes the checkpoints of one run into the folder `root`.

    `interrupted` says whether a signal ends the run before its next step. If a step may be abandoned
    (checkpoint.on_signal), the state after the last finished step is kept in main memory until it is on disk, because
    the next step changes weights and optimizer.
    """

    def __init__(self, root: Path, settings: CheckpointConfig, interrupt: Interrupt, num_steps: int) -> None:
        self._root, self._settings, self._interrupt, self._num_steps = root, settings, interrupt, num_steps
        self._finished = 0
        self._unsaved: Checkpoint | None = None
        self.interrupted = False

    def begin(self, step: int) -> None:
        """Called before the first step, which follows `step` steps whose state is saved or initial."""
        self._finished = step
        self._interrupt.in_step = step < self._num_steps
        self.interrupted = self._interrupt.requested

    def after_step(self, step: int, make: Callable[[], Checkpoint], stage: Callable[[str], None]) -> None:
        """Called after `step` steps. `make` returns their state; `stage` is called when it is written."""
        every, last = self._settings.every, step == self._num_steps
        with self._interrupt.saving():
            self.interrupted = self._interrupt.requested
            self._interrupt.in_step = not last
            self._finished = step
            if last or self.interrupted or (every and step % every == 0):
                stage("checkpoint")
                self._save(make())
                self.interrupted = self._interrupt.requested  # a signal during the write ends the run, too
            elif self._settings.on_signal != "step":
                self._unsaved = in_memory(make())

    def save_last_finished(self) -> int:
        """Called when a step is abandoned: saves the state before it and returns the number of finished steps."""
        self.interrupted = True
        if self._unsaved is not None:
            self._save(self._unsaved)
        return self._finished

    def _save(self, state: Checkpoint) -> None:
        checkpoint.save(self._root, state, self._settings.keep)
        self._unsaved = None


def in_memory(state: Checkpoint) -> Checkpoint:
    """A copy of the state in main memory, independent of the run. Its tensors must be copies already.

    Raises:
        ValueError: the state has folders, which are written from the run's current weights.
    """
    if state.write_folders:
        raise ValueError(f"{sorted(state.write_folders)} cannot be copied: they change with the run")

    def moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    return replace(
        state,
        adapters={role: moved(tensors) for role, tensors in state.adapters.items()},
        heads={role: moved(tensors) for role, tensors in state.heads.items()},
        optimizer=moved(state.optimizer),
        tensors={name: moved(tensors) for name, tensors in state.tensors.items()},
        state=copy.deepcopy(state.state),
        records=copy.deepcopy(state.records),
    )
