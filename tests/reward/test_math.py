import threading
import time

import math_verify
import pytest
from in_one_test import each
from reward_groups import TAGGED

from rlft.reward import math
from rlft.reward.math import MAX_SECONDS, Math, compared
from rlft.reward.workers.scorer import Scorer, specs


@pytest.fixture(autouse=True)
def no_haste(monkeypatch):
    """What an answer is worth must not depend on the machine's speed; tests of the limit set their own."""
    monkeypatch.setattr(math, "MAX_SECONDS", 60.0)


def math_reward(**keys):
    return Math(**{**TAGGED, "unevaluated": False, "max_chars": 200, **keys})


def test_the_answer_in_its_place_is_compared(group):
    texts = [f"<answer>{answer}</answer>" for answer in (r"\boxed{18}", "17", "", "$", r"\frac{1}{", "18, 18, 18")]
    assert math_reward()(group([*texts, "18"])) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@each("answer", [
    "9^{9^{9^{9}}}", "((9^9)^{9999})^{9999}", "(10^9)!", "9!!!!!", r"\binom{1000000000}{500000000}",
    r"\sum_{i=1}^{1000000000} \sin(i)", r"\prod_{i=1}^{1000000000} i", r"\sin(9^{9^{9}})", "1e999999999",
    "(" * 99 + "1" + ")" * 99, "x^" * 99 + "2", "9" * 5000, r"\frac{" * 30 + "1" + "}{2}" * 30,
])  # fmt: skip
def test_answers_that_would_take_for_ever_are_wrong_at_once(group, answer):
    reward = math_reward()
    reward.start()
    start = time.monotonic()
    assert reward(group([f"<answer>{answer}</answer>"] * 2, answer="x+1")) == [0.0, 0.0]
    assert time.monotonic() - start < 60


def test_unfinished_sums_can_be_allowed(group):
    texts = ["<answer>8+10</answer>", "<answer>6*3</answer>", "<answer>6*4</answer>"]
    assert math_reward(unevaluated=True)(group(texts)) == [1.0, 1.0, 0.0]


def test_the_librarys_own_alarm_is_off(group, monkeypatch):
    import signal

    # It would take over SIGALRM, which is the scorer's time limit.
    monkeypatch.setattr(signal, "alarm", lambda *_: pytest.fail("math-verify set its own time-out"))
    assert math_reward()(group([r"<answer>\frac{3}{6}</answer>"], answer=r"\frac{1}{2}")) == [1.0]


# One answer of each kind that data sets of mathematics hold, and another value of the same kind.
GOLDS = [
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} 1/3 \\ 2/3 \end{pmatrix}"),
    (r"\begin{bmatrix} 0 & \infty \\ x & 1 \end{bmatrix}", r"\begin{bmatrix} 0 & \infty \\ y & 1 \end{bmatrix}"),
    (r"\infty", r"-\infty"), (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty, 2) \cup [3, \infty)"),
    (r"(5,\infty)", r"[5,\infty)"), (r"\left[0,\frac{1}{2}\right)", r"\left[0,\frac{1}{3}\right)"),
    ("[-2,7]", "(-2,7]"), (r"x \in [-2,7]", r"x \in [-2,8]"), (r"\{1,2,3\}", r"\{1,2,4\}"),
    (r"\{1\pm\sqrt{5},-2\}", r"\{1\pm\sqrt{6},-2\}"), (r"\emptyset", r"\{0\}"),
    (r"\mathbb{R}\setminus\{0\}", r"\mathbb{R}\setminus\{1\}"), ("1,-2", "1,2"), ("(6,31,-1)", "(6,-1,31)"),
    ("(2,1)", "(1,2)"), ("(1,2), (3,4)", "(1,2), (4,3)"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\left( 3, \frac{\pi}{3} \right)"),
    (r"\binom{100}{50}", r"\binom{100}{49}"), (r"\binom{20000}{10000}", r"\binom{20000}{9999}"),
    (r"\binom{1000000}{500000}", r"\binom{1000000}{500001}"), ("3^{5000}", "3^{5001}"), ("100!", "99!"),
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"), (r"x+2^{-99}", r"x+2^{-98}"), (r"11\sqrt{2}", r"11\sqrt{3}"),
    (r"\sqrt[3]{4}", r"\sqrt[3]{5}"), (r"\frac{14}{3}", r"\frac{13}{3}"), ("3/8", "3/7"),
    (r"12\frac{3}{5}", r"12\frac{2}{5}"), (r"11\%", r"12\%"), (r"0.\overline{05}", r"0.\overline{06}"),
    (r"18\text{ cm}^2", r"18\text{ cm}^3"), (r"\frac{270}7\text{ degrees}", r"\frac{271}7\text{ degrees}"),
    (r"90^\circ", r"90\text{ radians}"), (r"\$32,\!500", r"\$32,\!600"),
    (r"6.02 \times 10^{23}", r"6.02 \times 10^{22}"), ("4210_{5}", "4210_{6}"), (r"\text{Monday}", "Tuesday"),
    (r"\text{June 20}", r"\text{June 21}"), ("Yes", "No"), ("No", "on"), (r"\text{(C)}", r"\text{(D)}"),
    ("x=3", "y=3"), ("y = 2x + 3", "y = 2x - 3"), ("(x-2)^2+(y+1)^2=9", "(x-2)^2+(y+1)^2=8"),
    ("x^3+3x-6", "x^3+3x+6"), (r"\frac{x+2}{7}", r"\frac{x-2}{7}"), (r"2 \leq x \leq 4", r"2 \leq x < 4"),
    ("6 - 5i", "6 + 5i"), (r"e^{i\pi/4}", r"e^{i\pi/3}"), (r"\pm 3", "3"), (r"1 \pm \sqrt{19}", r"1 + \sqrt{19}"),
    (r"\log_2 3", r"\log_3 2"), (r"\frac{\pi}{3}+2\pi n", r"\frac{\pi}{3}+\pi n"), ("3:2", "2:3"),
]  # fmt: skip


