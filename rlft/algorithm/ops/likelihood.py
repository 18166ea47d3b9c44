"""The likelihood of a text: the loss of supervised fine-tuning and of pretraining text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlft.algorithm.ops.mask import row_sum

if TYPE_CHECKING:
    from torch import Tensor


def negative_log_likelihood(logprobs: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """-(sum of the masked tokens' log-probs) / num_tokens, `[]`, in nats per token.

    Args:
        logprobs: log-probs, `[B, T]`.
        mask: the masked tokens, bool `[B, T]`.
        num_tokens: number of masked tokens in the whole optimizer batch, so that micro-batches add up to its mean.
    """
    return -row_sum(logprobs, mask).sum() / max(1, num_tokens)
