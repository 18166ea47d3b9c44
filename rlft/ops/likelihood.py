"""How likely a text is: the loss of supervised fine-tuning and of pretraining text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlft.ops.mask import row_sum

if TYPE_CHECKING:
    from torch import Tensor


def negative_log_likelihood(logprobs: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """-sum over the masked tokens of their log-prob / num_tokens, `[]`, in nats a token; log-probs and mask `[B, T]`.

    num_tokens: of the whole optimizer batch, so that micro-batches add up to its mean over tokens.
    """
    return -row_sum(logprobs, mask).sum() / max(1, num_tokens)
