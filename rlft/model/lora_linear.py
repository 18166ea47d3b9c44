"""PEFT's LoRA layer with its arithmetic in one autograd function: y = x W' + b + s (x A') B'.

PEFT computes the adapter's output, scales it and adds it to the base's, and autograd adds up two gradients of x: five
passes over `[N, out]` and `[N, in]`. Here the products are added in place as they are made, and only x and x A' are
kept. The result is the same sum in another order; the layer falls back to PEFT's own for what it does not know.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn


def install(config: LoraConfig) -> None:
    """Adapters made with this config put `LoraLinear` where PEFT would put its own layer."""
    config._register_custom_module({nn.Linear: LoraLinear})


class LoraLinear(Linear):
    """A linear layer of the base with adapters, of which one at most is active here.

    sums: by role, (W + s B A)' `[in, out]`, which multiplies a few rows a sixth faster than its transpose; for passes
    without gradient where a role is used for long without a change (sampling).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sums: dict[str, Tensor] = {}

    def add_up(self, role: str, dtype: torch.dtype | None = None) -> None:
        """Makes the role's sum, beside the base, which stays as it is. A 16-bit base gets none: B A would be lost.

        dtype: the sum is rounded to it once it is made, and x is for the product; None: that of the base.
        """
        weight = cast(nn.Linear, self.base_layer).weight
        if weight.dtype not in (torch.float32, torch.float64) or role not in self.lora_A:
            return
        up, down = (cast(nn.Linear, side[role]).weight for side in (self.lora_B, self.lora_A))
        room = self.sums.get(role)
        with torch.no_grad():
            if dtype in (None, weight.dtype):
                self.sums[role] = torch.addmm(weight.t(), down.t(), up.t(), alpha=self.scaling[role], out=room)
            else:
                self.sums[role] = torch.addmm(weight.t(), down.t(), up.t(), alpha=self.scaling[role]).to(dtype)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[.., out]` from x `[.., in]`."""
        base = cast(nn.Linear, self.base_layer)
        if self.disable_adapters and not self.merged and not args and not kwargs:
            return base(x)
        role = self._plain_role()
        if role in self.sums and not torch.is_grad_enabled():
            total = self.sums[role]
            y = (x.to(total.dtype) @ total).to(x.dtype)
            return y if base.bias is None else y.add_(base.bias)
        if role is None or args or kwargs or x.dtype != base.weight.dtype:
            return super().forward(x, *args, **kwargs)
        down, up = (cast(nn.Linear, side[role]) for side in (self.lora_A, self.lora_B))
        operands = (x, base.weight, base.bias, down.weight, up.weight, self.scaling[role])
        return _LoraProduct.apply(*operands) if torch.is_grad_enabled() else _product(*operands)[0]

    def _plain_role(self) -> str | None:
        """The active adapter, if it is the only one and nothing but two matrices."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        [role] = self.active_adapters
        if role not in self.lora_A or role in self.lora_variant or self.lora_bias.get(role, False):
            return None
        dropout = self.lora_dropout[role]
        idle = isinstance(dropout, nn.Identity) or not dropout.training
        return role if idle and not cast(nn.Linear, self.base_layer).weight.requires_grad else None


class _LoraProduct(torch.autograd.Function):
    """The adapter's float32 matrices are used in the dtype of x; their gradients are in their own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        y, flat, low = _product(x, weight, bias, down, up, scale)
        ctx.save_for_backward(flat, low, weight, down, up)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grad_outputs
        flat, low, weight, down, up = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1])
        g_low = (g @ up.to(g.dtype)).mul_(ctx.scale)
        g_down = g_low.t() @ flat if ctx.needs_input_grad[3] else None
        # Turned, because a product that is narrow in its rows is made twice as fast as one narrow in its columns.
        g_up = (low.t() @ g).mul_(ctx.scale).t() if ctx.needs_input_grad[4] else None
        g_x = None
        if ctx.needs_input_grad[0]:
            g_x = (g @ weight).addmm_(g_low, down.to(g.dtype)).view(*grad.shape[:-1], -1)
        return g_x, None, None, _as(g_down, down), _as(g_up, up), None


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x as a matrix, x A')."""
    flat = x.reshape(-1, x.shape[-1])
    low = flat @ down.to(x.dtype).t()
    y = flat @ weight.t() if bias is None else torch.addmm(bias, flat, weight.t())
    y.addmm_(low, up.to(x.dtype).t(), alpha=scale)
    return y.view(*x.shape[:-1], -1), flat, low


def _as(grad: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(parameter.dtype)
