"""Options, system messages, history, roles and scores of rows, in the forms in which data sets hold them."""

from __future__ import annotations

import json
import logging
import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from in_one_test import each
from reward_groups import TAGGED

from rlft.data import templates
from rlft.data.fields import RowError, TypedRow, UselessRow, messages_of
from rlft.reward.choice import Choice
from rlft.tokens.options import letters, options_of
from rlft.types import Prompt, Split, UserError

TEXTS = ("Rome", "1.5 m", "A new one", "x) y", "Ünï", "b")
FORMS: Mapping[str, Callable[[Sequence[str], Sequence[str]], Any]] = {
    "list": lambda labels, texts: list(texts),
    "label and text": lambda labels, texts: {"text": list(texts), "label": list(labels)},
    "objects": lambda labels, texts: [{"label": a, "text": b} for a, b in zip(labels, texts, strict=True)],
    "by label": lambda labels, texts: {**dict(zip(labels, texts, strict=True)), "Z": None},
    "JSON": lambda labels, texts: json.dumps(list(texts)),
    "columns": lambda labels, texts: None,
}
PREFIXES = ("", "({}) ", "{}) ", "{}. ", "({})")


def option_rows() -> Iterator[tuple[dict[str, Any], Any, dict[str, str]]]:
    """(row, options_field, {label: text}): forms x labels x prefixes x numbers of options."""
    for form, labels, prefix, number in product(FORMS, (string.ascii_uppercase, "123456", "abcdef"), PREFIXES, (2, 6)):
        own, texts = list(labels[:number]), list(TEXTS[:number])
        written = [prefix.format(label) + text for label, text in zip(own, texts, strict=True)]
        has_labels = form in ("label and text", "objects", "by label") or prefix
        expected = dict(zip(own if has_labels else letters(number), texts, strict=True))
        if form == "columns":
            columns = {f"ans{i}": written[i] if i < number else "" for i in range(6)}
            yield {"question": "Which?", **columns}, list(columns), expected
        else:
            yield {"question": "Which?", "choices": FORMS[form](own, written)}, "choices", expected


@pytest.mark.parametrize("template", ["{question}", "{options}\n\nWhich of these: {question}"])
def test_options_are_written_with_their_labels_and_the_reward_reads_the_same(make_data, template: str) -> None:
    number = 0
    for row, field, expected in option_rows():
        data = make_data(
            "jsonl", path="x", prompt_field="question", answer_field=None, options_field=field, prompt_template=template
        )
        [made] = data.parse(row, "x")
        shown = "\n".join(f"{label}) {text}" for label, text in expected.items())
        content = made.made.prompt.messages[0]["content"]
        assert content == (f"Which?\n{shown}" if template == "{question}" else f"{shown}\n\nWhich of these: Which?"), (
            row
        )
        assert options_of(made.made.prompt.metadata["options"]) == expected, row
        number += 1
    assert number == 6 * 3 * 5 * 2


def test_options_that_are_null_or_blank_leave_the_labels_of_the_others(make_data, write, tmp_path: Path) -> None:
    """Each set of those that are none x nothing that says so x form x table; an index counts all items of a list."""
    texts, number = ("x", "y", "z", "w"), 0
    for given, none, form in product(
        product((True, False), repeat=4), (None, "", " ", math.nan), ("list", "columns", "JSON")
    ):
        if sum(given) < 2 or (form == "JSON" and none != none):
            continue
        items = [text if has else none for text, has in zip(texts, given, strict=True)]
        expected = {label: text for label, text, has in zip("ABCD", texts, given, strict=True) if has}
        last = max(i for i, has in enumerate(given) if has)
        row = {"prompt": "Q", "answer": str(last), **dict(zip("ABCD", items, strict=True))}
        row["o"] = json.dumps(items) if form == "JSON" else items
        data = make_data("jsonl", path="x", options_field=list("ABCD") if form == "columns" else "o")
        for fields in (row, TypedRow(row)):
            [made] = data.parse(fields, "x")
            shown = "\n".join(f"{label}) {text}" for label, text in expected.items())
            assert made.made.prompt.messages[0]["content"] == f"Q\n{shown}", (items, form)
            reward = Choice(**TAGGED, ignore_case=True, choices_field="options")
            prompt = Prompt(id="x", messages=(), answer=row["answer"], metadata=made.made.prompt.metadata)
            assert reward._right(prompt, reward._choices(prompt)) == {"ABCD"[last]}
            number += 1
    assert number == 11 * (4 * 2 + 3) * 2
    for first, second, third in (("(A) ", "(C) ", "(D) "), ("(A) ", "(B) ", "(C) "), ("1. ", "2. ", "3. ")):
        found = options_of([f"{first}x", None, f"{second}y", f"{third}z"])
        assert found == {first.strip("(). "): "x", second.strip("(). "): "y", third.strip("(). "): "z"}


