"""Which rows are in which lane: balanced, whole where it can be, and a function of the batch alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from pathlib import Path

import pytest
import torch
from met_ranks import together
from torch import Tensor
from torch.nn import Parameter

from rlft.trainer import update
from rlft.trainer.ranks import Exchange, LaneShare
from rlft.trainer.update import Costs, LaneGradients, assign, balance, costs_of, divide
from rlft.types import Batch

RECORDED = json.loads(Path(__file__).with_name("row_lengths.json").read_text())
"""{what: [[tokens of a prompt, [tokens of each of its completions]], ..]}: steps of recipes on the embedded model, and
lengths of a log-normal distribution with a median of 245 and a longest one of 6,000 tokens."""


def recorded(name: str) -> Costs:
    """A token costs 1 here, and a pair of tokens nothing."""
    groups = RECORDED[name]
    return Costs(
        rows=[float(length) for _, lengths in groups for length in lengths],
        prompts=[float(prompt) for prompt, lengths in groups for _ in lengths],
        groups=[group for group, (_, lengths) in enumerate(groups) for _ in lengths],
    )


def cost_of(costs: Costs, rows: list[int]) -> float:
    """By its meaning: each prompt once, each row once."""
    prompts = {costs.groups[row]: costs.prompts[row] for row in rows}
    return sum(prompts.values()) + sum(costs.rows[row] for row in rows)


@pytest.mark.parametrize("num_lanes", [2, 3, 4, 8])
@pytest.mark.parametrize("name", RECORDED)
def test_lanes_of_recorded_lengths_are_within_a_tenth_of_the_best(name: str, num_lanes: int) -> None:
    """No assignment is better than the mean, or than the most expensive row by itself."""
    costs = recorded(name)
    lanes, totals = assign(costs, num_lanes)
    assert sorted(row for lane in lanes for row in lane) == list(range(len(costs.rows)))
    assert totals == pytest.approx([cost_of(costs, lane) for lane in lanes])
    costliest_row = max(row + prompt for row, prompt in zip(costs.rows, costs.prompts, strict=True))
    assert max(totals) <= 1.1 * max(cost_of(costs, list(range(len(costs.rows)))) / num_lanes, costliest_row)


@pytest.mark.parametrize("seed", range(20))
def test_few_rows_are_within_a_tenth_of_the_best_of_all_assignments(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 30, (7,), generator=generator).tolist()
    prompts = torch.randint(0, 12, (3,), generator=generator).tolist()
    groups = [0, 0, 0, 1, 1, 2, 2]
    costs = Costs(rows=rows, prompts=[prompts[group] for group in groups], groups=groups)
    best = min(
        max(cost_of(costs, [row for row in range(7) if lanes[row] == lane]) for lane in range(3))
        for lanes in product(range(3), repeat=7)
    )
    assert max(assign(costs, 3)[1]) <= 1.1 * best


def test_groups_stay_whole_where_that_is_as_good() -> None:
    """Eight equal groups on four lanes: two each, no prompt twice."""
    costs = Costs(rows=[5.0] * 32, prompts=[9.0] * 32, groups=[row // 4 for row in range(32)])
    lanes, totals = assign(costs, 4)
    assert totals == [58.0] * 4  # 2 x (9 + 4 x 5)
    assert all(len({costs.groups[row] for row in lane}) == 2 for lane in lanes)


def test_one_long_group_is_shared_out() -> None:
    lanes, totals = assign(Costs(rows=[10.0] * 8, prompts=[1.0] * 8, groups=[0] * 8), 4)
    assert [len(lane) for lane in lanes] == [2, 2, 2, 2]
    assert totals == [21.0] * 4


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_moving_rows_ends_where_none_helps(num_lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    search = update._Lanes.best_moves

    def counted(self: update._Lanes) -> list[tuple[int, int, int]]:
        moves = search(self)
        searches.append(len(moves))
        return moves

    monkeypatch.setattr(update._Lanes, "best_moves", counted)
    update.assign(update.Costs(rows=[9.0, 7.0, 5.0, 3.0, 2.0], prompts=[1.0] * 5, groups=[0, 0, 1, 1, 2]), num_lanes)
    assert searches.count(0) == 1, "the search that finds nothing is the last one"


def test_there_may_be_fewer_rows_than_lanes() -> None:
    lanes, totals = assign(Costs(rows=[3.0, 2.0], prompts=[1.0, 1.0], groups=[0, 1]), 4)
    assert sorted(map(len, lanes)) == [0, 0, 1, 1]
    assert sorted(totals) == [0.0, 0.0, 3.0, 4.0]
    assert assign(Costs(rows=[], prompts=[], groups=[]), 3) == ([[], [], []], [0.0] * 3)


@pytest.fixture
def batch(make_batch: Callable[..., Batch]) -> Batch:
    rows = [(0, [5] * 4, [6] * 8), (0, [5] * 4, [6] * 2), (1, [7] * 9, [8] * 3), (1, [7] * 9, [8])]
    return make_batch(rows)


def test_costs_are_tokens_and_the_pairs_that_attend_to_each_other(batch: Batch) -> None:
    costs = costs_of(batch, torch.tensor([0, 2]), shared_prompts=True)
    # 8 tokens, each with 4 before them and half of 8 beside them: 8 x (4 + 4) pairs; 6,144 pairs cost as a token.
    assert costs.rows == pytest.approx([8 + 64 / 6144, 3 + 3 * (9 + 1.5) / 6144])
    assert costs.prompts == pytest.approx([4 + 8 / 6144, 9 + 40.5 / 6144])
    assert costs.groups == [0, 1]


def test_a_padded_row_costs_its_whole_length(batch: Batch) -> None:
    costs = costs_of(batch, torch.arange(4), shared_prompts=False)
    assert costs.rows == pytest.approx([12 + 72 / 6144, 6 + 18 / 6144, 12 + 72 / 6144, 10 + 50 / 6144])
    assert costs.prompts == [0.0] * 4


def test_rows_of_a_lane_are_in_the_order_of_the_batch(batch: Batch) -> None:
    lanes, _ = divide(batch, torch.tensor([3, 1, 2]), 2, shared_prompts=True)
    assert sorted(torch.cat(lanes).tolist()) == [1, 2, 3]
    assert [rows.tolist() for rows in lanes] == [[3, 2], [1]]  # in the order in which they are given
    assert all(rows.dtype == torch.int64 for rows in lanes)


def test_the_balance_is_the_share_of_time_in_which_lanes_work() -> None:
    assert balance([[4.0, 2.0], [1.0, 3.0]]) == pytest.approx((3 + 2) / (4 + 3))
    assert balance([[0.0, 0.0]]) == 1.0


# -- the sum of lanes' gradients ---------------------------------------------------------------------------------------
LANES = 6
SHAPES = ((7, 3), (), (40,), (2, 2, 2))
SILENT = 1
"""A lane without rows."""


def gradient_of(lane: int) -> list[Tensor | None]:
    """Numbers of unlike sizes, of which the sum depends on the order; lane 4 has none for the third parameter. The
    columns of the first one lie one after the other, as after a transposition."""
    random = torch.Generator().manual_seed(lane)
    made = [torch.randn(shape, generator=random) * 10.0**lane for shape in SHAPES]
    made[0] = made[0].T.contiguous().T
    return [None if (lane, number) == (4, 2) else tensor for number, tensor in enumerate(made)]


def expected() -> list[Tensor]:
    """One lane after the other."""
    lanes = [gradient_of(lane) for lane in range(LANES) if lane != SILENT]
    return [reduce(torch.add, [t for t in tensors if t is not None]) for tensors in zip(*lanes, strict=True)]


def added_up(share: LaneShare) -> tuple[list[Tensor], list[Tensor | None]]:
    """(the sum on this rank, the tensors of its first lane)."""
    learns, own = [Parameter(torch.zeros(shape)) for shape in SHAPES], []
    lanes = LaneGradients(learns, share)
    for lane in (lane for lane in share.mine if lane != SILENT):
        for parameter, gradient in zip(learns, gradient_of(lane), strict=True):
            parameter.grad = gradient
        own = own or [parameter.grad for parameter in learns]
        lanes.set_aside(lane)
    lanes.add_up([lane for lane in range(LANES) if lane != SILENT])
    return [parameter.grad for parameter in learns if parameter.grad is not None], own


@pytest.mark.parametrize("size", [20, 52, 10**9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_the_sum_is_that_of_the_lanes_in_their_order(
    ranks: int, size: int, met: Callable[..., list[Exchange]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets of 5 numbers, of 13, and of all 70."""
    monkeypatch.setattr(update, "BUCKET", size)
    exchanges: Sequence[Exchange | None] = met(ranks) if ranks > 1 else [None]
    shares = [LaneShare(lanes=LANES, rank=rank, ranks=ranks, exchange=e) for rank, e in enumerate(exchanges)]
    for found, own in together([lambda share=share: added_up(share) for share in shares]):
        assert all(torch.equal(a, b) for a, b in zip(found, expected(), strict=True))
        assert [tensor.is_contiguous() for tensor in found] == [True] * len(SHAPES)
        # Where the first lane of a rank has a gradient that lies in a row, the sum takes its place.
        places = [(a.data_ptr(), b.data_ptr()) for a, b in zip(found[1:], own[1:], strict=False) if b is not None]
        assert all(a == b for a, b in places)
        assert bool(places) == bool(own)
