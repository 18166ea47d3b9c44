"""What is said in a conversation and is not in what the chat template writes of it: nobody would ever read it.

A template is compared twice: with the texts themselves, and with marks in their place, because a text that it leaves
out may be a part of another one ("2" of "2 + 3?").
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlft.tokens.text import CALL_ID, THINKING_FIELDS, TOOL, WITH_TOOLS, Conversation, RunTokenizer, rendered_if_taken
from rlft.types import IMAGE

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
