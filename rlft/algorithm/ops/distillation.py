"""Comparisons of a teacher's log-probs with a student's: an advantage, a divergence, and the agreement of the two.

Log-probs are natural logarithms at temperature 1, of tokens that the student sampled.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.ops.aggregate import keep
from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


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
