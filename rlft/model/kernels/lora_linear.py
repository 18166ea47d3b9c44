"""PEFT's LoRA layer with its arithmetic in one autograd function: y = x W' + b + s (x A') B'.

PEFT computes the adapter's output, scales it and adds it to the base's, and autograd adds up two gradients of x: five
passes over `[N, out]` and `[N, in]`. Here the products are added in place as they are made, and only x and x A' are
kept. Layers that read the same x share its low-rank products and the sum of its gradients (`products`, `gradients`;
`decoder_layer.py` has them). Where W + s B A exists already (`LoraLinear.lend`), y and the gradient of x are one
product each. The result is the same sum in another order; for what it does not know the layer falls back to PEFT's own
forward, also for DoRA with gradient: only sums include its magnitudes.

A base that bitsandbytes holds in 4 bits is multiplied as it does itself: its function gives W in 16 bits for a product,
in the forward and again in the backward (`dense`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from rlft.system.products import Weight


def install(config: LoraConfig) -> None:
    """Makes adapters of this config use `LoraLinear` instead of PEFT's own layer, except where a base computes more."""
    config._register_custom_module({nn.Linear: cast(Any, _layer_of)})  # which PEFT only calls


def _layer_of(target: nn.Module, *args: Any, **kwargs: Any) -> Linear:
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    is_known = type(base).forward is nn.Linear.forward or is_4bit(base)
    return (LoraLinear if is_known else Linear)(target, *args, **kwargs)


def is_4bit(layer: nn.Module) -> bool:
    """Whether bitsandbytes, which is imported where it is, holds the layer's weights in 4 bits."""
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    return bitsandbytes is not None and type(layer) is bitsandbytes.nn.Linear4bit


class Operands(NamedTuple):
    """The matrices of one layer with which `products` multiplies x, all in the dtype of x and without gradient."""

    weight: Tensor  # W of the base, or its 4-bit numbers, of which `dense` makes W
    bias: Tensor | None = None  # b of the base, if it has one
    down: Tensor | None = None  # A; None if the layer has no adapter
    up: Tensor | None = None  # B; None if the layer has no adapter
    total: Tensor | None = None  # (W + s B A)' `[in, out]`, if it exists
    scale: float = 0.0  # s
    dtype: torch.dtype = torch.float32  # that of the parameters that A and B are copies of, and so of their gradients
    state: Any = None  # bitsandbytes' scales of 4-bit numbers; None where `weight` is W

    @property
    def rank(self) -> int:
        return 0 if self.down is None else len(self.down)


class Layers(NamedTuple):
    """Linear layers that are computed together."""

    operands: Sequence[Operands]
    # The parameters A and B of every layer that has them, one after the other: autograd's inputs.
    learned: Sequence[Tensor]

    @property
    def in_4_bits(self) -> bool:
        """Whether one of them has its base in 4 bits."""
        return any(layer.state is not None for layer in self.operands)


