"""YAML in, frozen dataclasses out; and everything that can be refused without loading a weight.

`build` turns a composed config into a `RunConfig`: every key is known, has its type and its bounds. `rlft.check` holds
the rules between parts. This file and cli.py are the only ones that know Hydra and OmegaConf.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlft
from rlft.fields import NonNegativeInt, PositiveFloat, PositiveInt
from rlft.generation.config import GenerationConfig
from rlft.model.config import LoraSettings, ModelConfig, SnapshotConfig
from rlft.trainer.config import CheckpointConfig, TrainerConfig
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.algorithm.protocol import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsConfig:
    max_tokens: PositiveInt
    over_limit: typing.Literal["drop", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringConfig:
    workers: NonNegativeInt
    timeout: PositiveFloat
    on_error: float | typing.Literal["stop"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The typed root. algorithm, data, reward and logger are open groups: `_target_` names a class, the rest are its keys."""

    name: str
    seed: NonNegativeInt
    steps: PositiveInt
    resume: str | None
    prompts_per_step: PositiveInt
    group_size: PositiveInt
    epochs: PositiveInt
    minibatches: PositiveInt
    token_budget: PositiveInt
    prompts: PromptsConfig
    model: ModelConfig
    lora: LoraSettings
    snapshot: SnapshotConfig
    trainer: TrainerConfig
    generation: GenerationConfig
    scoring: ScoringConfig
    freshness: FreshnessConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    algorithm: Mapping[str, Any]
    data: Mapping[str, Any]
    reward: Mapping[str, Any]
    logger: Mapping[str, Any]

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


def config_folder() -> Path:
    """Where the YAML lives: inside the installed package, or at the top of a checkout."""
    installed = Path(rlft.__file__).parent / "configs"
    return installed if installed.is_dir() else Path(rlft.__file__).parents[1] / "configs"


def recipe_folder() -> Path:
    return config_folder() / "recipe"


def choices(group: str) -> list[str]:
    """Names of the YAML files of a config group."""
    return sorted(f.stem for f in (config_folder() / group).glob("*.yaml"))


def compose(overrides: Sequence[str], config_dir: str | None = None) -> dict[str, Any]:
    """The plain, resolved config that these command-line overrides give."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register_resolvers()
    GlobalHydra.instance().clear()
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        return plain(hydra_compose("train", [*overrides, *search]))


def register_resolvers() -> None:
    """`rlft_run_dir`: a resumed run goes on in its folder, a new one gets runs/<name>/<time>."""
    from omegaconf import OmegaConf

    def run_dir(resume: str | None, name: str) -> str:
        from datetime import datetime

        return resume or f"runs/{name}/{datetime.now():%Y-%m-%d_%H-%M-%S}"

    OmegaConf.register_new_resolver("rlft_run_dir", run_dir, replace=True, use_cache=True)


def plain(composed: Any) -> dict[str, Any]:
    """Interpolations resolved, as ordinary dicts and lists."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        raise UserError(str(key), str(error).splitlines()[0], remedy="give it a value") from None


def build(config: Mapping[str, Any]) -> RunConfig:
    """The typed root from a plain config; refuses unknown keys, wrong types and values out of bounds."""
    return from_mapping(RunConfig, config, "")


def load_algorithm(name: str, **overrides: Any) -> Algorithm:
    """The algorithm of configs/algorithm/<name>.yaml with these keys overridden. Works on plain tensors, no model needed.

    >>> rlft.load_algorithm("grpo", clip_high=0.28).clip_high
    0.28
    """
    from hydra.errors import MissingConfigException

    try:
        composed = compose([f"algorithm={name}"])
    except MissingConfigException:
        raise UserError("algorithm", "is not known", got=name, remedy=f"choose one of {', '.join(choices('algorithm'))}") from None
    return instantiate({**composed["algorithm"], **overrides}, "algorithm")


