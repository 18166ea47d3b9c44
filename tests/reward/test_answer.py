import random
import re
import time
import unicodedata
from dataclasses import replace
from fractions import Fraction

import pytest
from in_one_test import each
from reward_groups import TAGGED, make_group
from slow_cases import slow_but

from rlft.reward import choice
from rlft.reward.answer import AnswerIn, AnswerKeys, Which, written_for
from rlft.reward.choice import Choice
from rlft.reward.code import prompt_tests
from rlft.reward.cosine import Cosine
from rlft.reward.exact_match import ExactMatch
from rlft.reward.format import Format, FormatMode
from rlft.reward.length import Length
from rlft.reward.math import Math
from rlft.reward.workers.worker import Failure, Loaded, score
from rlft.types import UserError


def keys(answer_in=AnswerIn.tag, tag="answer", pattern=None, which=Which.only):
    return AnswerKeys(answer_in=answer_in, tag=tag, pattern=pattern, which=which)


PLACES = {  # {place: (text, the only answer, the last answer)}
    "tag": [
        ("<think>8 + 10</think><answer>18</answer>", "18", "18"),
        ("<answer>\n 18 </answer> and more", "18", "18"),
        ("<answer>17</answer><answer>18</answer>", None, "18"),
        ("<answer>18</answer>" * 50, None, "18"),
        ("<answer>17 <answer>18</answer>", None, "18"),
        ("<answer>18</answer></answer>", None, "18"),
        ("<answer>18</answer><answer>", None, "18"),
        ("<answer>" + "1" * 3000 + "</answer>", "1" * 3000, "1" * 3000),
        *((text, None, None) for text in (
            "<answer>18", "</answer>18<answer>", "<answer></answer>", "<answer> \n </answer>", "<ANSWER>18</ANSWER>",
            "< answer >18</ answer >", "18", "",
        )),
    ],
    "boxed": [
        (r"so \boxed{18}", "18", "18"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{17} or \boxed{18}", None, "18"),
        (r"\boxed{18}: so it is \boxed{18}", "18", "18"),
        (r"\boxed{18} or \boxed{18.0}", None, "18.0"),
        (r"\boxed {18}", "18", "18"),
        (r"\fbox{18}", "18", "18"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right.", r"\left\{ 1, 2 \right."),
        (r"\boxed{\{1\}}", r"\{1\}", r"\{1\}"),
        *((text, None, None) for text in (r"\boxed{18", r"\boxed{1\}", "boxed{18}")),
    ],
    "hashes": [
        ("48 / 2 = 24\n#### 72", "72", "72"),
        ("#### 17\n#### 18\n", None, "18"),
        ("#### 18\nso once more\n#### 18", "18", "18"),
        ("#### Step 1\n9 + 9 = 18\n#### 2. The result\nis\n#### 18", "18", "18"),
        ("#### **Sums**\n9 + 9 = 18\n\n#### 18\n", "18", "18"),
        ("#### 17\nor rather\n#### 18", None, "18"),
        ("#### 17 apples\nor rather\n#### 18", None, "18"),
        ("#### Paris\n#### Rome", None, "Rome"),
        ("#### Paris\nis the capital", "Paris", "Paris"),
        ("#### Étape 1\n9 + 9 = 18\n#### (b) Somme\n18\n#### 第三步\n18\n#### 18", "18", "18"),
        ("#### (17)\nor rather\n#### 18", None, "18"),
        ("the sign #### 18", None, None),
        ("####", None, None),
    ],
    "text": [("  18\n", "18", "18")],
    "pattern": [
        ("Answer: 18.", "18", "18"),
        ("Answer: 17. Answer: 18.", None, "18"),
        ("Answer: 18. Answer: 18.", "18", "18"),
    ],
}  # fmt: skip


@each(("place", "text", "only", "last"), [(place, *case) for place, cases in PLACES.items() for case in cases])
def test_a_place_gives_one_answer_or_none(place, text, only, last):
    pattern = "Answer: ([0-9]+)"
    assert keys(AnswerIn(place), pattern=pattern, which=Which.only).extract(text) == only
    assert keys(AnswerIn(place), pattern=pattern, which=Which.last).extract(text) == last


@each(("place", "text", "spoken", "anywhere"), [
    ("tag", "<think><answer>17</answer>?</think><answer>18</answer>", "18", "18"),
    ("boxed", r"<think>\boxed{18}</think>It is 18.", None, "18"),
    ("hashes", "<thinking>\n#### 18\n</thinking>", None, "18"),
    ("pattern", "◁think▷Answer: 17◁/think▷Answer: 18", "18", "18"),
    ("text", "<think>9 + 9</think> 18", "18", "<think>9 + 9</think> 18"),
    ("tag", "<think>so <answer>18</answer></think>", None, "18"),
    ("tag", "<think>so <answer>18</answer>", None, "18"),
    ("tag", "so <answer>18</answer></think>", None, "18"),
    ("boxed", r"<think>\boxed{17}, no, \boxed{18}</think>It is \boxed{18}.", "18", "18"),
    ("boxed", r"[THINK]\boxed{18}[/THINK]It is 18.", None, "18"),
    ("hashes", "<reasoning>\n#### 17\n</reasoning>\n#### 18", "18", "18"),
    ("pattern", "<seed:think>Answer: 18</seed:think>", None, "18"),
    ("text", "<think>18", None, "<think>18"),
])  # fmt: skip
def test_an_answer_in_the_reasoning_counts_only_where_that_is_wanted(place, text, spoken, anywhere):
    """tests/tokens/test_reasoning.py has every marker of reasoning."""
    made = {"answer_in": AnswerIn(place), "tag": "answer", "pattern": "Answer: ([0-9]+)"}
    assert AnswerKeys(**made, which=Which.only, in_reasoning=False).extract(text) == spoken
    assert AnswerKeys(**made, which=Which.last, in_reasoning=True).extract(text) == anywhere


@pytest.mark.parametrize("pattern", [None, "[0-9]+", "(unclosed"])
def test_a_pattern_without_a_group_is_refused(pattern):
    with pytest.raises(UserError, match="pattern"):
        keys(AnswerIn.pattern, pattern=pattern)


@pytest.mark.parametrize(
    "answer_in", slow_but(AnswerIn.tag, [AnswerIn.tag, AnswerIn.boxed, AnswerIn.hashes, AnswerIn.text])
)
@each("piece", [
    "<answer>", "</answer>", "<answer></answer>", "<think>", "</think>", "<think></think>", r"\boxed{",
    r"\boxed  ", "#### ", "####\n", "{", "9", "\n", " ",
])  # fmt: skip
def test_a_hostile_text_is_read_in_linear_time(answer_in, piece):
    # A quadratic search would need about 1e9 steps, many seconds; a linear one stays far under a second.
    text = piece * (200_000 // len(piece))
    start = time.process_time()
    for which in Which:
        keys(answer_in, which=which).extract(text)
    assert time.process_time() - start < 5


EXACT = ExactMatch(**TAGGED, numeric=True, ignore_case=False)
MATH = Math(**TAGGED, unevaluated=False, max_chars=200)
CHOICE = Choice(**TAGGED, ignore_case=True, choices_field="choices")
LENGTH = Length(**TAGGED, numeric=True, ignore_case=False, mode="kimi", target=None, limit=None, penalty=1.0)
COMPARING = {"exact_match": EXACT, "math": MATH, "choice": CHOICE, "length": LENGTH}


@each("reward", COMPARING.values(), ids=list(COMPARING))
def test_a_long_answer_is_right_if_it_is_the_reference(reward):
    rng = random.Random(16)
    for size in (1999, 2000, 2001, 5000, 50_000):
        moves = "\n".join(f"Move disk {rng.randint(1, 9)} to Peg {rng.randint(1, 3)}" for _ in range(2600))
        reference = moves[:size].strip()
        assert len(reference) >= size - 2
        made = make_group([f"<answer>{reference}</answer>", f"<answer>{reference[:-1]}x</answer>"], answer=reference)
        made = replace(made, prompt=replace(made.prompt, metadata={"choices": [reference, "another"]}))
        assert reward.right(made) == [True, False], size


# -- letters that are stored in two ways -------------------------------------------------------------------------------
MARKS = "\u0300\u0301\u0302\u0303\u0308\u030a\u030c\u0323\u0327\u0328\u0309\u031b"


def made_words(rng):
    """Words of letters with one or two marks, of Latin, Greek, Cyrillic, kana and Hangul."""
    letters = [rng.choice("aeiouycnszEOUА") for _ in range(rng.randint(3, 8))]
    letters = [letter + "".join(rng.sample(MARKS, rng.randint(0, 2))) for letter in letters]
    return " ".join(["Th", "".join(letters), rng.choice(["Hà Nội", "한국어", "ガギグ", "йод", "Ωμέγα", "São"])])


@each("normal", ["NFC", "NFD"])
def test_a_text_is_the_same_composed_or_not_in_every_reward_that_compares_texts(normal):
    rng = random.Random(12)
    other = "NFD" if normal == "NFC" else "NFC"
    for _ in range(100):
        reference, wrong = (unicodedata.normalize(normal, made_words(rng)) for _ in range(2))
        answer = unicodedata.normalize(other, reference)
        tag = unicodedata.normalize(normal, "đáp")
        written = unicodedata.normalize(other, "đáp")
        texts = [f"<{written}>{answer}</{written}>", f"<{written}>{wrong}</{written}>"]
        for name, reward in COMPARING.items():
            made = make_group(texts, answer=reference)
            made = replace(made, prompt=replace(made.prompt, metadata={"choices": [wrong, reference]}))
            tagged = replace(reward, tag=tag)
            assert tagged.right(made) == [True, False], (name, reference)
            several = replace(made, prompt=replace(made.prompt, answer=wrong + "x", other_answers=(reference,)))
            assert name == "choice" or tagged.right(several) == [True, False], (name, reference)
            by_pattern = replace(reward, answer_in=AnswerIn.pattern, pattern=f"{tag}: (.*)")
            said = make_group([f"{written}: {answer}"]).rollouts
            assert by_pattern.right(replace(made, rollouts=said)) == [True], name
        form = Format(mode=FormatMode.strict, tags=[tag], pattern=None)
        assert form(make_group(texts)) == [1.0, 1.0]
        pattern = Format(mode=FormatMode.strict, tags=[tag], pattern=f"{reference}.*")
        assert pattern(make_group([answer, wrong])) == [1.0, 0.0]


# -- texts that a pattern finds an answer in ---------------------------------------------------------------------------
@each(("pattern", "answer"), [
    (r"(?i)answer:\s*(-?\d+)", "18"),
    (r"(?<=Answer: )(\d+)", "18"),
    (r"\\boxed\{([^}]*)\}", "7"),
    (r"(?:The answer is|Answer:)\s+(.+?)(?:\.|$)", "Paris"),
    (r"[^0-9\s]{2,}=(\d+)$", "4"),
    (r"(?:so |x=([A-J])\b)+", "B"),
    (r"\*\*([^*]+)\*\*", "1/2"),
    (r"([^\s]+)\Z", "1/2"),
])  # fmt: skip
def test_the_pattern_finds_the_answer_in_the_text(pattern, answer):
    found = re.search(pattern, written_for(pattern, answer))
    assert found[1] == answer


def test_an_answer_that_a_pattern_cuts_stands_whole_in_the_text_and_none_is_made_where_none_can_be():
    assert written_for(r"#### (-?\d+)", "1,080") == "#### 1,080"
    assert [written_for(pattern, "a") for pattern in (r"(?P<x>a)(?P=x)", r"(a)(?!b)b", "(a")] == [None] * 3


def test_a_comparison_that_fails_is_of_the_completion_that_it_looks_at(monkeypatch):
    # The scorer tries that completion alone and goes on with its siblings: another one would take its failure score.
    class Fails(ExactMatch):
        def is_right(self, answer, reference):
            return refuse(answer)

    def refuse(answer, *_, **__):
        if answer == "bad":
            raise RuntimeError
        return False

    monkeypatch.setattr(choice, "named", lambda answer, *_, **__: refuse(answer) or "A")
    group = make_group([f"<answer>{answer}</answer>" for answer in ("1", "bad", "2", "3")], answer="A")
    fails = Fails(**TAGGED, numeric=True, ignore_case=False)
    for reward in (fails, Choice(**TAGGED, ignore_case=True, choices_field=None)):
        failure = score(Loaded(reward=reward, scores_steps=False), group, 10.0, [0, 0])
        assert isinstance(failure, Failure)
        assert failure.completion == 1


def test_a_reward_may_be_made_of_ones_scores_and_say_by_them_what_is_right():
    class Graded(ExactMatch):
        def __call__(self, group):
            return [10 * score for score in ExactMatch.__call__(self, group)]

        def right(self, group):
            return [score == 1 for score in ExactMatch.__call__(self, group)]

    group = make_group(["<answer>18</answer>", "<answer>17</answer>"])
    graded = Graded(**TAGGED, numeric=True, ignore_case=False)
    assert (graded(group), graded.right(group)) == ([10.0, 0.0], [True, False])


# -- several answers ---------------------------------------------------------------------------------------------------
CITIES = [f"<answer>{text}</answer>" for text in ("Rome", "Roma", "Paris", "0.5", "1/2")]


def several(group, *others):
    return replace(group, prompt=replace(group.prompt, other_answers=others))


@each(("reward", "expected"), [(EXACT, [1, 1, 0, 1, 0]), (MATH, [1, 1, 0, 1, 1])])
def test_each_of_several_answers_is_right(reward, expected):
    """Of `choice` all of them are, together (test_choice.py)."""
    group = several(make_group(CITIES, "Rome"), "Roma", "0.5")
    assert reward(group) == expected
    assert reward(several(group)) == [1, 0, 0, 0, 0]


def test_a_list_of_tests_in_the_answer_is_all_of_them():
    prompt = several(make_group([], "assert add(1, 2) == 3"), "assert add(0, 0) == 0").prompt
    assert prompt_tests(prompt, None) == ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]


# -- the normal form of an answer: the same answer is the same text, whatever scored it and where ---------------------
def read(reward, answers, reference, **metadata):
    """(score, the answer that it read) for each of these answers."""
    group = make_group([f"<answer>{answer}</answer>" for answer in answers], answer=reference)
    group = replace(group, prompt=replace(group.prompt, metadata=metadata))
    return [(float(verdict), verdict.answer) for verdict in reward(group)]


def numerals(rng):
    """Plain numbers as they are written, with their values: few values, many forms."""
    for _ in range(400):
        whole, cents = rng.choice([0, 1, 7, 1000, 12345]), rng.choice(["", ".0", ".50", ".5", ".25"])
        sign = rng.choice(["", "+", "-"])
        zeros = rng.choice(["", "0"])
        digits = f"{whole:,}" if rng.random() < 0.3 else f"{zeros}{whole}"
        yield f"{sign}{digits}{cents}", Fraction(f"{sign}{whole}{cents}")


def test_numbers_have_one_form_if_and_only_if_they_are_equal():
    written = list(numerals(random.Random(1)))
    assert len({value for _, value in written}) > 20
    for reward in (EXACT, MATH):
        forms = {}
        for text, value in written:
            forms.setdefault(reward.normal(text), set()).add(value)
        assert all(len(values) == 1 for values in forms.values())
        assert len(forms) == len({value for _, value in written})
    for (one, a), (other, b) in zip(written, random.Random(2).sample(written, len(written)), strict=True):
        assert EXACT.is_right(one, other) == (a == b)


def test_mathematical_answers_have_one_form_in_any_notation():
    rng, forms = random.Random(3), {}
    around = ["{}", "${}$", r"\({}\)", "**{}**", r"\boxed{{{}}}", "{}.", " {} "]
    for _ in range(300):
        value = Fraction(rng.randint(-30, 30), rng.choice([1, 3, 7]))
        sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
        ways = [f"{sign}{top}/{bottom}", rf"{sign}\frac{{{top}}}{{{bottom}}}"]
        ways.append(rf"{sign}\dfrac{{{2 * top}}}{{{2 * bottom}}}")
        if bottom == 1:
            ways = [str(value), f"{value}.0", f"x = {value}", f"{value} cm", rf"{value}\text{{ apples}}"]
        forms.setdefault(value, set()).add(MATH.normal(rng.choice(around).format(rng.choice(ways))))
    assert len(forms) > 80
    assert {value: {str(value)} for value in forms} == forms


@each(("reference", "answers", "expected"), [
    # A percentage is the fraction that it is, and its own number: the reference decides.
    ("0.5", ["50%", "0.5", "50"], [(1.0, "1/2"), (1.0, "1/2"), (0.0, "50")]),
    ("50", ["50%", "0.5", "50"], [(1.0, "50"), (0.0, "1/2"), (1.0, "50")]),
    # A unit that only one of two answers has makes no difference, and the form of neither has it.
    ("18 cm", ["18", "18 cm", "18 kg", "19 kg"], [(1.0, "18"), (1.0, "18"), (0.0, "18 kg"), (0.0, "19")]),
    # An expression is only evaluated to be compared.
    ("x+1", ["1 + x", "x + 2", "x+2", "2+x"], [(1.0, "x+1"), (0.0, "x+2"), (0.0, "x+2"), (0.0, "2+x")]),
    ("18", ["36/2", "20 - 2", ""], [(0.0, "36/2"), (0.0, "20-2"), (0.0, None)]),
    ("Monday", ["monday", r"\text{Monday}", "Friday"], [(1.0, "monday"), (1.0, "monday"), (0.0, "friday")]),
])  # fmt: skip
def test_a_right_answer_has_the_form_of_its_reference_and_no_other_has(reference, answers, expected):
    assert read(MATH, answers, reference) == expected


def test_a_choice_is_its_letter_and_what_names_none_is_no_answer():
    answers = ["B", "(b)", "Paris", "**B) Paris**", "A", "Berlin", "B or A", ""]
    expected = [(1.0, "B")] * 4 + [(0.0, "A")] + [(0.0, None)] * 3
    assert read(CHOICE, answers, "Paris", choices=["Rome", "Paris"]) == expected
    several = read(CHOICE, ["B, A", "(A)(B)", "A"], "A, B", choices=["Rome", "Paris"])
    assert several == [(1.0, "A, B"), (1.0, "A, B"), (0.0, "A")]


def test_a_reward_of_more_than_rightness_reads_the_same_answers():
    keys = {"right_at_0": 2.0, "right_at_max": 1.0, "wrong_at_0": -2.0, "wrong_at_max": -1.0, "exceeded": -9.0}
    cosine = Cosine(**TAGGED, numeric=True, ignore_case=False, max_tokens=10, **keys)
    found = read(cosine, ["18.0", "17", ""], "18")
    assert [answer for _, answer in found] == ["18", "17", None]
    assert found[0][0] > 1 > -1 > found[1][0]
