"""Root-mean-square norms and gated MLPs of a frozen base with fewer passes over memory: the same numbers, sooner.

Written out in torch, a norm makes six tensors of its input's size forward and backward, and a gated MLP keeps three;
here each is one autograd function that keeps what its gradient needs. A module gets its function only if, on a probe,
it gives what the module gave (Gemma's norm, which adds 1 to its weight, keeps its own), and only while its weight is
frozen.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlft.model.lora_linear import together


def install(model: nn.Module) -> None:
    """Replaces the forward of every module that the functions serve."""
    with torch.no_grad():
        for module in model.modules():
            for fits, forward in ((_is_norm, _norm), (_is_gated, _gated)):
                if fits(module) and _same(module, forward):
                    module.forward = functools.partial(forward, module, module.forward)


def _same(module: Any, forward: Any) -> bool:
    """Whether the function gives what the module does, to rounding, on a probe."""
    weight = module.weight if hasattr(module, "weight") else module.gate_proj.weight
    probe = torch.linspace(-3, 3, 4 * weight.shape[-1], device=weight.device, dtype=weight.dtype).view(1, 4, -1)
    try:
        expected = module(probe)
    except (RuntimeError, TypeError):
        return False
    wide = weight.dtype in (torch.float32, torch.float64)
    return torch.allclose(forward(module, module.forward, probe), expected, rtol=1e-5 if wide else 2e-2, atol=1e-5)


# -- norms -------------------------------------------------------------------------------------------------------------
def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, Tensor)
        and weight.dim() == 1
        and _eps(module) > 0
    )


def _eps(module: Any) -> float:
    return getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)) or 0.0


def _norm(module: Any, plain: Any, x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis; in float32 at least."""
    if (
        module.weight.requires_grad
        or x.dtype not in (torch.float32, torch.float64)
        or x.shape[-1] != len(module.weight)
    ):
        return plain(x)
    if not torch.is_grad_enabled():
        return (x * _scale(x, _eps(module))).mul_(module.weight)
    return cast(Tensor, _RMSNorm.apply(x, module.weight, _eps(module)))


def _scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _scale(x, eps)
        ctx.save_for_backward(x, scale, weight)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grad_outputs
        x, scale, weight = ctx.saved_tensors
        weighted = grad * weight
        along = (weighted.flatten(0, -2)[:, None] @ x.flatten(0, -2)[:, :, None]).view_as(scale)
        back = along.mul_(scale.pow(3)).div_(-x.shape[-1])
        return weighted.mul_(scale).addcmul_(x, back), None, None


# -- gated MLPs --------------------------------------------------------------------------------------------------------
def _is_gated(module: nn.Module) -> bool:
    has_parts = all(
        isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")
    )
    return has_parts and isinstance(getattr(module, "act_fn", None), nn.Module)


def _gated(module: Any, plain: Any, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    gate, up = together(x, module.gate_proj, module.up_proj)
    if not torch.is_grad_enabled():
        return module.down_proj(F.silu(gate).mul_(up))
    return module.down_proj(_SiLUProduct.apply(gate, up))


class _SiLUProduct(torch.autograd.Function):
    """silu(gate) * up; silu is made again in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        [grad] = grad_outputs
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
