"""Every field of a row can stand in its prompt, and several answers of a row are each right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_one_test import each

from rlft.data.fields import RowError, value_of
from rlft.data.prompts import fingerprinted
from rlft.data.templates import check_template, filled, for_typed, prompt_of
from rlft.types import Prompt, Split, UserError

ROW = {
    "Body": "Ada has 2 apples.", "Question": "How many?", "input": " ", "none": None, "number": 3.0, "a.b": "dotted",
    "a": {"b": "inner", "c": {"d": 5}}, "list": ["x", {"y": "z"}], "with space": "s", "space": " s", "curly": "{Body}",
}  # fmt: skip


@each(
    ("template", "expected"),
    [
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
    ],
)
def test_a_template_takes_the_rows_fields_and_leaves_the_rest(template: str, expected: str) -> None:
    assert filled(template, "Q", ROW)[0] == expected


@each(
    ("name", "problem"),
    [
        ("body", "there is no field 'body', only 'Body'"),
        ("a.x", "in 'a' there is no field 'x', only 'b', 'c'"),
        ("a.c.d.e", "and 'd' is a number"),
        ("list.7", "in 'list' there is no field '7', only '0', '1'"),
        ("list", "field 'list' must be a string or number, it is a list"),
    ],
)
def test_a_name_that_is_no_field_is_refused(name: str, problem: str) -> None:
    with pytest.raises(RowError) as refusal:
        filled(f"{{question}} {{{name}}}", "Q", ROW)
    assert problem in str(refusal.value)


@each(
    ("template", "answer_field", "problem"),
    [
        ("{question} {solution}", "solution", "would show the reference answer"),
        ("{Body} {tests}", "{tests}\n{setup}", "would show the reference answer"),
        ("Add.", "solution", r"has no \{question\}"),
        (r"Add. \boxed{answer}", "answer", r"has no \{question\}"),
    ],
)
def test_a_template_without_a_question_or_with_the_answer_is_refused(
    template: str, answer_field: str, problem: str
) -> None:
    with pytest.raises(UserError, match=f"^data.prompt_template: {problem}"):
        check_template(template, "data.prompt_template", answer_field)


@each("template", ["{question} {{solution}}", r"{question} \boxed{solution}", "{Body}"])
def test_a_template_may_name_the_field_of_the_answer_where_it_does_not_show_it(template: str) -> None:
    check_template(template, "data.prompt_template", "solution")


def test_every_item_of_a_list_is_reached_by_a_star() -> None:
    row = {"completions": [{"response": "a", "score": {"x": 1}}, {"response": "b", "score": {"x": 2}}]}
    assert value_of(row, "completions.*.response") == ["a", "b"]
    assert value_of(row, "completions.*.score.x") == [1, 2]
    assert value_of({"list": ["a", "b"]}, "list.*") == ["a", "b"]


def test_a_question_that_is_typed_has_no_fields() -> None:
    assert for_typed("{Body} {Question}") == "{question}"
    assert prompt_of("2+2?", "Add.", r"{question} in \boxed{answer}, as {{x}} or {y z}") == (
        {"role": "system", "content": "Add."},
        {"role": "user", "content": r"2+2? in \boxed{answer}, as {x} or {y z}"},
    )


@pytest.fixture
def load(make_data, write, tmp_path: Path) -> Callable[..., list[Prompt]]:
    def load_rows(*rows: dict[str, Any], **keys: Any) -> list[Prompt]:
        path = str(write(tmp_path / "a.jsonl", *rows))
        return make_data("jsonl", path=path, held_out_fraction=1.0, **keys).load(Split.held_out)

    return load_rows


def test_a_question_in_two_fields_is_known_by_both(load, caplog) -> None:
    rows = [{"Body": f"{i} apples.", "Question": "How many?", "Answer": float(i)} for i in (1, 2)]
    with caplog.at_level(logging.WARNING):
        prompts = load(*rows, prompt_template="{Body} {Question}", answer_field="Answer")
    assert not caplog.text, "the questions differ"
    assert [(p.messages[0]["content"], p.answer) for p in prompts] == [
        ("1 apples. How many?", "1"),
        ("2 apples. How many?", "2"),
    ]


def test_the_key_of_a_wrong_template_is_named_with_the_row(load) -> None:
    with pytest.raises(UserError) as refusal:
        load({"prompt": "1?", "answer": "1"}, prompt_template="{promt}")
    assert refusal.value.key == "data.prompt_template"
    assert "a.jsonl:1: there is no field 'promt', only 'prompt', 'answer'; name a field, or write {{promt}}" in str(
        refusal.value
    )
    with pytest.raises(UserError, match=r"^data\.answer_field: .*a\.jsonl:1: there is no field 'tests'"):
        load({"prompt": "1?", "answer": "1"}, answer_field="{tests}")


def test_equal_questions_with_other_answers_are_counted_and_named(load, caplog) -> None:
    rows = [("1?", "1"), ("2?", "2"), (" 1? ", "one"), ("2?", " 2 "), ("1?", "uno"), ("3?", ["a", "b"]), ("3?", "b")]
    with caplog.at_level(logging.WARNING):
        load(*({"prompt": prompt, "answer": answer} for prompt, answer in rows))
    [record] = caplog.records
    assert record.getMessage() == (
        "data.path: a question is repeated with another answer in 2 rows: a.jsonl:1 has '1', a.jsonl:3 has 'one'"
    )


def test_any_of_several_answers_is_right_and_all_of_them_are_the_data(load) -> None:
    row = {"prompt": "Capital?", "info": {"truth": ["#### Paris", "#### Lutetia", "#### Paris"]}}
    (prompt,) = load(row, answer_field="info.truth", answer_pattern="#### (.*)")
    assert (prompt.answer, prompt.other_answers) == ("Paris", ("Lutetia",))
    (alone,) = load(row, answer_field="info.truth.0", answer_pattern="#### (.*)")
    assert (alone.answer, alone.other_answers) == ("Paris", ())
    assert fingerprinted(prompt) != fingerprinted(alone)


def test_prompts_may_be_chats_and_may_have_no_answer(load) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"}]
    (prompt,) = load({"prompt": chat}, answer_field=None, prompt_template="Q: {question}")
    assert [m["content"] for m in prompt.messages] == ["Be brief.", "Q: 1?"]
    assert prompt.answer == ""
    with pytest.raises(UserError, match=r"a\.jsonl:1: the last message of field 'prompt' is not a user message"):
        load({"prompt": [*chat, {"role": "assistant", "content": "1"}]}, answer_field=None)


def test_an_answer_may_be_made_of_several_fields(load) -> None:
    row = {"prompt": "def f():", "test": "def check(c):\n    assert c() == {1: 2}", "entry_point": "f"}
    (prompt,) = load(row, answer_field="{test}\n\ncheck({entry_point})")
    assert prompt.answer == "def check(c):\n    assert c() == {1: 2}\n\ncheck(f)"
    (prompt,) = load({"prompt": "?", "question": "1", "answer": 2}, answer_field="{question}, {answer}")
    assert prompt.answer == "1, 2", "a field named question is one like any other"
    with pytest.raises(UserError, match=r"^data\.answer_field: has \\boxed\{answer\}, the same text for every row"):
        load({"prompt": "?", "note": "1", "answer": 2}, answer_field=r"{note} \boxed{answer}")


@each(
    ("solution", "answer"),
    [
        (r"so \boxed{1}, then $\boxed{\frac{1}{\sqrt{x^{2^{3}}}}}$.", r"\frac{1}{\sqrt{x^{2^{3}}}}"),
        (r"\fbox{72}", "72"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
    ],
)
def test_the_answer_of_a_solution_is_in_its_last_box(load, solution: str, answer: str) -> None:
    assert load({"prompt": "?", "answer": solution}, answer_pattern="boxed")[0].answer == answer
