"""The interface between the loop and a trainer: the networks that learn, wherever they run.

Its arguments and results are batches, numbers and tensors on the CPU, so that a trainer may be this process's own
(`local.py`) or several processes that share the work. The loop's other interface is `Generator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlft.algorithm.objective import Objective
from rlft.types import Adapter, Batch, Rollouts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Copies of all that changes in a trainer, for checkpoints.

    Attributes:
        adapters: {role: {PEFT name: tensor}}.
        optimizer: moments by parameter name, and the learned reward's pairs of tokens.
        heads: {role: {name: tensor}} of scalar heads.
        critic: the statistics that normalise the critic's values; None without a critic.
    """

    adapters: Mapping[str, Mapping[str, Tensor]]
    optimizer: Mapping[str, Tensor]
    heads: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    critic: Mapping[str, Any] | None = None


class Trainer(Protocol):
    def annotate(self, batch: Batch, zero_gradient_B: Tensor) -> Batch:
        """The batch with the log-probs of old policy, reference and teacher and the old values that are needed.

        Args:
            batch: the batch.
            zero_gradient_B: bool `[B]`, rows that teach nothing, which are not forwarded.
        """
        ...

    def update(self, algorithm: Objective, batch: Batch, zero_gradient_B: Tensor, step: int) -> dict[str, float]:
        """All updates of the step that follows `step` finished steps; returns their mean metrics."""
        ...

    def publish(self, version: int) -> Adapter:
        """The policy's current adapter, for an engine."""
        ...

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """The policy's log-probs (temperature 1) of every token but the first, for the freshness check."""
        ...

    def after_freshness_check(self) -> None:
        """Called once the engine has proven that it has what was published last."""
        ...

    def refresh(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        """After `step` steps, moves the snapshots that are due and trains the learned reward if that is due.

        Args:
            step: number of finished steps.
            rollouts: rollouts of the step that is just finished.

        Returns:
            The metrics of that training.
        """
        ...

    def policy_learns(self, step: int) -> bool:
        """False in the first steps, in which only the critic learns."""
        ...

    def rehearse(self, algorithm: Objective, micro: Batch) -> None:
        """Runs a teacher's pass, and forward and backward, of one micro-batch, and leaves no trace.

        Gradients are dropped, and no stream of random numbers moves on.
        """
        ...

    def state(self) -> TrainerState: ...

    def restore(self, state: TrainerState) -> None:
        """Continues from a state that `state` returned."""
        ...
