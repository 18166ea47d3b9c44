"""The interface of an environment: its keys, the tools that it shows, and its side of one conversation.

An environment is one module. Its class is a frozen dataclass whose fields are the keys below `environment`; workers get
a copy, in which `make` gives each conversation a `Play`. Nothing here imports torch or transformers.

Whether the arguments of a call fit the JSON schema of its tool is checked for tools of every kind, before the call is
made. Nothing is converted: "1" is no integer, and the policy reads why. Only 1.0 becomes 1, which JSON does not tell
apart. A name that the schema does not know is refused unless it says otherwise (additionalProperties).
"""

from __future__ import annotations

import copy
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, ClassVar, Literal

from rlft.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from rlft.config.instantiate import instantiate
from rlft.types import Schema, UserError, require


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


# -- arguments ---------------------------------------------------------------------------------------------------------
MAX_TOLD = 3  # the most errors of a call that the policy reads at once
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"} | {
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas")
}
"""Keywords by which a schema itself says which further names an object may have, or by which its parts may."""


class Checker:
    """Checks the arguments of calls of these tools, whose `schemas` are as chat templates show them.

    Raises UserError: a schema is none by its own rules, or refers to what it does not have.
    """

    def __init__(self, schemas: Sequence[Schema]) -> None:
        from jsonschema.validators import Draft202012Validator, extend, validator_for
        from referencing.jsonschema import EMPTY_REGISTRY

        self._validators = {}
        for schema in (schema["function"] for schema in schemas):
            parameters = strict(schema["parameters"])
            kind = validator_for(parameters, default=Draft202012Validator)
            _check(schema["name"], kind, parameters)
            types = kind.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
            kinds = kind, extend(kind, type_checker=types)  # for the second, 1.0 is no integer
            # The registry loads nothing.
            self._validators[schema["name"]] = [each(parameters, registry=EMPTY_REGISTRY) for each in kinds]

    def checked(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with whole numbers as int where an integer is due. Malformed: they are not the tool's."""
        from jsonschema.exceptions import best_match

        if name not in self._validators:
            raise Malformed(f"there is no tool {name!r:.80}; the tools are {', '.join(self._validators)}")
        validator, exact = self._validators[name]
        try:
            made = copy.deepcopy(dict(arguments))
            found = [best_match([error]) for error in islice(validator.iter_errors(made), MAX_TOLD)]
            if not found and _has_whole_float(made):
                _make_whole(made, [*exact.iter_errors(made)])
        except (RecursionError, OverflowError) as error:
            raise Malformed(f"{name}: the arguments are nested too deep or too large ({error!s:.80})") from None
        if found:
            told = (f"{error.json_path.removeprefix('$').lstrip('.')}: {error.message}".lstrip(": ") for error in found)
            raise Malformed(f"{name}: {'; '.join(text[:200] for text in told)}")
        return made


def _check(name: str, kind: Any, parameters: Mapping[str, Any]) -> None:
    from jsonschema.exceptions import SchemaError
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

    problem = ""
    try:
        kind.check_schema(parameters)
        resolver = EMPTY_REGISTRY.with_resource("", DRAFT202012.create_resource(parameters)).resolver()
        for reference in _references(parameters):
            resolver.lookup(reference)
    except SchemaError as error:
        problem = f"{error.json_path}: {error.message:.200}"
    except Unresolvable as error:
        problem = f"$ref: {error.ref!r:.80} leads to nothing"
    problem = problem and f"the parameters of the tool {name} are no JSON schema ({problem})"
    require(not problem, "environment", problem, remedy="correct them in the tool")


def _references(schema: Any) -> Iterator[str]:
    for key, value in schema.items() if isinstance(schema, Mapping) else enumerate(schema):
        if key == "$ref" and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list) and key not in ("enum", "const", "default", "examples"):
            yield from _references(value)


def strict(schema: Any) -> Any:
    """The schema, in which names that it does not have are refused, and transformers' `nullable` allows null.

    >>> strict({"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}})["properties"]
    {'a': {'type': ['integer', 'null']}}
    """
    if not isinstance(schema, Mapping):
        return schema
    made = {**schema, **{key: strict(schema[key]) for key in ("items", "additionalProperties") if key in schema}}
    if "prefixItems" in schema:
        made["prefixItems"] = [strict(each) for each in schema["prefixItems"]]
    if "properties" in schema:
        made["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
    if made.pop("nullable", False) and "type" in made:
        made["type"] = [*([made["type"]] if isinstance(made["type"], str) else made["type"]), "null"]
        made |= {"enum": [*made["enum"], None]} if "enum" in made else {}
    if made.get("properties") and not _OPEN & set(made):
        made["additionalProperties"] = False
    return made


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, Mapping | list):
        return any(map(_has_whole_float, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, float) and value.is_integer()


def _make_whole(arguments: dict[str, Any], errors: list[Any]) -> None:
    """Makes numbers such as 1.0 int where these errors of the arguments are that a schema wants an integer."""
    while errors:
        error = errors.pop()
        errors += error.context  # of the branches, where schemas are combined
        value, wants_integer = error.instance, error.validator == "type" and "integer" in error.validator_value
        if wants_integer and isinstance(value, float) and value.is_integer():
            *way, last = error.absolute_path
            functools.reduce(operator.getitem, way, arguments)[last] = int(value)


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value of this schema is a text, so that one that is written without quotes is not read as JSON.

    >>> [is_text(schema) for schema in ({}, {"type": "integer"}, {"anyOf": [{"type": "string"}, {"type": "null"}]})]
    [True, False, True]
    """
    kinds = schema.get("type", [])
    kinds = {kinds} if isinstance(kinds, str) else {*kinds}
    branches = [is_text(each) for key in ("anyOf", "oneOf") for each in schema.get(key, []) if each != {"type": "null"}]
    others = [each for each in schema.get("enum", []) if not isinstance(each, str)]
    return kinds <= {"string", "null"} and all(branches) and not others and "$ref" not in schema
