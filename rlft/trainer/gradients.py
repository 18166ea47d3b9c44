"""The gradients of an update's lanes, and their sum over all ranks, which exchange them in buckets of a fixed size.

Ranks that share a lane's tokens have a part of its gradient each. The sum is taken in the order of parts, so that no
bit of it depends on the number of ranks or on the size of a bucket.
With one lane per rank the sum takes no memory beside that lane's gradient but two buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import Parameter

from rlft.system.buckets import BUCKET, Bucket, buckets
from rlft.trainer.ranks import LaneShare


class LaneGradients:
    """The gradients of an update: each of several parts has one of its own; a single one simply stays in place."""

    def __init__(self, parameters: Sequence[Parameter], share: LaneShare) -> None:
        self._parameters, self._share = parameters, share
        self._of_parts: dict[int, list[Tensor]] = {}

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def set_aside(self, lane: int) -> None:
        """Keeps the gradients so far as those of this lane, with zeros where there are none, and clears them.

        Rank 0 has the first parts, so that it adds each to the sum of those before at once.
        """
        if self._share.parts == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self.clear()
        if self._share.rank == 0 and self._of_parts:
            [so_far] = self._of_parts.values()
            for total, gradient in zip(so_far, gradients, strict=True):
                total.add_(gradient)
        else:
            self._of_parts[self._share.part_of(lane)] = [gradient.contiguous() for gradient in gradients]

    def add_up(self, lanes: Sequence[int]) -> None:
        """Sets the gradients to the sum over the lanes that have one, in ascending order; to nothing if there are none.

        Raises RanksError: another rank is gone or late.
        """
        share = self._share
        if share.parts == 1 or not lanes:
            return
        parts = [number * share.lanes + lane for number in range(share.sequence) for lane in lanes]
        first = [part for part in parts if share.owner(part) == 0]
        terms = [*first[:1], *parts[len(first) :]]
        own, self._of_parts = self._of_parts, {}
        result = next(iter(own.values()), None) or [
            torch.empty_like(p, memory_format=torch.contiguous_format) for p in self._parameters
        ]
        for bucket in buckets(result, BUCKET) if share.exchange is not None else ():
            total = reduce(Tensor.add_, (share.sent(term, _flat(bucket, own.get(term), result)) for term in terms))
            places = _parts(bucket, result)
            for place, part in zip(places, total.split([len(place) for place in places]), strict=True):
                place.copy_(part)
        for parameter, gradient in zip(self._parameters, result, strict=True):
            parameter.grad = gradient


def most_gradients(parts: int, ranks: int) -> int:
    """The most gradients that a rank holds at a time: those of its parts; rank 0 the sum so far and the next one's."""
    of_each = parts // ranks
    return of_each if ranks > 1 else min(2, of_each)


def _parts(bucket: Bucket, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views `[n]` of the bucket's parts."""
    return [tensors[number].view(-1)[start:stop] for number, start, stop in bucket]


def _flat(bucket: Bucket, own: Sequence[Tensor] | None, like: Sequence[Tensor]) -> Tensor:
    """A copy of this rank's own tensors in a row; for another rank's, memory like that of such tensors."""
    parts = _parts(bucket, like if own is None else own)
    return parts[0].new_empty(sum(map(len, parts))) if own is None else torch.cat(parts)
