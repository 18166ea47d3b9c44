"""Every field of a row can stand in its prompt, as options, system messages and history do."""

import json
import logging
import math
import string
from itertools import product

import pytest
from in_one_test import each
from reward_groups import TAGGED

from rlft.data import templates
from rlft.data.fields import RowError, TypedRow, value_of
from rlft.data.prompts import fingerprinted
from rlft.data.templates import check_template, filled, for_typed, prompt_of
from rlft.reward.choice import Choice
from rlft.tokens.options import letters, options_of
from rlft.types import Prompt, Split, UserError
from tests.data.data_rows import every, says, user

ROW = {
    "Body": "Ada has 2 apples.", "Question": "How many?", "input": " ", "none": None, "number": 3.0, "a.b": "dotted",
    "a": {"b": "inner", "c": {"d": 5}}, "list": ["x", {"y": "z"}], "with space": "s", "space": " s", "curly": "{Body}",
}  # fmt: skip


@each(("template", "expected"), [
    ("{Body} {Question}", "Ada has 2 apples. How many?"),
    ("{question}", "Q"),
    ("{question}\n\n{input}", "Q"),
    ("{question} ({none})", "Q ()"),
    ("{input}\n\n{question}", "Q"),
    (" {question}", " Q"),
    ("{space}", " s"),
    ("{number} {a.c.d}", "3 5"),
    ("{a.b}", "dotted"),
    ("{list.0} {list.1.y}", "x z"),
    ("{with space}", "s"),
    ("{curly}", "{Body}"),
    (r"{question} \boxed{Body} \frac{a}{b} \boxed{}", r"Q \boxed{Body} \frac{a}{b} \boxed{}"),
    ("{question} {{Body}} {{b}}", "Q {Body} {b}"),
    ('{question} {"answer": 5} {the sum} {}', 'Q {"answer": 5} {the sum} {}'),
])  # fmt: skip
def test_a_template_takes_the_rows_fields_and_leaves_the_rest(template, expected):
    assert filled(template, "Q", ROW)[0] == expected


@each(("name", "problem"), [
    ("body", "there is no field 'body', only 'Body'"),
    ("a.x", "in 'a' there is no field 'x', only 'b', 'c'"),
    ("a.c.d.e", "and 'd' is a number"),
    ("list.7", "in 'list' there is no field '7', only '0', '1'"),
    ("list", "field 'list' must be a string or number, it is a list"),
])  # fmt: skip
def test_a_name_that_is_no_field_is_refused(name, problem):
    with pytest.raises(RowError) as refusal:
        filled(f"{{question}} {{{name}}}", "Q", ROW)
    assert problem in str(refusal.value)


@each(("template", "answer_field", "problem"), [
    ("{question} {solution}", "solution", "would show the reference answer"),
    ("{Body} {tests}", "{tests}\n{setup}", "would show the reference answer"),
    ("Add.", "solution", r"has no \{question\}"),
    (r"Add. \boxed{answer}", "answer", r"has no \{question\}"),
])  # fmt: skip
def test_a_template_without_a_question_or_with_the_answer_is_refused(template, answer_field, problem):
    with pytest.raises(UserError, match=f"^data.prompt_template: {problem}"):
        check_template(template, "data.prompt_template", answer_field)
    for shown in ("{question} {{solution}}", r"{question} \boxed{solution}", "{Body}"):  # not the answer
        check_template(shown, "data.prompt_template", "solution")


def test_every_item_of_a_list_is_reached_by_a_star():
    row = {"completions": [{"response": "a", "score": {"x": 1}}, {"response": "b", "score": {"x": 2}}]}
    assert value_of(row, "completions.*.response") == ["a", "b"]
    assert value_of(row, "completions.*.score.x") == [1, 2]
    assert value_of({"list": ["a", "b"]}, "list.*") == ["a", "b"]


def test_a_question_that_is_typed_has_no_fields():
    assert for_typed("{Body} {Question}") == "{question}"
    assert prompt_of("2+2?", "Add.", r"{question} in \boxed{answer}, as {{x}} or {y z}") == (
        {"role": "system", "content": "Add."},
        {"role": "user", "content": r"2+2? in \boxed{answer}, as {x} or {y z}"},
    )


def test_a_question_in_two_fields_is_known_by_both(load, caplog):
    rows = [{"Body": f"{i} apples.", "Question": "How many?", "Answer": float(i)} for i in (1, 2)]
    with caplog.at_level(logging.WARNING):
        prompts = load(*rows, prompt_template="{Body} {Question}", answer_field="Answer")
    assert not caplog.text, "the questions differ"
    found = [(prompt.messages[0]["content"], prompt.answer) for prompt in prompts]
    assert found == [("1 apples. How many?", "1"), ("2 apples. How many?", "2")]


