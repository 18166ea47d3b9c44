"""Rotary positions (Su et al. 2021, arXiv 2104.09864) with fewer passes over memory: the same numbers, faster.

transformers rotates queries and keys with `q * cos + rotate_half(q) * sin`, five tensors of q's size forward and as
many backward. Here the rotated tensor is the only one made, and only cos and sin are kept.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rlft.model.kernels.fusion import fused


def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[B, H, N, D]` and keys `[B, K, N, D]` rotated by their positions; cos and sin are `[B, N, D]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if not torch.is_grad_enabled():
        return turned(q, cos, sin), turned(k, cos, sin)
    return cast(Tensor, _Rotation.apply(q, cos, sin)), cast(Tensor, _Rotation.apply(k, cos, sin))


@fused
def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x1 cos1 - x2 sin1, x2 cos2 + x1 sin2), with x1 and x2 the halves of the last axis; a new tensor."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


@fused
def turned_back(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of x from that of `turned`: (g1 cos1 + g2 sin2, g2 cos2 - g1 sin1)."""
    half = g.shape[-1] // 2
    back = g * cos
    back[..., :half].addcmul_(g[..., half:], sin[..., half:])
    back[..., half:].addcmul_(g[..., :half], sin[..., :half], value=-1)
    return back


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return turned_back(*grad_outputs, *ctx.saved_tensors), None, None
