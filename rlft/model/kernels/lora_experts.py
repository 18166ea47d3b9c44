"""LoRA on the stacked experts of a layer: each token's rows go through its experts' A and B, not through W + s B A.

PEFT's own layer adds s B A of every expert to W in every forward. Here tokens are sorted by expert, and each of W, A
and B is one grouped product (`torch.nn.functional.grouped_mm`), or a loop over experts where torch has none. PEFT's
names, initial values and files are kept: A is `[experts x rank, in]`, and B `[out, rank x experts]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional

from rlft.model.experts import mixture_of

GROUPED = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: of what lengths rows must be for `grouped_mm`
GROUPED_FROM = (8, 0)  # the compute capability of GPUs from which on torch has it


def install(config: LoraConfig, model: nn.Module) -> None:
    """Makes adapters of this config use `LoraExperts` for the stacked experts of the model."""
    config._register_custom_module(dict.fromkeys(mixture_of(model).classes, LoraExperts))


class Factors(NamedTuple):
    """An adapter of one of the experts' matrices: A `[experts, rank, in]`, B `[experts, out, rank]`, and the scale."""

    down: Tensor
    up: Tensor
    scale: float


class LoraExperts(ParamWrapper):
    """Stacked experts with adapters on one of their matrices; the layer for the next matrix is around this one."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[tokens, hidden]` from x `[tokens, hidden]`, the chosen experts and their weights, `[tokens, chosen]`."""
        if self.merged or len(args) != 2 or kwargs or (not self.disable_adapters and len(self.active_adapters) != 1):
            return super().forward(x, *args, **kwargs)
        experts, factors, layer = self.get_base_layer(), {}, self
        while isinstance(layer, ParamWrapper):
            [role] = layer.active_adapters
            if not self.disable_adapters and role in layer.lora_A:
                factors[layer.parameter_name] = _factors(layer, role)
            layer = layer.base_layer
        return experts_forward(experts, x, *args, factors)


LoraExperts.__name__ = ParamWrapper.__name__  # by which PEFT knows the layers that it may put further ones around


def _factors(layer: ParamWrapper, role: str) -> Factors:
    down, up = (cast(nn.Linear, matrices[role]).weight for matrices in (layer.lora_A, layer.lora_B))
    number = layer.num_experts
    return Factors(
        down.view(number, -1, down.shape[1]), up.view(len(up), -1, number).permute(2, 0, 1), layer.scaling[role]
    )


def experts_forward(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor, factors: Mapping[str, Factors]) -> Tensor:
    """What transformers' experts return, with these adapters {name of a matrix: factors}.

    Args:
        x: `[tokens, hidden]`.
        chosen: int64 `[tokens, k]`, the experts of each token.
        weights: `[tokens, k]`, of their outputs.
    """
    k, flat = chosen.shape[-1], chosen.reshape(-1)
    order = flat.argsort(stable=True)
    sorted_experts = flat[order]
    numbers = torch.arange(experts.num_experts, device=flat.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)  # a bincount would wait for a GPU

    def linear(rows: Tensor, name: str) -> Tensor:
        matrix = getattr(experts, name)
        y = grouped(rows, matrix if experts.is_transposed else matrix.transpose(1, 2), ends)
        if experts.has_bias:
            y = y + getattr(experts, f"{name}_bias")[sorted_experts]
        if name in factors:
            down, up, scale = factors[name]
            low = grouped(rows, down.to(rows.dtype).transpose(1, 2), ends)
            y = y + scale * grouped(low, up.to(rows.dtype).transpose(1, 2), ends)
        return y

    rows = x[order // k]
    if experts.has_gate:
        inner = experts._apply_gate(linear(rows, "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(rows, "up_proj"))
    y = linear(inner, "down_proj") * weights.reshape(-1)[order, None]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return y[places].view(*chosen.shape, -1).sum(1).to(x.dtype)


def grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """`[rows, out]`: rows `[rows, in]` up to ends[0] times matrices[0] `[in, out]`, those up to ends[1] times the next.

    `ends` is int32 `[groups]`, and the last of them the number of rows.
    """
    if has_grouped_mm(rows, matrices):
        contiguous = matrices.stride(1) == 1 or matrices.stride(2) == 1
        return functional.grouped_mm(rows, matrices if contiguous else matrices.contiguous(), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), matrices.unbind(), strict=True)])


def has_grouped_mm(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch has a grouped product of these, and of their gradients."""
    if rows.dtype not in GROUPED or any(n * rows.element_size() % ALIGNMENT for n in matrices.shape[1:]):
        return False
    return rows.device.type == "cpu" or (rows.is_cuda and torch.cuda.get_device_capability(rows.device) >= GROUPED_FROM)
