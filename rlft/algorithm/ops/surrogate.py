"""Importance ratios of the current policy to the one that sampled, and losses of single tokens, to be minimised:
policy-gradient surrogates, and the critic's errors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.ops.aggregate import keep, row_mean, row_sum
from rlft.system.lazy import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor

# -- ratios ------------------------------------------------------------------------------------------------------------
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


# -- losses of tokens --------------------------------------------------------------------------------------------------
class SurrogateKind(StrEnum):
    """Kinds of surrogate.

    clipped: the ratio, clipped where that lowers the gain (PPO). importance: the ratio without a clip, for PPO with a
    penalty on KL(old, new) (arXiv 1707.06347, section 4). policy_gradient: log-probs (REINFORCE). cispo: log-probs
    weighted by a clamped ratio. sapo: the ratio with a smooth gate in place of the clip. gmpo: the geometric mean of
    clipped token ratios.
    """

    clipped = "clipped"
    importance = "importance"
    policy_gradient = "policy_gradient"
    cispo = "cispo"
    sapo = "sapo"
    gmpo = "gmpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """A surrogate, and where a clip *binds*: where the loss is that of the clip, not of the ratio.

    Where a clip binds, the gradient is 0, except in CISPO, and in GMPO if a row has advantages of both signs.
    """

    loss: Tensor  # loss of each token, `[B, T]`
    low: Tensor  # where the lower clip binds, bool `[B, T]`
    high: Tensor  # where the upper clip binds, bool `[B, T]`
    dual: Tensor  # where the dual clip binds, bool `[B, T]`

    @classmethod
    def unclipped(cls, loss: Tensor) -> Surrogate:
        """A surrogate without a clip."""
        nowhere = torch.zeros_like(loss, dtype=torch.bool)
        return cls(loss=loss, low=nowhere, high=nowhere, dual=nowhere)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at most -c A with a dual clip c > 1.

    Only the side on which the objective gains is clipped: A > 0 above, A < 0 below. PPO: arXiv 1707.06347;
    two ranges: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729.
    """
    assert ratio.shape == advantages.shape, (ratio.shape, advantages.shape)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    dual = torch.zeros_like(advantages, dtype=torch.bool)
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        objective = torch.where(dual, dual_clip * advantages, objective)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    return Surrogate(loss=-objective, low=low, high=high, dual=dual)


def cispo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Surrogate:
    """-sg[clamp(r, 1 - low, 1 + high)] A lp: the weight is clipped, so every token keeps its gradient.

    A clip binds where the clamp changes the weight of a nonzero advantage, of either sign. MiniMax-M1, arXiv
    2506.13585, whose clamp has no lower end: clip_low = 1.
    """
    assert logprobs.shape == ratio.shape == advantages.shape, (logprobs.shape, ratio.shape, advantages.shape)
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    low = (advantages != 0) & (ratio < 1 - clip_low)
    high = (advantages != 0) & (ratio > 1 + clip_high)
    return Surrogate(loss=-weight * advantages * logprobs, low=low, high=high, dual=torch.zeros_like(low))


def sapo(ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """-f(r) A with the gate f(r) = 4 / tau * sigmoid(tau (r - 1)), without a clip. `[B, T]`.

    tau is tau_positive where A > 0, tau_negative elsewhere. The gate's slope is 1 at r = 1 and falls off smoothly on
    both sides, faster for larger tau: 4 p (1 - p) with p = sigmoid(tau (r - 1)). SAPO, arXiv 2511.20347, section 3.
    """
    assert ratio.shape == advantages.shape, (ratio.shape, advantages.shape)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return Surrogate.unclipped(-gate * advantages)


def gmpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """-s A with s = exp(mean_t(clipped log r_t)), the geometric mean of a row's clipped token ratios. `[B, T]`.

    Each log-ratio is clipped before the mean, only on the side on which the objective gains: to at most clip_high where
    A > 0, to at least -clip_low where A < 0 (in nats: the ratio's range is exp(-clip_low) .. exp(clip_high)). If all
    tokens of a row have the same advantage, each token has the paper's loss of the row, and so has their mean. If a
    row's advantages differ in sign, each token has the mean for its own sign, so that none is optimistic.
    GMPO, arXiv 2507.20673, section 3.
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape == mask.shape
    log_ratio = (keep(logprobs, mask) - keep(old_logprobs, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    mean_if_positive_B = row_mean(log_ratio.clamp(max=clip_high), mask).exp()
    mean_if_negative_B = row_mean(log_ratio.clamp(min=-clip_low), mask).exp()
    mean_BT = torch.where(advantages > 0, mean_if_positive_B.unsqueeze(-1), mean_if_negative_B.unsqueeze(-1))
    low = mask & (advantages < 0) & (log_ratio < -clip_low)
    high = mask & (advantages > 0) & (log_ratio > clip_high)
    return Surrogate(loss=keep(-mean_BT * advantages, mask), low=low, high=high, dual=torch.zeros_like(mask))


def mirror_descent(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, tau: float) -> Tensor:
    """-A_t lp_t + (tau / 2) L^2 / |o| with L = sum_t(lp - lp_old), `[B, T]`; 0 outside the mask.

    With A_t = R_i - b on all tokens of a row, the row sums to -(R_i - b) log pi(o) + tau/2 (log pi/pi_old (o))^2: the
    surrogate (R_i - b - tau log pi/pi_old (o))^2 over 2 tau, up to a constant. The square of the whole row is divided
    evenly among its tokens. tau is in reward per nat. Kimi k1.5, arXiv 2501.12599.
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape == mask.shape
    logprobs, old_logprobs = keep(logprobs, mask), keep(old_logprobs, mask)
    log_ratio_B, mean_B = row_sum(logprobs - old_logprobs, mask), row_mean(logprobs - old_logprobs, mask)
    square_BT = (log_ratio_B * mean_B).unsqueeze(-1)  # L^2 / |o|
    return keep(tau / 2 * square_BT - advantages * logprobs, mask)


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None, clip: float | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Each token's 0.5 max((V - ret)^2, (V_old + clamp(V - V_old, -+c s) - ret)^2) / s^2, and where the clip binds.

    Both are `[B, T]`, the second bool. Where the clip binds, the clipped error is the larger one, and the gradient is
    0. PPO: arXiv 1707.06347; the clip is that of its reference implementation.

    Without `old_values` they are the current ones, so that nothing is clipped. The clip range c is in units of the
    scale s (`LossScale.value_scale`), by which errors are divided; None: no clip.
    """
    assert values.shape == returns.shape, (values.shape, returns.shape)
    errors_BT = (values - returns.detach()).square()
    if old_values is None or clip is None:
        return 0.5 * errors_BT / scale**2, torch.zeros_like(errors_BT, dtype=torch.bool)
    old_BT, max_change = old_values.detach(), clip * scale
    # With tensors as bounds, V inside the range stays exactly V; V_old + (V - V_old) would round.
    clipped_BT = (values.clamp(old_BT - max_change, old_BT + max_change) - returns.detach()).square()
    binds_BT = clipped_BT > errors_BT
    return 0.5 * torch.where(binds_BT, clipped_BT, errors_BT) / scale**2, binds_BT
