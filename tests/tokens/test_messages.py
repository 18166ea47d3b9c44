"""What a message says is read, or refused by name: messages and their faults are composed, so both are known."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from rlft.config.instantiate import instantiate
from rlft.data.fields import RowError, messages_of
from rlft.tokens.messages import FIELDS, TEXT_FIELDS, TEXT_PARTS, MessageError, message_of
from rlft.tokens.text import THINKING_FIELDS
from rlft.types import Split, UserError

WORDS = ("five", "<answer>5</answer>", "", "None", "null", "a\nb", "ключ", '{"a": null}')
ARGUMENTS = ({}, {"a": 1}, {"town": None, "to": ["x", None]}, {"a": {"b": {"c": False}}})


def composed(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a message in one of the forms that are known, what it says)."""
    role = rng.choice(list(FIELDS))
    says: dict[str, Any] = {"role": role}
    texts = rng.choices(WORDS, k=rng.randint(1, 4))
    parts: Any = [{"type": rng.choice(TEXT_PARTS), rng.choice(TEXT_FIELDS): text} for text in texts]
    content, says["content"] = (parts, "".join(texts)) if rng.random() < 0.7 else (texts[0], texts[0])
    for part in parts:  # as a table fills them
        part.update({key: None for key in (*TEXT_FIELDS, "image", "audio") if key not in part and rng.random() < 0.4})
    given: dict[str, Any] = {"role": role, "content": content}
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


def called(rng: random.Random, name: str, arguments: dict[str, Any], own: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments) if rng.random() < 0.5 else arguments}
    call = {"function": function} if rng.random() < 0.6 else function
    given = call | ({"type": "function"} if rng.random() < 0.6 else {}) | ({"id": own} if own else {})
    return given | ({"index": 0} if "function" in call and rng.random() < 0.3 else {})


def parts_of(message: dict[str, Any]) -> list[Any]:
    if not isinstance(message["content"], list) or not message["content"]:
        message["content"] = [{"type": "text", "text": "a"}]
    return message["content"]


def call_in(message: dict[str, Any]) -> dict[str, Any]:
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
Fault = Callable[[dict[str, Any], Any], Any]
FAULTS: list[tuple[str, Fault]] = [
    *(
        (f"has the field '{key}'", lambda m, value, key=key: m.update({key: value}))
        for key in ("train", "function_call", "refusal", "thoughts")
    ),
    *(
        (
            f"of the type {kind!r}",
            lambda m, value, kind=kind: parts_of(m).append({"type": kind, "text": "a", str(kind): value}),
        )
        for kind in PARTS
    ),
    ("has the field 'cache_control'", lambda m, value: parts_of(m)[-1].update({"cache_control": value})),
    ("must have one text in part", lambda m, value: parts_of(m).append({"type": "text", "text": None})),
    ("must have one text in part", lambda m, value: parts_of(m).append({"type": "text"})),
    ("must have one text in part", lambda m, value: parts_of(m).append({"type": "text", "text": "a", "value": "b"})),
    ("must have one text in part", lambda m, value: parts_of(m).append({"type": "text", "text": 5})),
    ("must have an object", lambda m, value: parts_of(m).append("a")),
    ("must have an object", lambda m, value: parts_of(m).append([{"type": "text", "text": "a"}])),
    ("must have an object", lambda m, value: parts_of(m).append(None)),
    ("must have a text as its content", lambda m, value: m.update({"content": {"type": "text", "text": "a"}})),
    ("must have a text as its content", lambda m, value: m.update({"content": 5})),
    ("must have a text as its content", lambda m, value: (m.update({"content": None}), m.pop("tool_calls", 0))),
    ("must have a text as its content", lambda m, value: (m.update({"content": []}), m.pop("tool_calls", 0))),
    ("has the field 'parameters'", lambda m, value: call_in(m)["function"].update({"parameters": value})),
    ("has the field 'custom'", lambda m, value: call_in(m).update({"custom": value})),
    ("has a call of a tool that is not", lambda m, value: call_in(m).update({"type": "custom"})),
    ("has a call of a tool that is not", lambda m, value: call_in(m).pop("function")),
    ("has a call of a tool that is not", lambda m, value: call_in(m)["function"].update({"arguments": "a b"})),
    ("has a call of a tool that is not", lambda m, value: call_in(m)["function"].update({"arguments": None})),
    ("has a call of a tool that is not", lambda m, value: call_in(m)["function"].update({"name": 5})),
    ("whose id must be a text", lambda m, value: call_in(m).update({"id": 5})),
    ("has tool_calls that must be a list", lambda m, value: (call_in(m), m.update({"tool_calls": "add"}))),
    ("must have a text as its reasoning", lambda m, value: (call_in(m), m.update({"reasoning": 5}))),
    ("has different thoughts in", lambda m, value: (call_in(m), m.update({"reasoning": "a", "thinking": "b"}))),
    ("has the weight", lambda m, value: (call_in(m), m.update({"weight": 0.5}))),
]


def test_a_message_of_any_known_form_says_what_it_says() -> None:
    rng = random.Random(1)
    for _ in range(1500):
        given, says = composed(rng)
        assert message_of(given) == says, given
        assert message_of(message_of(given)) == says, given


def test_what_is_not_known_of_a_message_is_refused_by_name() -> None:
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


def test_an_unknown_role_or_speaker_is_refused_by_name() -> None:
    for wrong in ("narrator", "", 5, ["user"], {"a": 1}, True):
        for row in ({"role": wrong, "content": "a"}, {"from": wrong, "value": "a"}, {"role": wrong, "from": "human"}):
            with pytest.raises(RowError, match="message 1 of field 'm' must be"):
                messages_of({"m": [{"role": "user", "content": "a"}, row]}, "m")


def test_every_reader_of_chats_refuses_what_is_not_known(make_any: Any, tmp_path: Any) -> None:
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
def make_any() -> Any:
    from rlft.config.compose import compose

    of_data = {"messages_field": "messages", "answer_field": None}

    def make(group: str, path: str) -> Any:
        words = {"data": [], "demonstrations": ["sft"], "preferences": ["dpo"]}[group]
        plain = compose([f"{group}=jsonl", f"{group}.path={path}"], None, *words)[group]
        return instantiate({**plain, **(of_data if group == "data" else {})}, group)

    return make
