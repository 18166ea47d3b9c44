"""The two branches of a Llama-like decoder layer, each one autograd function, including the residual sum.

    attention(x) = x + o(attend(turn(q(norm x)), turn(k(norm x)), v(norm x)))
    mlp(x)       = x + down(silu(gate(norm x)) * up(norm x))

In a chain of functions, each passes its gradient to the next in a new tensor, and autograd adds up those that meet.
Here a tensor that nothing else reads is overwritten by the next result, one that several need is kept once, and q, k
and v share the low-rank products of their input. The arithmetic is that of the parts (`elementwise`, `lora_linear`,
`attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rlft.model.checkpointing import is_recomputing
from rlft.model.kernels.block_attention import Scoring
from rlft.model.kernels.elementwise import (
    Heads,
    Norm,
    as_written,
    fused,
    norm_gradient,
    normed,
    silu_product,
    turned,
    turned_back,
)
from rlft.model.kernels.lora_linear import Layers, Operands, add_product, dense, gradients, products, products_of_few
from rlft.model.kernels.row_attention import Spans, attend, attention_gradients

if TYPE_CHECKING:
    from rlft.model.kernels.prefix_cache import FlashPrefixCache


def attention(x: Tensor, heads: Heads, spans: Spans, scale: float, layers: Layers) -> Tensor:
    """`[1, N, hidden]` from x of the same shape, a packed row.

    `spans` say which tokens see which, `scale` is the factor of the scores, and `layers` are those of q, k, v and o.
    """
    if not torch.is_grad_enabled():
        return _attention(x, heads, spans, scale, layers.operands)[0]
    return cast(Tensor, _Attention.apply(x, heads, spans, scale, layers.operands, *layers.learned))


def mlp(x: Tensor, norm: Norm, layers: Layers, tile: int | None = None) -> Tensor:
    """`[.., hidden]` from x of the same shape; `layers` are those of gate, up and down.

    `tile`: how many tokens are computed at a time, x alone being kept for the backward; None: all together.
    """
    if not torch.is_grad_enabled():
        return _mlp_in_tiles(x.detach(), norm, dense(layers.operands, x.dtype), tile)
    if tile is None:
        return cast(Tensor, _Mlp.apply(x, norm, layers.operands, *layers.learned))
    return cast(Tensor, _TiledMlp.apply(x, norm, layers.operands, tile, *layers.learned))


# -- in decoding -------------------------------------------------------------------------------------------------------
def decoded_attention(
    x: Tensor, heads: Heads, cache: FlashPrefixCache, window: int | None, scale: float, layers: Sequence[Operands]
) -> Tensor:
    """`attention` for the next token of each completion, x `[1, R, hidden]`, which is overwritten; no gradient.

    There are so few numbers that the number of launches decides: products are added up in their results.
    """
    inner, _ = normed(x, *heads.norm)
    q_RHD, k_RKD, v_RKD = (part.view(len(part), -1, heads.size) for part in products_of_few(inner, layers[:3]))
    out_RHD = cache.attend(q_RHD, k_RKD, v_RKD, Scoring(scale), window, heads=heads)
    return add_product(x, out_RHD.flatten(1), layers[3])


def decoded_mlp(x: Tensor, norm: Norm, layers: Sequence[Operands]) -> Tensor:
    """`mlp` for the next token of each completion, x `[1, R, hidden]`, which is overwritten; no gradient."""
    inner, _ = normed(x, *norm)
    gate, up = products_of_few(inner, layers[:2])
    return add_product(x, silu_product(gate, up), layers[2])


# -- attention ---------------------------------------------------------------------------------------------------------
def _attention(
    x: Tensor, heads: Heads, spans: Spans, scale: float, layers: Sequence[Operands]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """(x plus the branch, tensors that its gradients need)."""
    x = x.detach()  # else it would be compiled once for an x that needs a gradient, and once for one that does not
    q_NHD, k_NKD, v_NKD, *kept = _attention_inputs(x, heads, dense(layers[:3], x.dtype))
    out_NHD, *attention_kept = attend(q_NHD, k_NKD, v_NKD, spans, Scoring(scale))
    y, low_o = _attention_output(x, out_NHD, dense(layers[3:], x.dtype))
    return y, (x, q_NHD, k_NKD, v_NKD, out_NHD, *attention_kept, low_o, *kept)


@fused
def _attention_inputs(x: Tensor, heads: Heads, layers: Sequence[Operands]) -> tuple[Any, ...]:
    """(queries, keys, values, then what the gradients need: the scale of the norm, its output as a matrix, low-rank
    products, and of queries and keys what their norms get and their scales, or None)."""
    inner, scale = as_written(normed)(x, *heads.norm)
    parts, flat, low = products(inner, layers)
    q_NHD, k_NKD, v_NKD = (part.view(part.shape[1], -1, heads.size) for part in parts)
    results, kept = [], []
    for x_NHD, head_norm in ((q_NHD, heads.query_norm), (k_NKD, heads.key_norm)):
        y, head_scale = (x_NHD, None) if head_norm is None else as_written(normed)(x_NHD, *head_norm)
        results.append(as_written(turned)(y, *heads.angles))
        kept += [None if head_norm is None else x_NHD, head_scale]
    return *results, v_NKD, scale, flat, low, *kept


@fused
def _attention_output(x: Tensor, out_NHD: Tensor, layers: Sequence[Operands]) -> tuple[Tensor, Tensor]:
    """(x plus o of the attention, low-rank products)."""
    [y], _, low = products(out_NHD.view(*x.shape[:2], -1), layers)
    return y.add_(x), low


@fused
def _output_gradients(
    grad: Tensor, out_NHD: Tensor, low: Tensor, layers: Sequence[Operands]
) -> tuple[Tensor, list[Tensor]]:
    """(gradient of the attention, those of A and B of o)."""
    out_grad, learned_grads = gradients(layers, out_NHD.flatten(1), low, [grad], of_x=True)
    return cast(Tensor, out_grad).view_as(out_NHD), learned_grads


@fused
def _input_gradients(
    grad: Tensor,  # of the branch's result
    head_grads: Sequence[Tensor],  # of queries, keys and values
    x: Tensor,
    heads: Heads,
    kept: Sequence[Tensor | None],  # the last results of `_attention_inputs`
    layers: Sequence[Operands],
    needs_x: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """(gradient of x through the branch and the residual sum, those of A and B of q, k and v)."""
    scale, flat, low, *of_heads = kept
    grads = []
    for grad_NHD, head_norm, x_NHD, head_scale in (
        (head_grads[0], heads.query_norm, *of_heads[:2]),
        (head_grads[1], heads.key_norm, *of_heads[2:]),
    ):
        back = as_written(turned_back)(grad_NHD, *heads.angles)
        if head_norm is not None:
            back = as_written(norm_gradient)(back, head_norm, cast(Tensor, x_NHD), cast(Tensor, head_scale))
        grads.append(back.flatten(1))
    grads.append(head_grads[2].flatten(1))
    inner_grad, learned_grads = gradients(layers, cast(Tensor, flat), cast(Tensor, low), grads, needs_x)
    return _summed(inner_grad, x, cast(Tensor, scale), heads.norm, grad) if needs_x else None, learned_grads


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: Heads, spans: Spans, scale: float, layers: Sequence[Operands], *learned: Tensor
    ) -> Tensor:
        y, kept = _attention(x, heads, spans, scale, layers)
        ctx.save_for_backward(*kept)
        ctx.heads, ctx.spans, ctx.scale, ctx.layers = heads, spans, scale, layers
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad], layers = grad_outputs, ctx.layers
        x, q_NHD, k_NKD, v_NKD, out_NHD, lse, random, unused, low_o, *kept = ctx.saved_tensors
        out_grad, o_grads = _output_gradients(grad, out_NHD, low_o, dense(layers[3:], x.dtype))
        of_attention = (q_NHD, k_NKD, v_NKD, out_NHD, lse, random, unused)
        head_grads = attention_gradients(out_grad, of_attention, ctx.spans, Scoring(ctx.scale))
        layers, needs_x = dense(layers[:3], x.dtype), ctx.needs_input_grad[0]
        x_grad, qkv_grads = _input_gradients(grad, head_grads, x, ctx.heads, kept, layers, needs_x)
        return x_grad, None, None, None, None, *qkv_grads, *o_grads


# -- MLP ---------------------------------------------------------------------------------------------------------------
@fused
def _mlp(x: Tensor, norm: Norm, layers: Sequence[Operands]) -> tuple[Tensor, ...]:
    """(x plus the branch, tensors that its gradients need)."""
    inner, scale = as_written(normed)(x, *norm)
    (gate, up), flat, low = products(inner, layers[:2])
    [y], _, low_down = products(as_written(silu_product)(gate, up), layers[2:])
    return y.add_(x), scale, flat, low, gate, up, low_down


@fused
def _mlp_gradients(
    grad: Tensor, x: Tensor, norm: Norm, kept: Sequence[Tensor], layers: Sequence[Operands], needs_x: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """(gradient of x through the branch and the residual sum, those of A and B of gate, up and down).

    kept: the results of `_mlp` but the first.
    """
    scale, flat, low, gate, up, low_down = kept
    gate, up = gate.flatten(0, -2), up.flatten(0, -2)
    silu = F.silu(gate)
    product_grad, down_grads = gradients(layers[2:], silu * up, low_down, [grad], of_x=True)
    product_grad = cast(Tensor, product_grad)
    grads = (torch.ops.aten.silu_backward(product_grad * up, gate), silu.mul_(product_grad))
    inner_grad, gate_up_grads = gradients(layers[:2], flat, low, grads, needs_x)
    return _summed(inner_grad, x, scale, norm, grad) if needs_x else None, gate_up_grads + down_grads


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm, layers: Sequence[Operands], *learned: Tensor) -> Tensor:
        x = x.detach()
        y, *kept = _mlp(x, norm, dense(layers, x.dtype))
        ctx.save_for_backward(x, *kept)
        ctx.norm, ctx.layers = norm, layers
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad], (x, *kept) = grad_outputs, ctx.saved_tensors
        layers = dense(ctx.layers, x.dtype)
        x_grad, learned_grads = _mlp_gradients(grad, x, ctx.norm, kept, layers, ctx.needs_input_grad[0])
        return x_grad, None, None, *learned_grads


def _mlp_in_tiles(x: Tensor, norm: Norm, layers: Sequence[Operands], tile: int | None) -> Tensor:
    """x plus the branch; no gradient."""
    if tile is None:
        return _mlp(x, norm, layers)[0]
    y = torch.empty_like(x)
    for part, of_y in zip(x.split(tile, -2), y.split(tile, -2), strict=True):
        of_y.copy_(_mlp(part, norm, layers)[0])
    return y


class _TiledMlp(torch.autograd.Function):
    """`_Mlp` for so many tokens at a time: x alone is kept, and each tile is computed again for its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm, layers: Sequence[Operands], tile: int, *learned: Tensor) -> Tensor:
        x = x.detach()
        ctx.save_for_backward(x)
        ctx.norm, ctx.layers, ctx.tile = norm, layers, tile
        if is_recomputing():  # a checkpoint wants what is saved, and its last function's output is not
            return x.new_empty(()).expand_as(x)
        return _mlp_in_tiles(x, norm, dense(layers, x.dtype), tile)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad], [x], needs_x = grad_outputs, ctx.saved_tensors, ctx.needs_input_grad[0]
        layers, x_grad = dense(ctx.layers, x.dtype), torch.empty_like(x)
        totals: list[Tensor] = []
        for part, part_grad, of_x in zip(*(t.split(ctx.tile, -2) for t in (x, grad, x_grad)), strict=True):
            _, *kept = _mlp(part, ctx.norm, layers)
            part_x_grad, learned_grads = _mlp_gradients(part_grad, part, ctx.norm, kept, layers, needs_x)
            if part_x_grad is not None:
                of_x.copy_(part_x_grad)
            totals = [a.add_(b) for a, b in zip(totals, learned_grads, strict=True)] if totals else learned_grads
        return x_grad if needs_x else None, None, None, None, *totals


def _summed(inner_grad: Tensor | None, x: Tensor, scale: Tensor, norm: Norm, grad: Tensor) -> Tensor:
    """The gradient of x through the branch and through the residual sum; it overwrites that of the norm's output."""
    return as_written(norm_gradient)(cast(Tensor, inner_grad).view_as(x), norm, x, scale, grad)
