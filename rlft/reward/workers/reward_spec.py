"""A reward as its config describes it; mistakes are refused here, before a model is loaded.

`weight` and `on_error` belong to the scorer and are not passed on, so a reward class or function needn't know them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlft.config.instantiate import check_keys, convert, locate
from rlft.reward.workers import trl
from rlft.types import Prompt, Reward, UserError

OnError = Literal["stop"] | float
"""What happens if a reward fails on a completion: `stop` ends the run, a number becomes the completion's score."""

SCORER_KEYS = ("_target_", "weight", "on_error")
TURNS = "turns"
"""The name under which environments' rewards for turns stand among the rewards."""

FORM = "completions"
"""The key of a function in TRL's form that says how prompts and completions are given to it: `messages` or `texts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """A reward by the dotted path of its class or function; small and picklable, so that each worker builds its own.

    Attributes:
        name: name of the reward.
        target: dotted path of its class or function.
        kwargs: its keys.
        weight: factor in the total reward.
        on_error: what happens if it fails; None for the run's setting.
        form: how a function in TRL's form gets prompts and completions.
    """

    name: str
    target: str
    kwargs: Mapping[str, Any]
    weight: float
    on_error: OnError | None = None
    form: trl.Form = "messages"

    def build(self) -> Reward:
        """The callable: a class is instantiated with the keys, a function gets them with each call."""
        target = locate(self.target, f"reward.{self.name}._target_")
        if not isinstance(target, type):
            if trl.is_trl(target):
                return trl.TrlReward(function=target, keys=self.kwargs, form=self.form)
            return functools.partial(target, **self.kwargs)
        built = target(**self.kwargs)
        return trl.TrlReward(function=built, keys={}, form=self.form) if trl.is_trl(built) else built

    @property
    def columns(self) -> list[str]:
        """Fields of the data, besides the answer, that a function in TRL's form needs."""
        built = self.build()
        return trl.columns_of(built.function, list(built.keys)) if isinstance(built, trl.TrlReward) else []

    @property
    def scores_steps(self) -> bool:
        """Whether it gives `StepScores` instead of numbers: its class or function has `scores_steps = True`."""
        return self._says("scores_steps")

    @property
    def runs_in_trainer(self) -> bool:
        """Whether the trainer computes it, never a worker: its class or function has `runs_in_trainer = True`."""
        return self._says("runs_in_trainer")

    def note(self) -> str | None:
        """What the reward's method `note()` reports when a run begins; None without one."""
        note = getattr(self.build(), "note", None)
        return f"reward.{self.name}: {note()}" if callable(note) else None

    def examine(self, prompts: Sequence[Prompt]) -> str | None:
        """What the reward's method `examine(prompts)` reports about the data; UserError for bad data."""
        examine = getattr(self.build(), "examine", None)
        if not callable(examine):
            return None
        try:
            note = examine(prompts)
        except UserError as error:
            key = f"reward.{self.name}.{error.key}"
            raise UserError(key, error.problem, got=error.got, remedy=error.remedy) from None
        return None if note is None else f"reward.{self.name}: {note}"

    def _says(self, attribute: str) -> bool:
        return getattr(locate(self.target, f"reward.{self.name}._target_"), attribute, False) is True


def specs(rewards: Mapping[str, Any]) -> dict[str, RewardSpec]:
    """The specs of a `reward` config, `{name: {_target_, weight, ...}}`, each of them built once as a trial.

    Raises:
        UserError: a target that cannot be imported or called, keys that don't fit, a weight that is not a number.
    """
    if "_target_" in rewards:  # a user's own YAML that lacks its first line
        name = str(rewards["_target_"]).rpartition(".")[2]
        problem = "has a _target_ that is no reward's: a reward's YAML begins with the reward's name"
        remedy = f"begin that YAML with `{name}:` and indent the rest below it"
        raise UserError("reward", problem, got=rewards["_target_"], remedy=remedy)
    if TURNS in rewards:
        problem = "is the name under which an environment's own rewards are counted"
        raise UserError(f"reward.{TURNS}", problem, remedy="give the reward another name")
    return {name: _spec(name, config) for name, config in rewards.items()}


def notes(rewards: Mapping[str, RewardSpec]) -> tuple[str, ...]:
    """What these rewards report when a run begins, such as how untrusted code is isolated."""
    return tuple(note for spec in rewards.values() if (note := spec.note()) is not None)


def check_with_rewards(rewards: Mapping[str, RewardSpec], prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """What these rewards report about the data before a run; UserError if one of them cannot score these prompts."""
    return tuple(note for spec in rewards.values() if (note := spec.examine(prompts)) is not None)


def _spec(name: str, config: Any) -> RewardSpec:
    key = f"reward.{name}"
    if not isinstance(config, Mapping) or "_target_" not in config:
        # Usually a recipe or an override has set a key of a reward that is not chosen.
        remedy = f"choose it with reward=[...,{name}], leave it out with ~reward.{name}, or give its YAML a _target_"
        raise UserError(key, "has no _target_", got=config, remedy=remedy)
    target = locate(config["_target_"], f"{key}._target_")
    scorer_keys = (*SCORER_KEYS, FORM) if _has_form(target) else SCORER_KEYS
    kwargs = {k: v for k, v in config.items() if k not in scorer_keys}
    check_keys(_parameters(target), kwargs, key, also=scorer_keys[1:])
    spec = RewardSpec(
        name=name,
        target=config["_target_"],
        kwargs=_typed(target, kwargs, key),
        weight=_number(config.get("weight"), f"{key}.weight"),
        on_error=_on_error(config.get("on_error"), f"{key}.on_error"),
        form=convert(trl.Form, config.get(FORM, "messages"), f"{key}.{FORM}") if FORM in scorer_keys else "messages",
    )
    _try_build(spec, key)
    for name in (name for name in spec.columns if name in trl.TRAINERS_OWN):
        problem = f"{spec.target} cannot be called without {name}, which is part of TRL's trainer"
        raise UserError(f"{key}._target_", problem, remedy=f"give the function a default, {name}=None")
    if spec.runs_in_trainer and spec.on_error is not None:
        problem = "is for rewards that run in workers; where this one fails, the trainer itself is at fault"
        raise UserError(f"{key}.on_error", problem, got=spec.on_error, remedy="leave it out")
    return spec


def _parameters(target: Any) -> list[inspect.Parameter]:
    """The parameters that keys can set: those of a constructor, or those of a function except the first, the group."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        # It is written in C and has no signature: building it will tell what is wrong.
        return [inspect.Parameter("keys", inspect.Parameter.VAR_KEYWORD)]
    if isinstance(target, type):
        return parameters
    return trl.keys_of(target) if trl.is_trl(target) else parameters[1:]


def _has_form(target: Any) -> bool:
    """Whether a function, or the objects of a class, take TRL's form."""
    return trl.is_trl(target.__call__ if isinstance(target, type) else target)


def _typed(target: Any, kwargs: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The keys, converted to the types of a dataclass's fields; other targets take them as they are."""
    if not dataclasses.is_dataclass(target):
        return dict(kwargs)
    hints = typing.get_type_hints(target, include_extras=True)
    return {name: convert(hints[name], value, f"{key}.{name}") for name, value in kwargs.items()}


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
