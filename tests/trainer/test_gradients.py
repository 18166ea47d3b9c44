"""The sum of lanes' gradients: its bits depend neither on ranks nor on buckets, and it takes no second gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import pytest
import torch
from threaded_ranks import together
from torch import Tensor
from torch.nn import Parameter

from rlft.trainer import update
from rlft.trainer.ranks import Exchange, LaneShare
from rlft.trainer.update import LaneGradients

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
