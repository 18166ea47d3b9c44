"""Options, system messages, history, roles and scores of rows, in the forms in which data sets hold them."""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlft.data import prompt_keys
from rlft.data.fields import messages_of
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
        content = made.made.turns[0]["content"]
        assert content == (f"Which?\n{shown}" if template == "{question}" else f"{shown}\n\nWhich of these: Which?"), (
            row
        )
        assert options_of(made.made.metadata["options"]) == expected, row
        number += 1
    assert number == 6 * 3 * 5 * 2


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
    for number, (make, section) in product(
        range(4), ((make_data, "answer"), (make_demonstrations, "completion"), (make_preferences, "chosen"))
    ):
        row = {"prompt": "q", "answer": "a", "completion": "a", "chosen": "a", "rejected": "b", "s": "S"}
        row["history"] = [[f"q{i}", f"a{i}"] for i in range(number)]
        keys = {"path": "x", "system_field": "s", "prompt_template": "<{question}>"}
        [made] = make("jsonl", **keys).parse(row, "x")
        turns = made.made.turns if section == "answer" else made.made.prompt.messages
        texts = [turn["content"] for turn in turns]
        assert texts == ["S", *(text for pair in row["history"] for text in pair), "<q>"]
        assert [turn["role"] for turn in turns] == ["system", *["user", "assistant"] * number, "user"]


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


def test_completions_and_scores_in_several_fields_are_ranked(make_preferences) -> None:
    row = {"prompt": "1?", "a": "x", "b": "y", "score_a": 1, "score_b": 2}
    source = make_preferences("jsonl", path="x", completions_field=["a", "b"], scores_field=["score_a", "score_b"])
    [made] = source.parse(row, "x")
    assert [(each.completion, each.score) for each in made.made.candidates] == [("x", 1.0), ("y", 2.0)]


def test_a_boolean_answer_is_true_or_false(make_data) -> None:
    for value, text in ((True, "true"), (False, "false"), ("yes", "yes"), ([True, "yes"], "true")):
        [made] = make_data("jsonl", path="x").parse({"prompt": "1?", "answer": value}, "x")
        assert made.made.answer == text


def test_what_has_a_meaning_and_is_not_read_is_noted_once(
    make_data, make_demonstrations, make_preferences, caplog
) -> None:
    """Each field of the list x section, unless it is blank or a key names it; the note names the way."""
    base = {"prompt": "1?", "answer": "1", "completion": "c", "chosen": "c", "rejected": "r"}
    number = 0
    for name, (section, make) in product(
        prompt_keys.TELLING,
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
            prompt_keys._note.cache_clear()
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                for _ in range(2):
                    make("jsonl", path="x", **keys).parse({**base, name: row_value}, "x")
            noted = [record.getMessage() for record in caplog.records]
            assert [note.split(", which")[0] for note in noted] == [f"{section}.path: rows have {name!r}"] * is_noted
    assert number == 16 * 3 * 3
