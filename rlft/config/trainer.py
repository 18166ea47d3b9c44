"""Typed sections about training and the processes that share it. Defaults and meanings are in configs/train.yaml, and
those of `cluster` in configs/cluster/local.yaml."""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from rlft.config.bounds import Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlft.config.keys import Key


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class OptimizerKind(StrEnum):
    adamw = "adamw"
    adamw8bit = "adamw8bit"
    muon = "muon"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    optimizer: Annotated[OptimizerKind, Key(in_state=True)]
    lr: PositiveFloat
    schedule: Schedule
    warmup: NonNegativeInt
    beta1: Decay
    beta2: Decay
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat
    reset_every: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every: NonNegativeInt
    keep: PositiveInt
    on_signal: PositiveFloat | typing.Literal["step", "now"]


NEVER, FLAT = "never", "flat"  # when a run ends before its last step (stop.when)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    when: typing.Literal["never", "flat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The `cluster` section. The defaults: one process does all."""

    kind: Annotated[typing.Literal["local", "ray"], Key(free_in_sweep=True)] = "local"
    address: Annotated[str | None, Key(free_in_sweep=True)] = None
    engines: NonNegativeInt = 0
    gpus_per_engine: PositiveInt = 1
    ranks: PositiveInt = 1
    lanes: Annotated[PositiveInt | typing.Literal["auto"], Key(free=False)] = "auto"
    placement: Annotated[typing.Literal["auto", "pairs", "divided"], Key(free_in_sweep=True)] = "auto"
    timeout: Annotated[PositiveFloat, Key(free_in_sweep=True)] = 600.0
    max_engine_restarts: NonNegativeInt = 3
    scoring: bool = False
    jobs: Annotated[PositiveInt, Key(free_in_sweep=True)] = 1
    shard_base: bool = False
    sequence_ranks: Annotated[PositiveInt, Key(free=False)] = 1

    @property
    def num_lanes(self) -> int:
        """The lanes of a run that begins so; a resumed run has a number there (`kept_lanes`)."""
        return max(1, self.ranks // self.sequence_ranks) if self.lanes == "auto" else self.lanes

    @property
    def num_parts(self) -> int:
        """How many parts of a step's passes have gradients of their own: each lane's on each rank that shares it."""
        return self.num_lanes * self.sequence_ranks

    @property
    def joined_address(self) -> str | None:
        """The address of the Ray cluster on which the workers run; None where they run on this machine."""
        return (self.address or os.environ.get("RAY_ADDRESS") or None) if self.kind == "ray" else None

    @property
    def is_joined(self) -> bool:
        """Whether the workers run on a Ray cluster."""
        return self.joined_address is not None


def kept_lanes(cluster: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The plain section with a number for `lanes: auto`, unless one process does all; `before` is a resumed run's."""
    if cluster.get("lanes", "auto") != "auto":
        return dict(cluster)
    begun = cluster if before is None else before
    kept = begun.get("lanes", "auto")
    if kept == "auto":
        numbers = [begun.get(name, 1) for name in ("ranks", "sequence_ranks")]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            return dict(cluster)  # the section has no types yet, which refuse this
        kept = max(1, numbers[0] // numbers[1])
    return dict(cluster) if kept == cluster.get("ranks", 1) == 1 else {**cluster, "lanes": kept}