def written_otherwise(gold):
    """The same answer, as models write it."""
    around = [r"\(%s\)", r"\[%s\]", "$%s$", "$$ %s $$", r"\boxed{%s}", "**%s**", " %s.", r"\displaystyle %s"]
    changed = [
        gold.replace("\\frac", "\\dfrac"),
        gold.replace("\\text{", "\\textbf{"),
        gold.replace(" ", ""),
        gold.replace(",", ", ").replace(", \\!", ",\\!"),
        gold.replace("-", "−"),
        gold.replace("^\\circ", "^{\\circ}"),
        gold.replace("pmatrix", "bmatrix"),
    ]
    return [form % gold for form in around] + [form for form in changed if form != gold and "June20" not in form]


def right(answer, reference):
    return compared(answer, reference, unevaluated=False, max_chars=200) is True


def library(answer, reference):
    parsed, expected = (math_verify.parse(f"${text}$", parsing_timeout=None) for text in (answer, reference))
    return math_verify.verify(expected, parsed, timeout_seconds=None)


def test_every_kind_of_answer_is_right_in_every_form_and_another_value_is_wrong_either_way_round():
    for gold, other in GOLDS:
        for form in [gold, *written_otherwise(gold)]:
            assert right(form, gold), (form, gold)
            assert right(gold, form), (gold, form)
        assert not right(other, gold), (other, gold)
        assert not right(gold, other), (gold, other)


