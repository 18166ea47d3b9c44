"""REINFORCE: -lp * (return - baseline), no critic. R. J. Williams, Machine Learning 8 (1992).

RLOO and REINFORCE++ are the same class with other keys: see configs/algorithm/.

Differences from the paper: a baseline may look at the batch or at siblings, and a KL to the reference may be part of
the reward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.objective import RatioObjective
from rlft.fields import Fraction
from rlft.ops.advantage import Std, group_zscore, leave_one_out, reward_to_go, whiten
from rlft.ops.lazy import no_grad, torch
from rlft.ops.mask import keep, row_sum
from rlft.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


class Baseline(StrEnum):
    """What is taken off a return: nothing, or the mean return of the batch, of the group, or of the siblings."""

    none = "none"
    batch = "batch"
    group = "group"
    leave_one_out = "leave_one_out"


@dataclass(frozen=True, kw_only=True)
class Reinforce(RatioObjective):
    """Returns minus a baseline. Fields are the keys of configs/algorithm/reinforce.yaml, which explains them."""

    reward_to_go: bool
    gamma: Fraction
    baseline: Baseline
    whiten: bool

    @property
    def min_group_size(self) -> int:
        """The smallest G that can learn anything: 2 where siblings are the baseline."""
        return 2 if self.baseline in (Baseline.group, Baseline.leave_one_out) else 1

    def inert(self, batch: Batch) -> Tensor:
        """Rows whose advantages are all exactly 0, bool `[B]`, unless a KL or an entropy bonus acts on them."""
        if self._acts_without_advantage:
            return super().inert(batch)
        advantages = self.credit(batch).advantages
        assert advantages is not None, "credit makes them"
        return (advantages == 0).all(-1)

    @no_grad
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages `[B, T]`: G_t - b, whitened over the batch if asked; 0 outside the completions.

        G_t = sum_{k>=t} gamma^(k-t) r_k; or, without reward_to_go, the completion is one action and each of its tokens
        has the plain sum of all r_t. b: the mean of returns of whole completions, over those that `baseline` names.
        """
        mask = batch.loss_mask
        if self.reward_to_go:
            returns_BT = reward_to_go(self.token_scores(batch), mask, self.gamma)
            total_B = self._first_returns(returns_BT, batch)
        else:
            total_B = self.completion_scores(batch)
            returns_BT = total_B.unsqueeze(-1).expand(mask.shape)
        # total - b is exactly 0 in an equal group, so it is kept in one piece: G_t - b = (G_t - total) + (total - b).
        centred_B = self._minus_baseline(total_B, batch.group_ids)
        advantages_BT = keep((returns_BT - total_B.unsqueeze(-1)) + centred_B.unsqueeze(-1), mask)
        return replace(batch, advantages=whiten(advantages_BT, mask) if self.whiten else advantages_BT)

    def _first_returns(self, returns: Tensor, batch: Batch) -> Tensor:
        """G_0 of each completion, `[B]`; the reward of an empty one."""
        is_first_BT = batch.loss_mask & (batch.loss_mask.cumsum(-1) == 1)
        return torch.where(batch.loss_mask.any(-1), row_sum(returns, is_first_BT), batch.rewards.to(returns))

    def _minus_baseline(self, returns: Tensor, group_ids: Tensor) -> Tensor:
        match self.baseline:
            case Baseline.none:
                return returns
            case Baseline.batch:
                return group_zscore(returns, torch.zeros_like(group_ids), Std.none, eps=0.0)
            case Baseline.group:
                return group_zscore(returns, group_ids, Std.none, eps=0.0)
            case Baseline.leave_one_out:
                return leave_one_out(returns, group_ids)
