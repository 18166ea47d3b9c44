"""`environment=game`: a class that answers each turn of the policy as a whole, like an environment of Gymnasium.

`reset(**row)` begins and may return text for the end of the prompt; `step(text)` returns (observation, reward, done).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlft.config.instantiate import locate
from rlft.environment.protocol import Environment, Play, Step
from rlft.reward.workers.reward_spec import accepted
from rlft.types import require

KEY = "environment.factory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Game(Environment):
    """The keys of `environment=game`: the class as `module.Class`, and keyword arguments of which objects are made."""

    plays_a_game: ClassVar[bool] = True

    factory: str
    arguments: Mapping[str, Any] | None

    def check(self) -> None:
        cls = locate(self.factory, KEY)
        for method, remedy in (
            ("reset", "give it a method reset(self, **row), which begins a game"),
            ("step", "give it a method step(self, text) that returns (observation, reward, done)"),
        ):
            is_there = callable(getattr(cls, method, None))
            require(is_there, KEY, f"is a class without {method}", got=self.factory, remedy=remedy)

    def start(self) -> None:
        locate(self.factory, KEY)

    def make(self) -> ObjectSteps:
        return ObjectSteps(locate(self.factory, KEY)(**(self.arguments or {})))


class ObjectSteps(Play):
    """The answers of an object of such a class."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        text = self.held.reset(**accepted(self.held.reset, {"seed": seed, **row}))
        return None if text is None else str(text)

    def step(self, text: str) -> Step:
        observation, reward, done = self.held.step(text)
        return Step(observation, None if reward is None else float(reward), bool(done))
