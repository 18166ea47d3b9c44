"""The interface between the loop and an algorithm: a frozen dataclass whose fields are the keys of its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, Self

from rlft.types import Batch, Loss, LossScale, Outputs

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm(Protocol):
    @property
    def needs_values(self) -> bool:
        """Whether there must be a critic: `old_values` before `credit`, `Outputs.values` in `loss`."""
        ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def needs_teacher(self) -> bool:
        """Whether there must be a teacher (`teacher_logprobs`)."""
        ...

    @property
    def learns_from_teacher_alone(self) -> bool:
        """Whether nothing but a teacher moves the policy, so that one that equals the policy teaches nothing."""
        ...

    @property
    def teacher_top_k(self) -> int:
        """Of how many of its likeliest tokens the teacher's log-probs must be there (`teacher_top_k_ids`); 0: none."""
        ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def needs_old_in_credit(self) -> bool:
        """Whether `credit` reads `old_logprobs` (KL in the reward, a teacher's advantage)."""
        ...

    @property
    def needs_steps(self) -> bool:
        """Whether a reward must score steps, or an engine turns (`token_rewards`, `step_ends`)."""
        ...

    @property
    def needs_text(self) -> bool:
        """Whether pretraining text is mixed in (`text_loss`)."""
        ...

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the engine's log-probs enter the loss, so that sampling must be undistorted."""
        ...

    @property
    def min_group_size(self) -> int: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings that are allowed and hardly ever intended, in words for the person watching."""
        ...

    def inert(self, batch: Batch) -> Tensor:
        """bool `[B]`: rows that add exactly nothing to loss and gradient; known from rewards and group ids alone."""
        ...

    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages (and returns)."""
        ...

    def loss(self, outputs: Outputs, batch: Batch, scale: LossScale) -> Loss:
        """The loss of any subset of the optimizer batch's rows, divided by the whole batch's sizes."""
        ...

    def value_loss(self, values: Tensor, batch: Batch, scale: LossScale) -> Tensor:
        """The critic's term of that loss alone, `[]`; called where `needs_values`."""
        ...

    def text_loss(self, logprobs: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
        """The term `[]` that pretraining text adds, from its log-probs `[B, T]`; called where `needs_text`."""
        ...

    def adapt(self, metrics: Mapping[str, float]) -> Self:
        """The algorithm of the next step, after a step with these metrics: a KL controller moves its coefficient."""
        ...

    def state(self) -> dict[str, float]:
        """The values that `adapt` has changed, for the checkpoint."""
        ...

    def restored(self, state: Mapping[str, float]) -> Self:
        """The algorithm with the values that a checkpoint holds."""
        ...
