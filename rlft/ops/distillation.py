"""Comparisons of a teacher's log-probs with a student's: an advantage, a divergence, and the agreement of the two.

Log-probs are natural logarithms at temperature 1, of tokens that the student sampled.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.ops.lazy import torch
from rlft.ops.mask import keep

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
    """The divergence of the two distributions over the teacher's k most likely tokens, `[B, T]`, at least 0, in nats.

    Each is renormalised over these k tokens; p is the student's and q the teacher's:

        reverse         sum_k p log(p / q)
        forward         sum_k q log(q / p)
        jensen_shannon  beta sum_k q log(q / M) + (1 - beta) sum_k p log(p / M), with M = beta q + (1 - beta) p

    GKD (Agarwal 2023, arXiv 2306.13649), section 2. For beta near 0, jensen_shannon is beta times the forward KL, and
    for beta near 1 it is 1 - beta times the reverse KL.

    Args:
        student: the student's log-probs of these tokens, `[B, T, K]`, up to a constant for each of the `[B, T]`.
        teacher: the teacher's log-probs of the same tokens, `[B, T, K]`, likewise.
        divergence: which divergence.
        beta: weight of the teacher in jensen_shannon, above 0 and below 1.
    """
    logp, logq = student.log_softmax(-1), teacher.log_softmax(-1)
    match divergence:
        case Divergence.reverse:
            return _kl(logp, logq)
        case Divergence.forward:
            return _kl(logq, logp)
        case Divergence.jensen_shannon:
            logm = torch.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))
            return beta * _kl(logq, logm) + (1 - beta) * _kl(logp, logm)


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    """sum_k p log(p / q), `[B, T]`."""
    return (logp.exp() * (logp - logq)).sum(-1)
