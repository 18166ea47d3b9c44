"""GRPO: advantages relative to siblings, a clipped ratio, no critic. DeepSeekMath, arXiv 2402.03300.

Dr. GRPO, GSPO, DAPO, CISPO, SAPO, GMPO, GDPO and GRPO with process rewards are the same class with other keys.

The loss of an update, as formula.py reads it; what is not defined here is in objective.py.

    L = agg(w * m * S)
      + kl_coef * agg(KL)                                           if kl_coef > 0 and kl_in=loss
      - entropy_coef * agg(H)                                       if entropy_coef > 0

Credit: the advantage A of all tokens of a completion is its score normalised among its siblings, exactly 0 in a group
of equal scores. With process rewards, or rewards of turns, a token has the sum of the normalised scores of the steps
that end at or after it, in its turn or in the whole trajectory. Several rewards may be normalised separately (GDPO).

    A = z(R)                            if supervision=outcome and reward_aggregation=sum_then_normalize
    A = Z / (std_all(Z) + eps)          if supervision=outcome and reward_aggregation=normalize_then_sum
    A = z(reward) + to_go(z(step), 1)                               if supervision=process and credit_span=trajectory
    A = z(reward) + to_go_in_turn(z(step), 1)                       if supervision=process and credit_span=turn
    z(x) = (x - mean_group(x)) / (std_group(x, 1) + eps)            if std=sample
    z(x) = (x - mean_group(x)) / (std_group(x, 0) + eps)            if std=population
    z(x) = (x - mean_group(x)) / (std_all(x) + eps)                 if std=batch
    z(x) = x - mean_group(x)                                        if std=none
    Z = sum_k(weight_k * z(reward_k))

Differences from the paper: the KL coefficient is 0 by default (in the paper 0.04); the standard deviation is that of a
sample, with eps added (the paper does not specify it); a correction for the generator/trainer gap can be switched on;
and rewards of whole completions are added to those of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from rlft.algorithm.objective import CreditSpan, RatioObjective, required
from rlft.algorithm.ops.advantage import (
    Std,
    decoupled_zscore,
    group_is_equal,
    group_zscore,
    process_advantages,
    rounded,
    steps_are_equal,
)
from rlft.algorithm.ops.aggregate import keep
from rlft.config.bounds import NonNegativeFloat
from rlft.config.keys import Key
from rlft.system.lazy import no_grad, torch
from rlft.types import Batch, require

if TYPE_CHECKING:
    from torch import Tensor


class RewardAggregation(StrEnum):
    """What is normalised if a completion has several rewards: their weighted sum, or each before they are added."""

    sum_then_normalize = "sum_then_normalize"
    normalize_then_sum = "normalize_then_sum"


class Supervision(StrEnum):
    """What is normalised among siblings: a completion's score, or the scores of its steps."""

    outcome = "outcome"
    process = "process"


