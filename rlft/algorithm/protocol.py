"""What the loop asks of an algorithm. A frozen dataclass whose fields are its YAML keys and that has these is one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rlft.types import Batch, Loss, LossScale, Outputs


class Algorithm(Protocol):
    @property
    def needs_values(self) -> bool: ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def needs_old_in_credit(self) -> bool:
        """Whether `credit` reads `old_logprobs` (KL in the reward)."""
        ...

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the engine's log-probs enter the loss, so that sampling must be undistorted."""
        ...

    @property
    def min_group_size(self) -> int: ...

    def inert(self, batch: Batch) -> Tensor:
        """bool `[B]`: rows that add exactly nothing to loss and gradient; known from rewards and group ids alone."""
        ...

    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages (and returns)."""
        ...

    def loss(self, outputs: Outputs, batch: Batch, scale: LossScale) -> Loss:
        """The loss of any subset of the optimizer batch's rows, divided by the whole batch's sizes."""
        ...