# Answers to a reference, right by the library in another notation than a change of delimiters.
VARIANTS = [
    ("0.5", r"\frac{1}{2}"), (r"\frac{1}{3}", "0.333333"), (r"\frac{1}{81234}", "0.0000123101"), ("28\\%", "28"),
    ("28\\%", "0.28"), ("28\\%", "28 percent"), (r"28.5\%", "28.5"), ("1024", "1024.0"), ("2^{10}", "1024"),
    (r"\{1,2\}", "2,1"), ("1,2", r"\{2,1\}"), ("(1,2)", "1,2"), ("x=3", "3"), ("3", "x=3"), ("11", r"x\approx11"),
    (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"), (r"\frac{1}{2}", r"\frac{1}{2}=0.5"),
    ("(x+1)^2", "x^2+2x+1"), (r"\cos 2x", r"1-2\sin^2 x"), ("y=2x+3", "2x-y+3=0"),
    ("x^2/4 + y^2/3 = 1", "x^2/16 + y^2/12 = 1/4"), ("x > 5", "5 < x"), ("1 < x < 2", "(1,2)"),
    (r"(-\infty,1)\cup(2,3)", r"(2,3)\cup(-\infty,1)"), (r"(0,2)", r"(0,1]\cup(1,2)"), (r"\infty", "infinity"),
    ("abc", "cab"), (r"\binom{10}{3}", "120"),
    (r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}"), ("(p,q)=(3,2)", "(3,2)"),
    ("10\\text{ or }12", "12, 10"), ("2n\\pi", "2\\pi n"), ("6-5i", "-5i+6"),
    (r"\frac{270}{7}\text{ degrees}", r"\frac{270}{7}"), ("5 \\text{ inches}", "5"), ("0.00001", "1e-05"),
    ("1500", "1.5e+3"), ("1.5", "1 1/2"), ("-5", "−5"), ("0.5", "1/2"), ("1.5", r"1\frac{1}{2}"),
    (r"\{1,2\}", r"\{2,1\}"), ("[0,1)", "[0,1)"), ("Paris", "paris"),
]  # fmt: skip


def test_what_the_library_finds_right_is_right():
    pairs = [(form, gold) for gold, _ in GOLDS for form in [gold, *written_otherwise(gold)[:5]]]
    pairs = [(answer, reference) for answer, reference in pairs if "1000000" not in reference]  # minutes in the library
    pairs += [(answer, reference) for reference, answer in VARIANTS]
    below = [(answer, reference) for answer, reference in pairs if not right(answer, reference)]
    assert [pair for pair in below if library(*pair)] == []
    # Each variant is right, also where the library sees it only in the other direction.
    assert [pair for pair in VARIANTS if not right(pair[1], pair[0])] == []


# What may stand around a plain number, here 18, and ways to set it.
AROUND_A_NUMBER = [
    r"18^\circ", r"18^{\circ}", "18°", r"18^\circ\text{C}", r"18\text{ cm}^2", r"18 \text{ cm}^2", r"18\text{ km/h}",
    r"18\mathrm{cm}", r"18\,\text{cm}", r"18~\mathrm{cm}", r"18 \mbox{ inches}^3", "18 dollars", r"18\text{ apples}",
    r"\mathbf{18}", r"\textbf{18}", r"\mbox{18}", r"\text{18}", r"{\bf 18}", r"\underline{18}",
    r"\mathbf{18}\text{ cm}", r"\texttt{18}", r"\mathsf{18}", r"\boldsymbol{18}", r"\bm{18}", r"\pmb{18}",
    r"\mathnormal{18}", r"\textup{18}", r"\large 18", r"{\Large 18}", r"{\small\bf 18}", r"\color{red}18",
    r"\color{red}{18}", r"\textcolor{blue}{18}", r"\displaystyle 18", r"\(18\)", r"\[18\]", r"$18$.", r"\boxed{18}.",
    "18.", "**18**", "{18}", "+18", "18.0", r"\$18", "$18", r"\$18.00", "x=18", r"1.8\times10^1", r"1.8 \cdot 10^{1}",
    r"180\times10^{-1}", "*18*", "__18__", "`18`", "**`18`**", "18\\ ", "= 18", r"\therefore 18", "≈18", r"\approx 18",
    "１８", "١٨", "18 cm",
]  # fmt: skip
# Answers that hold the number 18, or come to it, and say another thing.
NOT_EIGHTEEN = [
    "18_9", "18_{20}", r"18 \text{ or 19}", r"18\text{ and }19", r"18 \text{ or } 19", "18 or 19", "17 or 18", "18, 19",
    r"18\text{ thousand}", "18 thousand", r"18\text{ million}", r"18\text{ dozen}", r"18\text{ squared}", "18x", "18i",
    r"18\pi", r"18\pm1", r"18\frac{1}{2}", "18!", "18^2", "18:1", "18/1", "x>18", r"\neq 18", r"\text{not }18",
    "not 18", "18-", "|18|", "--18", r"18\times10^1", r"1.8\times10^2", r"18^{\circ}15'", "18 = 19", "19 = 18",
    "x = 19 = 18", "= 17 = 18", "17 = 18", r"\sqrt{18}", "18.0001", "*17* 18", "17, 18", "17$ $18",
    r"\boxed{17}\boxed{18}", "18 18", "17 2/2", "8+10", "20 - 2", r"6 \times 3", "6*3", "36/2", r"\sqrt{324}",
    r"\textcolor{red}{17}", r"\infty", "The answer is 18", "What is 8 + 10? 18", "8 + 10 = 18",
]  # fmt: skip


def test_notation_around_a_number_changes_nothing_and_what_changes_it_is_wrong():
    assert [answer for answer in AROUND_A_NUMBER if not (right(answer, "18") and right("18", answer))] == []
    assert [answer for answer in ("1{,}000", r"1,\!000", r"1\,000", "1,000") if not right(answer, "1000")] == []
    assert right(r"1.2\times10^3", "1200")
    assert [answer for answer in NOT_EIGHTEEN if right(answer, "18")] == []
    assert not right("0x", "0")


# (answer, reference): wrong, though the library takes some of them for right.
PAID_BY_THE_LIBRARY = [
    ("90_8", "90"), ("90", "90_8"), (r"90\text{ rad}", r"90^\circ"), (r"5\text{ cm}", r"5\text{ m}"),
    ("[2,1]", "(2,1)"), (r"\{2,1\}", "(2,1)"), ("[1,2,3]", "(1,2,3)"), (r"\{1,2,3\}", "(1,2,3)"),
    (r"[-\infty,2]", r"(-\infty,2]"), ("(2,1]", "(5,3]"), (r"\frac{1}{3}=\frac{1}{2}", r"\frac{1}{2}"),
    (r"\frac{1}{2^{98}}", "0.0"), (r"\frac{1}{10^{20}}", r"\frac{1}{10^{21}}"),
    (r"(\frac{1}{2^{98}}, 3)", r"(\frac{1}{2^{99}}, 3)"), (r"0.\overline{05}", r"0.\overline{5}"),
    ("ABC DEF", "FED CBA"), ("on", r"\text{No}"), ("1e-05", "0.0001"), ("2e", "200"), ("[0,1]", "[0,1)"),
    ("siraP", "Paris"), ("10^3", "1000"), ("1e3", "1000"),
]  # fmt: skip


def test_wrong_answers_that_the_library_does_not_see_are_wrong():
    assert [pair for pair in PAID_BY_THE_LIBRARY if right(*pair)] == []


def test_words_are_compared_as_text_however_they_are_set():
    forms = [
        "Monday", r"\text{Monday}", r"\textbf{monday}", r"\mathrm{Monday}", "**Monday**", r"\(\text{ Monday }\)",
        "Monday.",
    ]  # fmt: skip
    assert [(a, b) for a in forms for b in forms if not right(a, b)] == []
    assert right("Bob, Alice", r"\text{Alice and Bob}")
    assert not right("Monday or Tuesday", "Monday")


def test_an_answer_longer_than_the_limit_is_right_if_it_is_the_reference_itself():
    reference = "+".join(f"x^{i}" for i in range(100))
    assert right(reference, reference)
    assert not right(reference + "+0", reference)


# Each took the library 1 to 60 seconds of processor time.
COSTLY = [
    "(x+y+z)^{40}", r"\frac{(x+y)^{20}}{(x-y)^{20}}", r"\frac{(x+1)^{30}}{(x+2)^{30}}", "(x+1)^{9999}",
    r"(1+\sqrt{2}+\sqrt{3}+\sqrt{5})^{50}", r"\sin(x)^{20}\cos(x)^{20}", r"\int_0^1 \sin(x^2) e^{x^3} dx",
    r"\begin{vmatrix} a&b&c&d\\e&f&g&h\\i&j&k&l\\m&n&o&p\end{vmatrix}", "|x-1|+|x-2|+|x-3|+|x-4|>5",
]  # fmt: skip


def test_an_answer_that_took_too_long_is_counted_by_the_scorer(monkeypatch, group):
    # on_error is 0 in math.yaml.
    monkeypatch.setattr(math, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(math, "_compare", lambda answer, *_: endless() if "x" in answer else True)
    config = {"_target_": "rlft.reward.math.Math", "weight": 1.0, "on_error": 0.0}
    scorer = Scorer(specs({"math": {**config, **TAGGED, "unevaluated": False, "max_chars": 200}}), 0, 10.0, "stop")
    made = group([f"<answer>{answer}</answer>" for answer in ("x+1", "y+1", r"\frac{1}{x}")], answer="y+2")
    assert scorer([made]).total.tolist() == [[0.0, 1.0, 0.0]]
    assert scorer.num_failures == 2
    assert "took too much processor time to compare an answer" in scorer.last_failure


def endless():
    while True:
        pass


def test_what_would_take_long_to_compare_is_wrong_within_a_second_in_any_thread(monkeypatch):
    monkeypatch.setattr(math, "MAX_SECONDS", MAX_SECONDS)
    math_reward().start()
    taken = {}

    def compare():
        for answer in COSTLY:
            begun = time.thread_time()
            assert not right(answer, r"\{1,2\}" if ">" in answer else "x+1")
            taken[answer] = time.thread_time() - begun

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert len(taken) == len(COSTLY)
    # One tick more, and what the interpreter does at a stretch.
    assert max(taken.values()) < MAX_SECONDS + 0.6, taken
