"""What a message says is read, or refused by name: messages and their faults are composed, so both are known."""

import copy
import json
import random

import pytest

from rlft.config.instantiate import instantiate
from rlft.data.fields import RowError, messages_of
from rlft.data.prompts import scan
from rlft.environment.endpoint.bodies import Chat, Refusal, read
from rlft.environment.endpoint.service import Speech
from rlft.tokens.messages import FIELDS, TEXT_FIELDS, TEXT_PARTS, MessageError, message_of, unread
from rlft.tokens.text import THINKING_FIELDS, rendered_if_taken
from rlft.types import Prompt, Split, UserError
from tests.helpers.family_tokenizers import family_tokenizer, with_attributes

WORDS = ("five", "<answer>5</answer>", "", "None", "null", "a\nb", "ключ", '{"a": null}')
ARGUMENTS = ({}, {"a": 1}, {"town": None, "to": ["x", None]}, {"a": {"b": {"c": False}}})


def composed(rng):
    """(a message in one of the forms that are known, what it says)."""
    role = rng.choice(list(FIELDS))
    says = {"role": role}
    texts = rng.choices(WORDS, k=rng.randint(1, 4))
    parts = [{"type": rng.choice(TEXT_PARTS), rng.choice(TEXT_FIELDS): text} for text in texts]
    content, says["content"] = (parts, "".join(texts)) if rng.random() < 0.7 else (texts[0], texts[0])
    for part in parts:  # as a table fills them
        part.update({key: None for key in (*TEXT_FIELDS, "image", "audio") if key not in part and rng.random() < 0.4})
    given = {"role": role, "content": content}
    if role == "assistant" and rng.random() < 0.5:
        name = rng.choice(THINKING_FIELDS)
        given[name] = says[name] = rng.choice(WORDS)
    if role == "assistant" and rng.random() < 0.5:
        weight = rng.choice((0, 1, 0.0, 1.0))
        given[rng.choice(("weight", "loss_weight"))] = says["weight"] = weight
    if role != "assistant" and rng.random() < 0.3:
        given["loss_weight"] = 0.0
    if role == "assistant" and rng.random() < 0.6:
        calls = [(f"tool{i}", rng.choice(ARGUMENTS), rng.choice(("", f"id{i}"))) for i in range(rng.randint(1, 3))]
        given["tool_calls"] = [called(rng, *call) for call in calls]
        says["tool_calls"] = [
            {"type": "function", **({"id": own} if own else {}), "function": {"name": name, "arguments": arguments}}
            for name, arguments, own in calls
        ]
        if rng.random() < 0.5:
            says["content"], given["content"] = "", rng.choice((None, [], ""))
    if role == "tool" and rng.random() < 0.7:
        given |= {"tool_call_id": "id0", "name": "tool0"}
        says |= {"tool_call_id": "id0", "name": "tool0"}
    nothing = {name: rng.choice((None, [])) for name in ("refusal", "annotations", "audio", "function_call")}
    return given | {key: value for key, value in nothing.items() if rng.random() < 0.4}, says


def called(rng, name, arguments, own):
    function = {"name": name, "arguments": json.dumps(arguments) if rng.random() < 0.5 else arguments}
    call = {"function": function} if rng.random() < 0.6 else function
    given = call | ({"type": "function"} if rng.random() < 0.6 else {}) | ({"id": own} if own else {})
    return given | ({"index": 0} if "function" in call and rng.random() < 0.3 else {})


def parts_of(message):
    if not isinstance(message["content"], list) or not message["content"]:
        message["content"] = [{"type": "text", "text": "a"}]
    return message["content"]


def call_in(message):
    message["role"] = "assistant"
    for key in ("name", "tool_call_id", "loss_weight"):
        message.pop(key, None)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    message.setdefault("tool_calls", []).append(call)
    return call


VALUES = ("None", 5, True, 0.0, "", {"a": 1}, ["a"])
PARTS = (
    "audio", "input_audio", "video", "file", "thinking", "reasoning", "tool_use", "tool_result", "refusal", "document",
    "image", "image_url", 5,
)  # fmt: skip

