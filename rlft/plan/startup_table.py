"""The rows of the start-up table that describe the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import Parameter

from rlft.config.model import LoraSettings
from rlft.model.kernels.selection import Decision
from rlft.model.lora_config import adapted_words
from rlft.system.machine import multiplies_in

TableRow = tuple[str, str, str]  # (name, value, explanation)


def learner_of(lora: LoraSettings | None) -> str:
    """What learns, in words."""
    return "all weights" if lora is None else f"{lora.kind} rank {lora.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a model, loaded or planned."""

    base: int  # number of the base's parameters
    trainable: int  # number of trained parameters
    dtype: str  # the compute dtype
    device: str
    forward: str  # "packed" or "padded" rows
    reason: str  # why they are packed or padded
    kernels: Decision
    # (copies of the base in trainer and engine together, what they share or why they cannot); None where the engine has
    # no base of its own.
    base_copies: tuple[int, str] | None = None
    # (layers with an adapter, layers without one, number of weights of the former); empty without adapters.
    layer_kinds: tuple[str, str, int] = ("", "", 0)

    def model_row(self, path: str, what: str = "frozen parameters") -> TableRow:
        return "model", path, f"{self.base:,} {what}, {self.dtype} on {self.device}"

    def adapter_rows(self) -> list[TableRow]:
        """The row about layers with adapters; none where all weights are trained."""
        adapted, others, number = self.layer_kinds
        weights = f"with {number:,} of {self.base:,} weights"
        return [("adapted layers", adapted, f"{weights}; not {others}" if others else weights)] if adapted else []

    def base_rows(self) -> list[TableRow]:
        """The row about copies of the base; none where the engine has no base of its own."""
        if self.base_copies is None:
            return []
        number, explanation = self.base_copies
        return [("copies of the base", str(number), explanation)]

    def forward_rows(self) -> list[TableRow]:
        """How rows go through the network: packed or padded, and by which kernels."""
        kernels = "; ".join(filter(None, (self.kernels.reason, self.kernels.modules)))
        return [
            ("forward", self.forward, self.reason.removeprefix("padded rows: ")),
            ("kernels", str(self.kernels.choice), kernels),
        ]

    def network_rows(self) -> list[TableRow]:
        return [*self.adapter_rows(), *self.base_rows(), *self.forward_rows()]

    @property
    def notes(self) -> list[str]:
        """Notes about a model that takes more time than it has to."""
        notes = [] if self.forward == "packed" else [self.reason]
        if not self.kernels.requested:
            why = self.kernels.reason
            notes.append(f"model.kernels: plain instead of auto, which takes more time and memory: {why}")
        if slow := slow_dtype(self.dtype, self.device):
            notes.append(slow)
        return notes


def slow_dtype(dtype: str, device: str) -> str | None:
    """A note if the processor has to emulate this dtype; None if it does not, or the device is no CPU."""
    if device != "cpu" or multiplies_in(dtype):
        return None
    problem = "this processor has no instructions for it, so that products take about ten times as long as in float32"
    return f"model.dtype: {problem}, got {dtype}; use model.dtype=float32, which auto is on a CPU"


def facts_of(
    model: nn.Module,
    learning: Iterable[tuple[str, Parameter]],
    backbone: Any,
    forward: Any,
    base_copies: tuple[int, str] | None = None,
) -> Facts:
    """The facts about a loaded model with these trained parameters."""
    return Facts(
        base=sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name),
        trainable=sum(p.numel() for _, p in learning),
        dtype=str(backbone.model.dtype).removeprefix("torch."),
        device=str(backbone.device),
        forward="packed" if forward.packed else "padded",
        reason=forward.reason,
        kernels=backbone.kernels.decision,
        base_copies=base_copies,
        layer_kinds=adapted_words(model),
    )