@dataclass(frozen=True, kw_only=True)
class GRPO(RatioObjective):
    """Group-relative policy optimisation."""

    supervision: Annotated[Supervision, Key(acts="rewards=true")]
    std: Annotated[Std, Key(acts="rewards=true")]
    eps: Annotated[
        NonNegativeFloat,
        Key(acts="rewards=true and std!=none or rewards=true and reward_aggregation=normalize_then_sum"),
    ]
    credit_span: Annotated[CreditSpan, Key(acts="rewards=true and supervision=process")]
    reward_aggregation: Annotated[RewardAggregation, Key(acts="rewards=true and supervision=outcome")]

    def __post_init__(self) -> None:
        super().__post_init__()
        of_steps = self.supervision == Supervision.process
        if self._kl_in_reward:
            problem = "algorithm.supervision=process has no one score of a completion that the KL could be a part of"
            remedy = "use algorithm.kl_in=loss, or algorithm.supervision=outcome"
            require(not of_steps, "algorithm.kl_in", problem, got=self.kl_in, remedy=remedy)
        if self.credit_span == CreditSpan.turn:
            problem = "algorithm.supervision=outcome has one score for all turns of a completion"
            remedy = "use algorithm.supervision=process, or algorithm.credit_span=trajectory"
            require(of_steps, "algorithm.credit_span", problem, got=self.credit_span, remedy=remedy)
        if self._normalizes_each_reward:
            problem = "algorithm.reward_aggregation=normalize_then_sum normalises the rewards of whole completions"
            remedy = "use algorithm.supervision=outcome, or algorithm.reward_aggregation=sum_then_normalize"
            require(not of_steps, "algorithm.supervision", problem, got=self.supervision, remedy=remedy)
            problem = "algorithm.reward_aggregation=normalize_then_sum has no one score that the KL could be a part of"
            remedy = "use algorithm.kl_in=loss, or algorithm.reward_aggregation=sum_then_normalize"
            require(not self._kl_in_reward, "algorithm.kl_in", problem, got=self.kl_in, remedy=remedy)

    @property
    def facts(self) -> dict[str, bool]:
        return super().facts | {"token_advantages": self.supervision == Supervision.process}

    @property
    def needs_steps(self) -> bool:
        return self.supervision == Supervision.process

    @property
    def _normalizes_each_reward(self) -> bool:
        return self.reward_aggregation == RewardAggregation.normalize_then_sum

    @property
    def min_group_size(self) -> int:
        """A single completion always has advantage 0."""
        return 2

    def zero_gradient_rows(self, batch: Batch) -> Tensor:
        """Rows of groups whose rewards are all equal, bool `[B]`; none if a KL or an entropy bonus acts on them."""
        return super().zero_gradient_rows(batch) if self._acts_without_advantage else self.rows_without_signal(batch)

    def rows_without_signal(self, batch: Batch) -> Tensor:
        """Rows of groups whose rewards, as they are normalised, are all equal, bool `[B]`."""
        if self._normalizes_each_reward:
            rewards_BK, _ = _each_reward(batch)
            columns_K = [group_is_equal(column, batch.group_ids) for column in rounded(rewards_BK).unbind(-1)]
            return torch.stack([torch.ones_like(batch.group_ids, dtype=torch.bool), *columns_K]).all(0)
        match self.supervision:
            case Supervision.outcome:
                return group_is_equal(self.completion_rewards(batch), batch.group_ids)
            case Supervision.process:
                token_rewards, step_ends = _steps(batch)
                steps_equal_B = steps_are_equal(token_rewards, step_ends & batch.loss_mask, batch.group_ids)
                return steps_equal_B & group_is_equal(rounded(batch.rewards), batch.group_ids)

    @no_grad
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages `[B, T]`, 0 outside the completions.

        A KL in the reward is part of a completion's score, so it is included *before* normalisation. With
        supervision=process, scores of steps are normalised among all steps of the group (section 4.1.3), and rewards of
        whole completions separately (without such rewards exactly 0 is added, as in the paper). A turn with a reward is
        a step.
        """
        mask, group_ids = batch.loss_mask, batch.group_ids
        if self._normalizes_each_reward:
            rewards_BK, weights_BK = map(rounded, _each_reward(batch))
            advantages_B = decoupled_zscore(rewards_BK, weights_BK, group_ids, self.std, self.eps)
            advantages_BT = keep(advantages_B.unsqueeze(-1).expand(mask.shape), mask)
            return replace(batch, advantages=advantages_BT.to(batch.sampled_logprobs))
        match self.supervision:
            case Supervision.outcome:
                scores_B = self.completion_scores(batch)
                steps_BT = scores_B.new_zeros(mask.shape)
            case Supervision.process:
                token_rewards, step_ends = _steps(batch)
                scores_B = rounded(batch.rewards)
                ends = self.credit_span.ends(batch)
                steps_BT = process_advantages(token_rewards, step_ends, mask, group_ids, self.std, self.eps, ends)
        outcome_B = group_zscore(scores_B, group_ids, self.std, self.eps)
        advantages_BT = keep(outcome_B.unsqueeze(-1) + steps_BT, mask)
        return replace(batch, advantages=advantages_BT.to(batch.sampled_logprobs))


def _each_reward(batch: Batch) -> tuple[Tensor, Tensor]:
    needed_by = "reward_aggregation=normalize_then_sum"
    return required(batch.each_reward, "each_reward", needed_by), required(batch.each_weight, "each_weight", needed_by)


def _steps(batch: Batch) -> tuple[Tensor, Tensor]:
    needed_by = "supervision=process (a reward that scores steps)"
    token_rewards = rounded(required(batch.token_rewards, "token_rewards", needed_by))
    return token_rewards, required(batch.step_ends, "step_ends", needed_by)
