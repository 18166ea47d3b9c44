"""The typed `generation` section; its YAML, with meanings and defaults, is configs/generation/auto.yaml.

Beside the keys that all engines have, it holds a section for each engine, whose keys are the fields of its class. An
engine from outside the tree has a section with a `_target_`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import isabstract
from typing import Any, ClassVar

from rlft.config.bounds import Decay, NonNegativeFloat, NonNegativeInt, PositiveFraction, PositiveInt
from rlft.config.instantiate import from_mapping, locate, unknown_key
from rlft.types import Sampling, UserError

AUTO = "auto"
BUILT_IN: Mapping[str, str] = {
    "transformers": "rlft.generation.transformers.Transformers",
    "vllm": "rlft.generation.vllm.engine.VLLM",
    "scripted": "rlft.generation.scripted.Scripted",
}
"""{engine: its class} for the engines in the tree."""
ENGINE = "rlft.generation.engine.Engine"
"""The class of all engines, by name: this package is below the one of the engines."""
ON_A_GPU, ANYWHERE = "vllm", "transformers"
"""What `auto` chooses on a GPU, if that engine can run and serves the adapters, and what it chooses otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The `generation` section of a config.

    Attributes:
        engine: auto, the name of an engine's section, or `module.Class` of an engine outside the tree.
        engines: {section: engine} for the engines in the tree and the one that is chosen.
    """

    READ_FROM: ClassVar[Mapping[str, Mapping[str, str]]] = {"engines": BUILT_IN}
    """{field: {section that it is read from: class of the section}}."""

    engine: str
    max_tokens: PositiveInt
    temperature: NonNegativeFloat
    top_p: PositiveFraction
    top_k: NonNegativeInt
    engines: Mapping[str, Any]
    min_p: Decay
    stop: Sequence[str | int]
    include_stop_str_in_output: bool

    def __post_init__(self) -> None:
        if any(stop == "" for stop in self.stop):
            problem = "holds an empty string, which is in every completion"
            raise UserError("generation.stop", problem, got=list(self.stop), remedy="leave it out")
        negative = [stop for stop in self.stop if isinstance(stop, int) and stop < 0]
        if negative:
            remedy = "use token ids of the model's vocabulary, or strings"
            raise UserError("generation.stop", "holds a token id below 0", got=negative[0], remedy=remedy)

    @classmethod
    def with_sections_read(cls, values: Mapping[str, Any], prefix: str, verb: str) -> dict[str, Any]:
        """The plain section, in which the sections of engines are replaced by `engines`, the engines made of them.

        Raises:
            UserError: a class that is not an engine's, or a wrong key of an engine.
        """
        chosen = str(values.get("engine"))
        targets = {**BUILT_IN, **_outside(chosen, values)}
        shared_keys = [field.name for field in fields(cls) if field.name != "engines"]
        for name in (name for name in values if name not in shared_keys and name not in targets):
            section = values[name]
            if name == chosen and isinstance(section, Mapping) and "_target_" not in section:
                remedy = f"name the engine's class, as in {prefix}.{name}._target_=mine.Engine"
                raise UserError(f"{prefix}.{name}", "has no _target_", remedy=remedy)
            if not (isinstance(section, Mapping) and "_target_" in section):  # else an engine that is not chosen
                raise unknown_key(name, section, [*shared_keys, *targets], prefix, verb)
        engines = {}
        for name, target in targets.items():
            if name in BUILT_IN and name not in values:
                raise UserError(f"{prefix}.{name}", "is missing", remedy="give it a value")
            engines[name] = _engine(target, values.get(name, {}), f"{prefix}.{name}", chosen == target, verb)
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


def free_keys(section: Mapping[str, Any]) -> Iterator[str]:
    """Keys of a plain `generation` section that change no number, so that a run may be resumed with other values."""
    for name, target in {**BUILT_IN, **_outside(str(section.get("engine")), section)}.items():
        yield from (f"generation.{name}.{key}" for key in _class(target, f"generation.{name}").may_change)


def packages(section: Mapping[str, Any]) -> Iterator[str]:
    """Distributions that the engines of a plain `generation` section need, besides those that rlft needs itself."""
    for name, target in {**BUILT_IN, **_outside(str(section.get("engine")), section)}.items():
        yield from _class(target, f"generation.{name}").packages


def _outside(chosen: str, values: Mapping[str, Any]) -> dict[str, str]:
    """{section: class} of the chosen engine if it is from outside the tree, else {}."""
    if "." in chosen:
        return {section_of(chosen): chosen}
    section = values.get(chosen)
    return {chosen: section["_target_"]} if isinstance(section, Mapping) and "_target_" in section else {}


def _class(target: Any, key: str) -> Any:
    cls = locate(target, key)
    if not (isinstance(cls, type) and issubclass(cls, locate(ENGINE, key))):
        remedy = f"make it a subclass of {ENGINE} (docs/engines.md)"
        raise UserError(key, "is not an engine's class", got=target, remedy=remedy)
    if isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise UserError(key, f"is an engine's class without {missing}", got=target, remedy=f"define {missing} in it")
    return cls


def _engine(target: str, section: Any, key: str, is_by_class: bool, verb: str) -> Any:
    cls = _class(target, "generation.engine" if is_by_class else f"{key}._target_")
    if isinstance(section, Mapping):
        section = {name: value for name, value in section.items() if name != "_target_"}
    return from_mapping(cls, section, key, verb)
