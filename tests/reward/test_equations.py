import time

import pytest
from in_one_test import each
from reward_groups import TAGGED

from rlft.reward.answer import AnswerIn, Which
from rlft.reward.equations import Equations, equations
from rlft.types import StepScores


def reward(**keys):
    weights = {"equation_weight": 1.0, "answer_weight": 1.0, "max_equations": 16}
    return Equations(**{**TAGGED, **weights, **keys})


def found(text):
    """The equations of a text up to their ends, and whether they hold."""
    return [(text[:end], holds) for end, holds in equations(text)]


@each(("text", "holds"), [
    ("7+5=12", True), ("7+5=13", False), ("4+8+1=13", True), ("12-7=5", True), ("3-5=-2", True), ("-3+5=2", True),
    ("-3-5=-8", True), ("2*3*4=24", True), ("0*7=0", True), ("007+1=8", True), ("7 + 5 = 12", True),
    ("12 -7= 5", True),
    ("5-1-1=3", True), ("5-1-1=5", False),  # from the left: not 5-(1-1)
    ("2+3*4=14", True), ("2*3+4*5=26", True), ("10-2*3=4", True),  # products first: not 20
])  # fmt: skip
def test_an_equation_is_a_step_that_holds_or_not(text, holds):
    assert found(text) == [(text, holds)]


@each("text", [
    "", "12", "12=12", "7+5", "7+5=", "=12", "7+5==12", "7++5=12", "1+2=3=3", "1+2=3+0", "1 + 2 = 3 + 4 = 7",
    "x+1+2=3", "x + 1 + 2 = 3", "6/2+1=4", "6 / 2 + 1 = 4", "(1+2)=3", "1+2=3)", "1+2=3.5", "1.5+1=2", "0.1+2=3",
    "1+2=3%", "1+2=3apples", "2**3=8", "7  +  5=12", "7\n+5=12", "７+５=12", "1_0+2=12", "0x1+2=3",
    "__import__('os').abort()+1=2", "(lambda:1)()+1=2",
    "1" * 60 + "+" + "0" * 60 + "=" + "1" * 60,  # longer than anybody writes
])  # fmt: skip
def test_what_is_not_plainly_an_equation_is_no_step(text):
    assert found(text) == []


@each("separator", [",", " ", "\n", ", ", ";", "\t", "</think><think>", ". ", "\n- ", "\n* "])
def test_equations_are_found_between_separators(separator):
    first, second = "7+5=12", f"7+5=12{separator}4+8+1=14"
    assert found(f"{second}{separator.rstrip('-* ')}") == [(first, True), (second, False)]


def test_an_equation_in_a_sentence_is_found():
    text = "So 48 + 24 = 72. Then 72-2=71, which leaves 71."
    assert found(text) == [("So 48 + 24 = 72", True), ("So 48 + 24 = 72. Then 72-2=71", False)]


@each("part", ["1", "a", "1+", "+", "=", "1+1=2 ", "+ ", " +", "1+1=2+", " ", ",", "- 1"])
def test_a_hostile_text_is_read_in_linear_time(part):
    """Anything worse would take minutes for so many characters, not a fraction of a second."""
    text = part * (200_000 // len(part))
    start = time.process_time()
    list(equations(text))
    assert time.process_time() - start < 10


def test_the_working_of_the_embedded_model_is_read_step_by_step(group):
    # 47 + 85 = 132, digit by digit from the right; the third completion forgets the carry.
    think, answer = "<think>7+5=12,4+8+1=13</think>", "<answer>132</answer>"
    wrong = "<think>7+5=12,4+8=13</think><answer>131</answer>"
    scores = reward()(group([think + answer, think, wrong, answer, "I give up"], answer="132"))
    # <think> has 7 characters, so 7+5=12 ends before character 13, and ,4+8+1=13 nine later.
    assert scores == [
        StepScores(values=(1.0, 1.0, 1.0), ends=(13, 22, len(think + answer))),
        StepScores(values=(1.0, 1.0), ends=(13, 22)),
        StepScores(values=(1.0, 0.0, 0.0), ends=(13, 20, len(wrong))),
        StepScores(values=(1.0,), ends=(len(answer),)),
        StepScores(values=(), ends=()),
    ]


def test_the_weights_are_of_right_equations_and_of_the_right_answer(group):
    texts = ["1+1=2<answer>18</answer>", "1+1=3<answer>18</answer>", "1+1=2<answer>17</answer>"]
    scores = reward(equation_weight=0.25, answer_weight=2.0)(group(texts))
    assert [each.values for each in scores] == [(0.25, 2.0), (0.0, 2.0), (0.25, 0.0)]


def test_further_equations_than_the_limit_are_no_steps(group):
    scores = reward(max_equations=2)(group(["1+1=2 " * 5 + "<answer>18</answer>"]))
    assert scores == [StepScores(values=(1.0, 1.0, 1.0), ends=(5, 11, 30 + 19))]


def test_the_answer_is_found_where_the_keys_say(group):
    scores = reward(answer_in=AnswerIn.hashes)(group(["9+9=18\n#### 18"]))
    assert scores == [StepScores(values=(1.0, 1.0), ends=(6, 14))]
    twice = "<answer>17</answer><answer>18.0</answer>"
    assert reward()(group([twice])) == [StepScores(values=(), ends=())]
    assert reward(which=Which.last)(group([twice])) == [StepScores(values=(1.0,), ends=(40,))]


def test_an_equation_at_the_end_of_the_text_shares_its_step_with_the_answer(group):
    # The whole text is the answer here: it is not 18, but it holds.
    assert reward(answer_in=AnswerIn.text)(group(["9+9=18"])) == [StepScores(values=(1.0,), ends=(6,))]
    assert reward(answer_in=AnswerIn.text)(group(["9+9=18"], answer="9+9=18")) == [StepScores(values=(2.0,), ends=(6,))]


def test_a_prompt_without_an_answer_is_an_error_not_a_zero(group):
    with pytest.raises(ValueError, match="'p0' has no reference answer"):
        reward()(group(["1+1=2"], answer=" "))