def test_options_are_written_for_demonstrations_and_preferences_too(make_demonstrations, make_preferences) -> None:
    row = {"prompt": "Which?", "c": ["x", "y"], "completion": "A", "chosen": "A", "rejected": "B"}
    for make in (make_demonstrations, make_preferences):
        [made] = make("jsonl", path="x", options_field="c").parse(row, "x")
        assert made.made.prompt.messages[-1]["content"] == "Which?\nA) x\nB) y"


def test_what_are_no_options_is_refused_by_the_key(make_data, write, tmp_path: Path) -> None:
    for value in ("Rome", [], 5, None, {"text": ["a", "b"], "label": ["A"]}, [{"a": 1}, {"a": 2}]):
        file = write(tmp_path / "a.jsonl", {"prompt": "1?", "answer": "A", "c": value})
        with pytest.raises(UserError, match=r"^data\.options_field: .*a\.jsonl:1: in 'c' "):
            make_data("jsonl", path=str(file), options_field="c").load(Split.train)


def every(source: Any) -> list[Prompt]:
    return [prompt for split in Split for prompt in source.load(split)]


def test_a_rows_own_system_message_is_first(make_data, make_demonstrations, make_preferences, write, tmp_path) -> None:
    rows = [
        {"prompt": f"{i}?", "answer": str(i), "completion": "c", "chosen": "c", "rejected": "r", "s": system}
        for i, system in enumerate(["Be brief.", "", None, "  "] * 10)
    ]
    file = write(tmp_path / "a.jsonl", *rows)
    keys = {"path": str(file), "system_field": "s", "system_prompt": "Add.", "held_out_fraction": 0.5}
    prompts = [
        *every(make_data("jsonl", **keys)),
        *(made.prompt for made in every(make_demonstrations("jsonl", **keys))),
        *(ranking.prompt for split in Split for ranking in make_preferences("jsonl", **keys).load(split).rankings),
    ]
    assert len(prompts) == 120
    for prompt in prompts:
        own = rows[int(prompt.messages[-1]["content"][:-1])]["s"]
        assert prompt.messages[0] == {"role": "system", "content": "Be brief." if own == "Be brief." else "Add."}
        assert len(prompt.messages) == 2


def test_history_is_read_as_the_turns_before(make_data, make_demonstrations, make_preferences) -> None:
    """Lengths x sections; the system message stands before it, and the template is that of the last turn alone."""
    for number, make in product(range(4), (make_data, make_demonstrations, make_preferences)):
        row = {"prompt": "q", "answer": "a", "completion": "a", "chosen": "a", "rejected": "b", "s": "S"}
        row["history"] = [[f"q{i}", f"a{i}"] for i in range(number)]
        keys = {"path": "x", "system_field": "s", "prompt_template": "<{question}>"}
        [made] = make("jsonl", **keys).parse(row, "x")
        turns = made.made.prompt.messages
        texts = [turn["content"] for turn in turns]
        assert texts == ["S", *(text for pair in row["history"] for text in pair), "<q>"]
        assert [turn["role"] for turn in turns] == ["system", *["user", "assistant"] * number, "user"]


