"""The interface of an environment: its keys, the tools that it shows, and its side of one conversation.

An environment is one module. Its class is a frozen dataclass whose fields are the keys below `environment`; workers get
a copy, in which `make` gives each conversation a `Play`. Nothing here imports torch or transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal

from rlft.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from rlft.config.instantiate import instantiate
from rlft.types import UserError


class Cause(StrEnum):
    """Why a call of a tool has no answer of the tool's own."""

    malformed = "malformed"  # it cannot be read, names no tool, or has other arguments than the tool
    raised = "raised"
    time = "time"  # no answer within environment.call_timeout, or what was left of environment.timeout
    died = "died"  # the tool has ended its process
    limit = "limit"  # not made: beyond environment.max_tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call as the policy wrote it."""

    name: str  # name of the tool; "" where it cannot be read
    arguments: Mapping[str, Any]
    written: str  # the arguments as text
    problem: str = ""  # why it cannot be made, as a sentence for the policy; "" if it can
    id: str = ""  # what the policy calls this call, which its answer names in some templates; "" if nothing


class Malformed(ValueError):
    """A call names no tool, or has other arguments than the tool."""


@dataclass(frozen=True, slots=True)
class Step:
    """A game's answer to a turn: what the policy reads next, the reward, and whether the game is over."""

    observation: Any
    reward: float | None = None
    done: bool = False


class Play:
    """The environment's side of one conversation, which has those of these methods that its kind needs.

    It lives in a worker process, and may raise anything.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        """Begins the conversation; returns text to add to the prompt's last message, None for nothing.

        `row` is the prompt as a row of data: prompt (its messages), id, answer and its metadata; `seed` is the same for
        all completions of a prompt.
        """
        return None

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """A tool's answer. Raises Malformed if there is no tool of that name, or it has other arguments."""
        raise Malformed(f"there is no tool {name!r:.80}")

    def step(self, text: str) -> Step:
        """A game's answer to the text of a turn."""
        raise NotImplementedError(f"{type(self).__name__} answers no turns: it has no step()")

    def play(self, row: Mapping[str, Any], base_url: str, api_key: str, model: str) -> float | None:
        """Has an agent hold the whole conversation by itself, through an endpoint; returns the reward."""
        raise NotImplementedError(f"{type(self).__name__} is not an agent: it has no play()")

    def reward(self) -> float | None:
        """The reward of the whole conversation, at its end; None for none."""
        return None

    def close(self) -> None:
        """Called when the conversation is over; must not wait for anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(ABC):
    """An environment. Subclasses are frozen dataclasses; meanings and defaults are in configs/environment/."""

    plays_a_game: ClassVar[bool] = False
    """Whether it answers each turn as a whole (`Play.step`), or the calls of tools in it (`Play.call`)."""
    plays_itself: ClassVar[bool] = False
    """Whether it holds whole conversations by itself, through an endpoint (`rlft.environment.endpoint`)."""
    keeps_state: ClassVar[bool] = True
    """Whether what it answers depends on earlier turns, so that each conversation stays with its worker."""

    max_turns: PositiveInt
    max_tool_calls: NonNegativeInt | None
    turn_tokens: PositiveInt | None
    call_timeout: PositiveFloat
    timeout: PositiveFloat
    max_answer: PositiveInt
    workers: PositiveInt
    syntax: Literal["template", "json", "xml"]
    show_tools: bool

    def check(self) -> None:  # noqa: B027 (not every environment has something to refuse)
        """Imports what the keys name and checks it. Raises UserError by the environment's own key."""

    def schemas(self) -> list[dict[str, Any]]:
        """The tools. Raises UserError by the environment's own key for one without types or docstring."""
        return []

    @property
    def rewards_turns(self) -> bool:
        """Whether it gives rewards itself."""
        return self.plays_a_game or self.plays_itself

    def start(self) -> None:  # noqa: B027
        """Called once in each worker: the place for slow imports, which no time limit counts."""

    @abstractmethod
    def make(self) -> Play:
        """The environment's side of a new conversation, in a worker."""


def read_environment(section: Mapping[str, Any] | None) -> Environment | None:
    """The environment of this section of a config; None for completions of a single turn."""
    if not section:
        return None
    environment = instantiate(section, "environment")
    if not isinstance(environment, Environment):
        remedy = "make it a subclass of rlft.environment.protocol.Environment, or use environment=class"
        raise UserError("environment._target_", "is no environment", got=section["_target_"], remedy=remedy)
    return environment
