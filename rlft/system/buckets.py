"""Tensors in buckets: parts of them that together have a limited size, to be sent one bucket at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BUCKET = 64 * 2**20  # bytes of tensors that are sent at a time

Bucket = list[tuple[int, int, int]]
"""Parts of tensors: (number of the tensor, its first element, the one after its last)."""


def buckets(tensors: Sequence[Tensor], size: int) -> list[Bucket]:
    """All elements of tensors in their order, in buckets of one dtype and at most `size` bytes each."""
    result: list[Bucket] = []
    room, dtype = 0, None
    for number, tensor in enumerate(tensors):
        start = 0
        while start < tensor.numel():
            if not room or tensor.dtype != dtype:
                result.append([])
                room, dtype = size // tensor.itemsize, tensor.dtype
            stop = min(tensor.numel(), start + room)
            result[-1].append((number, start, stop))
            start, room = stop, room - (stop - start)
    return result