def test_history_beside_a_chat_is_noted_and_not_said_to_be_read(
    make_data, make_demonstrations, make_preferences, caplog
) -> None:
    """Prompt as text or chat, or no prompt, x section: the turns of history are in the prompt, or there is a note."""
    chat, whole = [{"role": "user", "content": "q"}], [{"role": "user", "content": "q"}]
    number = 0
    for prompt, (make, section), template in product(
        ("q", chat, "whole"),
        ((make_data, "data"), (make_demonstrations, "demonstrations"), (make_preferences, "preferences")),
        ("{question}", "{other}"),
    ):
        row = {"prompt": prompt, "answer": "a", "completion": "a", "chosen": "a", "rejected": "b", "other": "o"}
        row["history"] = [["h", "i"]]
        keys: dict[str, Any] = {"path": "x", "prompt_template": template}
        if prompt == "whole":
            if section != "preferences":
                continue
            chosen, rejected = ([*whole, {"role": "assistant", "content": text}] for text in "ab")
            row |= {"prompt": "q", "chosen": chosen, "rejected": rejected}
        templates._note.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            [made] = make("jsonl", **keys).parse(row, "x")
        turns = made.made.prompt.messages
        is_read = [turn["content"] for turn in turns[:-1]] == ["h", "i"]
        assert is_read is (prompt == "q" or (prompt != "whole" and template == "{other}")), (section, prompt)
        noted = [record.getMessage().split(", which")[0] for record in caplog.records]
        assert noted == [f"{section}.path: rows have 'history'"] * (not is_read), (section, prompt, template)
        number += 1
    assert number == 14


def test_other_names_of_roles_are_these_roles() -> None:
    """Names x upper and lower case x both forms of messages."""
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    names = {"human": "user", "prompter": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
             "model": "assistant", "chatgpt": "assistant", "observation": "tool", "function": "tool",
             "ipython": "tool", "tool": "tool", "developer": "system", "system": "system"}  # fmt: skip
    number = 0
    for (name, role), change, (key, content) in product(
        names.items(), (str, str.upper, str.title), (("role", "content"), ("from", "value"))
    ):
        [message] = messages_of({"m": [{key: change(name), content: "x"}]}, "m")
        assert message == {"role": role, "content": "x"}
        number += 1
    assert number == 78
    for key, content in (("role", "content"), ("from", "value")):
        for text in (call, f"[{call}]"):
            [message] = messages_of({"m": [{key: "function_call", content: text}]}, "m")
            assert message["role"] == "assistant"
            assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("completion", "score", "values"),
    [("completion", "label", [True, False]), ("response", "helpfulness", [4, 1.5]), ("text", "s", ["3", "-1e1"])],
)
def test_completions_with_a_score_each_are_ranked_by_prompt(
    make_preferences, write, tmp_path: Path, completion: str, score: str, values: Sequence[Any]
) -> None:
    rows = [
        {"prompt": f"{i}?", completion: f"{i} {'worse' if value is values[-1] else 'better'}", score: value}
        for value in reversed(values)
        for i in range(20)
    ]
    file = write(tmp_path / "a.jsonl", *rows, {"prompt": "alone?", completion: "x", score: values[0]})
    keys = {"path": str(file), "held_out_fraction": 0.5}
    if completion in ("completion", "response"):
        with pytest.raises(UserError, match=f"set preferences.completions_field={completion} .*scores_field={score}"):
            make_preferences("jsonl", **keys).load(Split.train)
    source = make_preferences("jsonl", completions_field=completion, scores_field=score, **keys)
    sets = [source.load(split) for split in Split]
    rankings = [ranking for found in sets for ranking in found.rankings]
    assert sorted(ranking.completions for ranking in rankings) == sorted(
        (f"{i} better", f"{i} worse") for i in range(20)
    )
    assert sum(found.num_tied for found in sets) == 1