class LoraLinear(Linear):
    """A linear layer of the base with adapters, of which one at most is active here.

    `sums` is {role: (W + s B A)' `[in, out]`, with DoRA's magnitudes if it has them, perhaps rounded}, for passes
    without gradient by a role that does not change for long (sampling); this form multiplies a few rows a sixth faster
    than its transpose.
    `lent` is {role: (another role's sum, the role's own matrices, their versions when the sum was lent)}; `copies`
    is {role: (its matrices in the base's dtype, the matrices themselves, their versions when they were copied)}.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sums: dict[str, Weight] = {}
        self.lent: dict[str, tuple[Tensor, tuple[Tensor, Tensor], tuple[int, ...]]] = {}
        self.copies: dict[str, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[int, ...]]] = {}

    def add_up(self, role: str, dtype: torch.dtype | None = None) -> None:
        """Makes the role's sum, and leaves the base as it is. A 16-bit base gets no sum, since B A would be lost.

        The sum, and x for the product, are rounded to `dtype` (`rlft.system.products`); None: that of the base.
        """
        weight = cast(nn.Linear, self.base_layer).weight
        if weight.dtype not in (torch.float32, torch.float64) or role not in self.lora_A:
            return
        dtype = weight.dtype if dtype is None else dtype
        old_sum = self.sums.get(role)
        reused = old_sum.values if old_sum is not None and dtype == old_sum.dtype == weight.dtype else None
        self.lent.clear()  # the new sum overwrites what was lent
        self.sums[role] = self._sum(role, dtype, reused)

    def differs(self, role: str) -> Tensor | None:
        """Bool `[]`: whether a sum or copies that the role's passes would use here are not what its matrices give now.

        It is not waited for. None: the passes would use none.
        """
        matrices, total = self._matrices(role), self.sums.get(role)
        copies, copied, versions = self.copies.get(role, ((), (), ()))
        wrong = [] if total is None else [total.differs(self._sum(role, total.dtype))]
        if copies and _unchanged(matrices, copied, versions):
            wrong += [(copy != matrix.to(copy.dtype)).any() for copy, matrix in zip(copies, matrices, strict=True)]
        return torch.stack(wrong).any() if wrong else None

    @torch.no_grad()
    def _sum(self, role: str, dtype: torch.dtype, out: Tensor | None = None) -> Weight:
        weight, (down, up) = cast(nn.Linear, self.base_layer).weight, self._matrices(role)
        total = torch.addmm(weight.t(), down.t(), up.t(), alpha=self.scaling[role], out=out)
        if role in self.lora_variant:
            # The weights of each output, a column of `[in, out]`, get the length that the role has learned for it
            # (DoRA, arXiv 2402.09353, equation 5).
            total.mul_(cast(Tensor, self.lora_magnitude_vector[role].weight) / torch.linalg.norm(total, dim=0))
        return Weight.of(total, dtype)

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
            self.lent[role] = (self.sums[lender].values, own, tuple(matrix._version for matrix in own))

    def _matrices(self, role: str) -> tuple[Tensor, Tensor]:
        return cast(nn.Linear, self.lora_A[role]).weight, cast(nn.Linear, self.lora_B[role]).weight

    def _copies(self, role: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The role's matrices in this dtype and without gradient, written again when a matrix has changed.

        They stay where they are, since CUDA graphs read them there, and are parameters, whose sizes are constants to
        torch.compile.
        """
        matrices = self._matrices(role)
        now = tuple(matrix._version for matrix in matrices)
        if (known := self.copies.get(role)) is not None and known[0][0].dtype == dtype:
            copies, copied, versions = known
            if _unchanged(matrices, copied, versions):
                return copies
            # In the matrices' own dtype a copy is the matrix itself, perhaps one that is used elsewhere by now.
            if dtype != matrices[0].dtype and all(x.shape == y.shape for x, y in zip(copies, matrices, strict=True)):
                for copy, matrix in zip(copies, matrices, strict=True):
                    copy.data.copy_(matrix.detach())
                self.copies[role] = (copies, matrices, now)
                return copies
        down, up = (nn.Parameter(matrix.detach().to(dtype), requires_grad=False) for matrix in matrices)
        self.copies[role] = ((down, up), matrices, now)
        return down, up

    def in_use(self) -> Sequence[Tensor | None]:
        """What passes without gradient read besides parameters: the sum of the active adapter, or its copies."""
        role = self._lone_role() or ""
        return self.sums.get(role) or self.copies.get(role, ((),))[0]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[.., out]` from x `[.., in]`."""
        base = cast(nn.Linear, self.base_layer)
        if self.disable_adapters and not self.merged and not args and not kwargs:
            return base(x)
        role = self._lone_role()
        if role in self.sums and not torch.is_grad_enabled():
            return self.sums[role].times(x, base.bias)
        layers = None if args or kwargs else layers_of(x, [self])
        if layers is None:
            return super().forward(x, *args, **kwargs)
        if not torch.is_grad_enabled():
            [layer] = layers.operands
            if layer.state is None:
                return products(x, layers.operands)[0][0]
            y = base(x)  # for a few rows bitsandbytes reads W as it is
            low = x.reshape(-1, x.shape[-1]) @ _downs(layers.operands).t()
            _with_product(y.view(-1, y.shape[-1]), low, cast(Tensor, layer.up).t(), layer.scale)
            return y
        # As a matrix: some models overwrite the result, which torch forbids where a function returns a view.
        y = cast(Tensor, _LoraProduct.apply(x.reshape(-1, x.shape[-1]), layers.operands, *layers.learned))
        return y.view(*x.shape[:-1], y.shape[-1])

    def operands(self, x: Tensor) -> tuple[Operands, tuple[Tensor, Tensor]] | None:
        """The operands of `forward` and their parameters, if it is two products and nothing else; otherwise None."""
        base, role = _of_base(cast(nn.Linear, self.base_layer), x), self._lone_role()
        if base is None or role is None or role in self.lora_variant:
            return None
        if role in self.sums and not torch.is_grad_enabled():
            return None
        learned, total = self._matrices(role), None
        if role in self.lent and torch.is_grad_enabled():
            lent, lent_matrices, versions = self.lent[role]
            total = lent if _unchanged(learned, lent_matrices, versions) else None
        down, up = self._copies(role, x.dtype)
        adapter = {"down": down, "up": up, "total": total, "scale": self.scaling[role], "dtype": learned[0].dtype}
        return base._replace(**adapter), learned

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


def scales_of(state: Any) -> list[Tensor]:
    """The tensors of bitsandbytes' `quant_state`, whose scales may have scales of their own; none of None."""
    held = [] if state is None else vars(state).values()
    return [x for y in held for x in ([y] if isinstance(y, Tensor) else scales_of(y) if type(y) is type(state) else [])]


def _unchanged(matrices: Sequence[Tensor], known: Sequence[Tensor], versions: Sequence[int]) -> bool:
    """Whether these are the matrices that are known, and nothing was written to them since they had these versions."""
    return all(a is b and a._version == v for a, b, v in zip(matrices, known, versions, strict=True))


def layers_of(x: Tensor, modules: Iterable[nn.Module]) -> Layers | None:
    """The layers of these modules for x, or tensors like it; None if one of them does more than multiply with them.

    Among them may be frozen linear layers without an adapter.
    """
    operands: list[Operands] = []
    learned: list[Tensor] = []
    for module in modules:
        if isinstance(module, LoraLinear):
            adapted = module.operands(x)
            if adapted is None:
                return None
            operands.append(adapted[0])
            learned += adapted[1]
            continue
        is_own = "forward" not in vars(module)  # else it multiplies with a rounded copy of its weight
        is_linear = (type(module) is nn.Linear and is_own) or is_4bit(module)
        is_frozen = not any(parameter.requires_grad for parameter in module.parameters())
        base = _of_base(cast(nn.Linear, module), x) if is_linear and is_frozen else None
        if base is None:
            return None
        operands.append(base)
    return Layers(operands, learned)


def _of_base(base: nn.Linear, x: Tensor) -> Operands | None:
    """The operands of a linear layer of the base; None if it computes in another dtype than that of x."""
    if not is_4bit(base):
        return Operands(base.weight, base.bias) if base.weight.dtype == x.dtype else None
    state: Any = getattr(base.weight, "quant_state", None)
    bias_dtype = x.dtype if base.bias is None else base.bias.dtype
    # For some CPUs bitsandbytes packs the numbers in another way, which only its own forward can read.
    is_readable = state is not None and not getattr(state, "packing_format_for_cpu", False)
    is_of_x = base.compute_dtype == bias_dtype == x.dtype
    return Operands(base.weight, base.bias, state=state) if is_readable and is_of_x else None


def dense(layers: Sequence[Operands], dtype: torch.dtype) -> Sequence[Operands]:
    """The same with W in this dtype where the base has 4 bits: for the products at hand, and not to be kept.

    It is a parameter, whose sizes are constants to torch.compile.
    """
    return [
        layer
        if layer.state is None
        else layer._replace(weight=nn.Parameter(_dequantized(layer).to(dtype), requires_grad=False), state=None)
        for layer in layers
    ]


def _dequantized(layer: Operands) -> Tensor:
    return sys.modules["bitsandbytes"].functional.dequantize_4bit(layer.weight.data, layer.state)


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, operands: Sequence[Operands], *learned: Tensor) -> Tensor:
        [y], flat, low = products(x, dense(operands, x.dtype))
        ctx.save_for_backward(flat, low)
        ctx.operands = operands
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        flat, low = ctx.saved_tensors
        layers = dense(ctx.operands, flat.dtype)
        x_grad, learned_grads = gradients(layers, flat, low, grad_outputs, ctx.needs_input_grad[0])
        shape = grad_outputs[0].shape[:-1]
        return None if x_grad is None else x_grad.view(*shape, -1), None, *learned_grads


def products(x: Tensor, layers: Sequence[Operands]) -> tuple[list[Tensor], Tensor, Tensor]:
    """(y `[.., out]` of each layer, x as a matrix `[N, in]`, x A' of all layers side by side `[N, ranks]`)."""
    flat, lent = x.reshape(-1, x.shape[-1]), _all_lent(layers)
    low = flat @ _downs(layers).t()
    ys = []
    for layer, layer_low in zip(layers, low.split([layer.rank for layer in layers], 1), strict=True):
        weight = layer.total if lent and layer.total is not None else layer.weight.t()
        y = flat @ weight if layer.bias is None else torch.addmm(layer.bias, flat, weight)
        if layer.up is not None and not lent:
            y = _with_product(y, layer_low, layer.up.t(), layer.scale)
        ys.append(y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1]))
    return ys, flat, low


def products_of_few(x: Tensor, layers: Sequence[Operands]) -> list[Tensor]:
    """y `[N, out]` of each layer for x `[.., in]` of a few tokens: as few launches as can be, and no gradient.

    All layers share the product with A; those side by side whose B have one shape and scale share the one with B.
    """
    flat, ys, start = x.reshape(-1, x.shape[-1]), [], 0
    downs = [layer.down for layer in layers if layer.down is not None]
    low = flat @ _stacked(downs).t() if downs else flat[:, :0]
    for _, group in groupby(layers, lambda layer: (layer.up is None, layer.weight.shape, layer.rank, layer.scale)):
        alike = list(group)
        together = flat.new_empty(len(alike), len(flat), len(alike[0].weight))
        for y, layer in zip(together, alike, strict=True):
            if layer.bias is None:
                torch.mm(flat, layer.weight.t(), out=y)
            else:
                torch.addmm(layer.bias, flat, layer.weight.t(), out=y)
        if ups := [layer.up for layer in alike if layer.up is not None]:
            end, shape = start + len(alike) * alike[0].rank, (len(alike), -1)
            of_group = low[:, start:end].unflatten(1, shape).transpose(0, 1)
            together.baddbmm_(of_group, _stacked(ups).unflatten(0, shape).transpose(1, 2), alpha=alike[0].scale)
            start = end
        ys += together.unbind()
    return ys


def add_product(total: Tensor, x: Tensor, layer: Operands) -> Tensor:
    """total `[.., out]`, to which the layer's product with x `[.., in]` is added in place; no gradient."""
    flat, sums = x.reshape(-1, x.shape[-1]), total.view(-1, total.shape[-1])
    sums.addmm_(flat, layer.weight.t())
    if layer.bias is not None:
        sums.add_(layer.bias)
    if layer.down is not None and layer.up is not None:
        sums.addmm_(flat @ layer.down.t(), layer.up.t(), alpha=layer.scale)
    return total


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """These matrices `[rows, n]`, one below the other. They become parts of it, so that nothing is kept twice."""
    first, size = parts[0], (sum(map(len, parts)), parts[0].shape[1])
    if all(a.data_ptr() + a.numel() * a.element_size() == b.data_ptr() for a, b in pairwise(parts)) and all(
        part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in parts
    ):
        return first.as_strided(size, first.stride())
    stack = torch.cat(list(parts))
    for part, own in zip(parts, stack.split([len(part) for part in parts]), strict=True):
        part.data = own
    return stack


def gradients(
    layers: Sequence[Operands], flat: Tensor, low: Tensor, grads: Sequence[Tensor], of_x: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """(gradient of x `[N, in]`, those of A and B of every adapter in their order), from those of the layers' y.

    The results are new tensors; those of A and B are in the dtype of their parameters. `flat` and `low` are from
    `products`; `of_x`: whether the gradient of x is needed.
    """
    lent, sizes = _all_lent(layers), [layer.rank for layer in layers]
    ups: list[Tensor] = []
    low_grads: list[Tensor] = []
    x_grad: Tensor | None = None
    for layer, layer_low, grad in zip(layers, low.split(sizes, 1), grads, strict=True):
        g = grad.reshape(-1, grad.shape[-1])
        if layer.up is not None:
            low_grads.append(_scaled_product(g, layer.up, layer.scale))
            # Transposed, because a product with few rows is computed twice as fast as one with few columns.
            ups.append(_scaled_product(layer_low.t(), g, layer.scale).t().to(layer.dtype))
        if of_x:
            weight = layer.total.t() if lent and layer.total is not None else layer.weight
            x_grad = g @ weight if x_grad is None else _with_product(x_grad, g, weight)
    low_grad = low_grads[0] if len(low_grads) == 1 else torch.cat([low[:, :0], *low_grads], 1)
    if x_grad is not None and not lent:
        x_grad = _with_product(x_grad, low_grad, _downs(layers))
    adapted = [layer for layer in layers if layer.down is not None]
    downs = (low_grad.t() @ flat).split([layer.rank for layer in adapted])
    learned_grads: list[Tensor] = []
    for layer, down, up in zip(adapted, downs, ups, strict=True):
        learned_grads += [down.to(layer.dtype), up]
    return x_grad, learned_grads


def _with_product(y: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """y + scale a b, in the place of y. Compiled, the sum is left to the next pass over it: Inductor would copy y."""
    return y + scale * (a @ b) if torch.compiler.is_compiling() else y.addmm_(a, b, alpha=scale)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale a b."""
    if torch.compiler.is_compiling():
        return scale * (a @ b)
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _all_lent(layers: Sequence[Operands]) -> bool:
    """Whether every adapter's sum with its base exists; if one is missing, none is used."""
    return all(layer.total is not None for layer in layers if layer.down is not None)


def _downs(layers: Sequence[Operands]) -> Tensor:
    """A of all layers, one below the other `[ranks, in]`."""
    downs = [layer.down for layer in layers if layer.down is not None]
    return downs[0] if len(downs) == 1 else torch.cat([layers[0].weight[:0], *downs])
