"""Adapters of stacked experts in the form that vLLM reads: a pair of matrices for each expert.

transformers stacks the experts of a layer when it reads a model, and PEFT's adapter is on the stack. vLLM names experts
as the model's files do, one by one, in most families. transformers' own way back from stacks to files, by which it
saves models, is also that of an adapter: it takes `[experts, gate and up, rank]` apart as it does `[experts, gate and
up, in]`. Some of vLLM's models take PEFT's form instead (`is_3d_moe_weight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from rlft.generation.loaded_adapter import DOWN, PREFIX, UP
from rlft.types import Adapter

OUTER, FUSED = "down_proj", "gate_up_proj"
"""The matrix of experts that PEFT's outer layer is on, and the one that holds two matrices of the files."""


def of_experts(adapter: Adapter) -> list[str]:
    """The names of the stacked matrices that the adapter is on."""
    return [name for name in adapter.config.get("target_parameters") or () if not name.endswith(".weight")]


def one_by_one(adapter: Adapter, model_path: str, **where: Any) -> Adapter:
    """The adapter with a pair of matrices for each expert; the same adapter if the model's files hold stacks.

    `where` has the revision of the model and whether its code is trusted.
    """
    config: Any = AutoConfig.from_pretrained(model_path, **where)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])._from_config(config)
    sizes = {name: len(model.get_parameter(name)) for name in of_experts(adapter)}
    weights: dict[str, Tensor] = {}
    for ending in (DOWN, UP):
        stacked = _by_parameter(adapter.weights, sizes, ending)
        for name, tensor in revert_weight_conversion(model, stacked).items():
            if tensor.dim() > 2:
                return adapter
            weights[PREFIX + name.removesuffix(".weight") + ending] = tensor
    return replace(adapter, weights=weights)


def _by_parameter(weights: Mapping[str, Tensor], sizes: Mapping[str, int], ending: str) -> dict[str, Tensor]:
    """{name of an adapted parameter: its A or its B}, of experts in the shape of their matrices."""
    result = {}
    for name, tensor in weights.items():
        if not name.endswith(ending):
            continue
        stem = name.removeprefix(PREFIX).removesuffix(ending)
        module = stem.replace(".base_layer", "")
        owned = [parameter for parameter in sizes if parameter.rpartition(".")[0] == module]
        if not owned:
            result[f"{stem}.weight"] = tensor
            continue
        inner = next((parameter for parameter in owned if not parameter.endswith(OUTER)), owned[0])
        parameter = f"{module}.{OUTER}" if stem == module else inner
        number = sizes[parameter]
        if ending == DOWN:
            stack = tensor.view(number, -1, tensor.shape[1])
            stack = torch.cat([stack, stack], 1) if parameter.endswith(FUSED) else stack
        else:
            stack = tensor.view(len(tensor), -1, number).permute(2, 0, 1)
        result[parameter] = stack
    return result
