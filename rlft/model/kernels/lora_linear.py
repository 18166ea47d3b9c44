"""PEFT's LoRA layer with its arithmetic in one autograd function: y = x W' + b + s (x A') B'.

PEFT computes the adapter's output, scales it and adds it to the base's, and autograd adds up two gradients of x: five
passes over `[N, out]` and `[N, in]`. Here the products are added in place as they are made, and only x and x A' are
kept. Layers that read the same x share its low-rank products and the sum of its gradients (`products`, `gradients`;
`layer_branches.py` has them). Where W + s B A exists already (`LoraLinear.lend`), y and the gradient of x are one
product each. The result is the same sum in another order; for what it does not know the layer falls back to PEFT's own
forward, also for DoRA with gradient: only sums include its magnitudes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn


def install(config: LoraConfig) -> None:
    """Makes adapters of this config use `LoraLinear` instead of PEFT's own layer."""
    config._register_custom_module({nn.Linear: LoraLinear})


class Operands(NamedTuple):
    """The matrices of one layer with which `products` multiplies x.

    Attributes:
        weight: W of the base.
        bias: b of the base, if it has one.
        down: A; None if the layer has no adapter.
        up: B; None if the layer has no adapter.
        total: (W + s B A)' `[in, out]`, if it exists.
        scale: s.
    """

    weight: Tensor
    bias: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None
    total: Tensor | None = None
    scale: float = 0.0

    @property
    def rank(self) -> int:
        return 0 if self.down is None else len(self.down)

    @property
    def needed_backward(self) -> tuple[Tensor | None, ...]:
        """What to pass to `save_for_backward`; `restored` makes operands of it."""
        return self.weight, self.down, self.up, self.total


def restored(saved: Sequence[Tensor | None], scales: Sequence[float]) -> list[Operands]:
    """The operands of as many layers as there are scales, from their concatenated `needed_backward`."""
    rows = [saved[i : i + 4] for i in range(0, 4 * len(scales), 4)]
    return [
        Operands(weight=cast(Tensor, weight), down=down, up=up, total=total, scale=scale)
        for (weight, down, up, total), scale in zip(rows, scales, strict=True)
    ]


def regrouped(flat: Sequence[Any]) -> list[Operands]:
    """Operands of several layers, whose fields were passed to an autograd function one after the other."""
    size = len(Operands._fields)
    return [Operands(*flat[i : i + size]) for i in range(0, len(flat), size)]


