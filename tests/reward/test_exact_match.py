import pytest
from in_one_test import each
from reward_groups import TAGGED

from rlft.reward.exact_match import ExactMatch, normal


def exact_match(**keys):
    return ExactMatch(**{**TAGGED, "numeric": True, "ignore_case": False, **keys})


# What counts as the answer when the reference is a number: the number itself, plainly written, and nothing beside it.
EQUAL = [  # (answer, reference)
    ("18", "18"), (" 18\n", "18"), ("1,000", "1000"), ("1000", "1,000"), ("1,234,567.50", "1234567.5"), ("18.0", "18"),
    ("+18", "18"), ("018", "18"), ("-0", "0"), (".5", "0.5"), ("nan", "nan"),
]  # fmt: skip
DIFFERENT = {
    "a separator in the wrong place, or of another kind": [
        ("1,00", "100"), ("10,00", "1000"), ("1 000", "1000"), ("1_000", "1000"),
    ],
    "scientific notation: exact_match wants a plain number": [("1e3", "1000"), ("1e999999999", "1000")],
    "something beside it": [("18 apples", "18"), ("$18", "18"), ("18%", "18"), ("18.", "18")],
    "two answers": [("17, 18", "18"), ("17 or 18", "18"), ("18 18", "18")],
    "a sum or quotient still to be done": [("8+10", "18"), ("36/2", "18")],
    "other digits and signs": [
        ("0x12", "18"), ("１８", "18"), ("١٨", "18"), ("−18", "-18"), ("--18", "18"), ("1" * 500, "18"),
    ],
    "another number": [("18.000001", "18"), ("inf", "18")],
}  # fmt: skip


@each(
    ("right", "why", "pairs"),
    [(True, "the same number", EQUAL), *((False, why, pairs) for why, pairs in DIFFERENT.items())],
)
def test_verdicts_on_numbers(group, right, why, pairs):
    for answer, reference in pairs:
        scores = exact_match()(group([f"<think>hm</think><answer>{answer}</answer>"], answer=reference))
        assert scores == [float(right)], (why, answer, reference)


def test_an_answer_given_twice_or_outside_its_place_is_none(group):
    texts = ["<answer>18</answer>", "<answer>18</answer>" * 2, "<answer>8 + 10? 18</answer>", "<think>18</think>", ""]
    assert exact_match()(group(texts)) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_numbers_are_text_where_they_are_not_compared_by_value(group):
    texts = ["<answer>18</answer>", "<answer>18.0</answer>"]
    assert exact_match(numeric=False)(group(texts)) == [1.0, 0.0]


def test_words_are_compared_with_runs_of_space_as_one(group):
    texts = ["<answer>New \n York</answer>", "<answer>new york</answer>", "<answer>NewYork</answer>"]
    assert exact_match()(group(texts, answer="New York")) == [1.0, 0.0, 0.0]
    assert exact_match(ignore_case=True)(group(texts, answer="New York")) == [1.0, 1.0, 0.0]


def test_a_prompt_without_an_answer_is_an_error_not_a_zero(group):
    with pytest.raises(ValueError, match="'p0' has no reference answer"):
        exact_match()(group(["<answer></answer>"], answer=" "))


def test_white_space_around_an_answer_is_no_part_of_it():
    for text in ("000", ".000", "018", "1", "1" * 60, "new york"):
        for around in (f" {text}", f"{text} ", f"\n{text}\t"):
            assert normal(around, numeric=True, ignore_case=False) == normal(text, numeric=True, ignore_case=False)
        once = normal(text, numeric=True, ignore_case=True)
        assert normal(once, numeric=True, ignore_case=True) == once
