import time

import pytest

from rlft.reward.answer import AnswerIn, Which
from rlft.reward.math import Math


def math_reward(**keys) -> Math:
    defaults = {"answer_in": AnswerIn.tag, "tag": "answer", "pattern": None, "which": Which.only}
    return Math(**{**defaults, "unevaluated": False, "max_chars": 200, **keys})


VERDICTS = [
    ("18", "18", True, "the number"),
    ("18.0", "18", True, "the number"),
    ("1,000", "1000", True, "thousands separated"),
    ("$18", "18", True, "a currency sign"),
    (r"\$18", "18", True, "a currency sign as LaTeX writes it"),
    (r"\boxed{18}", "18", True, "boxed inside the tag"),
    (r"18\text{ apples}", "18", True, "a unit set as text"),
    ("18 cm", "18", True, "a unit the library knows"),
    ("18 dollars", "18", False, "a word it doesn't know is a product of symbols"),
    ("18 thousand", "18", False, "nor may a word change the number"),
    ("x = 18", "18", True, "the value of a variable"),
    ("−5", "-5", True, "a typographic minus"),
    (r"\frac{1}{2}", "0.5", True, "a fraction for a decimal"),
    ("1/2", "0.5", True, "a fraction for a decimal"),
    ("0.5", r"\frac{1}{2}", True, "a decimal for a fraction"),
    (r"1\frac{1}{2}", "1.5", True, "a mixed number"),
    (r"2\sqrt{2}", r"\sqrt{8}", True, "equal roots"),
    ("x^2+2x+1", "(x+1)^2", True, "equal polynomials"),
    (r"\{2,1\}", r"\{1,2\}", True, "equal sets"),
    ("(2,1)", "(1,2)", False, "different points"),
    ("[0,1)", "[0,1)", True, "equal intervals"),
    ("[0,1]", "[0,1)", False, "different intervals"),
    ("Paris", "Paris", True, "a word"),
    ("paris", "Paris", True, "a word, by its letters"),
    ("siraP", "Paris", False, "no product of letters"),
    ("17", "18", False, "another number"),
    ("18.0001", "18", False, "almost"),
    ("8+10", "18", False, "a sum still to be done"),
    ("20 - 2", "18", False, "a difference still to be done"),
    (r"6 \times 3", "18", False, "a product still to be done"),
    ("6*3", "18", False, "a product still to be done"),
    ("36/2", "18", False, "a quotient still to be done, where a whole number is due"),
    ("10^3", "1000", False, "a power still to be done"),
    (r"\sqrt{324}", "18", False, "a root still to be taken"),
    ("1e3", "1000", False, "1 * e * 3 to mathematics"),
    ("17, 18", "18", False, "two answers"),
    ("17 or 18", "18", False, "two answers"),
    ("17$ $18", "18", False, "two answers, apart"),
    (r"\boxed{17}\boxed{18}", "18", False, "two answers, boxed"),
    ("17 = 18", "18", False, "two answers, equated"),
    ("18, 18, 18", "18", False, "the answer over and over"),
    ("18 18", "18", False, "a product"),
    (r"\infty", "18", False, "not everything"),
    ("The answer is 18", "18", False, "prose"),
    ("What is 8 + 10? 18", "18", False, "an echo of the question before it"),
    ("8 + 10 = 18", "18", False, "an echo of the sum before it"),
    ("１８", "18", False, "full-width digits"),
    ("١٨", "18", False, "Arabic-Indic digits"),
    ("", "18", False, "nothing"),
    ("$", "18", False, "nothing"),
    (r"\frac{1}{", "18", False, "broken LaTeX"),
]


@pytest.mark.parametrize(("answer", "reference", "right", "why"), VERDICTS)
def test_verdicts(group, answer, reference, right, why):
    scores = math_reward()(group([f"<answer>{answer}</answer>"], answer=reference))
    assert scores == [float(right)], why


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "((9^9)^{9999})^{9999}",
        "(10^9)!",
        "9!!!!!",
        r"\binom{1000000000}{500000000}",
        r"\sum_{i=1}^{1000000000} \sin(i)",
        r"\prod_{i=1}^{1000000000} i",
        r"\sin(9^{9^{9}})",
        "1e999999999",
        "(" * 99 + "1" + ")" * 99,
        "x^" * 99 + "2",
        "9" * 5000,
        r"\frac{" * 30 + "1" + "}{2}" * 30,
    ],
)
def test_answers_that_would_take_for_ever_are_wrong_at_once(group, answer):
    reward = math_reward()
    reward.start()
    start = time.monotonic()
    assert reward(group([f"<answer>{answer}</answer>"] * 2, answer="x+1")) == [0.0, 0.0]
    assert time.monotonic() - start < 5


def test_unfinished_sums_can_be_allowed(group):
    texts = ["<answer>8+10</answer>", "<answer>6*3</answer>", "<answer>6*4</answer>"]
    assert math_reward(unevaluated=True)(group(texts)) == [1.0, 1.0, 0.0]


def test_the_answer_is_looked_for_in_one_place_only(group):
    texts = [r"\boxed{18}", "18", "<answer>17</answer> or <answer>18</answer>"]
    assert math_reward()(group(texts)) == [0.0, 0.0, 0.0]
    assert math_reward(answer_in=AnswerIn.boxed)(group(texts)) == [1.0, 0.0, 0.0]


def test_an_answer_given_over_and_over_or_beside_an_echo_of_the_prompt_is_none(group):
    echo = "What is 8 + 10? Write <answer>your number</answer>. <answer>18</answer>"
    assert math_reward()(group(["<answer>18</answer>" * 50, echo])) == [0.0, 0.0]


def test_the_librarys_own_alarm_is_off(group, monkeypatch):
    import signal

    # It would take over SIGALRM, which is the scorer's time limit.
    monkeypatch.setattr(signal, "alarm", lambda *_: pytest.fail("math-verify set its own time-out"))
    assert math_reward()(group([r"<answer>\frac{3}{6}</answer>"], answer=r"\frac{1}{2}")) == [1.0]
