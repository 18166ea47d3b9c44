"""REINFORCE: -A lp with A = return - baseline, no critic. R. J. Williams, Machine Learning 8 (1992).

RLOO and REINFORCE++ are the same class with other keys: see configs/algorithm/.

The complete loss of an update, with the keys of configs/algorithm/reinforce.yaml; a line applies where its `if` holds.
`rlft algorithms <name>` prints the lines that apply to an algorithm. The symbols of all families are in formula.py.

    L = agg(w * m * S)
      + kl_coef * agg(KL)                                           if kl_coef > 0 and kl_in=loss
      - entropy_coef * agg(H)                                       if entropy_coef > 0

    agg(x) = sum_i(sum_t(x)) / N                                    if aggregate=token_mean
    agg(x) = sum_i(mean_t(x)) / B                                   if aggregate=sequence_mean_token_mean
    agg(x) = sum_i(sum_t(x)) / B                                    if aggregate=sequence_mean_token_sum
    agg(x) = sum_i(sum_t(x)) / (B * T_max)                          if aggregate=constant

    S = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)       if surrogate=clipped and dual_clip=null
    S = -max(C, dual_clip * min(A, 0))                              if surrogate=clipped and dual_clip!=null
    S = -r * A                                                      if surrogate=importance
    S = -A * lp                                                     if surrogate=policy_gradient
    S = -stop(clip(r, 1 - clip_low, 1 + clip_high)) * A * lp        if surrogate=cispo
    S = -gate(tau_positive) * max(A, 0) - gate(tau_negative) * min(A, 0)    if surrogate=sapo
    S = -s_high * max(A, 0) - s_low * min(A, 0)                     if surrogate=gmpo
    C = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    gate(x) = 4 / x * sigmoid(x * (r - 1))
    s_high = exp(mean_t(min(lp - lp_old, clip_high)))
    s_low = exp(mean_t(max(lp - lp_old, -clip_low)))
    r = exp(lp - lp_old)                                            if ratio=token
    r = exp(mean_t(lp - lp_old))                                    if ratio=sequence
    r = stop(exp(mean_t(lp - lp_old))) * exp(lp - stop(lp))         if ratio=sequence_token

    w = 1                                                           if mismatch=off|auto
    w = min(v, mismatch_high)           if mismatch=token_truncate|sequence_truncate|sequence_product_truncate
    w = v * within(v, mismatch_low, mismatch_high)      if mismatch=token_mask|sequence_mask|sequence_product_mask
    v = exp(lp_old - lp_smp)                                        if mismatch=token_truncate|token_mask
    v = exp(mean_t(lp_old - lp_smp))                                if mismatch=sequence_truncate|sequence_mask
    v = exp(sum_t(lp_old - lp_smp))     if mismatch=sequence_product_truncate|sequence_product_mask
    m = 1                                                           if off_policy_limit=null
    m = max(A >= 0, mean_t(lp_smp - lp) <= off_policy_limit)        if off_policy_limit!=null

    KL = exp(-d) - 1 + d                                            if kl_to=reference and kl_estimator=auto|k3
    KL = d                                                          if kl_estimator=k1
    KL = d ** 2 / 2                                                 if kl_estimator=k2
    KL = exp(lp - lp_old) * (exp(-d) - 1 + d)                       if kl_estimator=k3_unbiased
    KL = exp(lp - lp_old) - 1 - (lp - lp_old)                       if kl_to=old
    d = lp - lp_ref

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

    R = reward + sum_t(step)
      - kl_coef * sum_t(KL_old)                                     if kl_coef > 0 and kl_in=reward

    KL_old = d_old                                                  if kl_estimator=auto|k1
    KL_old = d_old ** 2 / 2                                         if kl_estimator=k2
    KL_old = exp(-d_old) - 1 + d_old                                if kl_estimator=k3|k3_unbiased
    d_old = lp_old - lp_ref

Differences from the paper: a baseline may be computed from the batch or from siblings, a KL to the reference may be
part of the reward, and the loss of REINFORCE++ has PPO's clip.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.objective import RatioObjective
from rlft.algorithm.ops.advantage import Std, group_zscore, leave_one_out, reward_to_go, whiten
from rlft.algorithm.ops.mask import keep, row_sum
from rlft.config.bounds import Fraction
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
    """Returns minus a baseline. Fields are the keys of configs/algorithm/reinforce.yaml, which explains them."""

    reward_to_go: bool
    gamma: Fraction
    baseline: Baseline
    whiten: bool

    @property
    def min_group_size(self) -> int:
        """The smallest G from which anything can be learned: 2 where siblings are the baseline."""
        return 2 if self.baseline in (Baseline.group, Baseline.leave_one_out) else 1

    def inert(self, batch: Batch) -> Tensor:
        """Rows whose advantages are all exactly 0, bool `[B]`; none if a KL or an entropy bonus acts on them."""
        if self._acts_without_advantage:
            return super().inert(batch)
        advantages = self.credit(batch).advantages
        assert advantages is not None, "credit makes them"
        return (advantages == 0).all(-1)

    @no_grad
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages `[B, T]`: G_t - b, whitened over the batch with `whiten`; 0 outside completions.

        G_t = sum_{k>=t} gamma^(k-t) r_k. Without reward_to_go, the completion is one action, and each of its tokens has
        the plain sum of all r_t. The baseline b is the mean return of the completions that `baseline` names.
        """
        mask = batch.loss_mask
        if self.reward_to_go:
            returns_BT = reward_to_go(self.token_scores(batch), mask, self.gamma)
            total_B = self._first_returns(returns_BT, batch)
        else:
            total_B = self.completion_scores(batch)
            returns_BT = total_B.unsqueeze(-1).expand(mask.shape)
        # total - b, exactly 0 in a group of equal scores, is computed first: G_t - b = (G_t - total) + (total - b).
        centred_B = self._minus_baseline(total_B, batch.group_ids)
        advantages_BT = keep((returns_BT - total_B.unsqueeze(-1)) + centred_B.unsqueeze(-1), mask)
        return replace(batch, advantages=whiten(advantages_BT, mask) if self.whiten else advantages_BT)

    def _first_returns(self, returns: Tensor, batch: Batch) -> Tensor:
        """G_0 of each completion, `[B]`; for an empty completion its reward."""
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
