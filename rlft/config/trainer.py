"""Typed sections of the config that concern training. Defaults and their meaning are in configs/train.yaml."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from enum import StrEnum

from rlft.config.bounds import Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
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
