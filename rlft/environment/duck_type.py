"""`environment=class`: classes as TRL's `environment_factory` takes them, unmodified.

`reset(**row)` begins a conversation and may return text for the end of the prompt; every other public method is a tool,
with types and a docstring; `get_reward()`, which may be missing, gives the reward of the conversation at its end.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlft.environment.protocol import Environment
from rlft.environment.tools import called, schema_of
from rlft.keys.instantiate import locate
from rlft.types import UserError

KEY = "environment.factory"
NO_TOOLS = ("reset", "get_reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class DuckType(Environment):
    """factory: `module.Class`."""

    factory: str

    def check(self) -> None:
        made = self._class()
        if not callable(getattr(made, "reset", None)):
            remedy = "give it a method reset(self, **row), which begins a conversation"
            raise UserError(KEY, "is a class without reset", got=self.factory, remedy=remedy)
        if not tool_names(made):
            remedy = "give it a public method with types and a docstring, or use environment=game"
            raise UserError(KEY, "is a class without a tool", got=self.factory, remedy=remedy)
        needed = [p.name for p in parameters_of(made) if p.default is p.empty]
        if needed:
            problem = f"needs the arguments {', '.join(needed)}, and it is made without any"
            raise UserError(KEY, problem, got=self.factory, remedy="give them defaults")

    def schemas(self) -> list[dict[str, Any]]:
        made = self._class()
        return [schema_of(getattr(made, name), KEY, f"{self.factory}.{name}") for name in tool_names(made)]

    @property
    def rewards_turns(self) -> bool:
        return callable(getattr(self._class(), "get_reward", None))

    def start(self) -> None:
        self._class()

    def make(self) -> ObjectCalls:
        return ObjectCalls(self._class()())

    def _class(self) -> Any:
        return locate(self.factory, KEY)


class ObjectCalls:
    """The tools and the reward of an object of such a class."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        text = self.held.reset(**accepted(self.held.reset, row))
        return None if text is None else str(text)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        methods = {tool: getattr(self.held, tool) for tool in tool_names(type(self.held))}
        return called(methods, name, arguments)

    def reward(self) -> float | None:
        give = getattr(self.held, "get_reward", None)
        return None if give is None else give()


def tool_names(made: Any) -> list[str]:
    """The public methods of a class that are tools, in the order of their names."""
    public = (name for name in dir(made) if not name.startswith("_") and name not in NO_TOOLS)
    return [name for name in public if callable(inspect.getattr_static(made, name)) or _is_wrapped(made, name)]


def _is_wrapped(made: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(made, name), staticmethod | classmethod)


def accepted(function: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the row that the function takes: all of them where it has `**kwargs`."""
    parameters = parameters_of(function)
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        return dict(row)
    return {p.name: row[p.name] for p in parameters if p.name in row}


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """The named parameters of a function, or of making an object of a class."""
    try:
        all_of_them = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some that are written in C do not tell
        return []
    return [p for p in all_of_them if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
