"""Typed sections of the config that concern the model. Defaults and their meaning are in configs/train.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlft.fields import Decay, NonNegativeInt, PositiveFloat, PositiveInt


class Old(StrEnum):
    auto = "auto"
    sampled = "sampled"
    recompute = "recompute"


class Quantization(StrEnum):
    four_bit = "4bit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: str
    revision: str | None
    dtype: str
    device: str
    attn_implementation: str
    gradient_checkpointing: bool
    quantization: Quantization | None
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    rank: PositiveInt
    alpha: PositiveFloat
    dropout: Decay
    target_modules: str | Sequence[str]
    path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """reference: `none`, `base`, `copy`, or the folder of a PEFT adapter."""

    reference: str
    refresh_every: NonNegativeInt
    old: Old
