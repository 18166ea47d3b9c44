"""KL divergences: estimated from the log-probs of sampled tokens, d = lp - lp_ref, or summed over a teacher's top k.
Those over the whole vocabulary come from the LM head (`Outputs.kl`).

| estimator | value | its gradient as a loss, on-policy |
|---|---|---|
| k1 | unbiased | 0 in expectation |
| k2 | biased | that of the reverse KL |
| k3 | unbiased, never negative | that of the forward KL |
| k3_unbiased | unbiased, also off-policy | that of the reverse KL, also off-policy |
| exact | the KL at the token's place | the same, of the probabilities in this place |

A loss *adds* beta * KL (the objective subtracts it). Source: J. Schulman, "Approximating KL divergence" (2020).
Log-probs are natural logarithms; a teacher's and those compared with them are at temperature 1.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.ops.aggregate import keep
from rlft.algorithm.ops.surrogate import LOG_RATIO_LIMIT, token_ratio
from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class KLEstimator(StrEnum):
    """How KL(policy || reference) is estimated; `auto`: k3 in the loss, k1 in the reward."""

    auto = "auto"
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k3_unbiased = "k3_unbiased"
    exact = "exact"


class KLAnchor(StrEnum):
    """What the policy is kept close to: the reference, or the policy that sampled the batch (PPO-penalty)."""

    reference = "reference"
    old = "old"


class KLPlace(StrEnum):
    """Where the KL penalty is applied: as a term of the loss, or as part of the score."""

    loss = "loss"
    reward = "reward"


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d, which is never negative. `[B, T]`.

    d is clamped to at least -20, so that value and gradient stay finite. It is not clamped at +20: exp(-d) is harmless
    there, and the gradient, 1, pulls back a policy that has drifted that far.
    """
    d = (logprobs - reference_logprobs).clamp(min=-LOG_RATIO_LIMIT)
    return d + (-d).expm1()  # expm1: exp(-d) - 1 would lose all digits (and the sign) at small d


