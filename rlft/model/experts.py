"""Mixtures of experts by rule: which modules of a model are experts, and which are routers that choose among them.

Since transformers 5 the experts of a layer are one module whose matrices are stacked, `[experts, out, in]` or, where
`is_transposed`, `[experts, in, out]`. LoRA can be on those modules that follow transformers' interface of experts
(`use_experts_implementation` in integrations/moe.py). Shared experts, which every token reaches, are MLPs like others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peft.utils import transformers_weight_conversion
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlft.model.adapter_folder import ROUTER

EXPERTS = "experts"  # what a module of experts is called in most models

INTERFACE = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts and routers of a model, by the names of its modules."""

    # {a module of stacked experts: the names of its matrices, empty if LoRA cannot be on them}.
    stacked: Mapping[str, tuple[str, ...]]
    linear: frozenset[str]  # linear layers of experts that are modules of their own
    # Modules with a matrix from which experts are chosen or weighed; linear layers and others.
    routers: Mapping[str, nn.Module]
    classes: frozenset[type[nn.Module]]  # those of the stacked experts that LoRA can be on

    @property
    def linear_routers(self) -> set[str]:
        return {name for name, module in self.routers.items() if isinstance(module, nn.Linear)}

    def parameters(self, *, experts: bool, router: bool) -> list[str]:
        """Names of the parameters that an adapter is on: the experts' matrices, and those of routers that are no linear
        layers, as far as they are asked for."""
        names = [f"{name}.{own}" for name, matrices in self.stacked.items() for own in matrices] if experts else []
        others = sorted(self.routers.keys() - self.linear_routers) if router else []
        return names + [f"{name}.weight" for name in others]


def mixture_of(model: nn.Module) -> Mixture:
    """The experts and routers of a model, loaded or empty, without adapters."""
    stacked: dict[str, tuple[str, ...]] = {}
    linear, routers, classes, blocks = set(), {}, set(), set()
    for name, module in model.named_modules():
        block, _, own = name.rpartition(".")
        if own == EXPERTS or _is_stacked(module):
            blocks.add(block)
        if _is_stacked(module):
            stacked[name] = matrices = _matrices(module)
            classes |= {type(module)} if matrices else set()
        elif isinstance(module, (nn.Linear, Conv1D)) and re.search(rf"(^|\.){EXPERTS}\.\d+\.", name):
            linear.add(name)
    for block in blocks:
        for own, child in model.get_submodule(block).named_children():
            if ROUTER.fullmatch(own):
                path = f"{block}.{own}" if block else own
                routers |= {f"{path}.{n}".rstrip("."): m for n, m in child.named_modules() if _has_matrix(m)}
    return Mixture(stacked=stacked, linear=frozenset(linear), routers=routers, classes=frozenset(classes))


def _is_stacked(module: nn.Module) -> bool:
    three = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return three and "expert" in type(module).__name__.lower()


def _matrices(module: nn.Module) -> tuple[str, ...]:
    """The names of stacked matrices that LoRA can be on, in the order in which they are computed."""
    if not all(hasattr(module, field) for field in INTERFACE):
        return ()
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _has_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


# -- PEFT's names of what is adapted -----------------------------------------------------------------------------------
CONVERTED = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of linear layers that PEFT 0.21 reads as those of experts, or as their router, in some families of models
(`_convert_peft_config_moe` in utils/transformers_weight_conversion.py), although they may be of other modules."""


def is_mistaken(name: str, model_type: str) -> bool:
    """Whether PEFT would take this linear layer of a model of this type for one of an expert."""
    peft: Any = transformers_weight_conversion
    is_converted = peft._MODEL_TO_CONVERSION_PATTERN.get(model_type) in peft._MOE_TARGET_MODULE_MAPPING
    return is_converted and name.rpartition(".")[2] in CONVERTED


def named_for_peft(modules: Iterable[str], parameters: Iterable[str], model_type: str) -> tuple[list[str], list[str]]:
    """(`target_modules`, `target_parameters`) by which PEFT puts an adapter on these, for a model with experts.

    A linear layer that PEFT would take for one of an expert is named by its weight, which it takes as it is.
    """
    modules = set(modules)
    mistaken = {name for name in modules if is_mistaken(name, model_type)}
    return sorted(modules - mistaken), sorted([*parameters, *(f"{name}.weight" for name in mistaken)])


def named_in(model: PreTrainedModel, targets: Iterable[str]) -> tuple[set[str], list[str]]:
    """(linear layers, other parameters) of the model that an adapter's `target_parameters` name, by their whole names.

    The model may have other adapters.
    """
    targets, modules, parameters = tuple(f".{target}" for target in targets), set(), []
    for path, module in model.named_modules():
        block = path.replace(".base_layer", "")
        for own, _ in module.named_parameters(recurse=False):
            if f".{block}.{own}".endswith(targets):
                if isinstance(module, nn.Linear) and own == "weight":
                    modules.add(block)
                else:
                    parameters.append(f"{block}.{own}")
    return modules, sorted(parameters)
