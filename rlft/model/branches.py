"""The two branches of a Llama-like decoder layer, each one autograd function with the sum it is added to.

    attention(x) = x + o(attend(turn(q(norm x)), turn(k(norm x)), v(norm x)))
    mlp(x)       = x + down(silu(gate(norm x)) * up(norm x))

Written as a chain of functions, each hands its gradient to the next in a tensor of its own, and autograd adds up those
that meet. Here a tensor that nothing else reads takes the next result, one that several need is kept once, and q, k and
v share the low-rank products of their input. The arithmetic is that of the parts (`fused`, `rotary`,
`split_attention`, `lora_linear`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rlft.model.blocks import Block
from rlft.model.fused import Norm, norm_gradient, normed
from rlft.model.lora_linear import Operands, gradients, products, regrouped, restored
from rlft.model.rotary import turned, turned_back
from rlft.model.split_attention import attend, attention_gradients


class Heads(NamedTuple):
    """How the attention of a layer is made of its queries, keys and values.

    query_norm, key_norm: over each head before it is turned, None where there is none. cos, sin `[1, N, D]`.
    """

    norm: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    size: int
    cos: Tensor
    sin: Tensor
    blocks: Sequence[Block]
    scale: float


def attention(x: Tensor, heads: Heads, layers: Sequence[Operands]) -> Tensor:
    """`[1, N, hidden]` from x of the same shape, a packed row on a CPU; layers: q, k, v and o."""
    if not torch.is_grad_enabled():
        return _attention(x, heads, layers)[0]
    return cast(Tensor, _Attention.apply(x, heads, *(value for layer in layers for value in layer)))


def mlp(x: Tensor, norm: Norm, layers: Sequence[Operands]) -> Tensor:
    """`[.., hidden]` from x of the same shape; layers: gate, up and down."""
    if not torch.is_grad_enabled():
        return _mlp(x, norm, layers)[0]
    return cast(Tensor, _Mlp.apply(x, norm, *(value for layer in layers for value in layer)))


# -- attention ---------------------------------------------------------------------------------------------------------
def _attention(x: Tensor, heads: Heads, layers: Sequence[Operands]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """(the branch and its sum with x, what its gradients need)."""
    inner, scale = normed(x, heads.norm.weight, heads.norm.eps)
    parts, flat, low = products(inner, layers[:3])
    q_NHD, k_NKD, v_NKD = (part.view(part.shape[1], -1, heads.size) for part in parts)
    q_NHD, *q_kept = _turned(q_NHD, heads.query_norm, heads)
    k_NKD, *k_kept = _turned(k_NKD, heads.key_norm, heads)
    out_NHD, lse = attend(q_NHD, k_NKD, v_NKD, heads.blocks, heads.scale)
    [y], _, low_o = products(out_NHD.view(*x.shape[:2], -1), layers[3:])
    kept = (x, scale, flat, low, q_NHD, k_NKD, v_NKD, out_NHD, lse, low_o, *q_kept, *k_kept)
    return y.add_(x), kept


def _turned(x_NHD: Tensor, norm: Norm | None, heads: Heads) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(x with its norm, turned; x and the norm's scale, if there is one)."""
    cos, sin = heads.cos.transpose(0, 1), heads.sin.transpose(0, 1)
    if norm is None:
        return turned(x_NHD, cos, sin), None, None
    y, scale = normed(x_NHD, norm.weight, norm.eps)
    return turned(y, cos, sin), x_NHD, scale


def _turned_back(
    grad_NHD: Tensor, norm: Norm | None, x_NHD: Tensor | None, scale: Tensor | None, heads: Heads
) -> Tensor:
    back = turned_back(grad_NHD, heads.cos.transpose(0, 1), heads.sin.transpose(0, 1))
    if norm is not None:
        back = norm_gradient(back.mul_(norm.weight), cast(Tensor, x_NHD), cast(Tensor, scale))
    return back.flatten(1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Heads, *operands: Any) -> Tensor:
        layers = regrouped(operands)
        y, kept = _attention(x, heads, layers)
        ctx.save_for_backward(*kept, *(tensor for layer in layers for tensor in layer.needed_backward))
        ctx.heads, ctx.scales = heads, [layer.scale for layer in layers]
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad], heads = grad_outputs, ctx.heads
        x, scale, flat, low, q_NHD, k_NKD, v_NKD, out_NHD, lse, low_o, *rest = ctx.saved_tensors
        q_raw, q_scale, k_raw, k_scale, *rest = rest
        layers = restored(rest, ctx.scales)
        out_grad, of_o = gradients(layers[3:], out_NHD.flatten(1), low_o, [grad], of_x=True)
        q_grad, k_grad, v_grad = attention_gradients(
            cast(Tensor, out_grad).view_as(out_NHD), q_NHD, k_NKD, v_NKD, out_NHD, lse, heads.blocks, heads.scale
        )
        grads = [
            _turned_back(q_grad, heads.query_norm, q_raw, q_scale, heads),
            _turned_back(k_grad, heads.key_norm, k_raw, k_scale, heads),
            v_grad.flatten(1),
        ]
        of_x = ctx.needs_input_grad[0]
        inner_grad, of_qkv = gradients(layers[:3], flat, low, grads, of_x)
        return (_summed(inner_grad, x, scale, heads.norm, grad) if of_x else None, None, *of_qkv, *of_o)


# -- MLP ---------------------------------------------------------------------------------------------------------------
def _mlp(x: Tensor, norm: Norm, layers: Sequence[Operands]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(the branch and its sum with x, what its gradients need)."""
    inner, scale = normed(x, norm.weight, norm.eps)
    (gate, up), flat, low = products(inner, layers[:2])
    silu = F.silu(gate)
    [y], _, low_down = products(silu * up, layers[2:])
    return y.add_(x), (x, scale, flat, low, gate, up, silu, low_down)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm, *operands: Any) -> Tensor:
        layers = regrouped(operands)
        y, kept = _mlp(x, norm, layers)
        ctx.save_for_backward(*kept, *(tensor for layer in layers for tensor in layer.needed_backward))
        ctx.norm, ctx.scales = norm, [layer.scale for layer in layers]
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grad_outputs
        x, scale, flat, low, gate, up, silu, low_down, *rest = ctx.saved_tensors
        layers, of_x = restored(rest, ctx.scales), ctx.needs_input_grad[0]
        gate, up, silu = (tensor.flatten(0, -2) for tensor in (gate, up, silu))
        product = silu * up
        found, of_down = gradients(layers[2:], product, low_down, [grad], of_x=True)
        product_grad = cast(Tensor, found)
        up_grad = torch.mul(silu, product_grad, out=product)
        gate_grad = product_grad.mul_(up)
        torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
        inner_grad, of_others = gradients(layers[:2], flat, low, [gate_grad, up_grad], of_x)
        return (_summed(inner_grad, x, scale, ctx.norm, grad) if of_x else None, None, *of_others, *of_down)


def _summed(inner_grad: Tensor | None, x: Tensor, scale: Tensor, norm: Norm, grad: Tensor) -> Tensor:
    """The gradient of x through the branch and beside it, in the place of that of its norm's output."""
    weighted = cast(Tensor, inner_grad).view_as(x).mul_(norm.weight)
    return norm_gradient(weighted, x, scale).add_(grad)
