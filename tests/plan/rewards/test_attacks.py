"""The texts with which rewards are tried: what is called right is right, and what is called wrong is not."""

import dataclasses

from in_one_test import each

from rlft.plan.rewards.attacks import (
    Aim,
    Family,
    Form,
    another_answer,
    attacks,
    forms,
    gold_answers,
    is_another,
    value,
    wrong_answers,
)
from rlft.reward.answer import plain_number
from rlft.reward.math import compared

NUMBERS = ("41", "-7", "0", "10", "1800", "1,234,567", "0.25", "3/4", "7", "99", "-100")
TEXTS = ("Paris", "B", "True", "correct", "x^2+1", "(1,2)", "Alan Turing", "ja", "10")
TAG = Form(name="in a tag", template="<answer>{}</answer>", thinks="think")


def aim(gold, form=TAG, **fields):
    wrong = "4711" if gold != "4711" else "9"
    return dataclasses.replace(
        Aim(question="How many?", gold=gold, wrong=wrong, form=form, rewards=("mine",), special=("<|end|>",)), **fields
    )


@each("gold", ["x = y", "y = -x", r"$ \pi $", r"\text{ yes }", r"\pi \text{ m}", "Paris .", "Alan Mathison Turing"])
def test_words_are_tried_alone_where_all_are_plain_words(gold):
    tried = {kind: text for kind, text in wrong_answers(gold).items() if "word alone" in kind and text}
    assert bool(tried) == gold.startswith("Alan")
    equal = [text for text in tried.values() if compared(text, gold, unevaluated=False, max_chars=100)]
    assert not equal


@each("gold", [gold for gold in NUMBERS if value(gold) is not None])
def test_a_wrong_number_is_not_the_gold_in_another_notation(gold):
    wrong = [text for text in wrong_answers(gold).values() if is_another(text, [gold])]
    assert len(wrong) >= 8
    for text in wrong:
        number, due = plain_number(text), plain_number(gold)
        assert number is None or number != due, text
        assert not compared(text, gold, unevaluated=False, max_chars=200), text


@each("gold", ["41", "-7", "1800"])
def test_gold_answers_have_the_golds_value_as_mathematics(gold):
    in_words = {"sentence"}
    for kind, text in gold_answers(gold).items():
        assert kind in in_words or compared(text, gold, unevaluated=True, max_chars=200), kind


@each("gold", [*NUMBERS, *TEXTS])
def test_each_kind_of_text_stands_once_and_only_gold_answers_are_the_gold(gold):
    found = attacks(aim(gold))
    assert {attack.family for attack in found} == {*Family}
    keys = [(attack.family, attack.kind) for attack in found]
    assert len(keys) == len({*keys})
    texts = [attack.text for attack in found]
    assert len(texts) == len({*texts}), "no text is counted twice"
    assert not {TAG(gold), TAG("4711" if gold != "4711" else "9")} & {*texts}, "these two try the form"


def test_texts_that_are_the_same_for_all_rows_are_left_out_where_they_say_the_answer():
    def kinds(gold):
        return [attack.kind for attack in attacks(aim(gold)) if attack.family in (Family.judge, Family.names)]

    assert {"a rating", "as a word"} <= {*kinds("41")}
    assert "a rating" not in kinds("10")
    assert "as a word" not in kinds("Correct")


@each(
    ("gold", "rows", "wrong"),
    [
        ("1", ["1", "17", "1.0", "5"], "5"),  # neither the same number nor one with it inside
        ("17", ["17", "1", "117"], "4711"),
        ("B", ["B", "b", "B "], "A"),
        ("A", ["A"], "B"),
        ("4711", [], "29"),
        ("Lima", ["Lima", "lima", "Rome"], "Rome"),
        ("def f(a):\n    return a", ["def g(a):\n    return 2 * a"], "def f(a):\n    return None and a"),
    ],
)
def test_a_wrong_answer_has_nothing_in_common_with_the_gold_where_there_is_one(gold, rows, wrong):
    assert another_answer([gold], rows) == wrong


def test_without_a_reference_answer_no_text_is_right_or_wrong():
    families = {attack.family for attack in attacks(aim(""))}
    assert families == {*Family} - {Family.gold, Family.wrong, Family.two, Family.reasoning}


def test_no_two_forms_write_the_same_and_the_configs_own_are_among_them():
    own = [
        Form(name="as mine reads it", template="<answer>{}</answer>"),
        Form(name="in the tags of format", template="<solution>{}</solution>", thinks="reasoning"),
    ]
    known = forms(own)
    texts = [form("18") for form in known]
    assert len(texts) == len({*texts})
    assert "<reasoning>-</reasoning><solution>18</solution>" in texts
    assert texts.count("<answer>18</answer>") == 1
    assert Form(name="alone", template="{}")("18", "I think") == "I think\n18"
