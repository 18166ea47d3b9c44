"""Rewards, advantages and masks of a recorded step, as they should be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlft.algorithm.ops.advantage import Std, decoupled_zscore, group_std, group_zscore, rounded
from rlft.commands.audit.other_trainers.numbers import UNIT, Compared, one, roundings
from rlft.commands.audit.other_trainers.settings import Settings
from rlft.commands.audit.other_trainers.steps import Lacking, Step
from rlft.system.lazy import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor


def total_rewards(step: Step, settings: Settings) -> tuple[Tensor, Tensor]:
    """(the weighted sum `[B]`, the sum of the terms' sizes `[B]`); NaN where no reward function gave a score."""
    if step.rewards is None:
        assert step.totals is not None, "a completion without rewards has a total"
        return step.totals, step.totals.abs()
    weighted = step.rewards * torch.tensor(settings.weights(step.rewards.shape[1]), dtype=torch.float64)
    nothing = step.rewards.isnan().all(-1)
    return weighted.nansum(-1).masked_fill(nothing, math.nan), weighted.abs().nansum(-1)


def rewards(step: Step, settings: Settings) -> Iterator[Compared]:
    """Totals, as sums of the weighted rewards; and of verl's metrics the mean, largest and smallest score."""
    totals, sizes = total_rewards(step, settings)
    number = 1 if step.rewards is None else step.rewards.shape[1]
    if step.rewards is not None and step.totals is not None:
        expected, bound = totals.nan_to_num(0.0), (number + 1) * UNIT * sizes
        yield Compared(name="reward", places=step.places, logged=step.totals, expected=expected, bound=bound)
    elif not step.metrics:
        raise Lacking("there are no totals beside single rewards, or the other way round")
    sums = {"mean": totals.nanmean(), "max": totals.max(), "min": totals.min()}
    bound = (number + 1 + roundings(len(totals))) * UNIT * sizes.max()
    yield from _of_metrics(step, "critic/score", sums, bound)


def advantages(step: Step, settings: Settings) -> Iterator[Compared]:
    """One of each completion, which holds for all its tokens; of verl's metrics the largest and smallest.

    Raises Lacking: groups are not known.
    """
    if step.lacking:
        raise Lacking(step.lacking)
    if step.advantages is None and not step.metrics:
        raise Lacking("advantage is not recorded of all completions")
    expected, bound = credited(step, settings)
    if step.advantages is not None:
        yield Compared(name="advantage", places=step.places, logged=step.advantages, expected=expected, bound=bound)
    extremes = {"max": expected.max(), "min": expected.min()}
    yield from _of_metrics(step, "critic/advantages", extremes, bound.max())


def _of_metrics(step: Step, name: str, expected: Mapping[str, Tensor], bound: Tensor) -> Iterator[Compared]:
    for place, line in step.metrics:
        for what, value in expected.items():
            logged = line.data.get(f"{name}/{what}")
            if isinstance(logged, int | float):
                yield one(f"{name}/{what}", place, logged, value, bound)


@no_grad
def credited(step: Step, settings: Settings) -> tuple[Tensor, Tensor]:
    """(advantages `[B]`, their bounds `[B]`); 0 where no reward function gave a score.

    With n terms in the longest sum, M the largest reward and s + eps the divisor, the mean and the difference from it
    have an error c <= (n + K + 2) u M, the standard deviation one of at most 2 c + (n + 5) u s, and the quotient A
    (c + |A| (2 c + (n + 5) u s)) / (s + eps) + 2 u |A|.
    """
    totals, sizes = total_rewards(step, settings)
    scored = ~totals.isnan()
    ids, eps = step.group_ids[scored], settings.eps
    number = 1 if step.rewards is None else step.rewards.shape[1]
    if settings.multi_objective_aggregation == "normalize_then_sum" and step.rewards is not None:
        values = step.rewards[scored]
        if values.isnan().any():
            raise Lacking("rewards that were normalised one by one are not recorded of all completions")
        weights = torch.tensor(settings.weights(number), dtype=torch.float64).expand_as(values)
        std = Std(settings.std)
        found = decoupled_zscore(rounded(values), weights, ids, std, eps)
        correction = int(settings.std == "sample")
        errors, summed = torch.zeros_like(found), torch.zeros_like(found)
        for column, weight in zip(values.unbind(-1), weights.unbind(-1), strict=True):
            z, spread = group_zscore(rounded(column), ids, std, eps), group_std(column, ids, correction)
            errors += weight.abs() * _error(z, column.abs().max().expand_as(z), spread, eps, 2)
            summed += weight * z
        spread_B = group_std(summed, torch.zeros_like(ids), correction=1)
        bound = (errors.max() + _error(found, summed.abs().max().expand_as(found), spread_B, eps, number)) + (
            (errors.max() * (1 + 2 * found.abs())) / (spread_B + eps)
        )
    else:
        scores = rounded(totals[scored])
        of_what = torch.zeros_like(ids) if settings.scale_rewards == "batch" else ids
        spread = group_std(scores, of_what, correction=int(settings.std == "sample"))
        found = group_zscore(scores, ids, Std.none, 0.0)
        if settings.scale_rewards == "none":
            bound = (roundings(len(scores)) + number + 2) * UNIT * sizes[scored].max().expand_as(found)
        else:
            found = torch.where(found == 0, 0.0, found / (spread + eps))
            bound = _error(found, sizes[scored].max().expand_as(found), spread, eps, number)
    zeros = torch.zeros_like(totals)
    return zeros.masked_scatter(scored, found), zeros.masked_scatter(scored, bound)


def _error(advantages: Tensor, largest: Tensor, spread: Tensor, eps: float, number: int) -> Tensor:
    n = roundings(len(advantages))
    centring = (n + number + 2) * UNIT * largest
    of_spread = 2 * centring + (n + 5) * UNIT * spread
    divisor = (spread + eps).clamp(min=torch.finfo(torch.float64).tiny)
    return (centring + advantages.abs() * of_spread) / divisor + 2 * UNIT * advantages.abs()


# -- masks -------------------------------------------------------------------------------------------------------------
def expected_mask(step: Step, settings: Settings) -> Tensor:
    """The tokens that count, bool `[B, T]`: those of the completions that no tool wrote. Lacking: not recorded."""
    if step.right_mask is not None:
        return step.right_mask
    if step.completion is None:
        raise Lacking("neither completion_ids nor length are recorded of all completions")
    mask = step.completion if step.tool_mask is None else step.completion & step.tool_mask
    if settings.mask_truncated_completions:
        if step.truncated is None:
            raise Lacking("truncated is not recorded of all completions")
        mask = mask & ~step.truncated.unsqueeze(-1)
    return mask


def masks(step: Step, settings: Settings) -> Iterator[Compared]:
    """The tokens that count, of each completion a number: how many of its entries are as they should be."""
    if step.mask is None:
        raise Lacking("mask is not recorded of all completions")
    expected = expected_mask(step, settings)
    entry_B = (step.mask != expected).int().argmax(-1, keepdim=True)  # the first that differs, or the first of all
    logged, right = step.mask.gather(1, entry_B).squeeze(1).double(), expected.gather(1, entry_B).squeeze(1).double()
    places = [f"{place}, entry {entry}" for place, entry in zip(step.places, entry_B.squeeze(1).tolist(), strict=True)]
    yield Compared(name="mask", places=places, logged=logged, expected=right, bound=torch.zeros_like(right))
