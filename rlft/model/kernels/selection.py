"""The door to the kernels: which of them a model gets, and what the rest of rlft asks of them.

`auto` puts rlft's functions in the place of transformers' attention, rotary positions, norms, gated MLPs and decoder
layers and of PEFT's LoRA layers, for the model types in `FAMILIES` and the releases of transformers in `TESTED`.
`plain` is transformers and PEFT as they come. Both compute the same: where the log-probs of a model's own modules are
not those of ours (`rlft.model.forward.choose` compares them), and wherever a type or release is not listed, a model is
plain, and the reason is said when a run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel

from rlft.model.config import KernelChoice
from rlft.model.kernels import attention, decoder_layer, llama_attention, lora_linear, norm_and_mlp
from rlft.model.kernels.families import FAMILIES, TESTED

Replaced = tuple[nn.Module, Any, Any]
"""(module, its own forward where it had been replaced by another library and None where it is its class's, ours)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which kernels a model is computed with.

    Args:
        choice: what is in force.
        reason: why, in words.
        requested: whether `model.kernels` says so.
    """

    choice: KernelChoice
    reason: str
    requested: bool = True


def decide(setting: KernelChoice, model_type: str) -> Decision:
    """What a model of this type gets, as far as is known without its weights."""
    version = transformers.__version__
    if setting is KernelChoice.plain:
        return Decision(choice=KernelChoice.plain, reason="transformers and PEFT as they come")
    if not is_tested(version):
        known = f"transformers {version} is not among the tested releases ({TESTED[0]} to {TESTED[1]})"
        return Decision(choice=KernelChoice.plain, reason=known, requested=False)
    if model_type not in FAMILIES:
        known = f"model type {model_type} is not among {', '.join(sorted(FAMILIES))}"
        return Decision(choice=KernelChoice.plain, reason=known, requested=False)
    return Decision(choice=KernelChoice.auto, reason=f"{model_type} with transformers {version}")


def is_tested(version: str) -> bool:
    """Whether this release of transformers is one whose modules the kernels are tested against.

    >>> is_tested("5.17.0"), is_tested("5.23.1"), is_tested("5.16.2"), is_tested("5.24.0.dev0"), is_tested("unknown")
    (True, True, False, False, False)
    """

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:2])

    try:
        return numbers(TESTED[0]) <= numbers(version) <= numbers(TESTED[1])
    except ValueError:
        return False


@dataclass(slots=True, kw_only=True, eq=False)
class Kernels:
    """What one model is computed with. `decision` turns to plain when `remove` is called.

    replaced: the modules of the model whose forwards are ours.
    """

    decision: Decision = Decision(choice=KernelChoice.auto, reason="chosen by hand")
    replaced: Sequence[Replaced] = field(default=())

    @property
    def are_plain(self) -> bool:
        return self.decision.choice is KernelChoice.plain

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside, the model's modules compute as transformers has them; its attention over plain rows is the same."""
        for module, own, _ in self.replaced:
            _set_forward(module, own)
        try:
            yield
        finally:
            for module, _, ours in self.replaced:
                _set_forward(module, ours)

    def remove(self, reason: str) -> None:
        """Gives the model's modules their own forwards back, for good."""
        for module, own, _ in self.replaced:
            _set_forward(module, own)
        self.replaced = ()
        self.decision = Decision(choice=KernelChoice.plain, reason=reason, requested=False)

    # -- adapters --------------------------------------------------------------------------------------------------
    def choose_layers(self, config: LoraConfig) -> None:
        """Adapters that are made with this config lie in our layers, or in PEFT's where kernels are plain."""
        if not self.are_plain:
            lora_linear.install(config)


def install(model: PreTrainedModel, setting: KernelChoice, *, own_attention: bool) -> Kernels:
    """Gives a loaded, frozen model its kernels.

    own_attention: False where the user has chosen another attention (`model.attn_implementation`).
    """
    decision = decide(setting, model.config.model_type)
    if decision.choice is KernelChoice.plain:
        if own_attention:
            attention.install_plain(model)
        return Kernels(decision=decision)
    if own_attention:
        attention.install(model)
    family = FAMILIES[model.config.model_type]
    before = {module: vars(module).get("forward") for module in model.modules()}
    norm_and_mlp.install(model)
    if family.attention:
        llama_attention.install(model, family)
    if family.layer:
        decoder_layer.install(model)
    replaced = [
        (module, own, vars(module)["forward"])
        for module, own in before.items()
        if vars(module).get("forward") is not own
    ]
    return Kernels(decision=decision, replaced=replaced)


def _set_forward(module: nn.Module, forward: Any) -> None:
    """forward: None for that of the module's class."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        module.forward = forward


# -- sums of base and adapter, for passes by a role that does not change --------------------------------------------
def add_up(model: nn.Module, role: str, dtype: torch.dtype | None) -> None:
    """Makes the role's sums in every layer of ours (`LoraLinear.add_up`); PEFT's layers have none."""
    for layer in model.modules():
        if isinstance(layer, lora_linear.LoraLinear):
            layer.add_up(role, dtype)


def lend(model: nn.Module, lender: str, role: str) -> None:
    """The role learns on the lender's sums while its weights are the lender's (`LoraLinear.lend`)."""
    for layer in model.modules():
        if isinstance(layer, lora_linear.LoraLinear):
            layer.lend(lender, role)
