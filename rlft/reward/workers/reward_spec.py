"""A reward as its config describes it; mistakes are refused here, before a model is loaded.

`weight` and `on_error` belong to the scorer and are not passed on, so a reward class or function needn't know them.

Functions in the form that TRL's GRPOTrainer takes are rewards as they are: `def f(completions, **kwargs)`. TRL passes
keywords, each a list with one entry for each completion: prompts, completions, completion_ids, and every column of the
data. Here a call gets the completions of one prompt. The columns are `answer` and the fields that the data keep with
their prompts (data.metadata_fields). A function has this form if it has a parameter `completions`, `prompts` or
`completion_ids`, or nothing but keywords; rlft's own form has the group as its first parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlft.config.instantiate import check_keys, convert, locate
from rlft.types import Completion, Group, Reward, UserError, require

OnError = Literal["stop"] | float
"""What happens if a reward fails on a completion: `stop` ends the run, a number becomes the completion's score."""

SCORER_KEYS = ("_target_", "weight", "on_error")
TURNS = "turns"  # the name under which environments' rewards for turns stand among the rewards

Form = Literal["messages", "texts"]
"""How a function in TRL's form gets prompts and completions: as lists of messages (TRL's conversational form) or texts.
"""
FORM = "completions"  # the key of such a function that says its form
PASSED = ("prompts", "completions", "completion_ids")
ANSWER = "answer"
TRAINERS_OWN = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL takes from its trainer, which reward workers do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """A reward by the dotted path of its class or function; small and picklable, so that each worker builds its own."""

    name: str
    target: str
    kwargs: Mapping[str, Any]
    weight: float  # its factor in the total reward
    on_error: OnError | None = None  # what happens if it fails; None for the run's setting
    form: Form = "messages"

    def build(self) -> Reward:
        """The callable: a class is instantiated with the keys, a function gets them with each call."""
        target = locate(self.target, f"reward.{self.name}._target_")
        if not isinstance(target, type):
            if is_trl(target):
                return TrlReward(function=target, keys=self.kwargs, form=self.form)
            return functools.partial(target, **self.kwargs)
        built = target(**self.kwargs)
        return TrlReward(function=built, keys={}, form=self.form) if is_trl(built) else built

    @property
    def columns(self) -> list[str]:
        """Fields of the data, besides the answer, that a function in TRL's form needs."""
        built = self.build()
        if not isinstance(built, TrlReward):
            return []
        known = (*PASSED, ANSWER, *built.keys)
        return [p.name for p in named_parameters(built.function) if p.default is p.empty and p.name not in known]

    @property
    def scores_steps(self) -> bool:
        """Whether it gives `StepScores` instead of numbers: its class or function has `scores_steps = True`."""
        return says(self.target, "scores_steps")

    @property
    def runs_in_trainer(self) -> bool:
        """Whether the trainer computes it, never a worker: its class or function has `runs_in_trainer = True`."""
        return says(self.target, "runs_in_trainer")

    @property
    def reads_answers(self) -> bool:
        """Whether its scores are Verdicts: its class or function has `reads_answers = True`."""
        return says(self.target, "reads_answers")


def says(target: str, attribute: str) -> bool:
    """Whether the class or function of this dotted path has this attribute with the value True."""
    return getattr(locate(target, "reward"), attribute, False) is True


def specs(rewards: Mapping[str, Any]) -> dict[str, RewardSpec]:
    """The specs of a `reward` config, `{name: {_target_, weight, ...}}`, each of them built once as a trial.

    Raises UserError: a target that cannot be imported or called, keys that don't fit, a weight that is not a number.
    """
    if "_target_" in rewards:  # a user's own YAML that lacks its first line
        name = str(rewards["_target_"]).rpartition(".")[2]
        problem = "has a _target_ that is no reward's: a reward's YAML begins with the reward's name"
        remedy = f"begin that YAML with `{name}:` and indent the rest below it"
        raise UserError("reward", problem, got=rewards["_target_"], remedy=remedy)
    problem = "is the name under which an environment's own rewards are counted"
    require(TURNS not in rewards, f"reward.{TURNS}", problem, remedy="give the reward another name")
    return {name: _spec(name, config) for name, config in rewards.items()}


def reported(rewards: Mapping[str, RewardSpec], method: Literal["note", "examine"], *arguments: Any) -> Iterator[str]:
    """What the rewards report before a run, by their methods `note()`, such as how untrusted code is isolated, or
    `examine(prompts)` about the data. UserError for bad data."""
    for name, spec in rewards.items():
        report = getattr(spec.build(), method, None)
        try:
            note = report(*arguments) if callable(report) else None
        except UserError as error:
            raise _below(f"reward.{name}", error) from None
        if note is not None:
            yield f"reward.{name}: {note}"


