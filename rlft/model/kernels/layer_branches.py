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
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rlft.model.kernels.attention import Spans, attend, attention_gradients
from rlft.model.kernels.elementwise import Norm, fused, norm_gradient, normed, turned, turned_back
from rlft.model.kernels.lora_linear import Operands, gradients, products, regrouped, restored


class Heads(NamedTuple):
    """How the attention of a layer is computed.

    Attributes:
        norm: the layer's input norm.
        query_norm: norm over each head of the queries before it is rotated; None if there is none.
        key_norm: the same for the keys.
        size: size of a head.
        cos: `[1, N, D]`, cosines of the rotary positions.
        sin: `[1, N, D]`, their sines.
        spans: which tokens see which.
        scale: factor of the attention scores.
    """

    norm: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    size: int
    cos: Tensor
    sin: Tensor
    spans: Spans
    scale: float


def attention(x: Tensor, heads: Heads, layers: Sequence[Operands]) -> Tensor:
    """`[1, N, hidden]` from x of the same shape, a packed row; `layers` are those of q, k, v and o."""
    if not torch.is_grad_enabled():
        return _attention(x, heads, layers)[0]
    return cast(Tensor, _Attention.apply(x, heads, *(value for layer in layers for value in layer)))


def mlp(x: Tensor, norm: Norm, layers: Sequence[Operands]) -> Tensor:
    """`[.., hidden]` from x of the same shape; `layers` are those of gate, up and down."""
    if not torch.is_grad_enabled():
        return _mlp(x, norm, layers)[0]
    return cast(Tensor, _Mlp.apply(x, norm, *(value for layer in layers for value in layer)))


# -- attention ---------------------------------------------------------------------------------------------------------
def _attention(x: Tensor, heads: Heads, layers: Sequence[Operands]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """(x plus the branch, tensors that its gradients need)."""
    inner, scale = normed(x, heads.norm.weight, heads.norm.eps)
    parts, flat, low = products(inner, layers[:3])
    q_NHD, k_NKD, v_NKD = (part.view(part.shape[1], -1, heads.size) for part in parts)
    q_NHD, *q_kept = _turned(q_NHD, heads.query_norm, heads)
    k_NKD, *k_kept = _turned(k_NKD, heads.key_norm, heads)
    out_NHD, *attention_kept = attend(q_NHD, k_NKD, v_NKD, heads.spans, heads.scale)
    [y], _, low_o = products(out_NHD.view(*x.shape[:2], -1), layers[3:])
    kept = (x, scale, flat, low, q_NHD, k_NKD, v_NKD, out_NHD, *attention_kept, low_o, *q_kept, *k_kept)
    return y.add_(x), kept


def _turned(x_NHD: Tensor, norm: Norm | None, heads: Heads) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(x after its norm and rotation, x, the norm's scale); the last two are None without a norm."""
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
        x, scale, flat, low, q_NHD, k_NKD, v_NKD, out_NHD, lse, random, unused, low_o, *rest = ctx.saved_tensors
        q_raw, q_scale, k_raw, k_scale, *rest = rest
        layers = restored(rest, ctx.scales)
        out_grad, o_grads = gradients(layers[3:], out_NHD.flatten(1), low_o, [grad], of_x=True)
        kept = (q_NHD, k_NKD, v_NKD, out_NHD, lse, random, unused)
        attention_grad = cast(Tensor, out_grad).view_as(out_NHD)
        q_grad, k_grad, v_grad = attention_gradients(attention_grad, kept, heads.spans, heads.scale)
        grads = [
            _turned_back(q_grad, heads.query_norm, q_raw, q_scale, heads),
            _turned_back(k_grad, heads.key_norm, k_raw, k_scale, heads),
            v_grad.flatten(1),
        ]
        needs_x = ctx.needs_input_grad[0]
        inner_grad, qkv_grads = gradients(layers[:3], flat, low, grads, needs_x)
        return (_summed(inner_grad, x, scale, heads.norm, grad) if needs_x else None, None, *qkv_grads, *o_grads)


# -- MLP ---------------------------------------------------------------------------------------------------------------
def _mlp(x: Tensor, norm: Norm, layers: Sequence[Operands]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(x plus the branch, tensors that its gradients need)."""
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
        layers, needs_x = restored(rest, ctx.scales), ctx.needs_input_grad[0]
        gate, up, silu = (tensor.flatten(0, -2) for tensor in (gate, up, silu))
        product = silu * up
        product_grad, down_grads = gradients(layers[2:], product, low_down, [grad], of_x=True)
        gate_grad, up_grad = _product_gradients(cast(Tensor, product_grad), gate, up, silu, product)
        inner_grad, gate_up_grads = gradients(layers[:2], flat, low, [gate_grad, up_grad], needs_x)
        return (_summed(inner_grad, x, scale, ctx.norm, grad) if needs_x else None, None, *gate_up_grads, *down_grads)


@fused
def _product_gradients(grad: Tensor, gate: Tensor, up: Tensor, silu: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of gate, gradient of up) from that of silu * up, which they overwrite together with the product."""
    up_grad = torch.mul(silu, grad, out=product)
    gate_grad = grad.mul_(up)
    torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
    return gate_grad, up_grad


def _summed(inner_grad: Tensor | None, x: Tensor, scale: Tensor, norm: Norm, grad: Tensor) -> Tensor:
    """The gradient of x through the branch and through the residual sum; it overwrites that of the norm's output."""
    weighted = cast(Tensor, inner_grad).view_as(x).mul_(norm.weight)
    return norm_gradient(weighted, x, scale).add_(grad)