# -- components: `_target_` and its keys -----------------------------------------------------------------------------
def locate(target: Any, key: str) -> Any:
    """The class or function that `_target_` names."""
    if not isinstance(target, str) or "." not in target:
        raise UserError(f"{key}._target_", "must be module.Name of a class or function", got=target, remedy="name one that can be imported")
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{key}._target_", f"cannot be imported ({error})", got=target, remedy="check the spelling and that its folder is on PYTHONPATH"
        ) from None
    if not callable(found):
        raise UserError(f"{key}._target_", "is not callable", got=target, remedy="name a class or a function")
    return found


def instantiate(config: Any, key: str) -> Any:
    """The component a `_target_` config describes; a dataclass has its fields' types and bounds checked."""
    return call(locate(component_target(config, key), key), {k: v for k, v in config.items() if k != "_target_"}, key)


def component_target(config: Any, key: str) -> Any:
    if not isinstance(config, Mapping) or "_target_" not in config:
        raise UserError(key, "has no _target_", got=config, remedy=f"choose one of the {key.split('.')[0]} configs (rlft train --help)")
    return config["_target_"]


def call(target: Any, keys: Mapping[str, Any], key: str) -> Any:
    if dataclasses.is_dataclass(target):
        return from_mapping(target, keys, key)
    try:
        inspect.signature(target).bind(**keys)
    except TypeError as error:
        raise UserError(key, f"its keys do not fit {target.__name__} ({error})", got=sorted(keys), remedy="check its YAML") from None
    return target(**keys)


def from_mapping(cls: Any, values: Any, prefix: str) -> Any:
    """A dataclass from a mapping: unknown and missing keys, types and bounds are refused by their full key."""
    if not isinstance(values, Mapping):
        raise UserError(prefix, "must be a section of keys", got=values, remedy=f"set {prefix}.<key> instead")
    names = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            # `+recpie=x` is a new key to Hydra; `recipe` itself is a group, not a key.
            close = difflib.get_close_matches(str(key), names if prefix else [*names, "recipe"], n=1)
            wanted = "+recipe=<name>" if close == ["recipe"] else _join(prefix, close[0]) if close else ""
            remedy = f"did you mean {wanted}?" if close else f"known here: {', '.join(names)}"
            raise UserError(_join(prefix, key), "there is no such key", got=_short(values[key]), remedy=remedy)
    required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    for name in required:
        if name not in values:
            raise UserError(_join(prefix, name), "is missing", remedy="give it a value")
    hints = _hints(cls)
    converted = {name: convert(hints[name], value, _join(prefix, name)) for name, value in values.items()}
    return cls(**converted)


def convert(hint: Any, value: Any, key: str) -> Any:
    """The value as its field's type, checked by pydantic in strict mode (no "5" for 5, no True for 1)."""
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, key)
    from pydantic import ValidationError

    enums = [kind for kind in _options(hint) if isinstance(kind, type) and issubclass(kind, Enum)]
    for kind in enums:
        if value in [member.value for member in kind]:
            return kind(value)
    try:
        validated = _adapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        problem = "; ".join(dict.fromkeys(_sentence(e) for e in error.errors()))
        choices = [str(m.value) for kind in enums for m in kind]
        remedy = f"choose one of {', '.join(choices)}" if choices else _remedy(hint)
        raise UserError(key, "is not one of its choices" if choices else problem, got=_short(value), remedy=remedy) from None
    if isinstance(validated, float) and not abs(validated) < float("inf"):
        raise UserError(key, "must be finite", got=value, remedy="give a finite number")
    return tuple(validated) if isinstance(validated, list) else validated


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _sentence(error: Any) -> str:
    message = str(error["msg"])
    return message.replace("Input should be", "must be").replace("Input should", "must")


def _remedy(hint: Any) -> str:
    literal = [str(v) for kind in _options(hint) if typing.get_origin(kind) is typing.Literal for v in typing.get_args(kind)]
    if literal:
        return f"use {' or '.join(literal)}" + (" or a number" if len(_options(hint)) > 1 else "")
    return "see configs/train.yaml for its meaning"


def _join(prefix: str, key: object) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
