"""REINFORCE: -A lp with A = return - baseline, no critic. R. J. Williams, Machine Learning 8 (1992).

RLOO and REINFORCE++ are the same class with other keys.

The loss of an update, as formula.py reads it; what is not defined here is in objective.py.

    L = agg(w * m * S)
      + kl_coef * agg(KL)                                           if kl_coef > 0 and kl_in=loss
      - entropy_coef * agg(H)                                       if entropy_coef > 0

Credit: the advantage A of a token is the return from that token on, or the score of the whole completion, minus a
baseline: the mean return of whole completions.

    A = A_raw                                                       if whiten=false
    A = (A_raw - mean_tokens(A_raw)) / (std_tokens(A_raw) + 1e-8)   if whiten=true

    A_raw = G - b
    G = to_go(reward_t, gamma)                                      if reward_to_go=true
    G = R                                                           if reward_to_go=false
    b = 0                                                           if baseline=none
    b = mean_all(G_first)                                           if baseline=batch
    b = mean_group(G_first)                                         if baseline=group
    b = mean_siblings(G_first)                                      if baseline=leave_one_out
    G_first = first_token(G)                                        if reward_to_go=true
    G_first = R                                                     if reward_to_go=false

    reward_t = at_last_token(reward) + step
      - kl_coef * KL_old                                            if kl_coef > 0 and kl_in=reward

Differences from the paper: a baseline may be computed from the batch or from siblings, a KL to the reference may be
part of the reward, and the loss of REINFORCE++ has PPO's clip.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from rlft.algorithm.objective import RatioObjective
from rlft.algorithm.ops.advantage import Std, group_zscore, leave_one_out, reward_to_go, whiten
from rlft.algorithm.ops.aggregate import keep, row_sum
from rlft.algorithm.ops.kl import KLController
from rlft.config.bounds import Fraction
from rlft.config.keys import Key
from rlft.system.lazy import no_grad, torch
from rlft.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


class Baseline(StrEnum):
    """What is subtracted from a return: nothing, or the mean return of the batch, of the group, or of the siblings."""

    none = "none"
    batch = "batch"
    group = "group"
    leave_one_out = "leave_one_out"


@dataclass(frozen=True, kw_only=True)
class Reinforce(RatioObjective):
    """Returns minus a baseline."""

    reward_to_go: bool
    gamma: Annotated[Fraction, Key(acts="reward_to_go=true")]
    baseline: Baseline
    whiten: bool

    @property
    def facts(self) -> dict[str, bool]:
        return super().facts | {"token_advantages": self.reward_to_go}

    @property
    def min_group_size(self) -> int:
        """2 where siblings are the baseline."""
        return 2 if self.baseline in (Baseline.group, Baseline.leave_one_out) else 1

    def zero_gradient_rows(self, batch: Batch) -> Tensor:
        """Rows whose advantages are all exactly 0, bool `[B]`; none if a KL or an entropy bonus acts on them."""
        return super().zero_gradient_rows(batch) if self._acts_without_advantage else self._without_advantage(batch)

    def rows_without_signal(self, batch: Batch) -> Tensor:
        """Rows without an advantage by rewards alone, or with the rewards of their siblings where these are the
        baseline, else of the whole step, bool `[B]`.
        """
        of_siblings = self.baseline in (Baseline.group, Baseline.leave_one_out)
        equal_B = self._equal_rewards(batch, batch.group_ids) if of_siblings else super().rows_without_signal(batch)
        return self._without_advantage(batch) | equal_B

    def _without_advantage(self, batch: Batch) -> Tensor:
        advantages = replace(self, kl_coef=0.0, kl_controller=KLController.fixed).credit(batch).advantages
        assert advantages is not None, "credit makes them"
        return (advantages == 0).all(-1)

    @no_grad
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages `[B, T]`, whitened over the batch with `whiten`; 0 outside completions.

        Without reward_to_go, the completion is one action, and each of its tokens has the plain sum of all r_t.
        """
        mask = batch.loss_mask
        if self.reward_to_go:
            returns_BT = reward_to_go(self.token_scores(batch), mask, self.gamma)
            first_B = row_sum(returns_BT, mask & (mask.cumsum(-1) == 1))
            total_B = torch.where(mask.any(-1), first_B, batch.rewards.to(returns_BT))  # the reward if it is empty
        else:
            total_B = self.completion_scores(batch)
            returns_BT = total_B.unsqueeze(-1).expand(mask.shape)
        # total - b, exactly 0 in a group of equal scores, is computed first: G_t - b = (G_t - total) + (total - b).
        centred_B = self._minus_baseline(total_B, batch.group_ids)
        advantages_BT = keep((returns_BT - total_B.unsqueeze(-1)) + centred_B.unsqueeze(-1), mask)
        advantages_BT = whiten(advantages_BT, mask) if self.whiten else advantages_BT
        return replace(batch, advantages=advantages_BT.to(batch.sampled_logprobs))

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
