"""The interface between the loop and an algorithm, a frozen dataclass whose fields are the keys of its YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, Self

from rlft.types import Batch, Loss, LossScale, Outputs

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm(Protocol):
    @property
    def needs_values(self) -> bool:
        """Whether it requires a critic: `old_values` before `credit`, and `Outputs.values` in `loss`."""
        ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def needs_teacher(self) -> bool:
        """Whether it requires a teacher (`teacher_logprobs`)."""
        ...

    @property
    def learns_from_teacher_alone(self) -> bool:
        """Whether only a teacher changes the policy, so that nothing is learned from one that equals the policy."""
        ...

    @property
    def teacher_top_k(self) -> int:
        """Number of the teacher's most likely tokens whose log-probs it requires (`teacher_top_k_ids`); 0: none."""
        ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def needs_old_in_credit(self) -> bool:
        """Whether `credit` reads `old_logprobs` (KL in the reward, a teacher's advantage)."""
        ...

    @property
    def needs_steps(self) -> bool:
        """Whether it requires a reward's scores of steps, or an engine's of turns (`token_rewards`, `step_ends`)."""
        ...

    @property
    def needs_text(self) -> bool:
        """Whether pretraining text is mixed in (`text_loss`)."""
        ...

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the loss uses the engine's log-probs, which requires undistorted sampling."""
        ...

    @property
    def min_group_size(self) -> int: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages for the user about settings that are allowed but hardly ever intended."""
        ...

    def inert(self, batch: Batch) -> Tensor:
        """Rows that add exactly 0 to loss and gradient, bool `[B]`, as known from rewards and group ids."""
        ...

    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages (and returns)."""
        ...

    def loss(self, outputs: Outputs, batch: Batch, scale: LossScale) -> Loss:
        """The loss of any subset of the optimizer batch's rows, divided by the whole batch's sizes."""
        ...

    def value_loss(self, values: Tensor, batch: Batch, scale: LossScale) -> Tensor:
        """The critic's term of that loss, `[]`; called if `needs_values`."""
        ...

    def text_loss(self, logprobs: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
        """The term `[]` that pretraining text adds, from its log-probs `[B, T]`; called if `needs_text`."""
        ...

    def adapt(self, metrics: Mapping[str, float]) -> Self:
        """The algorithm of the next step, after a step with these metrics: a KL controller changes its coefficient."""
        ...

    def state(self) -> dict[str, float]:
        """{name: value} of what `adapt` has changed, for the checkpoint."""
        ...

    def restored(self, state: Mapping[str, float]) -> Self:
        """The algorithm with the values that a checkpoint holds."""
        ...
