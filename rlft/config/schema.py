"""The typed roots of configs, one per verb, and their sections; defaults and meanings are in configs/.

The sections `algorithm`, `data`, `reward`, `environment`, `logger`, `demonstrations`, `preferences` and `loss` are
open: `_target_` names a class, the rest is its keys.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from rlft.config.bounds import Decay, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed
from rlft.config.cluster import ClusterConfig
from rlft.config.generation import GenerationConfig
from rlft.config.instantiate import ALLOW_UNSCORABLE
from rlft.config.keys import Key
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
    workers: Annotated[NonNegativeInt, Key(free=True)]
    timeout: Annotated[PositiveFloat, Key(free=True)]
    on_error: float | typing.Literal["stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingConfig:
    max_rounds: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapConfig:
    lag: typing.Literal[0, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig:
    path: Annotated[str | None, Key(free=True)]
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
    every: Annotated[NonNegativeInt, Key(only_trains=True)]
    num_prompts: PositiveInt
    num_samples: PositiveInt
    temperature: float | None
    correct_at: Annotated[float, Key(free=False)]
    num_examples: Annotated[NonNegativeInt, Key(only_trains=True)]
    kl_base: Annotated[bool, Key(only_trains=True)]


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
    num_rankings: Annotated[PositiveInt, Key(free=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    path: Annotated[str | None, Key(free=True)]
    fraction: Decay


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """The keys of every verb's config (configs/base/run.yaml)."""

    verb: Annotated[str, Key(in_state=True)]
    name: Annotated[str, Key(free=True, only_trains=True)]
    seed: Annotated[Seed, Key(in_trial="always")]
    resume: Annotated[str | None, Key(free=True)]
    token_budget: Annotated[PositiveInt, Key(free=True, in_trial="always")]
    prompts: Annotated[PromptsConfig, Key(of_data=True)]
    model: Annotated[ModelConfig, Key(in_state=True, in_trial="always")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRoot(Root):
    """The root of a verb that samples and scores (configs/base/sampling.yaml, and its groups)."""

    generation: Annotated[GenerationConfig, Key(in_trial="always")]
    scoring: ScoringConfig
    freshness: Annotated[FreshnessConfig, Key(free=True, in_trial="always")]
    data: Annotated[Mapping[str, Any], Key(inside={"path": Key(free=True), "allow_unscorable": Key(free=True)})]
    reward: Mapping[str, Any]
    environment: Annotated[
        Mapping[str, Any] | None, Key(inside={"workers": Key(free=True), "port": Key(free=True)})
    ] = None

    @property
    def allows_unscorable(self) -> bool:
        """Whether a run goes on with prompts whose reference answer a reward cannot use."""
        return bool(self.data.get(ALLOW_UNSCORABLE, False)) if self.data else False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(SamplingRoot):
    """The root of `rlft train`."""

    steps: Annotated[PositiveInt, Key(free=True, measured=True, only_trains=True)]
    prompts_per_step: Annotated[PositiveInt, Key(only_trains=True, in_trial="typed")]
    group_size: Annotated[PositiveInt, Key(only_trains=True, in_trial="typed")]
    epochs: Annotated[PositiveInt, Key(only_trains=True)]
    minibatches: Annotated[PositiveInt, Key(only_trains=True)]
    lora: Annotated[LoraSettings, Key(in_state=True, in_trial="always")]
    snapshot: SnapshotConfig
    critic: Annotated[CriticConfig, Key(only_trains=True)]
    trainer: Annotated[TrainerConfig, Key(only_trains=True, in_trial="always")]
    reward_model: Annotated[RewardModelConfig, Key(only_trains=True)]
    dynamic_sampling: Annotated[DynamicSamplingConfig, Key(only_trains=True)]
    overlap: Annotated[OverlapConfig, Key(only_trains=True)]
    cluster: Annotated[ClusterConfig, Key(free=True, measured=False, only_trains=True)]
    pretrain: Annotated[PretrainConfig, Key(only_trains=True)]
    eval: Annotated[EvalConfig, Key(free=True, measured=True)]
    checkpoint: Annotated[CheckpointConfig, Key(free=True, only_trains=True)]
    alarms: Annotated[AlarmsConfig | None, Key(measured=False, only_trains=True, in_trial="always")]
    token_values: Annotated[TokenValuesConfig | None, Key(free=True, only_trains=True)]
    rollouts: Annotated[RolloutsConfig, Key(free=True, only_trains=True)]
    algorithm: Annotated[Mapping[str, Any], Key(only_trains=True)]
    logger: Annotated[Mapping[str, Any], Key(free=True, only_trains=True)]

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(SamplingRoot):
    """The root of `rlft sft`. With steps=None `epochs` decides; lora=None trains the model's own weights."""

    steps: Annotated[PositiveInt | None, Key(free=True, measured=True)]
    epochs: PositiveInt
    examples_per_step: PositiveInt
    max_completion_tokens: Annotated[PositiveInt, Key(of_data=True)]
    lora: Annotated[LoraSettings | None, Key(in_state=True)]
    trainer: TrainerConfig
    eval: Annotated[EvalConfig, Key(free=True, measured=True)]
    checkpoint: Annotated[CheckpointConfig, Key(free=True)]
    demonstrations: Annotated[Mapping[str, Any], Key(inside={"path": Key(free=True)})]
    logger: Annotated[Mapping[str, Any], Key(free=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingRoot(Root):
    """The root of verbs that learn from preferences (configs/base/rankings.yaml). With steps=None `epochs` decides."""

    steps: Annotated[PositiveInt | None, Key(free=True, measured=True)]
    epochs: PositiveInt
    rankings_per_step: PositiveInt
    max_completion_tokens: Annotated[PositiveInt, Key(of_data=True)]
    lora: Annotated[LoraSettings, Key(in_state=True)]
    trainer: TrainerConfig
    eval: Annotated[RankingEvalConfig, Key(free=True, measured=True)]
    checkpoint: Annotated[CheckpointConfig, Key(free=True)]
    preferences: Annotated[Mapping[str, Any], Key(inside={"path": Key(free=True)})]
    logger: Annotated[Mapping[str, Any], Key(free=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RmConfig(RankingRoot):
    """The root of `rlft rm`."""

    lora: Annotated[LoraSettings, Key(in_state=True, inside={"path": Key(roles=("reward", "policy"))})]
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

    adapter: Annotated[str | None, Key(roles=("policy",))]
    split: typing.Literal["train", "held_out"]
    num_prompts: Annotated[PositiveInt | None, Key(free=True)]
    n: PositiveInt
    prompts_per_step: PositiveInt
    keep: Keep
    min_reward: float | None
    max_per_prompt: PositiveInt | None
    dedupe: bool
