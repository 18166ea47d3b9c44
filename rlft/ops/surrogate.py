"""Policy-gradient surrogates: per-token losses, to be minimised."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.ops.lazy import torch
from rlft.ops.mask import keep, row_mean, row_sum
from rlft.ops.ratio import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor


class SurrogateKind(StrEnum):
    """The ratio, clipped where it would gain (PPO) or not; log-probs (REINFORCE), or by a clamped ratio (CISPO).

    A smooth gate in place of the clip (SAPO); the geometric mean of clipped token ratios (GMPO).
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

    loss `[B, T]`; low, high, dual: bool `[B, T]`. The gradient there is 0, except in CISPO, and in GMPO where a row has
    advantages of both signs.
    """

    loss: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at most -c A with a dual clip c > 1.

    Only the side that would gain is clipped: A > 0 above, A < 0 below. PPO: arXiv 1707.06347;
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


def importance(ratio: Tensor, advantages: Tensor) -> Surrogate:
    """-r A, where nothing binds: what PPO's penalty on KL(old, new) goes with. arXiv 1707.06347, section 4."""
    assert ratio.shape == advantages.shape, (ratio.shape, advantages.shape)
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(loss=-ratio * advantages, low=nowhere, high=nowhere, dual=nowhere)


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Surrogate:
    """-A lp, where nothing binds. Williams (1992)."""
    assert logprobs.shape == advantages.shape, (logprobs.shape, advantages.shape)
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(loss=-advantages * logprobs, low=nowhere, high=nowhere, dual=nowhere)


def cispo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Surrogate:
    """-sg[clamp(r, 1 - low, 1 + high)] A lp: the weight is clipped, so every token keeps its gradient.

    low and high: where the clamp cuts a weight that has an advantage to weigh, of either sign. MiniMax-M1, arXiv
    2506.13585, whose clamp has no lower end: clip_low = 1.
    """
    assert logprobs.shape == ratio.shape == advantages.shape, (logprobs.shape, ratio.shape, advantages.shape)
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    low = (advantages != 0) & (ratio < 1 - clip_low)
    high = (advantages != 0) & (ratio > 1 + clip_high)
    return Surrogate(loss=-weight * advantages * logprobs, low=low, high=high, dual=torch.zeros_like(low))


def sapo(ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """-f(r) A with the gate f(r) = 4 / tau * sigmoid(tau (r - 1)), where nothing binds. `[B, T]`.

    tau is tau_positive where A > 0, tau_negative elsewhere. The gate's slope is 1 at r = 1 and falls off smoothly on
    both sides, the faster the larger tau: 4 p (1 - p) with p = sigmoid(tau (r - 1)). SAPO, arXiv 2511.20347, section 3.
    """
    assert ratio.shape == advantages.shape, (ratio.shape, advantages.shape)
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return Surrogate(loss=-gate * advantages, low=nowhere, high=nowhere, dual=nowhere)


def gmpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """-s A with s = exp(mean_t(clipped log r_t)), the geometric mean of a row's clipped token ratios. `[B, T]`.

    Each log-ratio is clipped before the mean, only on the side that would gain: to at most clip_high where A > 0, to at
    least -clip_low where A < 0 (nats: the ratio's range is exp(-clip_low) .. exp(clip_high)). With one advantage on all
    of a row's tokens each of them has the paper's loss of the row, and so has the row's mean. Where a row's advantages
    differ in sign, each token has the mean that its own sign asks for, so that none is optimistic.
    GMPO, arXiv 2507.20673, section 3.
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape == mask.shape
    log_ratio = (keep(logprobs, mask) - keep(old_logprobs, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    for_good_B = row_mean(log_ratio.clamp(max=clip_high), mask).exp()
    for_bad_B = row_mean(log_ratio.clamp(min=-clip_low), mask).exp()
    mean_BT = torch.where(advantages > 0, for_good_B.unsqueeze(-1), for_bad_B.unsqueeze(-1))
    low = mask & (advantages < 0) & (log_ratio < -clip_low)
    high = mask & (advantages > 0) & (log_ratio > clip_high)
    return Surrogate(loss=keep(-mean_BT * advantages, mask), low=low, high=high, dual=torch.zeros_like(mask))


def mirror_descent(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, tau: float) -> Tensor:
    """-A_t lp_t + (tau / 2) L^2 / |o| with L = sum_t(lp - lp_old), `[B, T]`; 0 outside the mask.

    With A_t = R_i - b on all of a row's tokens the row sums to -(R_i - b) log pi(o) + tau/2 (log pi/pi_old (o))^2: the
    surrogate (R_i - b - tau log pi/pi_old (o))^2 over 2 tau, up to a constant. The square belongs to the whole row and
    is dealt to its tokens evenly. tau in reward per nat. Kimi k1.5, arXiv 2501.12599.
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape == mask.shape
    logprobs, old_logprobs = keep(logprobs, mask), keep(old_logprobs, mask)
    log_ratio_B, mean_B = row_sum(logprobs - old_logprobs, mask), row_mean(logprobs - old_logprobs, mask)
    square_BT = (log_ratio_B * mean_B).unsqueeze(-1)  # L^2 / |o|
    return keep(tau / 2 * square_BT - advantages * logprobs, mask)