def kl(logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """The chosen estimate of KL(policy || reference) at each token, `[B, T]`. `auto` must have been resolved."""
    match estimator:
        case KLEstimator.k1:
            return logprobs - reference_logprobs
        case KLEstimator.k2:
            return (logprobs - reference_logprobs).square() / 2
        case KLEstimator.k3:
            return k3(logprobs, reference_logprobs)
        case KLEstimator.k3_unbiased:
            # With a gradient through the ratio, too: r * d * grad lp, the score-function gradient of the reverse KL for
            # samples of the old policy (DeepSeek-V3.2).
            return token_ratio(logprobs, old_logprobs) * k3(logprobs, reference_logprobs)
        case KLEstimator.auto | KLEstimator.exact:
            raise ValueError(f"kl: {estimator} is no estimate from sampled tokens; pass k1, k2, k3 or k3_unbiased")


# -- the coefficient ---------------------------------------------------------------------------------------------------
LARGEST_ERROR = 0.2  # a proportional controller clips the relative error of the KL to +-0.2


class KLController(StrEnum):
    """How the KL coefficient changes: never, by factors of 2 (PPO), or in proportion to the error (Ziegler)."""

    fixed = "fixed"
    adaptive = "adaptive"
    proportional = "proportional"


def next_coefficient(
    controller: KLController, coef: float, kl: float, *, target: float, tolerance: float, gain: float
) -> float:
    """The coefficient of the next step, from beta of the last one; kl and its target are in nats per token.

    fixed: beta. adaptive: beta / 2 if kl < target / tolerance, 2 beta if kl > tolerance target, else beta (arXiv
    1707.06347, section 4, with a tolerance of 1.5). proportional: beta (1 + gain clip(kl / target - 1, -0.2, 0.2))
    (arXiv 1909.08593).
    """
    match controller:
        case KLController.fixed:
            return coef
        case KLController.adaptive:
            if kl < target / tolerance:
                return coef / 2
            return 2 * coef if kl > tolerance * target else coef
        case KLController.proportional:
            error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            return coef * (1 + gain * error)


# -- a teacher ---------------------------------------------------------------------------------------------------------
class Divergence(StrEnum):
    """A divergence of student and teacher: KL(student || teacher), KL(teacher || student), or one between these two."""

    reverse = "reverse"
    forward = "forward"
    jensen_shannon = "jensen_shannon"


def teacher_advantages(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """A_t = log p_teacher(y_t) - log p_student(y_t), `[B, T]`; 0 outside the mask.

    Its mean over tokens of the student is -KL(student || teacher), and its policy gradient is the gradient of that KL
    for each token on its own: the effect of a token on later ones is ignored. Thinking Machines, "On-Policy
    Distillation" (2025); MiniLLM (Gu 2023, arXiv 2306.08543), section 2.2, calls it the single-step part.
    """
    return keep(teacher_logprobs, mask) - keep(student_logprobs, mask)


def agreement(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """min(1, p_teacher / p_student) of tokens that the student sampled, `[B, T]`, in (0, 1].

    Its expectation is sum_v min(p_student, p_teacher), the probability mass that both have in common: 1 minus their
    total variation distance. (It is the acceptance rate of speculative decoding, Leviathan 2022, arXiv 2211.17192.)
    """
    return (teacher_logprobs - student_logprobs).clamp(max=0).exp()


def top_k_divergence(student: Tensor, teacher: Tensor, divergence: Divergence, beta: float = 0.5) -> Tensor:
    """The divergence of both distributions over the teacher's k most likely tokens and the rest, `[B, T]`, in nats.

    The rest is all other tokens together, so that each side has k + 1 outcomes whose probabilities add up to 1, p the
    student's and q the teacher's:

        reverse         sum p log(p / q)
        forward         sum q log(q / p)
        jensen_shannon  beta sum q log(q / M) + (1 - beta) sum p log(p / M), with M = beta q + (1 - beta) p

    Up to rounding it is at least 0, and at most the divergence over the whole vocabulary (data-processing inequality),
    which it equals where one token is left or all others have the same ratio p / q. GKD (Agarwal 2023, arXiv
    2306.13649), section 2, sums over the vocabulary. For beta near 0 the last is beta times the forward KL, for beta
    near 1 it is 1 - beta times the reverse one.

    Args:
        student, teacher: log-probs `[B, T, K]` of the same tokens, normalised over the whole vocabulary.
        beta: of jensen_shannon, above 0 and below 1.
    """
    logp, logq = with_the_rest(student), with_the_rest(teacher)
    match divergence:
        case Divergence.reverse:
            return _kl(logp, logq)
        case Divergence.forward:
            return _kl(logq, logp)
        case Divergence.jensen_shannon:
            logm = torch.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))
            return beta * _kl(logq, logm) + (1 - beta) * _kl(logp, logm)


SMALLEST_REST = 8
"""Probability of the rest below which it is a matter of rounding, in units of the dtype's eps (1e-6 in float32)."""


def with_the_rest(logprobs: Tensor) -> Tensor:
    """`[.., K + 1]`: the log-probs of K tokens, and that of all others together, log(1 - sum_k exp(lp_k)).

    Where the K tokens have all of the probability up to rounding, the rest has `SMALLEST_REST`, without gradient. What
    comes out is normalised again, so that no rounding makes a KL divergence negative.
    """
    total = logprobs.logsumexp(-1, keepdim=True)
    rest = log1mexp(total.clamp(max=-SMALLEST_REST * torch.finfo(logprobs.dtype).eps))
    return torch.cat([logprobs, rest], -1).log_softmax(-1)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, by expm1 near 0 and log1p far from it (Maechler 2012, "log1mexp")."""
    return torch.where(x > -math.log(2), (-x.expm1()).log(), (-x.exp()).log1p())


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    """sum_k p log(p / q), `[B, T]`."""
    return (logp.exp() * (logp - logq)).sum(-1)
