"""Sums and means over the tokens that count, and what k samples of a prompt are worth together: pass@k and maj@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.system.lazy import torch
from rlft.types import LossScale

if TYPE_CHECKING:
    from torch import Tensor


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True and exactly 0 elsewhere, with a gradient of 0 there. Same shape.

    Apply it to the *inputs* of a formula: if only the result is masked, 0 * inf = NaN gets into the gradient.
    """
    return torch.where(mask, values, values.new_zeros(()))


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over each row's masked tokens `[B]`; 0 for a row without masked tokens."""
    return keep(values, mask).sum(-1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's masked tokens `[B]`; 0 for a row without masked tokens."""
    return row_sum(values, mask) / mask.sum(-1).clamp(min=1)


def max_abs(values: Tensor, mask: Tensor) -> Tensor:
    """Largest |value| of all masked tokens `[]`; 0 if there are none."""
    absolute = keep(values, mask).abs()
    return absolute.amax() if absolute.numel() else absolute.new_zeros(())


class Aggregate(StrEnum):
    """The weights of tokens. Denominators are those of the whole optimizer batch."""

    token_mean = "token_mean"
    sequence_mean_token_mean = "sequence_mean_token_mean"
    sequence_mean_token_sum = "sequence_mean_token_sum"
    constant = "constant"


def aggregate(values: Tensor, mask: Tensor, scale: LossScale, how: Aggregate) -> Tensor:
    """This micro-batch's share `[]` of the optimizer batch's loss; the shares of all micro-batches add up to it.

    A row with an empty mask contributes 0, but still counts as a sequence.

    `values` and `mask` are `[B, T]`. token_mean: sum / tokens; sequence_mean_token_mean: mean over sequences of the
    mean over tokens; sequence_mean_token_sum: mean over sequences of the sum over tokens; constant: sum / (sequences *
    longest allowed completion).
    """
    assert values.shape == mask.shape, (values.shape, mask.shape)
    num_tokens, num_sequences = max(scale.num_tokens, 1), max(scale.num_sequences, 1)
    match how:
        case Aggregate.token_mean:
            return row_sum(values, mask).sum() / num_tokens
        case Aggregate.sequence_mean_token_mean:
            return row_mean(values, mask).sum() / num_sequences
        case Aggregate.sequence_mean_token_sum:
            return row_sum(values, mask).sum() / num_sequences
        case Aggregate.constant:
            return row_sum(values, mask).sum() / (num_sequences * max(scale.max_completion_tokens, 1))


def negative_log_likelihood(logprobs: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """-(sum of the masked tokens' log-probs) / num_tokens, `[]`, in nats per token.

    `num_tokens` is that of the whole optimizer batch, so that micro-batches add up to its mean.
    """
    return -row_sum(logprobs, mask).sum() / max(1, num_tokens)


def pass_sizes(k: int) -> list[int]:
    """The powers of two below k, and k itself."""
    return sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k})


def pass_at(size: int, num_samples: int, num_right: int) -> float:
    """Unbiased estimate of pass@size, 1 - C(n - c, size) / C(n, size) for c of n samples correct (arXiv 2107.03374)."""
    return 1 - math.comb(num_samples - num_right, size) / math.comb(num_samples, size)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """maj@k of a prompt (arXiv 2203.11171): whether the answer that most of its k samples give is right.

    Where several answers are given most often, it is the mean over them, as if one was drawn. A sample without an
    answer (None) has no vote; 0 if there are no votes.
    """
    votes = Counter(answers)
    votes[None] = 0
    most = max(votes.values())
    chosen = [is_right for answer, is_right in zip(answers, right, strict=True) if most and votes[answer] == most]
    return sum(chosen) / len(chosen) if chosen else 0.0
