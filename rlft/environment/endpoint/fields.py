"""What requests may say, at every level: a field that is used is a field of a model here or in `bodies.py`.

assets/endpoint_fields.yaml lists the fields that change no answer or ask for nothing. All others are refused by name.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from rlft.config.choices import closest
from rlft.system.files import asset
from rlft.tokens.messages import FIELDS
from rlft.tokens.text import THINKING_FIELDS
from rlft.types import well_formed

NOT_USED: Mapping[str, Any] = asset("endpoint_fields.yaml")
"""{class: its `without_effect` and `neutral`}."""


class Fields(BaseModel):
    """An object of a request, whose fields are used; null stands for a field that is not given.

    `without_effect` are its fields that change no answer, `neutral` those that must ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    without_effect: ClassVar[Sequence[str]] = ()
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}  # {field: its values that ask for nothing, besides null}

    @classmethod
    def __pydantic_init_subclass__(cls, **keys: Any) -> None:
        of_class = NOT_USED.get(cls.__name__, {})
        cls.without_effect, cls.neutral = of_class.get("without_effect", ()), of_class.get("neutral", {})

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name, value in given.items():
            if name in cls.neutral:
                if value is not None and not any(_same(value, other) for other in cls.neutral[name]):
                    raise refused(name, "is not supported here; leave it out")
            elif name not in cls.model_fields and name not in cls.without_effect:
                meant = closest(name, (*cls.model_fields, *cls.neutral, *cls.without_effect))
                raise refused(name, f"is not known here; {f'did you mean {meant}?' if meant else 'leave it out'}")
        return {name: value for name, value in given.items() if name in cls.model_fields and value is not None}


def refused(field: str, problem: str) -> PydanticCustomError:
    """The error of a field of the object that is being validated; `problem` says what to do as well."""
    field, problem = (text.encode("utf-8", "backslashreplace").decode() for text in (field, problem))
    return PydanticCustomError("refused", "{problem}", {"field": field, "problem": problem})


def _same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


# -- messages ----------------------------------------------------------------------------------------------------------
class Part(Fields):
    """A part of a message's content."""

    type: Literal["text"] = "text"
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("type") not in (None, "text"):
            raise refused("type", "only text is understood here; leave images, sounds and files out")
        return given


class CalledFunction(Fields):
    """What a call of a tool calls; `arguments` are an object, or JSON in a text."""

    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] = ""


class Called(Fields):
    """A call of a tool in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        arguments: Any = self.function.arguments or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # then it stays as the policy wrote it
                arguments = json.loads(arguments)
        return {"type": "function", "id": self.id, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Fields):
    """A message; its thoughts may have any of the names that templates have for them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Called] = Field(default_factory=list)
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    @model_validator(mode="after")
    def _of_its_role(self) -> Message:
        known = {"role", "content", "name", *FIELDS[self.plain_role]}
        for field in type(self).model_fields:
            if field not in known and getattr(self, field):
                raise refused(field, f"a message of the role {self.role} has none; leave it out")
        if self.content is None and self.role != "assistant":
            raise refused("content", "is missing; send a text")
        if len({thoughts for field in THINKING_FIELDS if (thoughts := getattr(self, field))}) > 1:
            raise refused(THINKING_FIELDS[0], f"differs from {' or '.join(THINKING_FIELDS[1:])}; send one of them")
        return self

    @property
    def plain_role(self) -> str:
        return "system" if self.role == "developer" else self.role

    @property
    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it: content is a text, arguments of calls are objects if they are JSON."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        made: dict[str, Any] = {"role": self.plain_role, "content": well_formed(text)}
        if thoughts := next((value for field in THINKING_FIELDS if (value := getattr(self, field))), ""):
            made[THINKING_FIELDS[0]] = thoughts
        made |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        return made | ({"tool_calls": [call.plain for call in self.tool_calls]} if self.tool_calls else {})


class Function(Fields):
    """A tool's name, and what a chat template shows of it."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    """A tool of a request."""

    type: Literal["function"] = "function"
    function: Function
    _given: Mapping[str, Any] = PrivateAttr({})

    @model_validator(mode="wrap")
    @classmethod
    def _as_given(cls, given: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        made = handler(given)
        made._given = given["function"]
        return made

    @property
    def plain(self) -> dict[str, Any]:
        """The tool in the client's order of fields, completed with what OpenAI's API lets clients leave out."""
        function = dict(self._given)
        function["description"] = function.get("description") or ""
        function["parameters"] = dict(function.get("parameters") or {})
        function["parameters"].setdefault("type", "object")
        function["parameters"].setdefault("properties", {})
        return {"type": "function", "function": function}


class StreamOptions(Fields):
    """What a stream has besides its answer."""

    include_usage: bool = False
