"""What is known of the messages of a chat: their roles, fields, parts and calls of tools, for data and requests alike.

Whatever is in none of these lists is refused by name, since what nobody reads would be lost without a word. Null and an
empty list say nothing: tables and APIs have all fields in each message.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from rlft.tokens.text import THINKING_FIELDS
from rlft.types import Message

FIELDS: Mapping[str, tuple[str, ...]] = {  # {role: the fields of its messages beside role and content}
    "system": (),
    "user": (),
    "assistant": ("tool_calls", "weight", *THINKING_FIELDS),
    "tool": ("tool_call_id", "name"),
}
TEXT_PARTS = ("text", "input_text", "output_text")  # the types of parts that are text, as in OpenAI's two APIs
TEXT_FIELDS = ("text", "value")  # that hold the text of such a part, the second as in LLaMA-Factory's files
CALL_FIELDS = ("id", "type", "index", "function")
FUNCTION_FIELDS = ("name", "arguments")


class MessageError(Exception):
    """What is wrong with a message, as a predicate: `has the field 'x'; ..`. remedy: what to do; None: correct it."""

    def __init__(self, problem: str, remedy: str | None = None) -> None:
        self.remedy = remedy
        super().__init__(problem)


def message_of(message: Mapping[str, Any]) -> Message:
    """The message, whose role is one of `FIELDS`, with its content as a text. Raises MessageError.

    `loss_weight` is LLaMA-Factory's name of `weight`, and says nothing but 0 of other roles than the assistant's.
    """
    role, made = message["role"], known(message, None, "")
    if "loss_weight" in made and "weight" not in made:
        weight = made.pop("loss_weight")
        made |= {"weight": weight} if role == "assistant" or weight != 0 else {}
    known(made, ("role", "content", *FIELDS[role]), f"a message of the role {role}")
    made["content"] = "" if "content" not in made and "tool_calls" in made else text_of(message.get("content"))
    if made.get("weight", 1) not in (0, 1):
        raise MessageError(f"has the weight {made['weight']!r}; it must be 0 (read) or 1 (learned)")
    for key in (*THINKING_FIELDS, "tool_call_id", "name"):
        if not isinstance(made.get(key, ""), str):
            raise MessageError(f"must have a text as its {key}, it is {kind(made[key])}")
    thoughts = [key for key in THINKING_FIELDS if key in made]
    if len({made[key] for key in thoughts}) > 1:
        raise MessageError(f"has different thoughts in {' and '.join(thoughts)}, of which one would be read")
    if "tool_calls" in made:
        calls = made["tool_calls"]
        if not isinstance(calls, list | tuple):
            raise MessageError(f"has tool_calls that must be a list, it is {kind(calls)}")
        made["tool_calls"] = [call_of(call) for call in calls]
    return made


def text_of(content: Any) -> str:
    """The content of a message: a text, or the texts of a list of parts. Raises MessageError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        raise MessageError(f"must have a text as its content, it is {kind(content)}")
    return "".join(_text_of_part(part, f"part {number} of its content") for number, part in enumerate(content))


def _text_of_part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise MessageError(f'must have an object {{"type": "text", "text": text}} as {where}, it is {kind(part)}')
    if (type_of_part := part.get("type") or "text") not in TEXT_PARTS:
        read = ", ".join(TEXT_PARTS)
        raise MessageError(f"has a {where} of the type {type_of_part!r}; those of the types {read} are read here")
    given = known(part, ("type", *TEXT_FIELDS), where)
    texts = [given[key] for key in TEXT_FIELDS if key in given]
    if len(texts) != 1 or not isinstance(texts[0], str):
        problem = kind(texts[0] if texts else None) if len(texts) < 2 else f"in {' and in '.join(TEXT_FIELDS)}"
        raise MessageError(f"must have one text in {where}, it is {problem}")
    return texts[0]


def call_of(call: Any) -> dict[str, Any]:
    """A call of a tool, whose arguments are an object. Raises MessageError."""
    call = known(call, None, "") if isinstance(call, Mapping) else {}
    function = call.get("function", call)  # without the object around it, as templates write it
    function = known(function, None, "") if isinstance(function, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping) or call.get("type", "function") != "function":
        form = '{"function": {"name": text, "arguments": object}}'
        raise MessageError(f"has a call of a tool that is not {form}, where arguments may be JSON in a text", "fix it")
    bare = ("id", "type", *FUNCTION_FIELDS)
    known(call, CALL_FIELDS if "function" in call else bare, f"a call of {name}")
    known(function, FUNCTION_FIELDS if "function" in call else bare, f"a call of {name}")
    if not isinstance(call.get("id", ""), str):
        raise MessageError(f"has a call of {name} whose id must be a text, it is {kind(call['id'])}")
    own = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", **own, "function": {"name": name, "arguments": dict(arguments)}}


def known(given: Mapping[str, Any], names: Collection[str] | None, what: str) -> dict[str, Any]:
    """The fields that hold something. MessageError if one of them is none of these; `what` has them, such as a part."""
    found = {key: value for key, value in given.items() if value is not None and value != []}
    unknown = next((key for key in found if names is not None and key not in names), None)
    if unknown is not None:
        raise MessageError(
            f"has the field {unknown!r}; {what} has {', '.join(names or ())}",
            "use it under a name that is known, or leave it out",
        )
    return found


def kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    if value == []:
        return "an empty list"
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
