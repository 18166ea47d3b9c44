"""The typed roots of configs, one per command, and their sections; defaults and meanings are in configs/.

The sections `algorithm`, `data`, `reward`, `environment`, `logger`, `demonstrations`, `preferences` and `loss` are
open: `_target_` names a class, the rest is its keys. The section `generation` has, besides the keys of all engines, a
section for each engine, whose keys are the fields of its class; that of an engine from outside the tree has a
`_target_`.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from inspect import isabstract
from typing import Annotated, Any

from rlft.config import bounds, catalog
from rlft.config.instantiate import ALLOW_UNSCORABLE, from_mapping, locate
from rlft.config.keys import Key
from rlft.config.model import (
    CriticConfig,
    LoraSettings,
    ModelConfig,
    ReferenceConfig,
    RewardModelConfig,
    RoutingSource,
    SnapshotConfig,
)
from rlft.config.suggest import unknown_in_section
from rlft.config.trainer import CheckpointConfig, ClusterConfig, StopConfig, TrainerConfig
from rlft.types import Sampling, UserError, require

AUTO = "auto"
HISTORY = "history"  # of `generation.drafts`
WEIGHTS, FASTEST = "generation.transformers.weights", "fastest"
"""A key, and its value for what is measured when a run starts, and what its resumes keep."""
ENGINE = "rlft.generation.engine.Engine"  # by name: this package is below the one of the engines
ON_A_GPU, ANYWHERE = "vllm", "transformers"
"""What `auto` chooses on a GPU, if that engine can run and serves the adapters, and what it chooses otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsConfig:
    max_tokens: bounds.PositiveInt
    over_limit: typing.Literal["drop", "refuse"]
    style: typing.Literal["chat", "raw"]
    template_variables: Annotated[Mapping[str, Any], Key(in_state=False)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringConfig:
    workers: Annotated[bounds.NonNegativeInt, Key(free=True)]
    timeout: Annotated[bounds.PositiveFloat, Key(free=True)]
    on_error: float | typing.Literal["stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingConfig:
    max_rounds: bounds.NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    running: bool
    path: Annotated[str | None, Key(free=True)]
    weight: typing.Literal["variance", "uniform"]
    above: bounds.Fraction | None
    below: bounds.Fraction | None
    replay: bounds.Fraction
    memory: bounds.PositiveFraction

    @property
    def is_on(self) -> bool:
        return self.running or self.path is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapConfig:
    lag: typing.Literal[0, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig:
    path: Annotated[str | None, Key(free=True)]
    rows: Annotated[str | None, Key(before=None)]
    field: str
    given_field: str | None
    max_tokens: bounds.PositiveInt
    sequences_per_update: bounds.PositiveInt
    held_out: bounds.PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessConfig:
    threshold: bounds.PositiveFloat | typing.Literal["auto"]
    every: bounds.PositiveInt
    read_back: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    every: Annotated[bounds.NonNegativeInt, Key(only_trains=True)]
    num_prompts: bounds.PositiveInt
    num_samples: bounds.PositiveInt
    temperature: float | None
    correct_at: Annotated[float, Key(free=False)]
    num_examples: Annotated[bounds.NonNegativeInt, Key(only_trains=True)]
    kl_base: Annotated[bool, Key(only_trains=True)]

    def drawn(self, sampling: Sampling) -> Sampling:
        """How the completions of an evaluation are drawn where others are drawn so."""
        return sampling if self.temperature is None else replace(sampling, temperature=self.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmsConfig:
    patience: bounds.PositiveInt
    accuracy_drop: bounds.PositiveFloat | None
    kl: bounds.PositiveFloat | None
    length_growth: bounds.PositiveFloat | None
    equal_groups: bounds.Fraction | None
    logprob_gap: bounds.PositiveFloat | None
    clipped: bounds.Fraction | None
    value_loss: bounds.PositiveFloat | None
    grad_norm: bounds.PositiveFloat | None
    constant_reward: bounds.PositiveInt | None
    sampler_kl: bounds.PositiveFloat | None
    effective_samples: bounds.Fraction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsConfig:
    every: bounds.NonNegativeInt
    keep: bounds.PositiveInt | None

    def writes(self, step: int) -> bool:
        """Whether the completions of this step, counted from 1, are written."""
        return self.every > 0 and step % self.every == 0

    def most_files(self, num_steps: int) -> int:
        """The most files at a time in a run of this many steps; a new one is complete before the oldest is deleted."""
        written = num_steps // self.every if self.every else 0
        return written if self.keep is None else min(written, self.keep + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    live: Annotated[bool, Key(before=True)]
    plain_seconds: Annotated[bounds.NonNegativeFloat, Key(before=5.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValuesConfig:
    every: bounds.NonNegativeInt
    groups: bounds.PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingEvalConfig:
    every: bounds.NonNegativeInt
    num_rankings: Annotated[bounds.PositiveInt, Key(free=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    path: Annotated[str | None, Key(free=True)]
    fraction: bounds.Decay


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The `generation` section of a config."""

    engine: str
    max_tokens: bounds.PositiveInt
    temperature: bounds.NonNegativeFloat
    top_p: bounds.PositiveFraction
    top_k: bounds.NonNegativeInt
    engines: Mapping[str, Any]  # {section: engine} for those in the tree and the one that is chosen
    min_p: bounds.Decay
    stop: Sequence[str | int]
    include_stop_str_in_output: bool
    drafts: Annotated[typing.Literal["off", "history", "auto"], Key(before="off")]
    draft_rows: Annotated[bounds.PositiveInt | typing.Literal["auto"], Key(before="auto")]

    def __post_init__(self) -> None:
        problem = "holds an empty string, which is in every completion"
        require("" not in self.stop, "generation.stop", problem, got=list(self.stop), remedy="leave it out")
        for stop in (stop for stop in self.stop if isinstance(stop, int) and stop < 0):
            remedy = "use token ids of the model's vocabulary, or strings"
            raise UserError("generation.stop", "holds a token id below 0", got=stop, remedy=remedy)

    @classmethod
    def with_sections_read(cls, values: Mapping[str, Any], prefix: str, command: str) -> dict[str, Any]:
        """The plain section, in which the sections of engines are replaced by `engines`, the engines made of them.

        Raises UserError: a class is not an engine's, or a key of an engine is wrong.
        """
        targets, chosen = _targets(values), str(values.get("engine"))
        shared_keys = [field.name for field in fields(cls) if field.name != "engines"]
        for name in (name for name in values if name not in (*shared_keys, *targets)):
            section = values[name]
            if isinstance(section, Mapping) and "_target_" not in section and name == chosen:
                remedy = f"name the engine's class, as in {prefix}.{name}._target_=mine.Engine"
                raise UserError(f"{prefix}.{name}", "has no _target_", remedy=remedy)
            if not (isinstance(section, Mapping) and "_target_" in section):  # else an engine that is not chosen
                raise unknown_in_section(name, section, [*shared_keys, *targets], prefix, command)
        engines = {}
        for name, target in targets.items():
            key = f"{prefix}.{name}"
            require(target is not None or name in values, key, "is missing", remedy="give it a value")
            engine = _class(name, target, "generation.engine" if target == chosen else f"{key}._target_")
            section = values.get(name, {})
            if isinstance(section, Mapping):
                section = {inner: value for inner, value in section.items() if inner != "_target_"}
            engines[name] = from_mapping(engine, section, key, command)
        return {**{name: value for name, value in values.items() if name in shared_keys}, "engines": engines}

    def named(self, engine: str) -> Any:
        """The engine of this name (a `rlft.generation.engine.Engine`), which must not be `auto`."""
        return self.engines[section_of(engine)]

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


def section_of(engine: str) -> str:
    """The section of `generation` that holds an engine's keys.

    >>> section_of("vllm"), section_of("mine.Engine")
    ('vllm', 'Engine')
    """
    return engine.rpartition(".")[2]


@cache
def own_engines() -> tuple[str, ...]:
    """The engines in the tree: the sections of configs/generation/auto.yaml, each with a module in rlft/generation/."""
    entries = catalog.entries(catalog.files("generation")[AUTO])
    return tuple(key for key, entry in entries.items() if "." not in key and not entry.default)


def free_keys(section: Mapping[str, Any]) -> Iterator[str]:
    """Keys of a plain `generation` section that change no number, so that a run may be resumed with other values."""
    for name, engine in engine_classes(section).items():
        yield from (f"generation.{name}.{key}" for key in engine.may_change)


def packages(section: Mapping[str, Any]) -> Iterator[str]:
    """Distributions that the engines of a plain `generation` section need, besides those that rlft needs itself."""
    for engine in engine_classes(section).values():
        yield from engine.packages


def engine_classes(section: Mapping[str, Any]) -> dict[str, Any]:
    """{section: its class} of the engines of a plain `generation` section."""
    return {name: _class(name, target, f"generation.{name}") for name, target in _targets(section).items()}


def _targets(values: Mapping[str, Any]) -> dict[str, str | None]:
    """{section: the class that it names} of each engine in the tree (None), and of a chosen one from outside it."""
    targets: dict[str, str | None] = dict.fromkeys(own_engines())
    chosen = str(values.get("engine"))
    section = values.get(chosen)
    if "." in chosen:
        targets[section_of(chosen)] = chosen
    elif isinstance(section, Mapping) and "_target_" in section:
        targets[chosen] = section["_target_"]
    return targets


def _class(name: str, target: str | None, key: str) -> Any:
    """The class that `target`, the value of a key, names; with None the only engine that its own module defines."""
    engine = locate(ENGINE, key)
    if target is None:
        module = importlib.import_module(f"rlft.generation.{name}")
        module = importlib.import_module(f"{module.__name__}.engine") if hasattr(module, "__path__") else module
        classes = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, engine)]
        return next(kind for kind in classes if kind.__module__ == module.__name__)
    cls = locate(target, key)
    if not (isinstance(cls, type) and issubclass(cls, engine)):
        remedy = f"make it a subclass of {ENGINE} (docs/how-to/engines.md)"
        raise UserError(key, "is not an engine's class", got=target, remedy=remedy)
    if isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise UserError(key, f"is an engine's class without {missing}", got=target, remedy=f"define {missing} in it")
    return cls


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """The keys of every command's config (configs/base/run.yaml)."""

    command: Annotated[str, Key(in_state=True)]
    name: Annotated[str, Key(free=True, only_trains=True)]
    seed: Annotated[bounds.Seed, Key(in_trial="always")]
    resume: Annotated[str | None, Key(free=True)]
    token_budget: Annotated[bounds.PositiveInt, Key(free=True, in_trial="always")]
    prompts: Annotated[PromptsConfig, Key(of_data=True)]
    model: Annotated[ModelConfig, Key(in_state=True, in_trial="always")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRoot(Root):
    """The root of a command that samples and scores (configs/base/sampling.yaml, and its groups)."""

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
    """The root of `rlft train`; lora=None trains the model's own weights."""

    steps: Annotated[bounds.PositiveInt, Key(free=True, measured=True, only_trains=True)]
    prompts_per_step: Annotated[bounds.PositiveInt, Key(only_trains=True, in_trial="typed")]
    group_size: Annotated[bounds.PositiveInt, Key(only_trains=True, in_trial="typed")]
    epochs: Annotated[bounds.PositiveInt, Key(only_trains=True)]
    minibatches: Annotated[bounds.PositiveInt, Key(only_trains=True)]
    lora: Annotated[LoraSettings | None, Key(in_state=True, in_trial="always")]
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
    stop: Annotated[StopConfig, Key(free=True, measured=True, only_trains=True)]
    alarms: Annotated[AlarmsConfig | None, Key(measured=False, only_trains=True, in_trial="always")]
    token_values: Annotated[TokenValuesConfig | None, Key(free=True, only_trains=True)]
    rollouts: Annotated[RolloutsConfig, Key(free=True, only_trains=True)]
    algorithm: Annotated[Mapping[str, Any], Key(only_trains=True)]
    console: Annotated[ConsoleConfig | None, Key(free=True, only_trains=True, before=None)]
    logger: Annotated[Mapping[str, Any], Key(free=True, only_trains=True)] = field(default_factory=dict)
    curriculum: Annotated[CurriculumConfig | None, Key(only_trains=True)] = None  # runs from before it have none

    @property
    def sampling(self) -> Sampling:
        """How the completions of a step are drawn; with drafts, which a run makes, where it asks for them."""
        notes_experts, has_drafts = self.snapshot.routing is RoutingSource.engine, self.generation.drafts == HISTORY
        return replace(self.generation.sampling, notes_experts=notes_experts, drafts=has_drafts or None)

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(SamplingRoot):
    """The root of `rlft sft`. With steps=None `epochs` decides; lora=None trains the model's own weights."""

    steps: Annotated[bounds.PositiveInt | None, Key(free=True, measured=True)]
    epochs: bounds.PositiveInt
    examples_per_step: bounds.PositiveInt
    max_completion_tokens: Annotated[bounds.PositiveInt, Key(of_data=True)]
    lora: Annotated[LoraSettings | None, Key(in_state=True)]
    trainer: TrainerConfig
    eval: Annotated[EvalConfig, Key(free=True, measured=True)]
    checkpoint: Annotated[CheckpointConfig, Key(free=True)]
    stop: Annotated[StopConfig, Key(free=True, measured=True)]
    demonstrations: Annotated[Mapping[str, Any], Key(inside={"path": Key(free=True)})]
    console: Annotated[ConsoleConfig | None, Key(free=True, before=None)]
    logger: Annotated[Mapping[str, Any], Key(free=True)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingRoot(Root):
    """Of commands that learn from preferences (configs/base/rankings.yaml). With steps=None `epochs` decides."""

    steps: Annotated[bounds.PositiveInt | None, Key(free=True, measured=True)]
    epochs: bounds.PositiveInt
    rankings_per_step: bounds.PositiveInt
    max_completion_tokens: Annotated[bounds.PositiveInt, Key(of_data=True)]
    lora: Annotated[LoraSettings, Key(in_state=True)]
    trainer: TrainerConfig
    eval: Annotated[RankingEvalConfig, Key(free=True, measured=True)]
    checkpoint: Annotated[CheckpointConfig, Key(free=True)]
    stop: Annotated[StopConfig, Key(free=True, measured=True)]
    preferences: Annotated[Mapping[str, Any], Key(inside={"path": Key(free=True)})]
    console: Annotated[ConsoleConfig | None, Key(free=True, before=None)]
    logger: Annotated[Mapping[str, Any], Key(free=True)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RmConfig(RankingRoot):
    """The root of `rlft rm`."""

    lora: Annotated[LoraSettings, Key(in_state=True, inside={"path": Key(roles=("reward", "policy"))})]
    margin: bounds.NonNegativeFloat
    center: bool
    replay: ReplayConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig(RankingRoot):
    """The root of `rlft dpo`."""

    loss: Mapping[str, Any]
    snapshot: ReferenceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig(SamplingRoot):
    """The root of `rlft sample`."""

    adapter: Annotated[str | None, Key(roles=("policy",))]
    split: typing.Literal["train", "held_out"]
    num_prompts: Annotated[bounds.PositiveInt | None, Key(free=True)]
    n: bounds.PositiveInt
    prompts_per_step: bounds.PositiveInt
    keep: typing.Literal["all", "best", "above"]
    min_reward: float | None
    max_per_prompt: bounds.PositiveInt | None
    dedupe: bool
