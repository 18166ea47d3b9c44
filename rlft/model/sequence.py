"""Sequence parallelism: several ranks share the tokens of each packed row (DeepSpeed Ulysses, arXiv 2309.14509).

Everything in a decoder layer but attention concerns one token at a time. Of S ranks, rank r computes the tokens r,
r + S, r + 2 S, .. of a row: neighbours are on different ranks, so that each rank has as many of the completions'
tokens, which alone go through the LM head, as any other. Before attention, an exchange turns all heads of a rank's
tokens into a part of the heads of all tokens, and afterwards another one turns this back; so attention itself, with
windows, caps and sinks, is that of a whole row. So are recurrent layers (`rlft.model.kernels.recurrent`).

Numbers of sampled tokens are added up over the ranks, on which they are 0 but for one. Each rank then computes the loss
of the whole row, whose backward ends at the rank's own tokens: its gradients are one part of a sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShare:
    """Which tokens of a packed row a rank has."""

    rank: int  # number of this rank among those that share a row
    ranks: int  # how many they are
    exchange: Any  # the connections between these ranks (`rlft.trainer.ranks.Exchange`)

    def own(self, x: Tensor) -> Tensor:
        """`[.., n]` of `[.., N]`: the numbers of this rank's tokens."""
        return x[..., self.rank :: self.ranks]

    def to_heads(self, num_tokens: int, *parts: Tensor) -> list[Tensor]:
        """`[N, H / ranks, D]` for each `[n, H, D]`: this rank's heads of all N tokens.

        Where there are fewer heads than ranks, neighbouring ranks get the same one.
        """
        parts = tuple(x.repeat_interleave(max(1, self.ranks // x.shape[1]), 1) for x in parts)
        heads = [x.shape[1] // self.ranks for x in parts]
        sent = torch.cat([x.unflatten(1, (self.ranks, -1)) for x in parts], 2).transpose(0, 1)  # [ranks, n, heads, D]
        counts = self._counts(num_tokens)
        arrived = self._exchanged(sent, [len(parts[0])] * self.ranks, counts)
        results = [x.new_empty(num_tokens, h, x.shape[2]) for x, h in zip(parts, heads, strict=True)]
        for rank, of_rank in enumerate(arrived.split(counts)):
            for result, x in zip(results, of_rank.split(heads, 1), strict=True):
                result[rank :: self.ranks] = x
        return results

    def to_tokens(self, *parts: Tensor, heads: Sequence[int]) -> list[Tensor]:
        """`[n, H, D]` for each `[N, H / ranks, D]`: all heads of this rank's tokens; the inverse of `to_heads`.

        parts: what this rank's heads have.
        heads: number of all heads of each; what ranks have of the same head is added up.
        """
        num_tokens, own_heads = len(parts[0]), [x.shape[1] for x in parts]
        together = torch.cat(parts, 1)
        sent, counts = torch.cat([together[rank :: self.ranks] for rank in range(self.ranks)]), self._counts(num_tokens)
        n = counts[self.rank]
        arrived = self._exchanged(sent, counts, [n] * self.ranks)
        by_head = arrived.unflatten(0, (self.ranks, n)).transpose(0, 1)  # [n, ranks, heads of a rank, D]
        results = [x.reshape(n, -1, x.shape[3]) for x in by_head.split(own_heads, 2)]
        return [
            (x if x.shape[1] == number else x.unflatten(1, (number, -1)).sum(2)).contiguous()
            for x, number in zip(results, heads, strict=True)
        ]

    def gathered(self, x: Tensor, num_tokens: int) -> Tensor:
        """`[N, ..]` of `[n, ..]`, small integers of all ranks' tokens."""
        whole = x.new_zeros(num_tokens, *x.shape[1:], dtype=torch.int32)  # gloo adds up no shorter integers
        whole[self.rank :: self.ranks] = x.int()
        self.exchange.add_up(whole)
        return whole.to(x.dtype)

    def own_heads(self, x: Tensor) -> Tensor:
        """`[H / ranks]` of `[H]`."""
        return x.unflatten(0, (self.ranks, -1))[self.rank]

    def added_up(self, x: Tensor) -> Tensor:
        """The sum over all ranks, of whose gradient each rank's x gets all."""
        return cast(Tensor, _AddedUp.apply(x, self.exchange))

    def _counts(self, num_tokens: int) -> list[int]:
        return [len(range(rank, num_tokens, self.ranks)) for rank in range(self.ranks)]

    def _exchanged(self, sent: Tensor, counts: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Rows from all ranks, the first rank's first, for the rows `sent`; both are numbers of rows for each rank."""
        [*_, heads, size] = sent.shape
        row = heads * size * sent.itemsize
        as_bytes = sent.contiguous().view(-1).view(torch.uint8)
        arrived = self.exchange.all_to_all(as_bytes, [row * n for n in counts], [row * n for n in arriving])
        return arrived.view(sent.dtype).view(-1, heads, size)


class _AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        exchange.add_up(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


_current: ContextVar[TokenShare | None] = ContextVar("tokens of this rank", default=None)


@contextmanager
def sharing_tokens(share: TokenShare | None) -> Iterator[None]:
    """Inside, packed rows are made of this rank's tokens; None: of all tokens."""
    before = _current.set(share)
    try:
        yield
    finally:
        _current.reset(before)


def current_share() -> TokenShare | None:
    """The share of passes that begin now."""
    return _current.get()
