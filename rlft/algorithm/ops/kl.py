"""Estimates of KL(policy || reference) from the log-probs of sampled tokens, with d = lp - lp_ref.

| estimator | value | its gradient as a loss, on-policy |
|---|---|---|
| k1 | unbiased | 0 in expectation |
| k2 | biased | that of the reverse KL |
| k3 | unbiased, never negative | that of the forward KL |
| k3_unbiased | unbiased, also off-policy | that of the reverse KL, also off-policy |

A loss *adds* beta * KL (the objective subtracts it). Source: J. Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.ops.ratio import LOG_RATIO_LIMIT, token_ratio

if TYPE_CHECKING:
    from torch import Tensor


class KLEstimator(StrEnum):
    """How KL(policy || reference) is estimated; `auto`: k3 in the loss, k1 in the reward."""

    auto = "auto"
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k3_unbiased = "k3_unbiased"


class KLPlace(StrEnum):
    """Where the KL penalty is applied: as a term of the loss, or as part of the score."""

    loss = "loss"
    reward = "reward"


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The log-ratio d. `[B, T]`."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio, d^2 / 2. `[B, T]`."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d, which is never negative. `[B, T]`.

    d is clamped to at least -20, so that value and gradient stay finite. It is not clamped at +20: exp(-d) is harmless
    there, and the gradient, 1, pulls back a policy that has drifted that far.
    """
    d = (logprobs - reference_logprobs).clamp(min=-LOG_RATIO_LIMIT)
    return d + (-d).expm1()  # expm1: exp(-d) - 1 would lose all digits (and the sign) at small d


def k3_unbiased(logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Importance-weighted k3: r * k3 with r = exp(lp - lp_old), with a gradient through r, too. `[B, T]`.

    The gradient is r * d * grad lp: the score-function gradient of the reverse KL, for samples of the old policy.
    DeepSeek-V3.2.
    """
    return token_ratio(logprobs, old_logprobs) * k3(logprobs, reference_logprobs)


def kl(logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """The chosen estimate of KL(policy || reference) at each token, `[B, T]`. `auto` must have been resolved."""
    match estimator:
        case KLEstimator.k1:
            return k1(logprobs, reference_logprobs)
        case KLEstimator.k2:
            return k2(logprobs, reference_logprobs)
        case KLEstimator.k3:
            return k3(logprobs, reference_logprobs)
        case KLEstimator.k3_unbiased:
            return k3_unbiased(logprobs, reference_logprobs, old_logprobs)
        case KLEstimator.auto:
            raise ValueError("kl: `auto` depends on where the KL acts; pass k1, k2, k3 or k3_unbiased")


TOLERANCE = 1.5
"""An adaptive coefficient does not change if the KL is from target / 1.5 to 1.5 target (PPO, section 4)."""

LARGEST_ERROR = 0.2
"""A proportional controller clips the relative error of the KL to +-0.2."""


class KLController(StrEnum):
    """How the KL coefficient changes: never, by factors of 2 (PPO), or in proportion to the error (Ziegler)."""

    fixed = "fixed"
    adaptive = "adaptive"
    proportional = "proportional"


def next_coefficient(controller: KLController, coef: float, kl: float, *, target: float, gain: float) -> float:
    """The coefficient of the next step.

    Args:
        controller: fixed: beta. adaptive: beta / 2 if kl < target / 1.5, 2 beta if kl > 1.5 target, else beta (arXiv
            1707.06347, section 4). proportional: beta (1 + gain clip(kl / target - 1, -0.2, 0.2)) (arXiv 1909.08593).
        coef: the coefficient beta of the last step.
        kl: measured KL, in nats per token.
        target: its target, in nats per token, above 0.
        gain: the gain of a proportional controller.
    """
    match controller:
        case KLController.fixed:
            return coef
        case KLController.adaptive:
            if kl < target / TOLERANCE:
                return coef / 2
            return 2 * coef if kl > TOLERANCE * target else coef
        case KLController.proportional:
            error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            return coef * (1 + gain * error)