def test_completions_that_are_chats_or_null_are_ranked_as_texts_are(make_preferences) -> None:
    """Each completion as text, chat of a table and null x one with its score, lists and columns."""
    forms: Sequence[Callable[[str], Any]] = (
        lambda text: text,
        lambda text: [{"role": "assistant", "content": text}],
        lambda text: [{"role": "assistant", "content": text, "tool_calls": None}],
        lambda text: None,
    )
    number = 0
    for form, score in product(forms[:3], (True, 0.5, "3")):
        for prompt in ("1?", [{"role": "user", "content": "1?"}]):
            row = TypedRow({"prompt": prompt, "completion": form("x"), "label": score})
            with pytest.raises(RowError) as refusal:
                make_preferences("jsonl", path="x").parse(row, "x")
            if not isinstance(score, str):
                assert "completions_field=completion preferences.scores_field=label" in str(refusal.value.remedy)
            source = make_preferences("jsonl", path="x", completions_field="completion", scores_field="label")
            [made] = [row.made for row in source.parse(row, "x")]
            assert (made.completions, made.scores) == (("x",), (float(score),))
            assert made.prompt.messages == ({"role": "user", "content": "1?"},)
            number += 1
    for chosen, scores in product(product(forms, repeat=3), (["3", 2, 1.0], [True, None, 0.5])):
        texts = [form(text) for form, text in zip(chosen, "xyz", strict=True)]
        expected = [(t, s) for t, text, s in zip("xyz", texts, scores, strict=True) if text is not None]
        row = TypedRow({"prompt": "1?", "texts": texts, "scores": scores, **dict(zip("abc", texts, strict=True))})
        row |= dict(zip("def", scores, strict=True))
        for keys in (("texts", "scores"), (list("abc"), list("def"))):
            source = make_preferences("jsonl", path="x", completions_field=keys[0], scores_field=keys[1])
            number += 1
            if any(score is None for _, score in expected):
                with pytest.raises(RowError, match=f"must be a list of {len(expected)} number"):
                    source.parse(row, "x")
            elif not expected and keys[0] != "texts":
                with pytest.raises(RowError, match="is not a pair"):
                    source.parse(row, "x")
            elif not expected:
                assert isinstance(source.parse(row, "x")[0].made, UselessRow)
            else:
                [made] = [row.made for row in source.parse(row, "x")]
                found = list(zip(made.completions, made.scores, strict=True))
                assert found == [(text, float(score)) for text, score in expected]
    assert number == 18 + 64 * 2 * 2


def test_completions_and_scores_in_several_fields_are_ranked(make_preferences) -> None:
    row = {"prompt": "1?", "a": "x", "b": "y", "score_a": 1, "score_b": 2}
    source = make_preferences("jsonl", path="x", completions_field=["a", "b"], scores_field=["score_a", "score_b"])
    [made] = source.parse(row, "x")
    assert (made.made.completions, made.made.scores) == (("x", "y"), (1.0, 2.0))


def test_a_boolean_answer_is_true_or_false(make_data) -> None:
    for value, text in ((True, "true"), (False, "false"), ("yes", "yes"), ([True, "yes"], "true")):
        [made] = make_data("jsonl", path="x").parse({"prompt": "1?", "answer": value}, "x")
        assert made.made.prompt.answer == text


def test_what_has_a_meaning_and_is_not_read_is_noted_once(
    make_data, make_demonstrations, make_preferences, caplog
) -> None:
    """Each field of the list x section, unless it is blank or a key names it; the note names the way."""
    base = {"prompt": "1?", "answer": "1", "completion": "c", "chosen": "c", "rejected": "r"}
    number = 0
    for name, (section, make) in product(
        templates.TELLING,
        (("data", make_data), ("demonstrations", make_demonstrations), ("preferences", make_preferences)),
    ):
        value = {"label": True, "tools": [], "history": "talk", "choices": ["a", "b"]}.get(name, "v")
        if name == "tools" and section == "data":
            value = [{"name": "f"}]
        for keys, row_value, is_noted in (
            ({}, value, name != "tools" or section == "data"),
            ({}, type(value)() if name != "label" else None, False),
            ({"prompt_template": f"{{question}} {{{name}}}"}, "v", False),
        ):
            number += 1
            if name == "tools" and keys:
                continue  # no template takes a list
            templates._note.cache_clear()
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                for _ in range(2):
                    make("jsonl", path="x", **keys).parse({**base, name: row_value}, "x")
            noted = [record.getMessage() for record in caplog.records]
            assert [note.split(", which")[0] for note in noted] == [f"{section}.path: rows have {name!r}"] * is_noted
    assert number == 16 * 3 * 3


