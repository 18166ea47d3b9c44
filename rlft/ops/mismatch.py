"""Importance weights for the gap between the generator's log-probs and the trainer's, of the same policy.

Right only when sampling is undistorted (top_p = 1, no top_k, the trainer at the generator's temperature).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.ops.lazy import no_grad, torch
from rlft.ops.mask import row_mean
from rlft.ops.ratio import sequence_ratio, token_ratio

if TYPE_CHECKING:
    from torch import Tensor


class Mismatch(StrEnum):
    """Correct per token or per completion (geometric mean); cap large weights, or drop what is out of bounds."""

    off = "off"
    token_truncate = "token_truncate"
    token_mask = "token_mask"
    sequence_truncate = "sequence_truncate"
    sequence_mask = "sequence_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights `[B, T]` without gradient, and where they were cut, bool `[B, T]`: dropped (to 0), capped (to high)."""

    weight: Tensor
    dropped: Tensor
    capped: Tensor


@no_grad
def mismatch_correction(
    old_logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, mode: Mismatch, *, low: float, high: float
) -> Correction:
    """Weights w = exp(sg[lp_old - lp_sampled]) to multiply the policy-gradient term (only) with.

    truncate: min(w, high). mask: w * 1[low <= w <= high]. off: 1. The sequence modes use the geometric mean over a
    completion's tokens: the plain product makes every long completion explode and be dropped.
    """
    nowhere = torch.zeros_like(mask)
    match mode:
        case Mismatch.off:
            return Correction(weight=torch.ones_like(old_logprobs), dropped=nowhere, capped=nowhere)
        case Mismatch.token_truncate | Mismatch.token_mask:
            weight = token_ratio(old_logprobs, sampled_logprobs)
        case Mismatch.sequence_truncate | Mismatch.sequence_mask:
            weight = sequence_ratio(old_logprobs, sampled_logprobs, mask).expand_as(old_logprobs)
    match mode:
        case Mismatch.token_truncate | Mismatch.sequence_truncate:
            return Correction(weight=weight.clamp(max=high), dropped=nowhere, capped=(weight > high) & mask)
        case Mismatch.token_mask | Mismatch.sequence_mask:
            inside = (weight >= low) & (weight <= high)
            return Correction(weight=torch.where(inside, weight, 0.0), dropped=~inside & mask, capped=nowhere)


@no_grad
def far_off_policy(
    logprobs: Tensor, sampled_logprobs: Tensor, advantages: Tensor, mask: Tensor, limit: float
) -> Tensor:
    """Tokens that DeepSeek-V3.2's off-policy sequence mask drops, bool `[B, T]`. arXiv 2512.02556, equation 9.

    Those with A < 0 in completions with mean_t(lp_sampled - lp) > limit, nats a token: what the policy already finds
    far less likely than its sampler did is not pushed down further. Tokens with A >= 0 stay.
    """
    distance_B = row_mean(sampled_logprobs - logprobs, mask)
    return mask & (advantages < 0) & (distance_B > limit).unsqueeze(-1)
