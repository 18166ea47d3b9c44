"""Importance ratios of the current policy to the policy that sampled the batch."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.ops.mask import row_mean, row_sum

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 nats before exp: the square of e^20 = 4.9e8 fits in float32; no gradient is inf."""


class RatioLevel(StrEnum):
    """What a ratio refers to: a token, or a whole completion."""

    token = "token"
    sequence = "sequence"
    sequence_token = "sequence_token"


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """r_t = exp(clamp(lp - lp_old, -20, 20)). `[B, T]`."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """s_i = exp(mean_t(lp - lp_old)), the geometric mean of a completion's token ratios. `[B, 1]`; 1 for an empty row.

    It is a mean, not a sum, so that ratios of long rows neither explode nor vanish (GSPO, arXiv 2507.18071).
    """
    mean_B = row_mean(logprobs - old_logprobs, mask)
    return mean_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().unsqueeze(-1)


def product_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(sum_t(lp - lp_old)), the ratio of the completions' probabilities. `[B, 1]`; 1 for an empty row."""
    sum_B = row_sum(logprobs - old_logprobs, mask)
    return sum_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().unsqueeze(-1)


def sequence_token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """s_it = sg[s_i] * exp(lp - sg[lp]). `[B, T]`: the value of s_i, but with a separate gradient for each token.

    It has the same gradient as `sequence_ratio` if the advantage is constant over the tokens. GSPO-token, arXiv
    2507.18071.
    """
    return sequence_ratio(logprobs, old_logprobs, mask).detach() * (logprobs - logprobs.detach()).exp()


def ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """The ratio at the given level, `[B, T]` (constant within a completion at the two sequence levels)."""
    match level:
        case RatioLevel.token:
            return token_ratio(logprobs, old_logprobs)
        case RatioLevel.sequence:
            return sequence_ratio(logprobs, old_logprobs, mask).expand_as(logprobs)
        case RatioLevel.sequence_token:
            return sequence_token_ratio(logprobs, old_logprobs, mask)
