"""GRPO: advantages relative to siblings, a clipped ratio, no critic. DeepSeekMath, arXiv 2402.03300.

Dr. GRPO, GSPO, GSPO-token, DAPO, CISPO and GRPO with process rewards are the same class with other keys: see
configs/algorithm/.

Differences from the paper: the KL coefficient is 0 by default (the paper: 0.04), the standard deviation is the sample
one (the paper does not say), a correction for the generator/trainer gap can be switched on, and rewards of whole
completions count beside those of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.objective import RatioObjective, there
from rlft.fields import NonNegativeFloat
from rlft.ops.advantage import Std, group_is_equal, group_zscore, process_advantages, steps_are_equal
from rlft.ops.lazy import no_grad
from rlft.ops.mask import keep
from rlft.types import Batch, UserError

if TYPE_CHECKING:
    from torch import Tensor


class Supervision(StrEnum):
    """What is normalised among siblings: a completion's score, or the scores of its steps."""

    outcome = "outcome"
    process = "process"


@dataclass(frozen=True, kw_only=True)
class GRPO(RatioObjective):
    """Group-relative policy optimisation. Fields are the keys of configs/algorithm/grpo.yaml, which explains them."""

    supervision: Supervision
    std: Std
    eps: NonNegativeFloat

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.supervision == Supervision.process and self.needs_old_in_credit:
            raise UserError(
                "algorithm.kl_in",
                "algorithm.supervision=process has no one score of a completion that the KL could be a part of",
                got=self.kl_in,
                remedy="use algorithm.kl_in=loss, or algorithm.supervision=outcome",
            )

    @property
    def needs_steps(self) -> bool:
        """Whether `Batch.token_rewards` and `Batch.step_ends` must be there."""
        return self.supervision == Supervision.process

    @property
    def min_group_size(self) -> int:
        """The smallest G that can learn anything: one alone always has advantage 0."""
        return 2

    def inert(self, batch: Batch) -> Tensor:
        """Rows of groups without any difference, bool `[B]`, unless a KL or an entropy bonus acts on them."""
        if self._acts_without_advantage:
            return super().inert(batch)
        match self.supervision:
            case Supervision.outcome:
                return group_is_equal(self.completion_scores(batch), batch.group_ids)
            case Supervision.process:
                token_rewards, step_ends = _steps(batch)
                steps_B = steps_are_equal(token_rewards, step_ends & batch.loss_mask, batch.group_ids)
                return steps_B & group_is_equal(batch.rewards, batch.group_ids)

    @no_grad
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages `[B, T]`, 0 outside the completions.

        outcome: the group z-score of the completion's score on each of its tokens; a KL in the reward is part of the
        score, so it goes in *before* normalisation. process: the z-scores of the steps that end at or after the token,
        each among all steps of the group (section 4.1.3); rewards of whole completions are normalised on their own and
        added on every token (without any they add exactly 0, which is the paper's).
        """
        mask, ids = batch.loss_mask, batch.group_ids
        match self.supervision:
            case Supervision.outcome:
                scores_B = self.completion_scores(batch)
                steps_BT = scores_B.new_zeros(mask.shape)
            case Supervision.process:
                token_rewards, step_ends = _steps(batch)
                scores_B = batch.rewards.to(batch.sampled_logprobs.dtype)
                steps_BT = process_advantages(token_rewards.to(scores_B), step_ends, mask, ids, self.std, self.eps)
        outcome_B = group_zscore(scores_B, ids, self.std, self.eps)
        return replace(batch, advantages=keep(outcome_B.unsqueeze(-1) + steps_BT, mask))


def _steps(batch: Batch) -> tuple[Tensor, Tensor]:
    why = "supervision=process (a reward that scores steps)"
    return there(batch.token_rewards, "token_rewards", why), there(batch.step_ends, "step_ends", why)
