"""`environment=class`: classes as TRL's `environment_factory` takes them, unmodified.

`reset(**row)` begins a conversation and may return text for the end of the prompt; every other public method is a tool,
with types and a docstring. `get_reward()`, which may be missing, gives the reward of the conversation at its end; a
method of another name or an attribute may do so instead. Each of the methods may be a coroutine function.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlft.config.instantiate import locate
from rlft.environment.protocol import Environment, Play
from rlft.environment.tools import called, schema_of
from rlft.reward.workers.reward_spec import accepted, awaited, named_parameters
from rlft.types import require

KEY = "environment.factory"
GET_REWARD = "get_reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolClass(Environment):
    """The keys of `environment=class`: the class as `module.Class`, and the method or attribute that gives rewards."""

    factory: str
    reward: str

    def check(self) -> None:
        cls = self._class()
        remedy = "give it a method reset(self, **row), which begins a conversation"
        require(callable(getattr(cls, "reset", None)), KEY, "is a class without reset", got=self.factory, remedy=remedy)
        remedy = "give it a public method with types and a docstring, or use environment=game"
        require(self._tools(cls), KEY, "is a class without a tool", got=self.factory, remedy=remedy)
        needed = [p.name for p in named_parameters(cls) if p.default is p.empty]
        problem = f"needs the arguments {', '.join(needed)}, and it is made without any"
        require(not needed, KEY, problem, got=self.factory, remedy="give them defaults")

    def schemas(self) -> list[dict[str, Any]]:
        cls = self._class()
        return [schema_of(getattr(cls, name), KEY, f"{self.factory}.{name}") for name in self._tools(cls)]

    @property
    def rewards_turns(self) -> bool:
        return self.reward != GET_REWARD or callable(getattr(self._class(), GET_REWARD, None))

    def start(self) -> None:
        self._class()

    def make(self) -> ObjectCalls:
        return ObjectCalls(self._class()(), self._tools(self._class()), self.reward if self.rewards_turns else None)

    def _tools(self, cls: Any) -> list[str]:
        """The names of the class's public methods that are tools, sorted."""
        names = [name for name in dir(cls) if not name.startswith("_")]
        members = {name: inspect.getattr_static(cls, name) for name in names}
        tools = {name for name, m in members.items() if callable(m) or isinstance(m, staticmethod | classmethod)}
        return sorted(tools - {"reset", GET_REWARD, self.reward})

    def _class(self) -> Any:
        return locate(self.factory, KEY)


class ObjectCalls(Play):
    """The tools and the reward of an object of such a class, by their names; None: nothing gives a reward."""

    def __init__(self, held: Any, tools: Sequence[str], reward: str | None) -> None:
        self.held, self._tools, self._reward = held, tools, reward

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        text = awaited(self.held.reset(**accepted(self.held.reset, row)))
        return None if text is None else str(text)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return called({tool: getattr(self.held, tool) for tool in self._tools}, name, arguments)

    def reward(self) -> float | None:
        if self._reward is None:
            return None
        reward = getattr(self.held, self._reward)
        return awaited(reward()) if callable(reward) else reward
