"""Reward functions in the form that TRL's GRPOTrainer takes, as they are: `def f(completions, **kwargs)`.

TRL passes keywords, each a list with one entry for each completion: prompts, completions, completion_ids, and every
column of the data. Here a call gets the completions of one prompt. The columns are `answer` and the fields that the
data keep with their prompts (data.metadata_fields). A function has this form if it has a parameter `completions`,
`prompts` or `completion_ids`, or nothing but keywords; rlft's own form has the group as its first parameter.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlft.types import Completion, Group

PASSED = ("prompts", "completions", "completion_ids")
ANSWER = "answer"
TRAINERS_OWN = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL takes from its trainer, which reward workers do not have."""

Form = Literal["messages", "texts"]
"""How prompts and completions are passed: as lists of messages (TRL's conversational form) or as texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlReward:
    """Calls such a function with the completions of a group.

    Attributes:
        function: the function.
        keys: arguments from the reward's YAML.
        form: how it gets prompts and completions.
    """

    function: Callable[..., Any]
    keys: Mapping[str, Any]
    form: Form

    def __call__(self, group: Group) -> list[Any]:
        """The function's result for each completion; a coroutine is run to its end.

        None means that the reward does not apply: it becomes 0, which adds nothing to the total.
        """
        returned = self.function(**self.arguments(group))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        return [0.0 if value is None else value for value in returned]

    def arguments(self, group: Group) -> dict[str, Any]:
        """The arguments that TRL would pass and the function takes, and the YAML's keys."""
        count = len(group.rollouts)
        columns = {ANSWER: group.prompt.answer, **group.prompt.metadata}
        passed: dict[str, Any] = {
            "prompts": [self._prompt(group) for _ in range(count)],
            "completions": [self._completion(rollout.completion) for rollout in group.rollouts],
            "completion_ids": [list(rollout.completion.token_ids) for rollout in group.rollouts],
            **{name: [value] * count for name, value in columns.items() if name not in PASSED},
        }
        names = None if takes_any_keyword(self.function) else {p.name for p in parameters_of(self.function)}
        return {name: value for name, value in passed.items() if names is None or name in names} | dict(self.keys)

    def _prompt(self, group: Group) -> Any:
        if self.form == "messages":
            return [dict(message) for message in group.prompt.messages]
        return "\n\n".join(message["content"] for message in group.prompt.messages)

    def _completion(self, completion: Completion) -> Any:
        return list(messages_of(completion)) if self.form == "messages" else completion.text


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


async def _awaited(coroutine: Awaitable[Any]) -> Any:
    return await coroutine


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """The function's parameters; none if it has no signature, like some functions written in C."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def takes_any_keyword(function: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters_of(function))


def is_trl(function: Any) -> bool:
    """Whether a function or callable object has TRL's form.

    >>> is_trl(lambda completions, **kwargs: []), is_trl(lambda **kwargs: []), is_trl(lambda group, limit=1: [])
    (True, True, False)
    """
    parameters = parameters_of(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    return any(p.name in PASSED for p in parameters) or (bool(parameters) and not positional)


def keys_of(function: Any) -> list[inspect.Parameter]:
    """The parameters that a YAML may set: named ones, except those that TRL itself passes.

    Without a value they are columns. Keys that only `**kwargs` would take are not allowed: a misspelt one would go
    unnoticed.
    """
    named = [p for p in parameters_of(function) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.replace(default=None) for p in named if p.name not in (*PASSED, *TRAINERS_OWN)]


def columns_of(function: Any, keys: Sequence[str]) -> list[str]:
    """Columns that the function needs, given the keys of its YAML."""
    named = [p for p in parameters_of(function) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = (*PASSED, ANSWER, *keys)
    return [p.name for p in named if p.default is p.empty and p.name not in known]
