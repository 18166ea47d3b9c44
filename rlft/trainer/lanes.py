"""Lanes: the parts into which the passes of training are divided, so that several ranks can share them.

Which rows are in which lane follows from the batch alone. Every lane adds up gradients of its own, and the lanes are
added in their order; so the bits of a result depend on the number of lanes, and not on how many ranks share them.

A lane costs about total / lanes: whole groups are assigned first, the dearest first, each to the lane that costs least;
then rows move from the dearest lane to the cheapest one while that lowers the dearer one of the two. A prompt counts
once in each lane that has rows of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, tensor

from rlft.model.packing import prompt_lengths
from rlft.types import Batch

PAIRS_PER_TOKEN = 6144.0
"""Number of query-key pairs that cost as much as a token: a layer of width h does 24 h^2 flops for a token outside of
attention and 4 h for a pair, so the number is 6 h; h = 1024."""
MOST_MOVES = 4096
MIN_GAIN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of rows, in tokens.

    Attributes:
        rows: cost of each row without its prompt.
        prompts: cost of each row's prompt.
        groups: the group with which each row shares its prompt.
    """

    rows: Sequence[float]
    prompts: Sequence[float]
    groups: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Rows of a batch in lanes.

    Attributes:
        rows: int64 indices of each lane's rows, in the order of the batch; a lane may be empty.
        costs: cost of each lane, in tokens.
    """

    rows: tuple[Tensor, ...]
    costs: tuple[float, ...]


def divide(batch: Batch, rows: Tensor, num_lanes: int, *, shared_prompts: bool) -> Division:
    """Divides rows of a batch into lanes.

    Args:
        batch: the batch.
        rows: int64 `[N]`, the rows.
        num_lanes: number of lanes.
        shared_prompts: whether rows of a group share their prompt in the forward; else each row costs its whole length.
    """
    lanes, costs = assign(costs_of(batch, rows, shared_prompts=shared_prompts), num_lanes)
    return Division(
        rows=tuple(rows[tensor(lane, dtype=rows.dtype)] for lane in lanes),
        costs=tuple(costs),
    )


def costs_of(batch: Batch, rows: Tensor, *, shared_prompts: bool) -> Costs:
    """The costs of the passes over these rows."""
    prompts = prompt_lengths(batch)[rows].tolist()
    lengths = batch.attention_mask.sum(1)[rows].tolist()
    groups = batch.group_ids[rows].tolist()
    if not shared_prompts:
        return Costs(rows=[token_cost(0, n) for n in lengths], prompts=[0.0] * len(groups), groups=groups)
    row_costs = [token_cost(p, n - p) for p, n in zip(prompts, lengths, strict=True)]
    return Costs(rows=row_costs, prompts=[token_cost(0, p) for p in prompts], groups=groups)


def token_cost(before: int, own: int) -> float:
    """The cost of `own` tokens after `before` others, to which each of them attends."""
    return own + own * (before + own / 2) / PAIRS_PER_TOKEN


def assign(costs: Costs, num_lanes: int) -> tuple[list[list[int]], list[float]]:
    """(indices of each lane's rows in ascending order, the lanes' costs)."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(costs.groups):
        members.setdefault(group, []).append(row)
    whole = {g: costs.prompts[m[0]] + sum(costs.rows[row] for row in m) for g, m in members.items()}
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    totals = [0.0] * num_lanes
    for group in sorted(members, key=lambda group: (-whole[group], members[group][0])):
        lane = _least(totals)
        lanes[lane] += members[group]
        totals[lane] += whole[group]
    _move_rows(costs, lanes, totals)
    return [sorted(lane) for lane in lanes], totals


def _move_rows(costs: Costs, lanes: list[list[int]], totals: list[float]) -> None:
    """Moves or swaps rows between the dearest lane and the cheapest one while that helps."""
    counts: list[dict[int, int]] = [{} for _ in lanes]
    for lane, rows in enumerate(lanes):
        for row in rows:
            counts[lane][costs.groups[row]] = counts[lane].get(costs.groups[row], 0) + 1
    for _ in range(MOST_MOVES):
        dearest, cheapest = max(range(len(totals)), key=lambda i: (totals[i], -i)), _least(totals)
        moves = _best_move(costs, lanes, totals, counts, dearest, cheapest)
        if moves is None:
            return
        for row, source, target in moves:
            _move(costs, lanes, totals, counts, row, source, target)


def _best_move(
    costs: Costs,
    lanes: list[list[int]],
    totals: list[float],
    counts: list[dict[int, int]],
    dearest: int,
    cheapest: int,
) -> list[tuple[int, int, int]] | None:
    """The moves (row, from, to) after which the dearer one of the two lanes is cheapest; None if none lowers it."""
    best, moves = totals[dearest] - MIN_GAIN, None
    for row in lanes[dearest]:
        saved, added = _without(costs, counts[dearest], row), _with(costs, counts[cheapest], row)
        dearer_cost = max(totals[dearest] - saved, totals[cheapest] + added)
        if dearer_cost < best:
            best, moves = dearer_cost, [(row, dearest, cheapest)]
    if moves is not None:
        return moves
    gap = totals[dearest] - totals[cheapest]
    swap_rows = sorted(lanes[cheapest], key=lambda row: (costs.rows[row], row))
    for row in sorted(lanes[dearest], key=lambda row: (-costs.rows[row], row))[:64]:
        for swapped in swap_rows[:64]:
            if not 0 < costs.rows[row] - costs.rows[swapped] < gap or costs.groups[row] == costs.groups[swapped]:
                continue
            saved, added = _without(costs, counts[dearest], row), _with(costs, counts[cheapest], row)
            swap_saved, swap_added = _without(costs, counts[cheapest], swapped), _with(costs, counts[dearest], swapped)
            dearer_cost = max(totals[dearest] - saved + swap_added, totals[cheapest] + added - swap_saved)
            if dearer_cost < best:
                best, moves = dearer_cost, [(row, dearest, cheapest), (swapped, cheapest, dearest)]
    return moves


def _without(costs: Costs, counts: dict[int, int], row: int) -> float:
    """What a lane saves without this row; the prompt is still needed if a sibling is in the lane."""
    return costs.rows[row] + (costs.prompts[row] if counts[costs.groups[row]] == 1 else 0.0)


def _with(costs: Costs, counts: dict[int, int], row: int) -> float:
    return costs.rows[row] + (0.0 if counts.get(costs.groups[row]) else costs.prompts[row])


def _move(
    costs: Costs,
    lanes: list[list[int]],
    totals: list[float],
    counts: list[dict[int, int]],
    row: int,
    source: int,
    target: int,
) -> None:
    group = costs.groups[row]
    totals[source] -= _without(costs, counts[source], row)
    totals[target] += _with(costs, counts[target], row)
    lanes[source].remove(row)
    lanes[target].append(row)
    counts[source][group] -= 1
    counts[target][group] = counts[target].get(group, 0) + 1


def _least(totals: Sequence[float]) -> int:
    """The lane that costs least; the first of several."""
    return min(range(len(totals)), key=lambda i: (totals[i], i))


def balance(costs: Sequence[Sequence[float]]) -> float:
    """The mean cost of a lane divided by that of the dearest one, over all updates; 1 where no lane waits for another.

    Args:
        costs: for each update the costs of its lanes.
    """
    dearest = sum(max(lanes) for lanes in costs)
    return sum(sum(lanes) / len(lanes) for lanes in costs) / dearest if dearest else 1.0
