"""The typed roots of configs, one per verb, and their sections; defaults and meanings are in configs/.

The sections `algorithm`, `data`, `reward`, `environment`, `logger`, `demonstrations`, `preferences` and `loss` are
open: `_target_` names a class, the rest is its keys.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlft.config.bounds import Decay, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed
from rlft.config.cluster import ClusterConfig
from rlft.config.generation import GenerationConfig
from rlft.config.instantiate import ALLOW_UNSCORABLE
from rlft.config.model import (
    CriticConfig,
    LoraSettings,
    ModelConfig,
    ReferenceConfig,
    RewardModelConfig,
    SnapshotConfig,
)
from rlft.config.trainer import CheckpointConfig, TrainerConfig


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
class OverlapConfig:
    lag: typing.Literal[0, 1]


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
class AlarmsConfig:
    """The `alarms` section; its YAML, with meanings and defaults, is in configs/train.yaml."""

    patience: PositiveInt
    accuracy_drop: PositiveFloat | None
    kl: PositiveFloat | None
    length_growth: PositiveFloat | None
    equal_groups: Fraction | None
    logprob_gap: PositiveFloat | None
    clipped: Fraction | None
    value_loss: PositiveFloat | None
    grad_norm: PositiveFloat | None
    constant_reward: PositiveInt | None
    sampler_kl: PositiveFloat | None
    effective_samples: Fraction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsConfig:
    """The `rollouts` section: which completions are written.

    Attributes:
        every: number of steps from one file to the next; 0 for no files.
        keep: number of the newest files that are kept; None for all.
    """

    every: NonNegativeInt
    keep: PositiveInt | None

    def writes(self, step: int) -> bool:
        """Whether the completions of this step, counted from 1, are written."""
        return self.every > 0 and step % self.every == 0

    def most_files(self, num_steps: int) -> int:
        """The most files at a time in a run of this many steps; a new one is complete before the oldest is deleted."""
        written = num_steps // self.every if self.every else 0
        return written if self.keep is None else min(written, self.keep + 1)


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
    """The keys of every verb's config (configs/base/run.yaml)."""

    verb: str
    name: str
    seed: Seed
    resume: str | None
    token_budget: PositiveInt
    prompts: PromptsConfig
    model: ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRoot(Root):
    """The root of a verb that samples and scores (configs/base/sampling.yaml, and its groups)."""

    generation: GenerationConfig
    scoring: ScoringConfig
    freshness: FreshnessConfig
    data: Mapping[str, Any]
    reward: Mapping[str, Any]
    environment: Mapping[str, Any] | None = None

    @property
    def allows_unscorable(self) -> bool:
        """Whether a run goes on with prompts whose reference answer a reward cannot use."""
        return bool(self.data.get(ALLOW_UNSCORABLE, False)) if self.data else False


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
    overlap: OverlapConfig
    cluster: ClusterConfig
    pretrain: PretrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    alarms: AlarmsConfig | None
    token_values: TokenValuesConfig | None
    rollouts: RolloutsConfig
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
    """The root of `rlft sft`. With steps=None `epochs` decides; lora=None trains the model's own weights."""

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
class RankingRoot(Root):
    """The root of verbs that learn from preferences (configs/base/rankings.yaml). With steps=None `epochs` decides."""

    steps: PositiveInt | None
    epochs: PositiveInt
    rankings_per_step: PositiveInt
    max_completion_tokens: PositiveInt
    lora: LoraSettings
    trainer: TrainerConfig
    eval: RankingEvalConfig
    checkpoint: CheckpointConfig
    preferences: Mapping[str, Any]
    logger: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RmConfig(RankingRoot):
    """The root of `rlft rm`."""

    margin: NonNegativeFloat
    center: bool
    replay: ReplayConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig(RankingRoot):
    """The root of `rlft dpo`."""

    loss: Mapping[str, Any]
    snapshot: ReferenceConfig


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
