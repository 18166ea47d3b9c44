"""The rows of the start-up table: those that a config alone decides, and those that describe a model.

They are printed in the order in which they become known: before torch is imported those of the config, before weights
are loaded those of the plan (`Plan.planned_rows`), and then those of the loaded model (`Plan.loaded_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlft.config.instantiate import component_name
from rlft.config.keys import ABSENT
from rlft.config.schema import DpoConfig, RankingRoot, RmConfig, RunConfig, SftConfig
from rlft.environment.protocol import read_environment
from rlft.generation.engine import NO_FACTS, EngineFacts
from rlft.system.machine import multiplies_in
from rlft.types import counted

if TYPE_CHECKING:
    from torch import nn
    from torch.nn import Parameter

    from rlft.model.kernels.selection import Decision

TableRow = tuple[str, str, str]  # (name, value, explanation)


def config_rows(config: Any) -> list[TableRow]:
    """The rows that the config alone decides; it is any command's."""
    lora: Any = getattr(config, "lora", ABSENT)
    learner = "trains all weights" if lora is None else "" if lora is ABSENT else f"trains {lora.kind} rank {lora.rank}"
    rows = [("model", config.model.path, learner + " and a scalar head" * isinstance(config, RmConfig))]
    if isinstance(config, RunConfig):
        rows += _rows_of_train(config)
    if isinstance(config, SftConfig):
        rows += [("a step", str(config.examples_per_step), "demonstrations in one optimizer update")]
    if isinstance(config, DpoConfig):
        section = dict(config.loss)
        name = component_name(section.pop("_target_"))
        rows += [("loss", name, ", ".join(f"{key} {str(value).lower()}" for key, value in section.items()))]
    if isinstance(config, RankingRoot):
        rows += [("a step", str(config.rankings_per_step), "rankings in one optimizer update")]
    return rows


def _rows_of_train(run: RunConfig) -> list[TableRow]:
    completions, environment = run.completions_per_step, read_environment(run.environment)
    rewards = [f"{name} x {reward['weight']:g}" for name, reward in run.reward.items()]
    rewards += ["the environment's"] * (environment is not None and environment.rewards_turns)
    groups = f"{counted(run.prompts_per_step, 'prompt')} x group of {run.group_size}"
    minibatches = f"{counted(run.epochs, 'epoch')} x {counted(run.minibatches, 'minibatch')}"
    minibatches += f" of {counted(completions // run.minibatches, 'completion')}"
    return [
        ("algorithm", run.algorithm["_target_"].rpartition(".")[2], f"rewards: {', '.join(rewards)}"),
        ("completions a step", f"{completions:,}", f"{groups}, up to {counted(run.generation.max_tokens, 'token')}"),
        ("updates a step", str(run.updates_per_step), minibatches),
    ]


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
    engine: EngineFacts = NO_FACTS  # what a live engine says of itself
    # (layers with an adapter, layers without one, number of weights of the former); empty without adapters.
    layer_kinds: tuple[str, str, int] = ("", "", 0)

    def rows(self) -> list[TableRow]:
        """The sizes, the layers with adapters, the engine's rows, and how rows go through the network."""
        rows = [("parameters", f"{self.base:,}", f"of the base, {self.dtype} on {self.device}")]
        if self.trainable:
            share = f"{self.trainable / self.base:.2%} of the parameters of the base"
            rows.append(("trainable", f"{self.trainable:,}", share))
        adapted, others, number = self.layer_kinds
        if adapted:
            weights = f"with {number:,} of {self.base:,} weights"
            rows.append(("adapted layers", adapted, f"{weights}; not {others}" if others else weights))
        if self.base_copies is not None:
            rows.append(("copies of the base", str(self.base_copies[0]), self.base_copies[1]))
        rows += self.engine.rows
        kernels = "; ".join(filter(None, (self.kernels.reason, self.kernels.modules)))
        rows.append(("forward", self.forward, self.reason.removeprefix("padded rows: ")))
        return [*rows, ("kernels", str(self.kernels.choice), kernels)]

    @property
    def notes(self) -> list[str]:
        """Notes about a model that takes more time than it has to."""
        notes = [*self.engine.notes, *([] if self.forward == "packed" else [self.reason])]
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
    engine: EngineFacts = NO_FACTS,
) -> Facts:
    """The facts about a loaded model with these trained parameters."""
    from rlft.model.lora_config import adapted_words  # with torch, which rows of a config do without

    return Facts(
        base=sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name),
        trainable=sum(p.numel() for _, p in learning),
        dtype=str(backbone.model.dtype).removeprefix("torch."),
        device=str(backbone.device),
        forward="packed" if forward.packed else "padded",
        reason=forward.reason,
        kernels=backbone.kernels.decision,
        base_copies=base_copies,
        engine=engine,
        layer_kinds=adapted_words(model),
    )
