"""The typed `generation` section; its YAML, with meanings and defaults, is configs/generation/auto.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlft.fields import Decay, NonNegativeFloat, NonNegativeInt, PositiveFraction, PositiveInt
from rlft.types import Sampling, UserError


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
    min_p: Decay = 0.0  # runs begun before there were this key and the next two have none of them
    stop: Sequence[str | int] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if any(stop == "" for stop in self.stop):
            problem = "holds an empty text, which is in every completion"
            raise UserError("generation.stop", problem, got=list(self.stop), remedy="leave it out")
        negative = [stop for stop in self.stop if isinstance(stop, int) and stop < 0]
        if negative:
            remedy = "use token ids of the model's vocabulary, or texts"
            raise UserError("generation.stop", "holds a token id below 0", got=negative[0], remedy=remedy)

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=tuple(stop for stop in self.stop if isinstance(stop, str)),
            stop_token_ids=tuple(stop for stop in self.stop if isinstance(stop, int)),
            include_stop_str_in_output=self.include_stop_str_in_output,
        )
