"""The typed roots of a config, one a verb, and their sections; defaults and meanings are in configs/.

The sections `algorithm`, `data`, `reward`, `logger`, `demonstrations` and `preferences` are open: `_target_` names a
class, the rest is its keys.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlft.fields import Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlft.generation.config import GenerationConfig
from rlft.logger.alarms import AlarmsConfig
from rlft.model.config import CriticConfig, LoraSettings, ModelConfig, RewardModelConfig, SnapshotConfig
from rlft.trainer.config import CheckpointConfig, TrainerConfig

ADDED_KEYS: Mapping[str, Any] = {
    "generation.min_p": 0.0,
    "generation.stop": [],
    "generation.include_stop_str_in_output": False,
    "lora.use_rslora": False,
    "lora.use_dora": False,
}
"""Keys that the configs of older runs lack, with the values by which these ran."""


class Verb(StrEnum):
    train = "train"
    sft = "sft"
    rm = "rm"
    sample = "sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsConfig:
    max_tokens: PositiveInt
    over_limit: typing.Literal["drop", "refuse"]
    style: typing.Literal["chat", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringConfig:
    workers: NonNegativeInt
    timeout: PositiveFloat
    on_error: float | typing.Literal["stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingConfig:
    max_rounds: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig:
    path: str | None
    field: str
    given_field: str | None
    max_tokens: PositiveInt
    sequences_per_update: PositiveInt
    held_out: PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessConfig:
    threshold: PositiveFloat | typing.Literal["auto"]
    every: PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    every: NonNegativeInt
    num_prompts: PositiveInt
    num_samples: PositiveInt
    temperature: float | None
    correct_at: float
    num_examples: NonNegativeInt
    kl_base: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValuesConfig:
    every: NonNegativeInt
    groups: PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingEvalConfig:
    every: NonNegativeInt
    num_rankings: PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    path: str | None
    fraction: Decay


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """What every verb's config has (configs/base/run.yaml)."""

    verb: Verb
    name: str
    seed: NonNegativeInt
    resume: str | None
    token_budget: PositiveInt
    prompts: PromptsConfig
    model: ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRoot(Root):
    """The root of a verb that samples and scores (configs/base/sampling.yaml, and the groups it needs)."""

    generation: GenerationConfig
    scoring: ScoringConfig
    freshness: FreshnessConfig
    data: Mapping[str, Any]
    reward: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(SamplingRoot):
    """The root of `rlft train`."""

    steps: PositiveInt
    prompts_per_step: PositiveInt
    group_size: PositiveInt
    epochs: PositiveInt
    minibatches: PositiveInt
    lora: LoraSettings
    snapshot: SnapshotConfig
    critic: CriticConfig
    trainer: TrainerConfig
    reward_model: RewardModelConfig
    dynamic_sampling: DynamicSamplingConfig
    pretrain: PretrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    alarms: AlarmsConfig | None = None  # None: the run was begun before there were any
    token_values: TokenValuesConfig | None = None  # as well
    algorithm: Mapping[str, Any]
    logger: Mapping[str, Any]

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(SamplingRoot):
    """The root of `rlft sft`. steps: None for as many as `epochs` take. lora: None trains the model's own weights."""

    steps: PositiveInt | None
    epochs: PositiveInt
    examples_per_step: PositiveInt
    max_completion_tokens: PositiveInt
    lora: LoraSettings | None
    trainer: TrainerConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    demonstrations: Mapping[str, Any]
    logger: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RmConfig(Root):
    """The root of `rlft rm`. steps: None for as many as `epochs` take."""

    steps: PositiveInt | None
    epochs: PositiveInt
    rankings_per_step: PositiveInt
    max_completion_tokens: PositiveInt
    margin: NonNegativeFloat
    center: bool
    replay: ReplayConfig
    lora: LoraSettings
    trainer: TrainerConfig
    eval: RankingEvalConfig
    checkpoint: CheckpointConfig
    preferences: Mapping[str, Any]
    logger: Mapping[str, Any]


class Keep(StrEnum):
    all = "all"
    best = "best"
    above = "above"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig(SamplingRoot):
    """The root of `rlft sample`."""

    adapter: str | None
    split: typing.Literal["train", "held_out"]
    num_prompts: PositiveInt | None
    n: PositiveInt
    prompts_per_step: PositiveInt
    keep: Keep
    min_reward: float | None
    max_per_prompt: PositiveInt | None
    dedupe: bool


ROOTS: Mapping[Verb, type[Root]] = {
    Verb.train: RunConfig,
    Verb.sft: SftConfig,
    Verb.rm: RmConfig,
    Verb.sample: SampleConfig,
}
