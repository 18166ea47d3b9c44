"""The typed `generation` section; its YAML, with meanings and defaults, is configs/generation/auto.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlft.fields import NonNegativeFloat, NonNegativeInt, PositiveFraction, PositiveInt
from rlft.types import Sampling


class Weights(StrEnum):
    """What the engine on the trainer's own base multiplies with."""

    merged = "merged"
    merged_bfloat16 = "merged_bfloat16"
    apart = "apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    batch_size: PositiveInt
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig:
    gpu_memory_utilization: PositiveFraction
    max_num_seqs: PositiveInt
    sleep: bool
    enforce_eager: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedConfig:
    answers: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """engine: auto, transformers, vllm, scripted, or `module.Class` of an engine outside the tree."""

    engine: str
    max_tokens: PositiveInt
    temperature: NonNegativeFloat
    top_p: PositiveFraction
    top_k: NonNegativeInt
    transformers: TransformersConfig
    vllm: VLLMConfig
    scripted: ScriptedConfig

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