def _spec(name: str, config: Any) -> RewardSpec:
    key = f"reward.{name}"
    if not isinstance(config, Mapping) or "_target_" not in config:
        # Usually a recipe or an override has set a key of a reward that is not chosen.
        remedy = f"choose it with reward=[...,{name}], leave it out with ~reward.{name}, or give its YAML a _target_"
        raise UserError(key, "has no _target_", got=config, remedy=remedy)
    target = locate(config["_target_"], f"{key}._target_")
    has_form = is_trl(target.__call__ if isinstance(target, type) else target)
    scorer_keys = (*SCORER_KEYS, FORM) if has_form else SCORER_KEYS
    kwargs = {k: v for k, v in config.items() if k not in scorer_keys}
    on_error = config.get("on_error")
    check_keys(_parameters(target), kwargs, key, also=scorer_keys[1:])
    spec = RewardSpec(
        name=name,
        target=config["_target_"],
        kwargs=_typed(target, kwargs, key),
        weight=_number(config.get("weight"), f"{key}.weight"),
        on_error=on_error if on_error in (None, "stop") else _number(on_error, f"{key}.on_error"),
        form=convert(Form, config.get(FORM, "messages"), f"{key}.{FORM}") if FORM in scorer_keys else "messages",
    )
    _try_build(spec, key)
    for column in spec.columns:
        problem = f"{spec.target} cannot be called without {column}, which is part of TRL's trainer"
        remedy = f"give the function a default, {column}=None"
        require(column not in TRAINERS_OWN, f"{key}._target_", problem, remedy=remedy)
    problem = "is for rewards that run in workers; where this one fails, the trainer itself is at fault"
    is_fine = spec.on_error is None or not spec.runs_in_trainer
    require(is_fine, f"{key}.on_error", problem, got=spec.on_error, remedy="leave it out")
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
    if not is_trl(target):
        return parameters[1:]
    # Without a value they are columns. Keys that only `**kwargs` would take are not allowed: a misspelt one would go
    # unnoticed.
    taken = (*PASSED, *TRAINERS_OWN)
    return [p.replace(default=None) for p in named_parameters(target) if p.name not in taken]


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


def _try_build(spec: RewardSpec, key: str) -> None:
    try:
        built = spec.build()
    except UserError as error:
        raise _below(key, error) from None
    except (Exception, SystemExit) as error:  # the constructor is the reward's own code
        cause = f"{type(error).__name__}: {error}"
        raise UserError(key, f"{spec.target} cannot be built ({cause})", remedy="check its keys") from error
    problem = "builds something that is not callable"
    require(callable(built), f"{key}._target_", problem, got=spec.target, remedy="give it __call__")


def _below(key: str, error: UserError) -> UserError:
    """The reward's error about one of its keys, with the place of that key in the config."""
    return UserError(f"{key}.{error.key}", error.problem, got=error.got, remedy=error.remedy)


# -- functions in TRL's form -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class TrlReward:
    """Calls such a function with the completions of a group, in this form; `keys` are arguments from its YAML."""

    function: Callable[..., Any]
    keys: Mapping[str, Any]
    form: Form

    def __call__(self, group: Group) -> Any:
        """The function's result for each completion; a coroutine is run to its end.

        None means that the reward does not apply: it becomes 0, which adds nothing to the total.
        """
        returned = awaited(self.function(**self.arguments(group)))
        is_list = isinstance(returned, list | tuple | Iterator)  # anything else is checked as it is
        return [0.0 if value is None else value for value in returned] if is_list else returned

    def arguments(self, group: Group) -> dict[str, Any]:
        """The arguments that TRL would pass and the function takes, and the YAML's keys."""
        count = len(group.rollouts)
        columns = {ANSWER: group.prompt.answer, **group.prompt.metadata}
        passed: dict[str, Any] = {
            "prompts": [self._prompt(group) for _ in range(count)],
            "completions": [
                list(messages_of(r.completion)) if self.form == "messages" else r.completion.text
                for r in group.rollouts
            ],
            "completion_ids": [list(rollout.completion.token_ids) for rollout in group.rollouts],
            **{name: [value] * count for name, value in columns.items() if name not in PASSED},
        }
        return accepted(self.function, passed) | dict(self.keys)

    def _prompt(self, group: Group) -> Any:
        if self.form == "messages":
            return [dict(message) for message in group.prompt.messages]
        return "\n\n".join(message["content"] for message in group.prompt.messages)


def messages_of(completion: Completion) -> Iterator[dict[str, Any]]:
    """A completion in TRL's conversational form: the policy's turns, and the answers of tools or users."""
    if not completion.turns:
        yield {"role": "assistant", "content": completion.text}
    for turn in completion.turns:
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls
        ]
        yield {"role": "assistant", "content": turn.text, **({"tool_calls": calls} if calls else {})}
        for call in turn.calls:
            yield {"role": "tool", "name": call.name, "content": call.answer}
        if turn.answer and not turn.calls:
            yield {"role": "user", "content": turn.answer}


def is_trl(function: Any) -> bool:
    """Whether a function or callable object has TRL's form."""
    parameters = parameters_of(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    return any(p.name in PASSED for p in parameters) or (bool(parameters) and not positional)


# -- functions of others -----------------------------------------------------------------------------------------------
def parameters_of(function: Any) -> list[inspect.Parameter]:
    """The parameters of a function, or of making an object of a class; none without a signature, as some in C."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def named_parameters(function: Any) -> list[inspect.Parameter]:
    return [p for p in parameters_of(function) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def takes_any_keyword(function: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters_of(function))


def accepted(function: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the function takes by their names: all of them if it has `**kwargs`."""
    if takes_any_keyword(function):
        return dict(values)
    names = {p.name for p in named_parameters(function)}
    return {name: value for name, value in values.items() if name in names}


def awaited(value: Any) -> Any:
    """The value, or the result of a coroutine or another awaitable, which is run to its end in a loop of its own."""

    import asyncio  # whose import takes longer than most commands' checks

    async def run() -> Any:
        return await value

    return asyncio.run(run()) if inspect.isawaitable(value) else value
