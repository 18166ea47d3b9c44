"""What a run wants of a reward, as its config says it; what is wrong with it is refused here, before a model is loaded.

`weight` and `on_error` belong to the scorer and are not passed on, so a reward class or function needn't know them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from rlft.types import Reward, UserError

OnError = Literal["stop"] | float
"""What a completion gets whose reward failed: `stop` ends the run, a number is its score."""

SCORER_KEYS = ("_target_", "weight", "on_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """A reward by the dotted path of its class or function; small and picklable, so that each worker builds its own.

    weight: factor in the total reward. on_error: None for what the run says.
    """

    name: str
    target: str
    kwargs: Mapping[str, Any]
    weight: float
    on_error: OnError | None = None

    def build(self) -> Reward:
        """The callable: a class is instantiated with the keys, a function gets them at each call."""
        found = locate(self.target, f"reward.{self.name}")
        return found(**self.kwargs) if isinstance(found, type) else functools.partial(found, **self.kwargs)


def specs(rewards: Mapping[str, Any]) -> dict[str, RewardSpec]:
    """The specs of a `reward` config, `{name: {_target_, weight, ...}}`, each of them built once as a trial.

    Raises:
        UserError: no reward, not importable, not callable, keys that don't fit, a weight that is no number.
    """
    if not rewards:
        raise UserError("reward", "is empty: nothing would be learned", remedy="try reward=[exact_match,format]")
    return {name: _spec(name, config) for name, config in rewards.items()}


def locate(target: Any, key: str) -> Any:
    """The class or function at a dotted path.

    >>> locate("rlft.reward.format.Format", "reward.format").__name__
    'Format'
    """
    key = f"{key}._target_"
    if not isinstance(target, str) or "." not in target.strip("."):
        raise UserError(key, "must be module.Name of a class or function", got=target, remedy="name one to import")
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # an import runs the module's own code, which may raise anything
        cause = f"{type(error).__name__}: {error}"
        remedy = "check the spelling, and that its folder is on PYTHONPATH"
        raise UserError(key, f"cannot be imported ({cause})", got=target, remedy=remedy) from error
    if not callable(found):
        raise UserError(key, "is not callable", got=target, remedy="name a class or a function")
    return found


def _spec(name: str, config: Any) -> RewardSpec:
    key = f"reward.{name}"
    if not isinstance(config, Mapping) or "_target_" not in config:
        # Most often a recipe or an override that sets a key of a reward which is not chosen.
        remedy = f"choose it with reward=[...,{name}], leave it out with ~reward.{name}, or give its YAML a _target_"
        raise UserError(key, "has no _target_", got=config, remedy=remedy)
    found = locate(config["_target_"], key)
    kwargs = {k: v for k, v in config.items() if k not in SCORER_KEYS}
    _check_keys(found, kwargs, key)
    spec = RewardSpec(
        name=name,
        target=config["_target_"],
        kwargs=_typed(found, kwargs, key),
        weight=_number(config.get("weight"), f"{key}.weight"),
        on_error=_on_error(config.get("on_error"), f"{key}.on_error"),
    )
    _try_build(spec, key)
    return spec


def _check_keys(found: Any, kwargs: Mapping[str, Any], key: str) -> None:
    """Refuses keys that the target doesn't take, and missing ones."""
    try:
        parameters = dict(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return  # written in C without a signature: the trial build says what is wrong
    if not isinstance(found, type):
        parameters.pop(next(iter(parameters), ""), None)  # the group
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    for unknown in (k for k in kwargs if k not in names and not takes_any):
        close = difflib.get_close_matches(str(unknown), names, n=1)
        remedy = f"did you mean {key}.{close[0]}?" if close else f"known here: {', '.join(names) or 'none'}"
        raise UserError(f"{key}.{unknown}", "there is no such key", got=kwargs[unknown], remedy=remedy)
    for missing in (p.name for p in named if p.default is p.empty and p.name not in kwargs):
        raise UserError(f"{key}.{missing}", "is missing", remedy="give it a value")


def _typed(found: Any, kwargs: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The keys as the types of a dataclass's fields; other targets take them as they are."""
    if not dataclasses.is_dataclass(found):
        return dict(kwargs)
    hints = typing.get_type_hints(found, include_extras=True)
    return {name: _convert(hints[name], value, f"{key}.{name}") for name, value in kwargs.items()}


def _convert(hint: Any, value: Any, key: str) -> Any:
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticSchemaGenerationError

    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [member.value for member in hint]
        if value not in choices:
            raise UserError(
                key, "is not one of its choices", got=value, remedy=f"choose {' or '.join(map(str, choices))}"
            )
        return hint(value)
    try:
        return TypeAdapter(hint).validate_python(value, strict=True)
    except PydanticSchemaGenerationError:
        return value  # a type of somebody's own: theirs to check
    except ValidationError as error:
        problem = error.errors()[0]["msg"].replace("Input should be", "must be")
        raise UserError(key, problem, got=repr(value), remedy="see the reward's YAML for its meaning") from None


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        got = "nothing" if value is None else repr(value)
        raise UserError(key, "must be a finite number", got=got, remedy="try 1.0")
    return float(value)


def _on_error(value: Any, key: str) -> OnError | None:
    return value if value in (None, "stop") else _number(value, key)


def _try_build(spec: RewardSpec, key: str) -> None:
    try:
        built = spec.build()
    except UserError as error:
        raise UserError(f"{key}.{error.key}", error.problem, got=error.got, remedy=error.remedy) from None
    except Exception as error:  # the constructor is the reward's own code
        cause = f"{type(error).__name__}: {error}"
        raise UserError(key, f"{spec.target} cannot be built ({cause})", remedy="check its keys") from error
    if not callable(built):
        raise UserError(
            f"{key}._target_", "builds something that is not callable", got=spec.target, remedy="give it __call__"
        )
