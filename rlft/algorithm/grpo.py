"""GRPO: advantages relative to siblings, a clipped ratio, no critic. DeepSeekMath, arXiv 2402.03300.

Dr. GRPO and GSPO are the same class with other keys: see configs/algorithm/.

Differences from the paper: the KL coefficient is 0 by default (the paper: 0.04), the standard deviation is the sample
one (the paper does not say), and a correction for the generator/trainer gap can be switched on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlft.fields import NonNegativeFloat, PositiveFloat
from rlft.ops.advantage import Std, group_is_equal, group_zscore
from rlft.ops.aggregate import Aggregate, aggregate
from rlft.ops.kl import KLEstimator, KLPlace, k3, kl
from rlft.ops.mask import keep, max_abs, row_sum
from rlft.ops.mismatch import Correction, Mismatch, mismatch_correction
from rlft.ops.ratio import RatioLevel, ratio
from rlft.ops.surrogate import Clipped, clipped_surrogate
from rlft.types import Batch, Loss, LossScale, Outputs, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO:
    """Group-relative policy optimisation. Fields are the keys of configs/algorithm/grpo.yaml, which explains them."""

    std: Std
    eps: NonNegativeFloat
    ratio: RatioLevel
    clip_low: NonNegativeFloat
    clip_high: NonNegativeFloat
    dual_clip: PositiveFloat | None
    aggregate: Aggregate
    kl_coef: NonNegativeFloat
    kl_in: KLPlace
    kl_estimator: KLEstimator
    entropy_coef: NonNegativeFloat
    mismatch: Mismatch
    mismatch_low: NonNegativeFloat
    mismatch_high: PositiveFloat

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise UserError(
                "algorithm.dual_clip",
                f"must lie above the clip range, which ends at 1 + clip_high = {1 + self.clip_high:g}",
                got=self.dual_clip,
                remedy="use 3, or null for no dual clip",
            )
        if not self.mismatch_low <= 1 <= self.mismatch_high:
            raise UserError(
                "algorithm.mismatch_low",
                "the bounds must have 1, the weight of a perfect match, between them",
                got=f"{self.mismatch_low:g} .. {self.mismatch_high:g}",
                remedy="use for instance mismatch_low=0.5 mismatch_high=2",
            )

    @property
    def needs_values(self) -> bool:
        """Whether `Batch.old_values` and `Outputs.values` must be there."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether `Batch.reference_logprobs` must be there."""
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether `Outputs.entropy` must be there, with gradient."""
        return self.entropy_coef > 0

    @property
    def needs_old_in_credit(self) -> bool:
        """Whether `Batch.old_logprobs` must be there before `credit`."""
        return self.needs_reference and self.kl_in == KLPlace.reward

    @property
    def corrects_mismatch(self) -> bool:
        """Whether sampling must be undistorted (top_p = 1, top_k = 0) for the importance weights to mean anything."""
        return self.mismatch != Mismatch.off

    @property
    def min_group_size(self) -> int:
        """The smallest G that can learn anything: one alone always has advantage 0."""
        return 2

    def inert(self, batch: Batch) -> Tensor:
        """Rows that add exactly nothing to loss and gradient, bool `[B]`, from rewards and group ids alone.

        They need no forward pass, but still count in `LossScale`. batch: whole groups, before or after `credit`.
        """
        if self.needs_reference or self.needs_entropy:
            return torch.zeros_like(batch.group_ids, dtype=torch.bool)
        return group_is_equal(batch.rewards, batch.group_ids)

    @torch.no_grad()
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages `[B, T]`: the group z-score of the score on each completion token, 0 elsewhere.

        A KL in the reward is part of the score, so it goes in *before* group normalisation:
        score_i = R_i - beta sum_t KL_t, with the log-probs at sampling time. batch: whole groups.
        """
        dtype, mask = batch.sampled_logprobs.dtype, batch.loss_mask
        scores_B = batch.rewards.to(dtype)
        if self.needs_old_in_credit:
            old = _there(batch.old_logprobs, "old_logprobs", "the KL in the reward")
            reference = _there(batch.reference_logprobs, "reference_logprobs", "kl_coef > 0")
            scores_B = scores_B - self.kl_coef * row_sum(kl(old, reference, old, self._kl_estimator), mask)
        advantages_B = group_zscore(scores_B, batch.group_ids, self.std, self.eps)
        return replace(batch, advantages=keep(advantages_B.unsqueeze(-1).expand(mask.shape), mask))

    def loss(self, outputs: Outputs, batch: Batch, scale: LossScale) -> Loss:
        """The loss of any subset of the optimizer batch's rows, divided by the whole batch's sizes (`scale`).

        L = agg[w * -min(r A, clip(r) A)] + beta agg[KL] - c_e agg[entropy]. `batch.old_logprobs = None` says that this
        is the first update on the samples: old is the current policy, detached. Metrics `loss/*` are the terms as they
        stand in the sum; the others are means over all completion tokens of the optimizer batch (`_max`: maxima).
        """
        mask = batch.loss_mask
        logprobs = keep(outputs.logprobs, mask)
        old = logprobs.detach() if batch.old_logprobs is None else keep(batch.old_logprobs.detach(), mask)
        sampled = keep(batch.sampled_logprobs.detach(), mask)
        advantages = keep(_there(batch.advantages, "advantages", "loss (call credit first)"), mask)

        correction = mismatch_correction(
            old, sampled, mask, self.mismatch, low=self.mismatch_low, high=self.mismatch_high
        )
        clipped = clipped_surrogate(
            ratio(logprobs, old, mask, self.ratio),
            advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        terms = {"loss/policy": aggregate(correction.weight * clipped.loss, mask, scale, self.aggregate)}
        if self.needs_reference and self.kl_in == KLPlace.loss:
            reference = keep(_there(batch.reference_logprobs, "reference_logprobs", "kl_coef > 0").detach(), mask)
            kl_BT = kl(logprobs, reference, old, self._kl_estimator)
            terms["loss/kl"] = self.kl_coef * aggregate(kl_BT, mask, scale, self.aggregate)
        if self.needs_entropy:
            entropy = _there(outputs.entropy, "entropy", "entropy_coef > 0")
            terms["loss/entropy"] = -self.entropy_coef * aggregate(entropy, mask, scale, self.aggregate)

        total = torch.stack(list(terms.values())).sum()
        metrics = {"loss/total": total.detach()} | {name: term.detach() for name, term in terms.items()}
        return Loss(total=total, metrics=metrics | self._diagnostics(outputs, batch, scale, old, clipped, correction))

    @property
    def _kl_estimator(self) -> KLEstimator:
        if self.kl_estimator != KLEstimator.auto:
            return self.kl_estimator
        return KLEstimator.k3 if self.kl_in == KLPlace.loss else KLEstimator.k1

    @torch.no_grad()
    def _diagnostics(
        self, outputs: Outputs, batch: Batch, scale: LossScale, old: Tensor, clipped: Clipped, correction: Correction
    ) -> dict[str, Tensor]:
        mask = batch.loss_mask
        logprobs, gap = outputs.logprobs, old - batch.sampled_logprobs
        means = {
            "ratio/clip_low_fraction": clipped.low,
            "ratio/clip_high_fraction": clipped.high,
            "kl/old": k3(old, logprobs),  # KL(old || current): the tokens are old's, so the roles turn round
            "sampler/logprob_gap_mean": gap.abs(),
            "waste/importance_dropped_fraction": correction.dropped,
        }
        if self.dual_clip is not None:
            means["ratio/dual_clip_fraction"] = clipped.dual
        if self.mismatch in (Mismatch.token_truncate, Mismatch.sequence_truncate):
            means["sampler/importance_capped_fraction"] = correction.capped
        if batch.reference_logprobs is not None:
            means["kl/reference"] = k3(logprobs, batch.reference_logprobs)
        if outputs.entropy is not None:
            means["policy/entropy"] = outputs.entropy
        metrics = {
            name: aggregate(values.to(logprobs.dtype), mask, scale, Aggregate.token_mean)
            for name, values in means.items()
        }
        return metrics | {"sampler/logprob_gap_max": max_abs(gap, mask)}


def _there(tensor: Tensor | None, name: str, why: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"{name} is None, but {why} needs it")
    return tensor