# -- refused keys ------------------------------------------------------------------------------------------------------
LINE = {"prompt": "{}?", "answer": "x", "completion": "x", "chosen": "good", "rejected": "bad"}
# {what is read: [(keys, the one that is named)]}
FILES = {
    "data": [
        ({"path": "missing.jsonl"}, "path"),
        ({"path": "folder"}, "path"),
        ({"path": "empty.jsonl"}, "path"),
        ({"path": "blank.jsonl"}, "path"),
        ({"held_out_path": "missing.jsonl"}, "held_out_path"),
        ({"held_out_path": "./good.jsonl"}, "held_out_path"),
        ({"held_out_fraction": 1.0}, "held_out_fraction"),  # nothing left to train on
        ({"held_out_fraction": 0.0}, "held_out_fraction"),
        ({"held_out_fraction": 1.5}, "held_out_fraction"),
        ({"held_out_path": "same_questions.jsonl"}, "path"),
        ({"answer_pattern": "("}, "answer_pattern"),
        ({"few_shot": -1}, "few_shot"),
        ({"few_shot": 5, "held_out_fraction": 1e-9}, "few_shot"),  # a question of 5 has 4 others
        ({"few_shot_template": "{anwser}"}, "few_shot_template"),
        ({"answer_field": None, "few_shot": 1}, "answer_field"),
        ({"prompt_template": "{question} {answer}"}, "prompt_template"),
        ({"prompt_template": r"\\boxed{question}"}, "prompt_template"),
        ({"prompt_template": "{qestion}"}, "prompt_template"),
        ({"promt_field": "x"}, "promt_field"),
        ({"prompt_field": 3}, "prompt_field"),
    ],
    "demonstrations": [
        ({"path": "missing.jsonl"}, "path"),
        ({"held_out_path": "missing.jsonl"}, "held_out_path"),
        ({"held_out_fraction": 1.0}, "held_out_fraction"),
        ({"prompt_template": "x"}, "prompt_template"),
        ({"turns": "first"}, "turns"),
        ({"token_ids": "both"}, "token_ids"),
    ],
    "preferences": [
        ({"path": "missing.jsonl"}, "path"),
        ({"held_out_path": "missing.jsonl"}, "held_out_path"),
        ({"held_out_fraction": 1.0}, "held_out_fraction"),
        ({"prompt_template": "x"}, "prompt_template"),
        ({"token_ids": "both"}, "token_ids"),
        ({"format": "HH"}, "format"),
        ({"prompt_template": "{chosen}"}, "prompt_template"),
    ],
}
DRAWN = {
    "arithmetic": [
        ({"difficulty": 0}, "difficulty"),
        ({"difficulty": 10}, "difficulty"),
        ({"operations": []}, "operations"),
        ({"operations": ["/"]}, "operations"),
        ({"difficulty": 1, "size": 200}, "size"),  # 100 sums + 55 differences of one digit
        ({"difficulty": 1, "held_out_size": 100}, "held_out_size"),
    ],
    "chains": [
        ({"steps": 0}, "steps"),
        ({"steps": 21}, "steps"),
        ({"largest": 8}, "largest"),
        ({"largest": 10_000}, "largest"),
        ({"steps": 1, "largest": 9, "size": 200}, "size"),
        ({"steps": 1, "largest": 9, "held_out_size": 100}, "held_out_size"),
    ],
    "shapes": [({"most": 10}, "most")],
}


@each("section, keys, key", [(section, *row) for section, rows in FILES.items() for row in rows])
def test_of_what_is_read_from_files(
    section: str, keys: dict[str, Any], key: str, request, write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = request.getfixturevalue(f"make_{section}")
    monkeypatch.chdir(tmp_path)
    for name, count in (("good", 5), ("same_questions", 9)):
        write(tmp_path / f"{name}.jsonl", *(LINE | {"prompt": f"{i}?"} for i in range(count)))
    (tmp_path / "folder").mkdir(exist_ok=True)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(UserError) as refusal:
        make("jsonl", **{"path": "good.jsonl"} | keys).load(Split.train)
    assert refusal.value.key == f"{section}.{key}"


@each("kind, keys, key", [(kind, *row) for kind, rows in DRAWN.items() for row in rows])
def test_of_what_is_drawn(kind: str, keys: dict[str, Any], key: str, make_data) -> None:
    with pytest.raises(UserError) as refusal:
        make_data(kind, **keys).load(Split.held_out if key == "held_out_size" else Split.train)
    assert refusal.value.key == f"data.{key}"
