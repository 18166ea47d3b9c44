"""Importance ratios of the current policy to the policy that sampled the batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.ops.aggregate import row_mean, row_sum
from rlft.system.lazy import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor


LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 nats before exp: the square of e^20 = 4.9e8 fits in float32; no gradient is inf."""


class RatioLevel(StrEnum):
    """What a ratio refers to: a token, or a whole completion."""

    token = "token"
    sequence = "sequence"
    sequence_token = "sequence_token"
    sequence_product = "sequence_product"


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """r_t = exp(clamp(lp - lp_old, -20, 20)). `[B, T]`."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """s_i = exp(mean_t(lp - lp_old)), the geometric mean of a completion's token ratios. `[B, 1]`; 1 for an empty row.

    It is a mean, not a sum, so that ratios of long rows neither explode nor vanish (GSPO, arXiv 2507.18071).
    """
    mean_B = row_mean(logprobs - old_logprobs, mask)
    return mean_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().unsqueeze(-1)


def sequence_token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """s_it = sg[s_i] * exp(lp - sg[lp]). `[B, T]`: the value of s_i, but with a separate gradient for each token.

    It has the same gradient as `sequence_ratio` if the advantage is constant over the tokens. GSPO-token, arXiv
    2507.18071.
    """
    return sequence_ratio(logprobs, old_logprobs, mask).detach() * (logprobs - logprobs.detach()).exp()


def sequence_product_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(sum_t(lp - lp_old)) = pi(o|q) / pi_old(o|q), the ratio of a whole completion's probabilities. `[B, 1]`.

    It is unbiased, and explodes with length: with differences of 0.1 nats per token a ratio of 200 tokens is of the
    order of e^1.4 if their signs vary, and e^20 if they do not.
    """
    sum_B = row_sum(logprobs - old_logprobs, mask)
    return sum_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().unsqueeze(-1)


def ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """The ratio at the given level, `[B, T]` (constant within a completion but at the level of tokens)."""
    match level:
        case RatioLevel.token:
            return token_ratio(logprobs, old_logprobs)
        case RatioLevel.sequence:
            return sequence_ratio(logprobs, old_logprobs, mask).expand_as(logprobs)
        case RatioLevel.sequence_token:
            return sequence_token_ratio(logprobs, old_logprobs, mask)
        case RatioLevel.sequence_product:
            return sequence_product_ratio(logprobs, old_logprobs, mask).expand_as(logprobs)


class Mismatch(StrEnum):
    """Weights per token or per completion (geometric mean or product); large ones are capped, or those out of bounds
    dropped. `auto` is replaced by another mode when a run is planned (`Objective.with_mismatch_of`), and is off before.
    """

    auto = "auto"
    off = "off"
    token_truncate = "token_truncate"
    token_mask = "token_mask"
    sequence_truncate = "sequence_truncate"
    sequence_mask = "sequence_mask"
    sequence_product_truncate = "sequence_product_truncate"
    sequence_product_mask = "sequence_product_mask"

    @property
    def is_on(self) -> bool:
        return self not in (Mismatch.auto, Mismatch.off)

    @property
    def of_tokens(self) -> bool:
        """Whether each token has a weight of its own."""
        return self in (Mismatch.token_truncate, Mismatch.token_mask)

    @property
    def truncates(self) -> bool:
        """Whether large weights are capped; otherwise weights out of bounds are dropped."""
        return self.value.endswith("truncate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights, and where they were changed."""

    weight: Tensor  # the weights, `[B, T]`, without gradient
    dropped: Tensor  # where they were set to 0, bool `[B, T]`
    capped: Tensor  # where they were lowered to the upper bound, bool `[B, T]`


@no_grad
def mismatch_correction(
    old_logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, mode: Mismatch, *, low: float, high: float
) -> Correction:
    """Weights by which the policy-gradient term, and only that, is multiplied; w = exp(sg[lp_old - lp_sampled]).

    truncate: min(w, high). mask: w * 1[low <= w <= high]. off: 1. The sequence modes use the geometric mean over a
    completion's tokens, which depends on no length and hardly ever leaves the bounds where engine and trainer differ by
    rounding alone. The sequence_product modes use the product: the ratio of the completion's probabilities. With gaps
    of 0.05 nats it leaves the bounds from some hundreds of tokens on, and long completions are then mostly dropped.
    """
    nowhere = torch.zeros_like(mask)
    match mode:
        case Mismatch.off | Mismatch.auto:
            return Correction(weight=torch.ones_like(old_logprobs), dropped=nowhere, capped=nowhere)
        case Mismatch.token_truncate | Mismatch.token_mask:
            weight = token_ratio(old_logprobs, sampled_logprobs)
        case Mismatch.sequence_truncate | Mismatch.sequence_mask:
            weight = sequence_ratio(old_logprobs, sampled_logprobs, mask).expand_as(old_logprobs)
        case Mismatch.sequence_product_truncate | Mismatch.sequence_product_mask:
            weight = sequence_product_ratio(old_logprobs, sampled_logprobs, mask).expand_as(old_logprobs)
    if mode.truncates:
        return Correction(weight=weight.clamp(max=high), dropped=nowhere, capped=(weight > high) & mask)
    inside = (weight >= low) & (weight <= high)
    return Correction(weight=torch.where(inside, weight, 0.0), dropped=~inside & mask, capped=nowhere)


@no_grad
def far_off_policy(
    logprobs: Tensor, sampled_logprobs: Tensor, advantages: Tensor, mask: Tensor, limit: float
) -> Tensor:
    """Tokens that DeepSeek-V3.2's off-policy sequence mask drops, bool `[B, T]`. arXiv 2512.02556, equation 9.

    These are the tokens with A < 0 in completions with mean_t(lp_sampled - lp) > limit, in nats per token: completions
    that have already become far less likely than when they were sampled are not pushed down further. Tokens with A >= 0
    are never dropped.
    """
    distance_B = row_mean(sampled_logprobs - logprobs, mask)
    return mask & (advantages < 0) & (distance_B > limit).unsqueeze(-1)
