"""The interface of the kernels: which of them a model gets, and what the rest of rlft needs from them.

`auto` replaces transformers' attention, norms, gated MLPs and PEFT's LoRA layers by rlft's functions, wherever modules
do what these do, for the releases of transformers in `TESTED`; for the model types in `FAMILIES` rotary positions and
decoder layers as well. `plain` leaves transformers and PEFT as they are. Both compute the same: if log-probs differ
(`rlft.model.forward.choose` compares them), or a release is not listed, a model is plain, and the reason is reported
when a run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import transformers
from packaging.version import InvalidVersion, Version
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel

from rlft.config.model import KernelChoice
from rlft.model import experts
from rlft.model.kernels import attention, decoder_layer, elementwise, lora_linear, recurrent
from rlft.model.kernels.decoder_layer import FAMILIES, TESTED, Family

Replaced = tuple[nn.Module, Any, Any]
"""(module, original forward: one from another library, or None for that of its class, rlft's forward)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which kernels a model is computed with."""

    choice: KernelChoice
    reason: str  # why, in words
    requested: bool = True  # whether `model.kernels` requested it
    fused_layers: bool = False  # whether each branch of a layer is one function, where its base is frozen
    modules: str = ""  # which norms and MLPs are fused and which are not, in words; empty before the weights are loaded


def decide(setting: KernelChoice, model_type: str) -> Decision:
    """The kernels for a model of this type, as far as they can be known without its weights."""
    version = transformers.__version__
    if setting is KernelChoice.plain:
        return Decision(choice=KernelChoice.plain, reason="transformers and PEFT as they come")
    if not is_tested(version):
        reason = f"transformers {version} is not among the tested releases ({TESTED[0]} to {TESTED[1]})"
        return Decision(choice=KernelChoice.plain, reason=reason, requested=False)
    reason = f"{model_type} with transformers {version}"
    return Decision(choice=KernelChoice.auto, reason=reason, fused_layers=family_of(model_type).layer)


def family_of(model_type: str) -> Family:
    """What can be replaced in this model type besides what is known by what it does."""
    return FAMILIES.get(model_type, Family())


def is_tested(version: str) -> bool:
    """Whether this release of transformers is one whose modules the kernels are tested against.

    >>> is_tested("5.17.0"), is_tested("5.23.1"), is_tested("5.16.2"), is_tested("5.25.0.dev0"), is_tested("unknown")
    (True, True, False, False, False)
    """
    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        return False
    return Version(TESTED[0]).release <= release <= Version(TESTED[1]).release


@dataclass(slots=True, kw_only=True, eq=False)
class Kernels:
    """What a model is computed with."""

    # Which kernels are in effect; `remove` sets it to plain.
    decision: Decision = Decision(choice=KernelChoice.auto, reason="chosen by hand")
    replaced: Sequence[Replaced] = field(default=())

    @property
    def are_plain(self) -> bool:
        return self.decision.choice is KernelChoice.plain

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside, the model's modules compute as in transformers; its attention over plain rows is the same."""
        for module, original, _ in self.replaced:
            _set_forward(module, original)
        try:
            yield
        finally:
            for module, _, replacement in self.replaced:
                _set_forward(module, replacement)

    def remove(self, reason: str) -> None:
        """Permanently gives the model's modules their original forwards back."""
        for module, original, _ in self.replaced:
            _set_forward(module, original)
        self.replaced = ()
        self.decision = Decision(choice=KernelChoice.plain, reason=reason, requested=False)

    # -- adapters --------------------------------------------------------------------------------------------------
    def choose_layers(self, config: LoraConfig, model: nn.Module) -> None:
        """Makes adapters of this config use rlft's layers, or PEFT's if kernels are plain.

        That of stacked experts is rlft's for all types of models, and PEFT's only if `model.kernels` asks for it.
        """
        if not self.are_plain:
            lora_linear.install(config)
        if not (self.are_plain and self.decision.requested):
            experts.install_adapters(config, model)


def install(model: PreTrainedModel, setting: KernelChoice, *, own_attention: bool) -> Kernels:
    """Gives a loaded, frozen model the kernels that `model.kernels` asks for.

    `own_attention` is False if the user has chosen another attention (`model.attn_implementation`).
    """
    recurrent.install_functions(model)
    decision = decide(setting, model.config.model_type)
    if decision.choice is KernelChoice.plain:
        if own_attention:
            attention.install_plain(model)
        return Kernels(decision=decision)
    if own_attention:
        attention.install(model)
    family = family_of(model.config.model_type)
    originals = {module: vars(module).get("forward") for module in model.modules()}
    decision = replace(decision, modules=elementwise.install(model))
    recurrent.install(model)
    if family.attention:
        decoder_layer.install_attention(model, family)
    if family.layer:
        decoder_layer.install(model)
    replaced = [
        (module, original, vars(module)["forward"])
        for module, original in originals.items()
        if vars(module).get("forward") is not original
    ]
    return Kernels(decision=decision, replaced=replaced)


def _set_forward(module: nn.Module, forward: Any) -> None:
    """Sets a module's forward; None restores that of its class."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        module.forward = forward