def test_the_key_of_a_wrong_template_is_named_with_the_row(load):
    with pytest.raises(UserError) as refusal:
        load({"prompt": "1?", "answer": "1"}, prompt_template="{promt}")
    assert refusal.value.key == "data.prompt_template"
    said = "a.jsonl:1: there is no field 'promt', only 'prompt', 'answer'; name a field, or write {{promt}}"
    assert said in str(refusal.value)
    with pytest.raises(UserError, match=r"^data\.answer_field: .*a\.jsonl:1: there is no field 'tests'"):
        load({"prompt": "1?", "answer": "1"}, answer_field="{tests}")


def test_equal_questions_with_other_answers_are_counted_and_named(load, caplog):
    rows = [("1?", "1"), ("2?", "2"), (" 1? ", "one"), ("2?", " 2 "), ("1?", "uno"), ("3?", ["a", "b"]), ("3?", "b")]
    with caplog.at_level(logging.WARNING):
        load(*({"prompt": prompt, "answer": answer} for prompt, answer in rows))
    [record] = caplog.records
    said = "a question is repeated with another answer in 2 rows: a.jsonl:1 has '1', a.jsonl:3 has 'one'"
    assert record.getMessage() == f"data.path: {said}"


def test_any_of_several_answers_is_right_and_all_of_them_are_the_data(load):
    row = {"prompt": "Capital?", "info": {"truth": ["#### Paris", "#### Lutetia", "#### Paris"]}}
    (prompt,) = load(row, answer_field="info.truth", answer_pattern="#### (.*)")
    assert (prompt.answer, prompt.other_answers) == ("Paris", ("Lutetia",))
    (alone,) = load(row, answer_field="info.truth.0", answer_pattern="#### (.*)")
    assert (alone.answer, alone.other_answers) == ("Paris", ())
    assert fingerprinted(prompt) != fingerprinted(alone)


def test_prompts_may_be_chats_and_may_have_no_answer(load):
    chat = [{"role": "system", "content": "Be brief."}, user("1?")]
    (prompt,) = load({"prompt": chat}, answer_field=None, prompt_template="Q: {question}")
    assert [m["content"] for m in prompt.messages] == ["Be brief.", "Q: 1?"]
    assert prompt.answer == ""
    with pytest.raises(UserError, match=r"a\.jsonl:1: the last message of field 'prompt' is not a user message"):
        load({"prompt": [*chat, says("1")]}, answer_field=None)


def test_an_answer_may_be_made_of_several_fields(load):
    row = {"prompt": "def f():", "test": "def check(c):\n    assert c() == {1: 2}", "entry_point": "f"}
    (prompt,) = load(row, answer_field="{test}\n\ncheck({entry_point})")
    assert prompt.answer == "def check(c):\n    assert c() == {1: 2}\n\ncheck(f)"
    (prompt,) = load({"prompt": "?", "question": "1", "answer": 2}, answer_field="{question}, {answer}")
    assert prompt.answer == "1, 2", "a field named question is one like any other"
    with pytest.raises(UserError, match=r"^data\.answer_field: has \\boxed\{answer\}, the same text for every row"):
        load({"prompt": "?", "note": "1", "answer": 2}, answer_field=r"{note} \boxed{answer}")


