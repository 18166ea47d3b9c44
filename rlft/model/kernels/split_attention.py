"""Attention over a packed row, block by block, on a CPU: torch's flash kernel, forward and backward.

A token's attention over two sets of keys is the mean of its attentions over each, weighted by their shares of the
normaliser: out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i). The kernel's backward needs out and lse
only to recompute the weights exp(score - lse) and the correction sum(grad x out); given out and lse of the whole, each
block's backward gives exactly its part of the gradients (as in ring attention, Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rlft.model.kernels.attention_blocks import Block, Places, put, take

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """(attention `[R, H, C, D]` to all keys except those with a bias of -inf, its log-sum-exp `[R, H, C]`); no grad."""
    return _FORWARD(query, key, value, 0.0, False, attn_mask=bias, scale=scale)


def merge(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(attention over both sets of keys, which overwrites `one`; its log-sum-exp), from attentions over disjoint sets.

    `one` and `other` are `[.., D]`, `one_lse` and `other_lse` are `[.., 1]`.
    """
    both = torch.logaddexp(one_lse, other_lse)
    # The weights have the normaliser's precision, which is at least float32.
    merged = one.mul_((one_lse - both).exp_().to(one.dtype))
    return merged.addcmul_(other, (other_lse - both).exp_().to(one.dtype)), both


def serves(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes these: tensors on a CPU, with queries and values of the same size."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def split_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float | None) -> Tensor:
    """`[N, H, D]` from query `[N, H, D]`, key and value `[N, K, D]` with K key heads (H a multiple of K)."""
    return cast(Tensor, _SplitAttention.apply(query, key, value, blocks, scale))


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float | None
    ) -> Tensor:
        out, lse = attend(query, key, value, blocks, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grad_outputs
        query, key, value, out, lse = ctx.saved_tensors
        return (*attention_gradients(grad, query, key, value, out, lse, ctx.blocks, ctx.scale), None, None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float | None
) -> tuple[Tensor, Tensor]:
    """(attention `[N, H, D]`, its log-sum-exp `[N, H, 1]`); no gradient."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(*query.shape[:2], 1, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    for block in blocks:
        q, k, v = _gathered(block, query, key, value)
        part, part_lse = _FORWARD(q, k, v, 0.0, block.causal, attn_mask=_bias(block, q), scale=scale)
        part, part_lse = _tokens(block.queries, part), _tokens(block.queries, part_lse[..., None])
        places = block.queries.real
        if not block.causal:
            part, part_lse = merge(take(out, places), take(lse, places), part, part_lse)
        if block.causal or not isinstance(places, slice):  # otherwise it was merged in place
            put(out, places, part)
        put(lse, places, part_lse)
    return out, lse


def attention_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: Sequence[Block],
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (new tensors) from that of `out`; `out` and `lse` are results of `attend`."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    for block in blocks:
        q, k, v = _gathered(block, query, key, value)
        g, o = (_rows(x, block.queries, block) for x in (grad, out))
        normaliser = _rows(lse, block.queries, block)[..., 0].contiguous()
        if block.queries.slots is not None:
            # A padded query has no weight: exp(score - inf) = 0.
            padded = torch.ones(block.shape[0] * block.shape[1], dtype=torch.bool)
            padded = padded.index_fill_(0, block.queries.slots, False).view(block.shape[0], 1, block.shape[1])
            normaliser = normaliser.masked_fill(padded, torch.inf)
        parts = _BACKWARD(g, q, k, v, o, normaliser, 0.0, block.causal, attn_mask=_bias(block, q), scale=scale)
        sides = (block.queries, block.keys, block.keys)
        for total, part, places in zip(grads, parts, sides, strict=True):
            _add(total, places.real, _tokens(places, part), first=block.causal)
    return grads[0], grads[1], grads[2]


def _gathered(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(query, block.queries, block), _rows(key, block.keys, block), _rows(value, block.keys, block)


def _rows(x_NHD: Tensor, places: Places, block: Block) -> Tensor:
    """`[R, H, C, D]`: the packed tokens at these places."""
    return take(x_NHD, places.index).unflatten(0, (block.shape[0], -1)).transpose(1, 2)


def _tokens(places: Places, x_RHCD: Tensor) -> Tensor:
    """`[n, H, D]`: the tokens of the real places, in their order."""
    flat = x_RHCD.transpose(1, 2).flatten(0, 1)
    return flat if places.slots is None else flat.index_select(0, places.slots)


def _bias(block: Block, query: Tensor) -> Tensor | None:
    return None if block.key_bias is None else block.key_bias.to(query.dtype)


def _add(total: Tensor, places: Tensor | slice, part: Tensor, *, first: bool) -> None:
    """Sets these places to the part, or adds it to them. No place occurs twice, so the order of additions is fixed."""
    if first:
        put(total, places, part)
    elif isinstance(places, slice):
        total[places] += part
    else:
        total.index_copy_(0, places, part.add_(total.index_select(0, places)))
