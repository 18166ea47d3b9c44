"""What is known of the messages of a chat, for data and requests alike, and what a chat template leaves out of them.

Roles, fields, parts and calls of tools that are in none of these lists are refused by name, since what nobody reads
would be lost without a word. Null and an empty list say nothing: tables and APIs have all fields in each message.

A template is compared twice: with the texts themselves, and with marks in their place, because a text that it leaves
out may be a part of another one ("2" of "2 + 3?").
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlft.tokens.text import CALL_ID, THINKING_FIELDS, TOOL, WITH_TOOLS, Conversation, RunTokenizer, rendered_if_taken
from rlft.types import IMAGE, Message

FIELDS: Mapping[str, tuple[str, ...]] = {  # {role: the fields of its messages besides role and content}
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


# -- what a template leaves out ----------------------------------------------------------------------------------------
WORD = re.compile(r"\w+")
SWITCH = re.compile(r"/\w+")  # such as /no_think, which some templates read and leave out
IN_TOOLS = {
    "name": "names",
    "description": "descriptions",
    "parameter": "parameters",
    "explanation": "descriptions of parameters",
}
MARK = re.compile(r"mark(\d+)([a-z]+)\d*mark")  # a mark: the index of a message, and its field


@dataclass(frozen=True, slots=True)
class Unread:
    """What a chat template leaves out: a field of the message of this index, or of the tools (None); what it says."""

    index: int | None
    field: str
    what: str
    said: str = ""


def unread(
    tokenizer: RunTokenizer,
    conversation: Conversation,
    text: str,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    by_template: bool = True,
    start: int = 0,
) -> Iterator[Unread]:
    """What the tools and the messages from `start` on say and the text, as which they were rendered, does not.

    A chat template may leave out the thoughts of earlier turns, if it writes any, and ids of calls. The name of a tool
    may stand at the call which its message answers. Images are no text; without `by_template` there are no marks.
    """
    bare, words = "".join(text.split()), None
    unwritten: frozenset[tuple[int, str]] = frozenset()
    if by_template and not any(IMAGE in message["content"] for message in conversation):
        marked = [*_marked(conversation), _marked_tools(len(conversation), tools)]
        unwritten = _unwritten(tokenizer, json.dumps(marked))
    contents = [message["content"].replace(IMAGE, "").rpartition("</think>")[2].strip() for message in conversation]
    written = [each for content in contents[start:] if (each := "".join(content.split())) in bare]
    for index, message in enumerate(conversation[start:], start):
        whose, content = f"the {message['role']}'s message", contents[index]
        sought = "".join(content.split())
        # Other messages may say it as well, or as a part of what they say.
        is_there = not sought or (sought in bare and bare.count(sought) >= sum(each.count(sought) for each in written))
        if sought not in bare:
            words = set(WORD.findall(text)) if words is None else words
            wanted = set(WORD.findall(SWITCH.sub("", content)))
            is_there = not wanted or 2 * len(wanted - words) < len(wanted)
        if content and (not is_there or (index, "content") in unwritten):
            yield Unread(index, "content", whose, content)
        name = message.get("name") or ""
        if name not in text or (index, "name") in unwritten:
            yield Unread(index, "name", f"the name of {whose}", name)
        called = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        if not all(each in text for each in called) or unwritten & {(index, "call"), (index, "argument")}:
            yield Unread(index, "tool_calls", f"the calls of {whose}", ", ".join(called))
        thoughts = _thoughts(message)
        if thoughts and not (_writes_thoughts(tokenizer) if by_template else thoughts in text):
            yield Unread(index, THINKING_FIELDS[0], f"the thoughts of {whose}", thoughts)
    for name in (tool["function"]["name"] for tool in tools):
        if name not in text:
            yield Unread(None, "name", f"the tool {name}", name)
    for index, field in sorted(unwritten):
        if index == len(conversation):
            yield Unread(None, field, f"the {IN_TOOLS[field]} of tools")


@lru_cache(maxsize=256)
def _unwritten(tokenizer: RunTokenizer, marked: str) -> frozenset[tuple[int, str]]:
    """The marks in these messages and tools that the template leaves out; none if it does not take them."""
    *conversation, tools = json.loads(marked)
    text = rendered_if_taken(tokenizer, conversation, tools=tools)
    found = () if text is None else (mark for mark in MARK.finditer(marked) if mark[0] not in text)
    return frozenset((int(mark[1]), mark[2]) for mark in found)


def _marked(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """The messages with marks in place of what they say; conversations of one shape have the same."""
    numbered: dict[str, str] = {}
    for index, message in enumerate(conversation):
        calls = [
            {
                "type": "function",
                "id": numbered.setdefault(call.get("id") or "", f"{len(numbered):09d}"),
                "function": {
                    "name": f"mark{index}call{number}mark",
                    "arguments": {"a": f"mark{index}argument{number}mark"} if call["function"].get("arguments") else {},
                },
            }
            for number, call in enumerate(message.get("tool_calls") or ())
        ]
        given = {
            "name": "tool" if message["role"] == "tool" else f"mark{index}namemark",
            "tool_call_id": numbered.get(message.get("tool_call_id") or "", CALL_ID),
            "tool_calls": calls,
        }
        content = f"mark{index}contentmark" if message["content"].strip() else ""
        made = {"role": message["role"], "content": content, **({"thinking": "thoughts"} if _thoughts(message) else {})}
        yield made | {field: value for field, value in given.items() if message.get(field)}


def _marked_tools(index: int, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A tool with marks of this index in place of all that any of these tools says; [] without tools."""
    functions = [tool["function"] for tool in tools]
    schemas = [(function.get("parameters") or {}).get("properties") or {} for function in functions]
    is_explained = any(
        isinstance(each, Mapping) and each.get("description") for schema in schemas for each in schema.values()
    )
    shown = {"description": f"mark{index}explanationmark"} if is_explained else {}
    properties = {f"mark{index}parametermark": {"type": "string", **shown}} if any(schemas) else {}
    is_described = any(function.get("description") for function in functions)
    made = {
        "name": f"mark{index}namemark",
        "description": f"mark{index}descriptionmark" if is_described else "",
        "parameters": {"type": "object", "properties": properties},
    }
    return [{"type": "function", "function": made}] if tools else []


def _thoughts(message: Mapping[str, Any]) -> str:
    return next((message[field] for field in THINKING_FIELDS if message.get(field)), "")


@lru_cache(maxsize=8)
def _writes_thoughts(tokenizer: RunTokenizer) -> bool:
    """Whether the template writes the thoughts of any turn."""
    thinking = {**WITH_TOOLS[1], THINKING_FIELDS[0]: "mark0thoughtsmark"}
    without_calls = {key: value for key, value in thinking.items() if key != "tool_calls"}
    turns = ([WITH_TOOLS[0], without_calls], [WITH_TOOLS[0], thinking, WITH_TOOLS[2]])
    return any("mark0thoughtsmark" in (rendered_if_taken(tokenizer, each, tools=[TOOL]) or "") for each in turns)