FAULTS = [
    *((f"has the field '{key}'", lambda m, value, key=key: m.update({key: value}))
      for key in ("train", "function_call", "refusal", "thoughts")),
    *((f"of the type {of!r}", lambda m, value, of=of: parts_of(m).append({"type": of, "text": "a", str(of): value}))
      for of in PARTS),
    ("has the field 'cache_control'", lambda m, value: parts_of(m)[-1].update({"cache_control": value})),
    *(("must have one text in part", lambda m, _, part=part: parts_of(m).append({"type": "text"} | part))
      for part in ({"text": None}, {}, {"text": "a", "value": "b"}, {"text": 5})),
    *(("must have an object", lambda m, _, part=part: parts_of(m).append(part))
      for part in ("a", [{"type": "text", "text": "a"}], None)),
    *(("must have a text as its content", lambda m, _, text=text: (m.update(content=text), m.pop("tool_calls", 0)))
      for text in ({"type": "text", "text": "a"}, 5, None, [])),
    ("has the field 'parameters'", lambda m, value: call_in(m)["function"].update({"parameters": value})),
    ("has the field 'custom'", lambda m, value: call_in(m).update({"custom": value})),
    ("has a call of a tool that is not", lambda m, _: call_in(m).pop("function")),
    *(("has a call of a tool that is not", lambda m, _, fields=fields: call_in(m)["function"].update(fields))
      for fields in ({"arguments": "a b"}, {"arguments": None}, {"name": 5})),
    *((words, lambda m, _, fields=fields: call_in(m).update(fields)) for words, fields in (
        ("has a call of a tool that is not", {"type": "custom"}), ("whose id must be a text", {"id": 5}),
    )),
    *((words, lambda m, _, fields=fields: (call_in(m), m.update(fields))) for words, fields in (
        ("has tool_calls that must be a list", {"tool_calls": "add"}),
        ("must have a text as its reasoning", {"reasoning": 5}),
        ("has different thoughts in", {"reasoning": "a", "thinking": "b"}),
        ("has the weight", {"weight": 0.5}),
    )),
]  # fmt: skip


def test_a_message_of_any_known_form_says_what_it_says():
    rng = random.Random(1)
    for _ in range(1500):
        given, says = composed(rng)
        assert message_of(given) == says, given
        assert message_of(message_of(given)) == says, given


def test_what_is_not_known_of_a_message_is_refused_by_name():
    """Each fault in 12 composed messages, with each kind of value of the unknown field."""
    rng = random.Random(2)
    for words, fault in FAULTS:
        for value in VALUES:
            for _ in range(12):
                given, _ = composed(rng)
                wrong = copy.deepcopy(given)
                fault(wrong, value)
                with pytest.raises(MessageError) as refusal:
                    message_of(wrong)
                assert words in str(refusal.value), wrong


def test_an_unknown_role_or_speaker_is_refused_by_name():
    for wrong in ("narrator", "", 5, ["user"], {"a": 1}, True):
        for row in ({"role": wrong, "content": "a"}, {"from": wrong, "value": "a"}, {"role": wrong, "from": "human"}):
            with pytest.raises(RowError, match="message 1 of field 'm' must be"):
                messages_of({"m": [{"role": "user", "content": "a"}, row]}, "m")


def test_every_reader_of_chats_refuses_what_is_not_known(make_any, tmp_path):
    """Prompts, demonstrations and both chats of a pair, as last and as earlier messages."""
    question = {"role": "user", "content": "a"}
    for words, wrong in (
        ("has the field 'train'", {"train": True}),
        ("must have one text in part 0", {"content": [{"type": "text", "text": None}]}),
        ("of the type 'audio'", {"content": [{"type": "audio", "text": "b"}]}),
        ("has the field 'custom'", {"tool_calls": [{"custom": 1, "function": {"name": "a", "arguments": {}}}]}),
    ):
        said = {"role": "assistant", "content": "b"}
        for chat in ([question, said | wrong], [question, said | wrong, question, said]):
            better = [*chat[:-1], {**chat[-1], "content": "c"}]
            for group, row in (
                ("data", {"messages": chat}),
                ("demonstrations", {"messages": chat}),
                ("demonstrations", {"prompt": chat[:-1], "completion": chat[-1:]}),
                ("preferences", {"chosen": better, "rejected": chat}),
                ("preferences", {"chosen": chat, "rejected": better}),
                ("preferences", {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [said]}),
            ):
                file = tmp_path / "mine.jsonl"
                file.write_text(json.dumps(row) + "\n")
                with pytest.raises(UserError, match=words):
                    make_any(group, str(file)).load(Split.train)


