"""What is said must be in what the template writes: conversations that are made, by templates that leave things out."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlft.data.prompts import scan
from rlft.environment.endpoint.bodies import Chat, Refusal, read
from rlft.environment.endpoint.speech import Speech
from rlft.tokens.said import unread
from rlft.tokens.text import RunTokenizer, rendered_if_taken
from rlft.types import Prompt, Split, UserError
from tests.helpers.family_tokenizers import family_tokenizer, with_attributes

WRITES = """
{%- if tools %}<|im_start|>system
{% for t in tools %}[tools]{{ t.function.name }}[/tools] [descriptions]{{ t.function.description }}[/descriptions]
{%- for name, p in t.function.parameters.properties.items() %}
[parameters]{{ name }}: {{ p.type }} [explanations]{{ p.description }}[/explanations][/parameters]
{%- endfor %}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{#- #}[names]{% if m.name and m.role != 'tool' %} {{ m.name }}{% endif %}[/names]
{% if m.reasoning_content %}[thoughts]<think>{{ m.reasoning_content }}</think>[/thoughts]{% endif %}
{%- if m.role == 'system' %}[system][later_system]{{ m.content }}[/later_system][/system]
{%- elif m.role == 'user' %}[user][starred]{{ m.content }}[/starred][/user]
{%- elif m.role == 'tool' %}[results]{{ m.content }}[/results]
{%- else %}[assistant][besides]{{ m.content }}[/besides][/assistant]{% endif %}
{%- for call in m.tool_calls or [] %}[calls][later_calls]
<tool_call>
{"name": "{{ call.function.name }}", "arguments": [arguments]{{ call.function.arguments | tojson }}[/arguments]}
</tool_call>[/later_calls][/calls]{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARTS = ("tools", "descriptions", "parameters", "explanations", "names", "thoughts", "system", "later_system", "user",
         "starred", "results", "assistant", "besides", "calls", "later_calls", "arguments")  # fmt: skip
"""Parts of the template, each of which a template may lack."""
ONLY_IF = {
    "later_system": "loop.first",
    "later_calls": "loop.first",
    "besides": "not m.tool_calls",
    "starred": "not m.content.startswith('*')",
}
"""The condition on which a template that lacks the part writes it nevertheless."""
REFUSED_WITH_TOOLS = ("results", "assistant", "calls", "arguments", "user", "later_calls")
"""Parts without which the endpoint takes no conversation with tools, whatever is said in it."""
SAYS = ("2", "2 + 3?", "2 + 3? Be brief.", "user", "system", "add", "?", "*note*", "im_start", "{}", "true")
"""Texts that are parts of each other, of the template, or no words."""
SHOWS = [said for said in SAYS if not said.startswith("*")]
"""What tools say; a template that lacks `starred` is told by comparing texts alone."""
NAMES = ("Ann", "user", "add", "2")


def template(*lacking: str) -> RunTokenizer:
    """A tokenizer whose template lacks these parts."""
    text = WRITES
    for part in PARTS:
        condition = ONLY_IF.get(part, "false")
        begin, end = (f"{{% if {condition} %}}", "{% endif %}") if part in lacking else ("", "")
        text = text.replace(f"[{part}]", begin).replace(f"[/{part}]", end)
    return with_attributes(family_tokenizer("qwen2.5"), chat_template=text)


WHOLE, TEMPLATES = template(), {part: template(part) for part in PARTS}


def tool_of(draw: random.Random, number: int) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name in ("a", "b")[: draw.randrange(3)]:
        properties[name] = {"type": "string"} | ({"description": draw.choice(SHOWS)} if draw.random() < 0.5 else {})
    function = {
        "name": f"add{number or ''}",
        "description": draw.choice(("", *SHOWS)),
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


def conversation(draw: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(messages, tools): questions, answers with thoughts and calls, results; some with names and system prompts."""
    messages: list[dict[str, Any]] = []

    def say(role: str, content: str, **more: Any) -> None:
        named = {"name": draw.choice(NAMES)} if role != "tool" and draw.random() < 0.15 else {}
        messages.append({"role": role, "content": content, **named, **more})

    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        say("system", draw.choice(SAYS))
    tools = [tool_of(draw, number) for number in range(draw.choice((0, 1, 2)))]
    say("user", draw.choice(SAYS))
    for _ in range(draw.randrange(3)):
        more: dict[str, Any] = {"reasoning_content": draw.choice(SAYS)} if draw.random() < 0.3 else {}
        if tools and draw.random() < 0.6:
            ids = [f"{draw.randrange(10**9):09d}" for _ in range(draw.choice((1, 2)))]
            more["tool_calls"] = [
                {
                    "type": "function",
                    "id": each,
                    "function": {"name": "add", "arguments": {"a": draw.choice(SAYS)} if draw.random() < 0.8 else {}},
                }
                for each in ids
            ]
            say("assistant", draw.choice(("", *SAYS)), **more)
            for each in ids:
                say("tool", draw.choice(SAYS), tool_call_id=each)
        else:
            say("assistant", draw.choice(SAYS), **more)
            say("user", draw.choice(SAYS))
    return messages, tools


def says(part: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template without the part leaves out something of this conversation."""
    functions = [tool["function"] for tool in tools]
    properties = [each for function in functions for each in function["parameters"]["properties"].values()]
    calls = [message.get("tool_calls", []) for message in messages]
    roles = {"system": "system", "user": "user", "assistant": "assistant", "results": "tool"}
    if part in roles:
        return any(message["role"] == roles[part] and message["content"] for message in messages)
    return {
        "tools": bool(functions),
        "descriptions": any(function["description"] for function in functions),
        "parameters": bool(properties),
        "explanations": any(each.get("description") for each in properties),
        "names": any(message.get("name") for message in messages),
        "thoughts": any(message.get("reasoning_content") for message in messages),
        "later_system": sum(message["role"] == "system" for message in messages) > 1,
        "starred": any(m["role"] == "user" and m["content"].startswith("*") for m in messages),
        "besides": any(message.get("tool_calls") and message["content"] for message in messages),
        "calls": any(calls),
        "later_calls": any(len(each) > 1 for each in calls),
        "arguments": any(call["function"]["arguments"] for each in calls for call in each),
    }[part]


def served(tokenizer: RunTokenizer, messages: Any, tools: Any) -> bool:
    """Whether the endpoint takes the request."""
    body = read(Chat, json.dumps({"messages": messages, **({"tools": tools} if tools else {})}).encode())
    try:
        Speech(tokenizer, "template", "serve.syntax").of(body).prompt([message.plain for message in body.messages])
    except Refusal as refusal:
        if (refusal.status, refusal.code) not in {(400, "left_out"), (400, "unsupported_template")}:
            raise
        return False
    return True


def trained(tokenizer: RunTokenizer, conversations: Sequence[tuple[Any, Any]]) -> bool:
    """Whether `rlft train` takes prompts of these messages and tools."""
    prompts = [
        Prompt(id=str(number), messages=tuple(messages), answer="", tools=tuple(tools))
        for number, (messages, tools) in enumerate(conversations)
    ]
    try:
        scan(prompts, tokenizer, 4000, "refuse", Split.train, "chat")
    except UserError as error:
        if "so the policy never reads it" not in error.problem and "does not show" not in error.problem:
            raise
        return False
    return True


@pytest.mark.parametrize("part", PARTS)
def test_all_that_is_said_is_written_or_refused_by_train_and_endpoint_alike(part: str) -> None:
    """Of conversations at random; a template that lacks a part leaves out what some of them say, by construction."""
    draw, tokenizer, all_of_it = random.Random(part), TEMPLATES[part], []
    for number in range(36):
        messages, tools = conversation(draw)
        is_left_out = says(part, messages, tools)
        case = (number, part, messages, tools)
        text = rendered_if_taken(tokenizer, messages, tools=tools)
        assert text is not None
        assert bool(list(unread(tokenizer, messages, text, tools))) is is_left_out, case
        if number % 9 == 0:
            assert trained(tokenizer, [(messages, tools)]) is not is_left_out, case
        if number % 12 == 0 and part != "tools":
            takes = served(tokenizer, messages, tools)
            assert not (takes and is_left_out), case
            assert takes or is_left_out or part in REFUSED_WITH_TOOLS, case
            assert served(WHOLE, messages, tools), case
        all_of_it.append((messages, tools, is_left_out))
    assert sum(is_left_out for *_, is_left_out in all_of_it) >= 3
    assert trained(WHOLE, [(messages, tools) for messages, tools, _ in all_of_it])


def test_tools_that_a_template_does_not_show_are_written_into_the_question_by_the_endpoint() -> None:
    messages, tools = [{"role": "user", "content": "2"}], [tool_of(random.Random(1), 0)]
    tools[0]["function"]["description"] = "Sums."
    assert not trained(TEMPLATES["tools"], [(messages, tools)])
    body = read(Chat, json.dumps({"messages": messages, "tools": tools}).encode())
    ids = (
        Speech(TEMPLATES["tools"], "template", "serve.syntax")
        .of(body)
        .prompt([message.plain for message in body.messages])
    )
    assert json.dumps(tools[0]["function"]) in TEMPLATES["tools"].decode(ids)
