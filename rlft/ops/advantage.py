"""Advantages from the rewards of siblings: completions of one prompt share a group id (any integers, in any order)."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Std(StrEnum):
    """What a centred reward is divided by: the group's (`population`: n, `sample`: n - 1), or the `batch`'s (n - 1)."""

    population = "population"
    sample = "sample"
    none = "none"
    batch = "batch"


def group_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """Each entry's group mean, `[B]`."""
    return _group_sum(values, group_ids) / group_size(values, group_ids)


def group_size(values: Tensor, group_ids: Tensor) -> Tensor:
    """Each entry's number of siblings, itself included, `[B]` in the dtype of `values`."""
    return _group_sum(torch.ones_like(values), group_ids)


def group_std(values: Tensor, group_ids: Tensor, correction: int) -> Tensor:
    """Each entry's group standard deviation, `[B]`; the squares are divided by max(n - correction, 1)."""
    squares_B = _group_sum((values - group_mean(values, group_ids)).square(), group_ids)
    return (squares_B / (group_size(values, group_ids) - correction).clamp(min=1)).sqrt()


def group_is_equal(values: Tensor, group_ids: Tensor) -> Tensor:
    """Whether all of an entry's group have exactly the same value (so also when it is alone), bool `[B]`."""
    groups, index = group_ids.unique(return_inverse=True)
    blank = values.new_zeros(len(groups))
    low = blank.scatter_reduce(0, index, values, "amin", include_self=False)
    high = blank.scatter_reduce(0, index, values, "amax", include_self=False)
    return (low == high)[index]


def group_zscore(rewards: Tensor, group_ids: Tensor, std: Std, eps: float) -> Tensor:
    """(R_i - mean) / (std + eps) within the group, `[B]`. Exactly 0 in a group of one or of equal rewards.

    `std=none` divides by nothing, not even eps (Dr. GRPO, arXiv 2503.20783). GRPO: arXiv 2402.03300, section 4.1.2.
    """
    centred_B = rewards - group_mean(rewards, group_ids)
    match std:
        case Std.none:
            advantages_B = centred_B
        case Std.population:
            advantages_B = centred_B / (group_std(rewards, group_ids, correction=0) + eps)
        case Std.sample:
            advantages_B = centred_B / (group_std(rewards, group_ids, correction=1) + eps)
        case Std.batch:
            one_group = torch.zeros_like(group_ids)
            advantages_B = centred_B / (group_std(rewards, one_group, correction=1) + eps)
    return _zero_where_equal(advantages_B, rewards, group_ids)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R_i minus the mean of its siblings = G/(G-1) * (R_i - mean), `[B]`. RLOO, arXiv 2402.14740.

    Needs G >= 2; one alone has no baseline and gets 0, as does a group of equal rewards, exactly.
    """
    size_B = group_size(rewards, group_ids)
    advantages_B = size_B / (size_B - 1).clamp(min=1) * (rewards - group_mean(rewards, group_ids))
    return _zero_where_equal(advantages_B, rewards, group_ids)


def _zero_where_equal(advantages: Tensor, rewards: Tensor, group_ids: Tensor) -> Tensor:
    # The mean of three times 0.1 is not 0.1: without this, rounding noise over a tiny std becomes an advantage.
    return advantages.masked_fill(group_is_equal(rewards, group_ids), 0.0)


def _group_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    assert values.shape == group_ids.shape, (values.shape, group_ids.shape)
    assert values.ndim == 1
    groups, index = group_ids.unique(return_inverse=True)
    return values.new_zeros(len(groups)).index_add(0, index, values)[index]