@pytest.fixture
def make_any():
    from rlft.config.compose import compose

    of_data = {"messages_field": "messages", "answer_field": None}

    def make(group, path):
        words = {"data": [], "demonstrations": ["sft"], "preferences": ["dpo"]}[group]
        plain = compose([f"{group}=jsonl", f"{group}.path={path}"], None, *words)[group]
        return instantiate({**plain, **(of_data if group == "data" else {})}, group)

    return make


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
TEMPLATE_PARTS = (
    "tools", "descriptions", "parameters", "explanations", "names", "thoughts", "system", "later_system", "user",
    "starred", "results", "assistant", "besides", "calls", "later_calls", "arguments",
)  # fmt: skip
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


def template(*lacking):
    """A tokenizer whose template lacks these parts."""
    text = WRITES
    for part in TEMPLATE_PARTS:
        condition = ONLY_IF.get(part, "false")
        begin, end = (f"{{% if {condition} %}}", "{% endif %}") if part in lacking else ("", "")
        text = text.replace(f"[{part}]", begin).replace(f"[/{part}]", end)
    return with_attributes(family_tokenizer("qwen2.5"), chat_template=text)


WHOLE, TEMPLATES = template(), {part: template(part) for part in TEMPLATE_PARTS}


def tool_of(draw, number):
    properties = {}
    for name in ("a", "b")[: draw.randrange(3)]:
        properties[name] = {"type": "string"} | ({"description": draw.choice(SHOWS)} if draw.random() < 0.5 else {})
    parameters = {"type": "object", "properties": properties}
    function = {"name": f"add{number or ''}", "description": draw.choice(("", *SHOWS)), "parameters": parameters}
    return {"type": "function", "function": function}


def conversation(draw):
    """(messages, tools): questions, answers with thoughts and calls, results; some with names and system prompts."""
    messages = []

    def say(role, content, **more):
        named = {"name": draw.choice(NAMES)} if role != "tool" and draw.random() < 0.15 else {}
        messages.append({"role": role, "content": content, **named, **more})

    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        say("system", draw.choice(SAYS))
    tools = [tool_of(draw, number) for number in range(draw.choice((0, 1, 2)))]
    say("user", draw.choice(SAYS))
    for _ in range(draw.randrange(3)):
        more = {"reasoning_content": draw.choice(SAYS)} if draw.random() < 0.3 else {}
        if tools and draw.random() < 0.6:
            ids = [f"{draw.randrange(10**9):09d}" for _ in range(draw.choice((1, 2)))]
            arguments = [{"a": draw.choice(SAYS)} if draw.random() < 0.8 else {} for _ in ids]
            functions = [{"name": "add", "arguments": each} for each in arguments]
            calls = zip(ids, functions, strict=True)
            more["tool_calls"] = [{"type": "function", "id": each, "function": function} for each, function in calls]
            say("assistant", draw.choice(("", *SAYS)), **more)
            for each in ids:
                say("tool", draw.choice(SAYS), tool_call_id=each)
        else:
            say("assistant", draw.choice(SAYS), **more)
            say("user", draw.choice(SAYS))
    return messages, tools


def says(part, messages, tools):
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


def served(tokenizer, messages, tools):
    """Whether the endpoint takes the request."""
    body = read(Chat, json.dumps({"messages": messages, **({"tools": tools} if tools else {})}).encode())
    try:
        Speech(tokenizer, "template", "serve.syntax").of(body).prompt([message.plain for message in body.messages])
    except Refusal as refusal:
        if (refusal.status, refusal.code) not in {(400, "left_out"), (400, "unsupported_template")}:
            raise
        return False
    return True


def trained(tokenizer, conversations):
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


@pytest.mark.parametrize("part", TEMPLATE_PARTS)
def test_all_that_is_said_is_written_or_refused_by_train_and_endpoint_alike(part):
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


def test_tools_that_a_template_does_not_show_are_written_into_the_question_by_the_endpoint():
    messages, tools = [{"role": "user", "content": "2"}], [tool_of(random.Random(1), 0)]
    tools[0]["function"]["description"] = "Sums."
    assert not trained(TEMPLATES["tools"], [(messages, tools)])
    body = read(Chat, json.dumps({"messages": messages, "tools": tools}).encode())
    speech = Speech(TEMPLATES["tools"], "template", "serve.syntax").of(body)
    ids = speech.prompt([message.plain for message in body.messages])
    assert json.dumps(tools[0]["function"]) in TEMPLATES["tools"].decode(ids)
