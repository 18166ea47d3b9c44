"""How ranks come to one state: rank 0 broadcasts it, one tensor at a time.

Weights are written where they are used, so that no rank holds a second copy of them and none is pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlft.trainer.ranks import Exchange

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # {name: (shape, dtype)} of tensors that are sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a rank that joins has to know of the state of rank 0 before the tensors arrive."""

    moments: Shapes  # the optimizers' moments
    critic: Mapping[str, Any] | None  # the statistics that normalise the critic's values; None without a critic


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def take_over(exchange: Exchange, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Writes rank 0's tensors into those of the same names on every other rank.

    Raises RanksError: another rank is gone or late.
    """
    for tensor in tensors.values():
        exchange.broadcast(tensor, 0, "exchange weights")
    if rank > 0:  # collectives count no change, by which copies of weights in 16 bits are kept
        torch.autograd.graph.increment_version(tensors.values())


def sent(
    exchange: Exchange, rank: int, shapes: Shapes, own: Mapping[str, Tensor], device: torch.device, root: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor on the device) of what rank `root` has, and of which every rank knows the shapes.

    All ranks take part, in the order of the shapes. Only rank `root` reads its `own`.

    Raises RanksError: another rank is gone or late.
    """
    for name, (shape, dtype) in shapes.items():
        tensor = own[name].to(device) if rank == root else torch.empty(shape, dtype=dtype, device=device)
        exchange.broadcast(tensor, root, "exchange moments")
        yield name, tensor
