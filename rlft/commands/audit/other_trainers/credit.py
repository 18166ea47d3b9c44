"""Rewards, advantages and masks of a recorded step, as they should be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlft.algorithm.ops.advantage import (
    Std,
    decoupled_zscore,
    group_is_equal,
    group_size,
    group_std,
    group_zscore,
    rounded,
)
from rlft.commands.audit.other_trainers.numbers import LONGEST_SUM, UNIT, Compared, one, roundings
from rlft.commands.audit.other_trainers.settings import Settings
from rlft.commands.audit.other_trainers.steps import Lacking, Step
from rlft.system.lazy import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor

EXACT = 2.0**12
"""Multiples of 1 / EXACT up to EXACT are float32 numbers, and so are their sums up to there."""


def total_rewards(step: Step, settings: Settings) -> tuple[Tensor, Tensor]:
    """(the weighted sum `[B]`, the sum of the terms' sizes `[B]`); NaN where no reward function gave a score."""
    if step.rewards is None:
        assert step.totals is not None, "a completion without rewards has a total"
        return step.totals, step.totals.abs()
    weighted = _weighted(step.rewards, settings)
    nothing = step.rewards.isnan().all(-1)
    return weighted.sum(-1).masked_fill(nothing, math.nan), weighted.abs().sum(-1)


def rewards(step: Step, settings: Settings) -> Iterator[Compared]:
    """Totals, as sums of the weighted rewards; and of verl's metrics the mean, largest and smallest score."""
    totals, sizes = total_rewards(step, settings)
    number = 1 if step.rewards is None else step.rewards.shape[1]
    if step.rewards is not None and step.totals is not None:
        expected, bound = totals.nan_to_num(0.0), (number + 1) * UNIT * sizes
        yield Compared(name="reward", places=step.places, logged=step.totals, expected=expected, bound=bound)
    elif not step.metrics:
        raise Lacking("only single rewards, or only totals, are recorded")
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
    highest, lowest = (expected + bound).max(), (expected - bound).min()
    extremes = {"max": expected.max(), "min": expected.min()}
    furthest = torch.maximum(highest - extremes["max"], extremes["min"] - lowest)
    yield from _of_metrics(step, "critic/advantages", extremes, furthest)


def _of_metrics(step: Step, name: str, expected: Mapping[str, Tensor], bound: Tensor) -> Iterator[Compared]:
    for place, line in step.metrics:
        for what, value in expected.items():
            logged = line.data.get(f"{name}/{what}")
            if isinstance(logged, int | float):
                yield one(f"{name}/{what}", place, logged, value, bound)


@no_grad
def credited(step: Step, settings: Settings) -> tuple[Tensor, Tensor]:
    """(advantages `[B]`, their bounds `[B]`); 0 where no reward function gave a score."""
    totals, _ = total_rewards(step, settings)
    scored = ~totals.isnan()
    ids, ddof = step.group_ids[scored], int(settings.std == "sample")
    if settings.multi_objective_aggregation == "normalize_then_sum" and step.rewards is not None:
        found, bound = _each_normalized(step.rewards[scored], ids, settings, ddof)
    else:
        scores, terms = rounded(totals[scored]), totals[scored].unsqueeze(-1)
        terms = terms if step.rewards is None else _weighted(step.rewards[scored], settings)
        spread_of = torch.zeros_like(ids) if settings.scale_rewards == "batch" else ids
        spread = group_std(scores, spread_of, ddof)
        found, centring = group_zscore(scores, ids, Std.none, 0.0), _centring(terms, ids)
        if settings.scale_rewards == "none":
            bound = centring
        else:
            found = torch.where(found == 0, 0.0, found / (spread + settings.eps))
            bound = _quotient(found, centring, _largest(centring, spread_of), spread, spread_of, settings.eps)
    zeros = torch.zeros_like(totals)
    return zeros.masked_scatter(scored, found), zeros.masked_scatter(scored, bound)


def _each_normalized(values: Tensor, ids: Tensor, settings: Settings, ddof: int) -> tuple[Tensor, Tensor]:
    """(advantages `[B]`, bounds) of rewards `[B, K]` that are normalised one by one, then added and normalised."""
    if values.isnan().any():
        raise Lacking("rewards that were normalised one by one are not recorded of all completions")
    weights = torch.tensor(settings.weights(values.shape[1]), dtype=torch.float64).expand_as(values)
    std, eps, everything = Std(settings.std), settings.eps, torch.zeros_like(ids)
    found = decoupled_zscore(rounded(values), weights, ids, std, eps)
    summed, error = torch.zeros_like(found), torch.zeros_like(found)
    for column, weight in zip(values.unbind(-1), weights.unbind(-1), strict=True):
        z, centring = group_zscore(rounded(column), ids, std, eps), _centring(column.unsqueeze(-1), ids)
        spread = group_std(column, ids, ddof)
        error += weight.abs() * _quotient(z, centring, _largest(centring, ids), spread, ids, eps)
        summed += weight * z
    error = error + 2 * _centring(summed.unsqueeze(-1), everything)
    spread = group_std(summed, everything, correction=1)
    return found, _quotient(found, error, error.max().expand_as(error), spread, everything, eps)


def _weighted(rewards: Tensor, settings: Settings) -> Tensor:
    return (rewards * torch.tensor(settings.weights(rewards.shape[1]), dtype=torch.float64)).nan_to_num(0.0)


def _largest(values: Tensor, ids: Tensor) -> Tensor:
    """The largest value of each entry's group, `[B]`."""
    groups, index = ids.unique(return_inverse=True)
    return values.new_zeros(len(groups)).scatter_reduce(0, index, values, "amax", include_self=False)[index]


def _centring(terms: Tensor, ids: Tensor) -> Tensor:
    """Bound `[B]` of the error of (the sum of a row's terms `[B, K]`, minus its group's mean).

    Where all terms are multiples of 2**-12, and a group's sum is below 2**12, sums are exact in float32; the mean and
    the difference add a rounding each, unless all are equal. Otherwise n + K terms add as many.
    """
    sizes = _largest(terms.abs().sum(-1), ids)
    grid = (terms * EXACT == (terms * EXACT).round()).all(-1)
    numbers = group_size(sizes, ids)
    is_exact = (_largest((~grid).double(), ids) == 0) & (sizes * numbers <= EXACT)
    of_sums = torch.where(is_exact, 0.0, numbers.clamp(max=LONGEST_SUM) + terms.shape[1])
    of_mean = torch.where(is_exact & group_is_equal(terms.sum(-1), ids), 0.0, 3.0)
    return (of_sums + of_mean) * UNIT * sizes


def _quotient(
    found: Tensor, centring: Tensor, largest: Tensor, spread: Tensor, spread_of: Tensor, eps: float
) -> Tensor:
    """Bound `[B]` of the error of A = c / (s + eps), of numbers c with the error `centring`.

    The standard deviation s of n numbers has an error d of at most 2 `largest` + (n + 5) u s, which changes A by
    |A| d / (s + eps).
    """
    numbers = group_size(spread, spread_of).clamp(max=LONGEST_SUM)
    of_spread = 2 * largest + (numbers + 5) * UNIT * spread
    divisor = (spread + eps).clamp(min=torch.finfo(torch.float64).tiny)
    return (centring + found.abs() * of_spread) / divisor + 2 * UNIT * found.abs()


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
