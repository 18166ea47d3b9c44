"""What rank 0 has is written where other ranks use it, and what any rank has can be sent to all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from threaded_ranks import together
from torch import Tensor

from rlft.trainer.ranks import Exchange, sent, shapes_of, take_over

CPU = torch.device("cpu")


def test_tensors_are_taken_over_in_their_places_however_they_lie_and_count_as_written(
    met: Callable[..., list[Exchange]],
) -> None:
    """The second one's columns lie one after the other; a publish tells by the count what has been written into."""
    held = [{"a": torch.full((3,), 1.0 + rank), "b": torch.arange(6.0).view(2, 3).T * (1 + rank)} for rank in range(3)]
    expected = {name: tensor.clone() for name, tensor in held[0].items()}
    before = [{name: (t.data_ptr(), t.stride(), t._version) for name, t in tensors.items()} for tensors in held]
    exchanges = met(3)
    together([lambda e=e, r=r: take_over(e, r, held[r]) for r, e in enumerate(exchanges)])
    for rank, tensors in enumerate(held):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        for name, (address, stride, version) in before[rank].items():
            assert (tensors[name].data_ptr(), tensors[name].stride()) == (address, stride)
            assert (tensors[name]._version > version) == (rank > 0), "rank 0 has written nothing"


def test_what_a_rank_has_is_sent_to_all(met: Callable[..., list[Exchange]]) -> None:
    """Of any dtype and shape, as optimizers' moments are."""
    own = {"step/p": torch.tensor(7), "exp_avg/p": torch.randn(2, 3), "codes/q": torch.tensor([1, 255]).byte()}

    def receive(rank: int, exchange: Exchange) -> dict[str, Tensor]:
        return dict(sent(exchange, rank, shapes_of(own), own if rank == 1 else {}, CPU, root=1))

    for found in together([lambda e=e, r=r: receive(r, e) for r, e in enumerate(met(2))]):
        assert shapes_of(found) == shapes_of(own)
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