class LoraLinear(Linear):
    """A linear layer of the base with adapters, of which one at most is active here.

    `sums` is {role: (W + s B A)' `[in, out]`, with DoRA's magnitudes if it has them}, for passes without gradient by a
    role that does not change for long (sampling); this form multiplies a few rows a sixth faster than its transpose.
    `lent` is {role: (another role's sum, the role's own matrices, their versions when the sum was lent)}.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sums: dict[str, Tensor] = {}
        self.lent: dict[str, tuple[Tensor, tuple[Tensor, Tensor], tuple[int, ...]]] = {}

    def add_up(self, role: str, dtype: torch.dtype | None = None) -> None:
        """Makes the role's sum, and leaves the base as it is. A 16-bit base gets no sum, since B A would be lost.

        The sum, and x for the product, are rounded to `dtype`; None: that of the base.
        """
        weight = cast(nn.Linear, self.base_layer).weight
        if weight.dtype not in (torch.float32, torch.float64) or role not in self.lora_A:
            return
        down, up = self._matrices(role)
        rounded = dtype not in (None, weight.dtype)
        old_sum = None if rounded else self.sums.get(role)
        self.lent.clear()  # the new sum overwrites what was lent
        with torch.no_grad():
            total = torch.addmm(weight.t(), down.t(), up.t(), alpha=self.scaling[role], out=old_sum)
            if role in self.lora_variant:
                self._give_magnitudes(role, total)
            self.sums[role] = total.to(dtype) if rounded else total

    def _give_magnitudes(self, role: str, total: Tensor) -> None:
        """Scales the weights of each output, a column of `[in, out]`, to the length that the role has learned for it
        (DoRA, arXiv 2402.09353, equation 5)."""
        magnitude = cast(Tensor, self.lora_magnitude_vector[role].weight)
        total.mul_(magnitude / torch.linalg.norm(total, dim=0))

    def lend(self, lender: str, role: str) -> None:
        """Lets `role` use the lender's sum in passes with gradient, until one of its two matrices changes.

        Nothing is lent unless the lender has the same matrices and scale, and a sum that is not rounded.
        """
        self.lent.pop(role, None)
        if role in self.lora_variant or lender in self.lora_variant:
            return
        if lender not in self.sums or self.sums[lender].dtype != cast(nn.Linear, self.base_layer).weight.dtype:
            return
        lender_matrices, own = (self._matrices(name) for name in (lender, role))
        if self.scaling[lender] == self.scaling[role] and all(
            torch.equal(a, b) for a, b in zip(lender_matrices, own, strict=True)
        ):
            self.lent[role] = (self.sums[lender], own, tuple(matrix._version for matrix in own))

    def _matrices(self, role: str) -> tuple[Tensor, Tensor]:
        """A and B of this role."""
        return cast(nn.Linear, self.lora_A[role]).weight, cast(nn.Linear, self.lora_B[role]).weight

    def _borrowed(self, role: str) -> Tensor | None:
        """The sum that was lent to the role, if the role's matrices have not changed since then."""
        if role not in self.lent:
            return None
        total, lent_matrices, versions = self.lent[role]
        matrices = self._matrices(role)
        unchanged = all(a is b and a._version == v for a, b, v in zip(matrices, lent_matrices, versions, strict=True))
        return total if unchanged else None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[.., out]` from x `[.., in]`."""
        base = cast(nn.Linear, self.base_layer)
        if self.disable_adapters and not self.merged and not args and not kwargs:
            return base(x)
        role = self._lone_role()
        if role in self.sums and not torch.is_grad_enabled():
            total = self.sums[role]
            y = (x.to(total.dtype) @ total).to(x.dtype)
            return y if base.bias is None else y.add_(base.bias)
        operands = None if args or kwargs else self.operands(x)
        if operands is None:
            return super().forward(x, *args, **kwargs)
        if not torch.is_grad_enabled():
            return products(x, [operands])[0][0]
        return cast(Tensor, _LoraProduct.apply(x, *operands))

    def operands(self, x: Tensor) -> Operands | None:
        """The operands of `forward`, if it is two products and nothing else; otherwise None."""
        base, role = cast(nn.Linear, self.base_layer), self._lone_role()
        if (
            role is None
            or role in self.lora_variant
            or x.dtype != base.weight.dtype
            or (role in self.sums and not torch.is_grad_enabled())
        ):
            return None
        total = self._borrowed(role) if torch.is_grad_enabled() else None
        return Operands(base.weight, base.bias, *self._matrices(role), total, self.scaling[role])

    def _lone_role(self) -> str | None:
        """The active adapter, if it is the only one and has just two matrices, perhaps with magnitudes (DoRA)."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        [role] = self.active_adapters
        if role not in self.lora_A or self.lora_bias.get(role, False):
            return None
        dropout = self.lora_dropout[role]
        idle = isinstance(dropout, nn.Identity) or not dropout.training
        return role if idle and not cast(nn.Linear, self.base_layer).weight.requires_grad else None


def operands_of(x: Tensor, layers: Iterable[nn.Module]) -> list[Operands] | None:
    """The operands of layers for x, or tensors like it; None if one of the layers does more than multiply with them.

    The layers may include frozen linear layers without an adapter.
    """
    operands: list[Operands] = []
    for layer in layers:
        layer_operands = layer.operands(x) if isinstance(layer, LoraLinear) else _frozen(x, layer)
        if layer_operands is None:
            return None
        operands.append(layer_operands)
    return operands


def _frozen(x: Tensor, layer: nn.Module) -> Operands | None:
    if (
        type(layer) is not nn.Linear
        or any(p.requires_grad for p in layer.parameters())
        or x.dtype != layer.weight.dtype
    ):
        return None
    return Operands(layer.weight, layer.bias)


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *operands: Any) -> Tensor:
        layer = Operands(*operands)
        [y], flat, low = products(x, [layer])
        ctx.save_for_backward(flat, low, *layer.needed_backward)
        ctx.scale = layer.scale
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        flat, low, *saved = ctx.saved_tensors
        x_grad, operand_grads = gradients(
            restored(saved, [ctx.scale]), flat, low, grad_outputs, ctx.needs_input_grad[0]
        )
        shape = grad_outputs[0].shape[:-1]
        return (None if x_grad is None else x_grad.view(*shape, -1), *operand_grads)


def products(x: Tensor, layers: Sequence[Operands]) -> tuple[list[Tensor], Tensor, Tensor]:
    """(y `[.., out]` of each layer, x as a matrix `[N, in]`, x A' of all layers side by side `[N, ranks]`)."""
    flat, lent = x.reshape(-1, x.shape[-1]), _all_lent(layers)
    low = flat @ _downs(layers).to(x.dtype).t()
    ys = []
    for layer, layer_low in zip(layers, low.split([layer.rank for layer in layers], 1), strict=True):
        weight = layer.total if lent and layer.total is not None else layer.weight.t()
        y = flat @ weight if layer.bias is None else torch.addmm(layer.bias, flat, weight)
        if layer.up is not None and not lent:
            y.addmm_(layer_low, layer.up.to(x.dtype).t(), alpha=layer.scale)
        ys.append(y.view(*x.shape[:-1], y.shape[-1]))
    return ys, flat, low


def gradients(
    layers: Sequence[Operands], flat: Tensor, low: Tensor, grads: Sequence[Tensor], of_x: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(gradient of x `[N, in]`, those of every layer's operands in their order), from those of the layers' y.

    The results are new tensors. An adapter's float32 matrices are used in the dtype of x; their gradients are in their
    own dtype. `flat` and `low` are from `products`; `of_x`: whether the gradient of x is needed.
    """
    lent, sizes, low_grad = _all_lent(layers), [layer.rank for layer in layers], torch.empty_like(low)
    ups: list[Tensor | None] = []
    x_grad: Tensor | None = None
    for layer, layer_low, layer_low_grad, grad in zip(
        layers, low.split(sizes, 1), low_grad.split(sizes, 1), grads, strict=True
    ):
        g = grad.reshape(-1, grad.shape[-1])
        if layer.up is None:
            ups.append(None)
        else:
            torch.addmm(layer_low_grad, g, layer.up.to(g.dtype), beta=0, alpha=layer.scale, out=layer_low_grad)
            # Transposed, because a product with few rows is computed twice as fast as one with few columns.
            up = torch.addmm(g.new_empty(()), layer_low.t(), g, beta=0, alpha=layer.scale)
            ups.append(up.t().to(layer.up.dtype))
        if of_x:
            weight = layer.total.t() if lent and layer.total is not None else layer.weight
            x_grad = g @ weight if x_grad is None else x_grad.addmm_(g, weight)
    downs = (low_grad.t() @ flat).split(sizes)
    if x_grad is not None and not lent:
        x_grad.addmm_(low_grad, _downs(layers).to(low_grad.dtype))
    results: list[Tensor | None] = []
    for layer, down, up in zip(layers, downs, ups, strict=True):
        results += [None, None, None if layer.down is None else down.to(layer.down.dtype), up, None, None]
    return x_grad, results


def _all_lent(layers: Sequence[Operands]) -> bool:
    """Whether every adapter's sum with its base exists; if one is missing, none is used."""
    return all(layer.total is not None for layer in layers if layer.down is not None)


def _downs(layers: Sequence[Operands]) -> Tensor:
    """A of all layers, one below the other `[ranks, in]`."""
    downs = [layer.down for layer in layers if layer.down is not None]
    return downs[0] if len(downs) == 1 else torch.cat([layers[0].weight[:0], *downs])