@each(("solution", "answer"), [
    (r"so \boxed{1}, then $\boxed{\frac{1}{\sqrt{x^{2^{3}}}}}$.", r"\frac{1}{\sqrt{x^{2^{3}}}}"),
    (r"\fbox{72}", "72"),
    (r"$\boxed 5$", "5"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
])  # fmt: skip
def test_the_answer_of_a_solution_is_in_its_last_box(load, solution, answer):
    assert load({"prompt": "?", "answer": solution}, answer_pattern="boxed")[0].answer == answer


# -- what a section reads of a row beside its question -----------------------------------------------------------------
TEXTS = ("Rome", "1.5 m", "A new one", "x) y", "Ünï", "b")
FORMS = {
    "list": lambda labels, texts: list(texts),
    "label and text": lambda labels, texts: {"text": list(texts), "label": list(labels)},
    "objects": lambda labels, texts: [{"label": a, "text": b} for a, b in zip(labels, texts, strict=True)],
    "by label": lambda labels, texts: {**dict(zip(labels, texts, strict=True)), "Z": None},
    "JSON": lambda labels, texts: json.dumps(list(texts)),
    "columns": lambda labels, texts: None,
}
PREFIXES = ("", "({}) ", "{}) ", "{}. ", "({})")


def option_rows():
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
def test_options_are_written_with_their_labels_and_the_reward_reads_the_same(make_data, template):
    number, keys = 0, {"prompt_field": "question", "answer_field": None, "prompt_template": template}
    for row, field, expected in option_rows():
        [made] = make_data("jsonl", path="x", options_field=field, **keys).parse(row, "x")
        options = "\n".join(f"{label}) {text}" for label, text in expected.items())
        shown = f"Which?\n{options}" if template == "{question}" else f"{options}\n\nWhich of these: Which?"
        assert made.made.prompt.messages[0]["content"] == shown, row
        assert options_of(made.made.prompt.metadata["options"]) == expected, row
        number += 1
    assert number == 6 * 3 * 5 * 2


def test_options_that_are_null_or_blank_leave_the_labels_of_the_others(make_data):
    """Each set of those that are none x nothing that says so x form x table; an index counts all items of a list."""
    texts, number, kinds = ("x", "y", "z", "w"), 0, product((True, False), repeat=4)
    for given, none, form in product(kinds, (None, "", " ", math.nan), ("list", "columns", "JSON")):
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


def test_what_are_no_options_is_refused_by_the_key(make_data, write, tmp_path):
    for value in ("Rome", [], 5, None, {"text": ["a", "b"], "label": ["A"]}, [{"a": 1}, {"a": 2}]):
        file = write(tmp_path / "a.jsonl", {"prompt": "1?", "answer": "A", "c": value})
        with pytest.raises(UserError, match=r"^data\.options_field: .*a\.jsonl:1: in 'c' "):
            make_data("jsonl", path=str(file), options_field="c").load(Split.train)


def test_a_rows_own_system_message_is_first(makers, write, tmp_path):
    rows = [
        {"prompt": f"{i}?", "answer": str(i), "completion": "c", "chosen": "c", "rejected": "r", "s": system}
        for i, system in enumerate(["Be brief.", "", None, "  "] * 10)
    ]
    file = write(tmp_path / "a.jsonl", *rows)
    keys = {"path": str(file), "system_field": "s", "system_prompt": "Add.", "held_out_fraction": 0.5}
    prompts = [
        *every(makers["data"]("jsonl", **keys)),
        *(made.prompt for made in every(makers["demonstrations"]("jsonl", **keys))),
        *(ranking.prompt for split in Split for ranking in makers["preferences"]("jsonl", **keys).load(split).rankings),
    ]
    assert len(prompts) == 120
    for prompt in prompts:
        own = rows[int(prompt.messages[-1]["content"][:-1])]["s"]
        assert prompt.messages[0] == {"role": "system", "content": "Be brief." if own == "Be brief." else "Add."}
        assert len(prompt.messages) == 2


def test_history_is_read_as_the_turns_before_and_options_are_written_behind_the_question(makers):
    """Lengths x sections; the system message stands before it, and the template is that of the last turn alone."""
    for number, make in product(range(4), makers.values()):
        row = {"prompt": "q", "answer": "a", "completion": "a", "chosen": "a", "rejected": "b", "s": "S"}
        row |= {"history": [[f"q{i}", f"a{i}"] for i in range(number)], "c": ["x", "y"]}
        keys = {"path": "x", "system_field": "s", "prompt_template": "<{question}>", "options_field": "c"}
        [made] = make("jsonl", **keys).parse(row, "x")
        turns = made.made.prompt.messages
        texts = [turn["content"] for turn in turns]
        assert texts == ["S", *(text for pair in row["history"] for text in pair), "<q>\nA) x\nB) y"]
        assert [turn["role"] for turn in turns] == ["system", *["user", "assistant"] * number, "user"]


def test_history_beside_a_chat_is_noted_and_not_said_to_be_read(makers, caplog):
    """Prompt as text or chat, or no prompt, x section: the turns of history are in the prompt, or there is a note."""
    chat, number = [user("q")], 0
    for prompt, section, template in product(("q", chat, "whole"), makers, ("{question}", "{other}")):
        row = {"prompt": prompt, "answer": "a", "completion": "a", "chosen": "a", "rejected": "b", "other": "o"}
        row["history"] = [["h", "i"]]
        keys = {"path": "x", "prompt_template": template}
        if prompt == "whole":
            if section != "preferences":
                continue
            chosen, rejected = ([*chat, says(text)] for text in "ab")
            row |= {"prompt": "q", "chosen": chosen, "rejected": rejected}
        templates._note.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            [made] = makers[section]("jsonl", **keys).parse(row, "x")
        turns = made.made.prompt.messages
        is_read = [turn["content"] for turn in turns[:-1]] == ["h", "i"]
        assert is_read is (prompt == "q" or (prompt != "whole" and template == "{other}")), (section, prompt)
        noted = [record.getMessage().split(", which")[0] for record in caplog.records]
        assert noted == [f"{section}.path: rows have 'history'"] * (not is_read), (section, prompt, template)
        number += 1
    assert number == 14


def test_what_has_a_meaning_and_is_not_read_is_noted_once(makers, caplog):
    """Each field of the list x section, unless it is blank or a key names it; the note names the way."""
    base = {"prompt": "1?", "answer": "1", "completion": "c", "chosen": "c", "rejected": "r"}
    number = 0
    for name, (section, make) in product(templates.TELLING, makers.items()):
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
