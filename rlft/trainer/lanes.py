"""Lanes: the parts into which the passes of training are divided, so that several ranks can share them.

Which rows are in which lane follows from the batch alone. Every lane adds up gradients of its own, and the lanes are
added in their order; so the bits of a result depend on the number of lanes, and not on how many ranks share them.

A lane costs about total / lanes: whole groups are assigned first, the most expensive first, each to the cheapest lane;
then rows move from the most expensive lane to the cheapest one while that lowers the higher cost of the two. A prompt
counts once in each lane that has rows of its group.
"""

from __future__ import annotations

from collections import Counter
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
    """Costs of rows, in tokens."""

    rows: Sequence[float]  # cost of each row without its prompt
    prompts: Sequence[float]  # cost of each row's prompt
    groups: Sequence[int]  # the group with which each row shares its prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Rows of a batch in lanes."""

    rows: tuple[Tensor, ...]  # int64 indices of each lane's rows, in the order of the batch; a lane may be empty
    costs: tuple[float, ...]  # cost of each lane, in tokens


def divide(batch: Batch, rows: Tensor, num_lanes: int, *, shared_prompts: bool) -> Division:
    """Divides rows of a batch (int64 `[N]`) into lanes.

    shared_prompts: whether rows of a group share their prompt in the forward; else each row costs its whole length.
    """
    lanes, costs = assign(costs_of(batch, rows, shared_prompts=shared_prompts), num_lanes)
    return Division(rows=tuple(rows[tensor(lane, dtype=rows.dtype)] for lane in lanes), costs=tuple(costs))


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
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(costs.groups):
        rows_of.setdefault(group, []).append(row)
    whole = {g: costs.prompts[rows[0]] + sum(costs.rows[row] for row in rows) for g, rows in rows_of.items()}
    lanes = _Lanes(costs, num_lanes)
    for group in sorted(rows_of, key=lambda group: (-whole[group], rows_of[group][0])):
        lanes.add_group(lanes.cheapest, group, rows_of[group], whole[group])
    for _ in range(MOST_MOVES):
        if not (moves := lanes.best_moves()):
            break
        for move in moves:
            lanes.move(*move)
    return [sorted(rows) for rows in lanes.rows], lanes.totals


class _Lanes:
    """Indices of the rows of each lane, and the lanes' costs."""

    def __init__(self, costs: Costs, num_lanes: int) -> None:
        self.costs = costs
        self.rows: list[list[int]] = [[] for _ in range(num_lanes)]
        self.totals = [0.0] * num_lanes
        self._siblings: list[Counter[int]] = [Counter() for _ in range(num_lanes)]  # number of rows of each group

    @property
    def cheapest(self) -> int:
        """The lane that costs least; the first of several."""
        return min(range(len(self.totals)), key=lambda i: (self.totals[i], i))

    def add_group(self, lane: int, group: int, rows: Sequence[int], cost: float) -> None:
        self.rows[lane] += rows
        self.totals[lane] += cost
        self._siblings[lane][group] += len(rows)

    def move(self, row: int, source: int, target: int) -> None:
        self.totals[source] -= self._saved(source, row)
        self.totals[target] += self._added(target, row)
        self.rows[source].remove(row)
        self.rows[target].append(row)
        self._siblings[source][self.costs.groups[row]] -= 1
        self._siblings[target][self.costs.groups[row]] += 1

    def best_moves(self) -> list[tuple[int, int, int]]:
        """The move (row, from, to), or the two of a swap, that most lower the highest cost; empty if nothing does."""
        costs, totals = self.costs, self.totals
        full, free = max(range(len(totals)), key=lambda i: (totals[i], -i)), self.cheapest
        best, moves = totals[full] - MIN_GAIN, list[tuple[int, int, int]]()
        for row in self.rows[full]:
            higher = max(totals[full] - self._saved(full, row), totals[free] + self._added(free, row))
            if higher < best:
                best, moves = higher, [(row, full, free)]
        if moves:
            return moves
        gap = totals[full] - totals[free]
        others = sorted(self.rows[free], key=lambda row: (costs.rows[row], row))
        for row in sorted(self.rows[full], key=lambda row: (-costs.rows[row], row))[:64]:
            for other in others[:64]:
                if not 0 < costs.rows[row] - costs.rows[other] < gap or costs.groups[row] == costs.groups[other]:
                    continue
                higher = max(
                    totals[full] - self._saved(full, row) + self._added(full, other),
                    totals[free] + self._added(free, row) - self._saved(free, other),
                )
                if higher < best:
                    best, moves = higher, [(row, full, free), (other, free, full)]
        return moves

    def _saved(self, lane: int, row: int) -> float:
        """What a lane saves without this row; the prompt is still needed if a sibling is in the lane."""
        alone = self._siblings[lane][self.costs.groups[row]] == 1
        return self.costs.rows[row] + (self.costs.prompts[row] if alone else 0.0)

    def _added(self, lane: int, row: int) -> float:
        return self.costs.rows[row] + (0.0 if self._siblings[lane][self.costs.groups[row]] else self.costs.prompts[row])


def balance(costs: Sequence[Sequence[float]]) -> float:
    """The mean cost of a lane divided by that of the most expensive one, over all updates; 1 where no lane waits."""
    longest = sum(max(lanes) for lanes in costs)
    return sum(sum(lanes) / len(lanes) for lanes in costs) / longest if longest else 1.0
