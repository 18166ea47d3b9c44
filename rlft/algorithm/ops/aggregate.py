"""Aggregation of per-token losses, independent of how the optimizer batch is split into micro-batches."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.ops.mask import row_mean, row_sum
from rlft.types import LossScale

if TYPE_CHECKING:
    from torch import Tensor


class Aggregate(StrEnum):
    """The weights of tokens. Denominators are those of the whole optimizer batch."""

    token_mean = "token_mean"
    sequence_mean_token_mean = "sequence_mean_token_mean"
    sequence_mean_token_sum = "sequence_mean_token_sum"
    constant = "constant"


def aggregate(values: Tensor, mask: Tensor, scale: LossScale, how: Aggregate) -> Tensor:
    """This micro-batch's share `[]` of the optimizer batch's loss; the shares of all micro-batches add up to it.

    A row with an empty mask contributes 0, but still counts as a sequence.

    Args:
        values: loss of each token, `[B, T]`.
        mask: the masked tokens, bool `[B, T]`.
        scale: sizes of the optimizer batch.
        how: `token_mean`: sum / tokens; `sequence_mean_token_mean`: mean over sequences of the mean over tokens;
            `sequence_mean_token_sum`: mean over sequences of the sum over tokens; `constant`: sum / (sequences *
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
