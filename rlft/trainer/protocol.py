"""The interface between the loop and a trainer: the networks that learn, wherever they run.

Its arguments and answers are batches, numbers and tensors on the CPU, so that a trainer may be this process's own
(`local.py`) or several processes that share the work. The loop's other seam is `Generator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlft.algorithm.protocol import Algorithm
from rlft.types import Adapter, Batch, Rollouts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Copies of all that changes in a trainer: what a checkpoint keeps of it.

    Args:
        adapters: {role: {PEFT name: tensor}}.
        heads: {role: {name: tensor}}, of scalar heads.
        optimizer: moments by parameter name, and the learned reward's pairs of tokens.
        critic: the statistics that normalise its values, None without a critic.
    """

    adapters: Mapping[str, Mapping[str, Tensor]]
    optimizer: Mapping[str, Tensor]
    heads: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    critic: Mapping[str, Any] | None = None


class Trainer(Protocol):
    def annotate(self, batch: Batch, inert_B: Tensor) -> Batch:
        """The batch with log-probs of old policy, reference and teacher and old values, as far as they are needed.

        inert_B: bool `[B]`; rows that teach nothing, which are not forwarded.
        """
        ...

    def update(self, algorithm: Algorithm, batch: Batch, inert_B: Tensor, step: int) -> dict[str, float]:
        """All updates of the step that follows `step` finished steps; returns their mean metrics."""
        ...

    def publish(self, version: int) -> Adapter:
        """The policy as it is, for an engine."""
        ...

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first by the policy: the freshness check."""
        ...

    def engine_verified(self) -> None:
        """The engine has proven that it has what was published last."""
        ...

    def refresh(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        """After `step` steps: moves the snapshots that are due and trains the learned reward when it is due.

        Returns the metrics of that training. rollouts: of the step that is just finished.
        """
        ...

    def policy_learns(self, step: int) -> bool:
        """False in the first steps, in which only the critic learns."""
        ...

    def rehearse(self, algorithm: Algorithm, micro: Batch) -> None:
        """A teacher's pass, and forward and backward, of one micro-batch, of which nothing is left.

        Neither a gradient nor a random number that was drawn.
        """
        ...

    def state(self) -> TrainerState: ...

    def restore(self, state: TrainerState) -> None:
        """Continues from what `state` returned."""
        ...
