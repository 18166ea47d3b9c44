"""Attention of a packed row over its spans, and its gradients, by flash calls on a CUDA GPU or by blocks elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlft.model.kernels import flash_attention, split_attention
from rlft.model.kernels.block_attention import Scoring
from rlft.model.kernels.flash_attention import RowLengths
from rlft.model.kernels.split_attention import Block
from rlft.model.sequence import TokenShare

if TYPE_CHECKING:
    from rlft.model.packing import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpans:
    """The spans of a row whose tokens several ranks share."""

    whole: Sequence[Block] | RowLengths  # those of the whole row
    share: TokenShare  # which of its tokens this rank has
    num_tokens: int  # of the whole row

    def to_heads(self, *parts: Tensor) -> list[Tensor]:
        """As `TokenShare.to_heads`."""
        return self.share.to_heads(self.num_tokens, *parts)


Spans = Sequence[Block] | RowLengths | SharedSpans
"""Which tokens of a packed row see which: blocks, or lengths for flash attention on a CUDA GPU."""


def spans_of(
    packed: PackedRows, x: Tensor, head_size: int, window: int | None = None, cap: float | None = None
) -> Spans:
    """Which tokens of this row see which, for heads of this size and of the dtype of x."""
    whole = None
    if flash_attention.takes(x.dtype, head_size, x.device, caps=cap is not None):
        whole = packed.lengths(window)
    whole = packed.blocks(window) if whole is None else whole
    if packed.share is None:
        return whole
    return SharedSpans(whole=whole, share=packed.share, num_tokens=packed.num_tokens)


def attend(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scoring: Scoring, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(attention `[N, H, D]`, three further tensors that `attention_gradients` needs); no gradient."""
    if isinstance(spans, SharedSpans):
        sinks = None if sinks is None else spans.share.own_heads(sinks)
        q, k, v = spans.to_heads(query, key, value)
        of_heads, lse, random, unused = attend(q, k, v, spans.whole, scoring, sinks)
        [out] = spans.share.to_tokens(of_heads, heads=[query.shape[1]])
        return out, lse, random, unused
    random = unused = None
    if isinstance(spans, RowLengths):
        out, lse, random, unused = flash_attention.attend(query, key, value, spans, scoring.scale)
    else:
        out, lse = split_attention.attend(query, key, value, spans, scoring)
    if sinks is not None:
        with_sinks(out, by_token(lse, spans), sinks)
    return out, lse, random, unused


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Overwrites attention `[N, H, D]` and log-sum-exp `[N, H, 1]` by those that sinks `[H]` take a share of."""
    scores = sinks.detach().to(lse.dtype)[:, None]
    out.mul_((lse - scores).sigmoid().to(out.dtype))
    lse.copy_(torch.logaddexp(lse, scores))


def by_token(lse: Tensor, spans: Spans) -> Tensor:
    """`[N, H, 1]`; the same memory, except where ranks share the row."""
    if isinstance(spans, SharedSpans):
        of_heads = by_token(lse, spans.whole)
        return spans.share.to_tokens(of_heads, heads=[of_heads.shape[1] * spans.share.ranks])[0]
    return lse.t()[..., None] if isinstance(spans, RowLengths) else lse


def attention_gradients(
    grad: Tensor, kept: Sequence[Tensor], spans: Spans, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (new tensors) from that of the attention.

    `kept` are query, key, value and the results of `attend`.
    """
    if isinstance(spans, SharedSpans):
        query, key, value, out, lse, random, unused = kept
        *of_heads, grad = spans.to_heads(query, key, value, out, grad)
        gradients = attention_gradients(grad, [*of_heads, lse, random, unused], spans.whole, scoring)
        heads = [x.shape[1] for x in (query, key, value)]
        query_grad, key_grad, value_grad = spans.share.to_tokens(*gradients, heads=heads)
        return query_grad, key_grad, value_grad
    if isinstance(spans, RowLengths):
        return flash_attention.attention_gradients(grad, kept, spans, scoring.scale)
    return split_attention.attention_gradients(grad, kept[:5], spans, scoring)


class RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, spans: Spans, scoring: Scoring
    ) -> Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out, *kept = attend(query, key, value, spans, scoring, sinks)
        ctx.save_for_backward(sinks, query, key, value, out, *kept)
        ctx.spans, ctx.scoring = spans, scoring
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad, (sinks, *kept), sinks_grad = grad_outputs[0].contiguous(), ctx.saved_tensors, None
        if ctx.needs_input_grad[3]:  # their share of each token's attention, times what they lack: the mean
            out, lse = kept[3], by_token(kept[4], ctx.spans)
            mean = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
            shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
            sinks_grad = -(shares * mean).sum((0, 2)).to(sinks.dtype)
        return *attention_gradients(grad, kept, ctx.spans, ctx.scoring), sinks_grad, None, None
