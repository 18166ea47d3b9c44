import pytest
from in_one_test import each
from reward_groups import TAGGED

from rlft.reward.exact_match import ExactMatch, normal


def exact_match(**keys) -> ExactMatch:
    return ExactMatch(**{**TAGGED, "numeric": True, "ignore_case": False, **keys})


# What counts as the answer when the reference is a number: the number itself, plainly written, and nothing beside it.
VERDICTS = [
    ("18", "18", True, "the answer"),
    (" 18\n", "18", True, "white space around it"),
    ("1,000", "1000", True, "thousands separated"),
    ("1000", "1,000", True, "in the reference too"),
    ("1,234,567.50", "1234567.5", True, "and with decimals"),
    ("18.0", "18", True, "trailing zeros"),
    ("+18", "18", True, "a sign"),
    ("018", "18", True, "leading zeros"),
    ("-0", "0", True, "minus zero"),
    (".5", "0.5", True, "no digit before the point"),
    ("1,00", "100", False, "separator in the wrong place"),
    ("10,00", "1000", False, "separator in the wrong place"),
    ("1 000", "1000", False, "a space is no separator"),
    ("1_000", "1000", False, "Python's separator"),
    ("1e3", "1000", False, "scientific notation: exact_match wants a plain number"),
    ("1e999999999", "1000", False, "an exponent that would be expensive"),
    ("18 apples", "18", False, "a unit"),
    ("$18", "18", False, "a currency"),
    ("18%", "18", False, "a percent sign"),
    ("18.", "18", False, "a full stop"),
    ("17, 18", "18", False, "two answers"),
    ("17 or 18", "18", False, "two answers"),
    ("18 18", "18", False, "the answer twice"),
    ("8+10", "18", False, "a sum still to be done"),
    ("36/2", "18", False, "a quotient still to be done"),
    ("0x12", "18", False, "hexadecimal"),
    ("１８", "18", False, "full-width digits"),
    ("١٨", "18", False, "Arabic-Indic digits"),
    ("−18", "-18", False, "a typographic minus"),
    ("--18", "18", False, "two signs"),
    ("18.000001", "18", False, "almost"),
    ("nan", "nan", True, "text that is equal is equal"),
    ("inf", "18", False, "no number"),
    ("1" * 500, "18", False, "absurdly long"),
]


@each(("answer", "reference", "right", "why"), VERDICTS)
def test_verdicts_on_numbers(group, answer, reference, right, why):
    scores = exact_match()(group([f"<think>hm</think><answer>{answer}</answer>"], answer=reference))
    assert scores == [float(right)], why


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
            assert normal(normal(text, numeric=True, ignore_case=True), numeric=True, ignore_case=True) == normal(
                text, numeric=True, ignore_case=True
            )
