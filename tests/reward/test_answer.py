from __future__ import annotations

import random
import re
import time
import unicodedata
from dataclasses import replace
from typing import Any

import pytest
from in_one_test import each
from reward_groups import TAGGED, make_group
from slow_cases import slow_but

from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.reward import choice
from rlft.reward.answer import AnswerIn, AnswerKeys, Which, written_for
from rlft.reward.choice import Choice
from rlft.reward.code import prompt_tests
from rlft.reward.exact_match import ExactMatch
from rlft.reward.format import Format, FormatMode
from rlft.reward.length import Length
from rlft.reward.math import Math
from rlft.reward.workers.worker import Failure, Loaded, score
from rlft.types import Group, UserError


def keys(answer_in=AnswerIn.tag, tag="answer", pattern=None, which=Which.only) -> AnswerKeys:
    return AnswerKeys(answer_in=answer_in, tag=tag, pattern=pattern, which=which)


@each(
    ("text", "only", "last"),
    [
        ("<think>8 + 10</think><answer>18</answer>", "18", "18"),
        ("<answer>\n 18 </answer> and more", "18", "18"),
        ("<answer>17</answer><answer>18</answer>", None, "18"),
        ("<answer>18</answer>" * 50, None, "18"),
        ("<answer>17 <answer>18</answer>", None, "18"),
        ("<answer>18</answer></answer>", None, "18"),
        ("<answer>18</answer><answer>", None, "18"),
        ("<answer>18", None, None),
        ("</answer>18<answer>", None, None),
        ("<answer></answer>", None, None),
        ("<answer> \n </answer>", None, None),
        ("<ANSWER>18</ANSWER>", None, None),
        ("< answer >18</ answer >", None, None),
        ("<answer>" + "1" * 3000 + "</answer>", "1" * 3000, "1" * 3000),
        ("18", None, None),
        ("", None, None),
    ],
)
def test_a_tag_gives_one_answer_or_none(text, only, last):
    assert keys(which=Which.only).extract(text) == only
    assert keys(which=Which.last).extract(text) == last


@each(
    ("text", "only", "last"),
    [
        (r"so \boxed{18}", "18", "18"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{17} or \boxed{18}", None, "18"),
        (r"\boxed{18", None, None),
        (r"\boxed{18}: so it is \boxed{18}", "18", "18"),
        (r"\boxed{18} or \boxed{18.0}", None, "18.0"),
        (r"\boxed {18}", "18", "18"),
        (r"\fbox{18}", "18", "18"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right.", r"\left\{ 1, 2 \right."),
        (r"\boxed{\{1\}}", r"\{1\}", r"\{1\}"),
        (r"\boxed{1\}", None, None),
        ("boxed{18}", None, None),
    ],
)
def test_a_box_gives_one_answer_or_none(text, only, last):
    assert keys(AnswerIn.boxed, which=Which.only).extract(text) == only
    assert keys(AnswerIn.boxed, which=Which.last).extract(text) == last


@each(
    ("text", "only", "last"),
    [
        ("48 / 2 = 24\n#### 72", "72", "72"),
        ("#### 17\n#### 18\n", None, "18"),
        ("the sign #### 18", None, None),
        ("#### 18\nso once more\n#### 18", "18", "18"),
        ("#### Step 1\n9 + 9 = 18\n#### 2. The result\nis\n#### 18", "18", "18"),
        ("#### **Sums**\n9 + 9 = 18\n\n#### 18\n", "18", "18"),
        ("#### 17\nor rather\n#### 18", None, "18"),
        ("#### 17 apples\nor rather\n#### 18", None, "18"),
        ("#### Paris\n#### Rome", None, "Rome"),
        ("#### Paris\nis the capital", "Paris", "Paris"),
        ("#### Étape 1\n9 + 9 = 18\n#### (b) Somme\n18\n#### 第三步\n18\n#### 18", "18", "18"),
        ("#### (17)\nor rather\n#### 18", None, "18"),
        ("####", None, None),
    ],
)
def test_hashes_give_the_rest_of_their_line(text, only, last):
    assert keys(AnswerIn.hashes, which=Which.only).extract(text) == only
    assert keys(AnswerIn.hashes, which=Which.last).extract(text) == last


@each(
    ("place", "text", "spoken", "anywhere"),
    [
        ("tag", "<think><answer>17</answer>?</think><answer>18</answer>", "18", "18"),
        ("tag", "<think>so <answer>18</answer></think>", None, "18"),
        ("tag", "<think>so <answer>18</answer>", None, "18"),
        ("tag", "so <answer>18</answer></think>", None, "18"),
        ("boxed", r"<think>\boxed{17}, no, \boxed{18}</think>It is \boxed{18}.", "18", "18"),
        ("boxed", r"<think>\boxed{18}</think>It is 18.", None, "18"),
        ("boxed", r"[THINK]\boxed{18}[/THINK]It is 18.", None, "18"),
        ("hashes", "<reasoning>\n#### 17\n</reasoning>\n#### 18", "18", "18"),
        ("hashes", "<thinking>\n#### 18\n</thinking>", None, "18"),
        ("pattern", "◁think▷Answer: 17◁/think▷Answer: 18", "18", "18"),
        ("pattern", "<seed:think>Answer: 18</seed:think>", None, "18"),
        ("text", "<think>9 + 9</think> 18", "18", "<think>9 + 9</think> 18"),
        ("text", "<think>18", None, "<think>18"),
    ],
)
def test_an_answer_in_the_reasoning_counts_only_where_that_is_wanted(place, text, spoken, anywhere):
    made = {"answer_in": AnswerIn(place), "tag": "answer", "pattern": "Answer: ([0-9]+)"}
    assert AnswerKeys(**made, which=Which.only, in_reasoning=False).extract(text) == spoken
    assert AnswerKeys(**made, which=Which.last, in_reasoning=True).extract(text) == anywhere


def test_text_and_pattern_are_the_other_places():
    assert keys(AnswerIn.text).extract("  18\n") == "18"
    assert keys(AnswerIn.pattern, pattern=r"Answer: ([0-9]+)").extract("Answer: 18.") == "18"
    assert keys(AnswerIn.pattern, pattern=r"Answer: ([0-9]+)").extract("Answer: 17. Answer: 18.") is None
    assert keys(AnswerIn.pattern, pattern=r"Answer: ([0-9]+)").extract("Answer: 18. Answer: 18.") == "18"


@pytest.mark.parametrize("pattern", [None, "[0-9]+", "(unclosed"])
def test_a_pattern_without_a_group_is_refused(pattern):
    with pytest.raises(UserError, match="pattern"):
        keys(AnswerIn.pattern, pattern=pattern)


@pytest.mark.parametrize(
    "answer_in", slow_but(AnswerIn.tag, [AnswerIn.tag, AnswerIn.boxed, AnswerIn.hashes, AnswerIn.text])
)
@each(
    "piece",
    [
        "<answer>", "</answer>", "<answer></answer>", "<think>", "</think>", "<think></think>", r"\boxed{",
        r"\boxed  ", "#### ", "####\n", "{", "9", "\n", " ",
    ],
)  # fmt: skip
def test_a_million_characters_take_no_time(answer_in, piece):
    # A quadratic search would need about 1e10 steps, minutes; a linear one stays far under a second.
    text = piece * (1_000_000 // len(piece))
    start = time.monotonic()
    for which in Which:
        keys(answer_in, which=which).extract(text)
    assert time.monotonic() - start < 60


LONG = [
    ("exact_match", lambda: ExactMatch(**TAGGED, numeric=True, ignore_case=False)),
    ("math", lambda: Math(**TAGGED, unevaluated=False, max_chars=200)),
    ("choice", lambda: Choice(**TAGGED, ignore_case=True, choices_field="choices")),
    (
        "length",
        lambda: Length(**TAGGED, numeric=True, ignore_case=False, mode="kimi", target=None, limit=None, penalty=1.0),
    ),
]


@each(("name", "make"), LONG)
def test_a_long_answer_is_right_if_it_is_the_reference(name, make):
    rng = random.Random(16)
    for size in (1999, 2000, 2001, 5000, 50_000):
        moves = [
            f"Move disk {rng.randint(1, 9)} from Peg {rng.randint(1, 3)} to Peg {rng.randint(1, 3)}"
            for _ in range(1700)
        ]
        reference = "\n".join(moves)[:size].strip()
        assert len(reference) >= size - 2
        made = make_group([f"<answer>{reference}</answer>", f"<answer>{reference[:-1]}x</answer>"], answer=reference)
        made = replace(made, prompt=replace(made.prompt, metadata={"choices": [reference, "another"]}))
        assert make().right(made) == [True, False], (name, size)


# -- letters that are stored in two ways -------------------------------------------------------------------------------
MARKS = "\u0300\u0301\u0302\u0303\u0308\u030a\u030c\u0323\u0327\u0328\u0309\u031b"


def made_words(rng: random.Random) -> str:
    """Words of letters with one or two marks, of Latin, Greek, Cyrillic, kana and Hangul."""
    letters = [
        rng.choice("aeiouycnszEOUА") + "".join(rng.sample(MARKS, rng.randint(0, 2))) for _ in range(rng.randint(3, 8))
    ]
    return " ".join(["Th", "".join(letters), rng.choice(["Hà Nội", "한국어", "ガギグ", "йод", "Ωμέγα", "São"])])


@each("normal", ["NFC", "NFD"])
def test_a_text_is_the_same_composed_or_not_in_every_reward_that_compares_texts(normal):
    rng = random.Random(12)
    other = "NFD" if normal == "NFC" else "NFC"
    for _ in range(100):
        reference, wrong = (
            unicodedata.normalize(normal, made_words(rng)),
            unicodedata.normalize(normal, made_words(rng)),
        )
        answer = unicodedata.normalize(other, reference)
        tag = unicodedata.normalize(normal, "đáp")
        written = unicodedata.normalize(other, "đáp")
        texts = [f"<{written}>{answer}</{written}>", f"<{written}>{wrong}</{written}>"]
        for name, reward in [(name, make()) for name, make in LONG]:
            made = make_group(texts, answer=reference)
            made = replace(made, prompt=replace(made.prompt, metadata={"choices": [wrong, reference]}))
            tagged = replace(reward, tag=tag)
            assert tagged.right(made) == [True, False], (name, reference)
            several = replace(made, prompt=replace(made.prompt, answer=wrong + "x", other_answers=(reference,)))
            assert name == "choice" or tagged.right(several) == [True, False], (name, reference)
            by_pattern = replace(reward, answer_in=AnswerIn.pattern, pattern=f"{tag}: (.*)")
            assert by_pattern.right(replace(made, rollouts=make_group([f"{written}: {answer}"]).rollouts)) == [True], (
                name
            )
        form = Format(mode=FormatMode.strict, tags=[tag], pattern=None)
        assert form(make_group(texts)) == [1.0, 1.0]
        pattern = Format(mode=FormatMode.strict, tags=[tag], pattern=f"{reference}.*")
        assert pattern(make_group([answer, wrong])) == [1.0, 0.0]


# -- texts that a pattern finds an answer in ---------------------------------------------------------------------------
@each(
    ("pattern", "answer"),
    [
        (r"(?i)answer:\s*(-?\d+)", "18"),
        (r"(?<=Answer: )(\d+)", "18"),
        (r"\\boxed\{([^}]*)\}", "7"),
        (r"(?:The answer is|Answer:)\s+(.+?)(?:\.|$)", "Paris"),
        (r"[^0-9\s]{2,}=(\d+)$", "4"),
        (r"(?:so |x=([A-J])\b)+", "B"),
        (r"\*\*([^*]+)\*\*", "1/2"),
        (r"([^\s]+)\Z", "1/2"),
    ],
)
def test_the_pattern_finds_the_answer_in_the_text(pattern, answer):
    found = re.search(pattern, written_for(pattern, answer))
    assert found[1] == answer


def test_an_answer_that_a_pattern_cuts_stands_whole_in_the_text():
    assert written_for(r"#### (-?\d+)", "1,080") == "#### 1,080"


@pytest.mark.parametrize("pattern", [r"(?P<x>a)(?P=x)", r"(a)(?!b)b", "(a"])
def test_no_text_is_made_where_none_can_be(pattern):
    assert written_for(pattern, "a") is None


def exact_match(kind: type[ExactMatch] = ExactMatch) -> ExactMatch:
    return kind(**TAGGED, numeric=True, ignore_case=False)


def test_a_comparison_that_fails_is_of_the_completion_that_it_looks_at(monkeypatch):
    # The scorer tries that completion alone and goes on with its siblings: another one would take its failure score.
    class Fails(ExactMatch):
        def is_right(self, answer: str, reference: str) -> bool:
            return refuse(answer)

    def refuse(answer: str, *_: object, **__: object) -> bool:
        if answer == "bad":
            raise RuntimeError
        return False

    monkeypatch.setattr(choice, "named", lambda answer, *_, **__: refuse(answer) or "A")
    group = make_group([f"<answer>{answer}</answer>" for answer in ("1", "bad", "2", "3")], answer="A")
    for reward in (exact_match(Fails), Choice(**TAGGED, ignore_case=True, choices_field=None)):
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
    assert exact_match(Graded)(group) == [10.0, 0.0]
    assert exact_match(Graded).right(group) == [True, False]


# -- several answers ---------------------------------------------------------------------------------------------------
CITIES = [f"<answer>{text}</answer>" for text in ("Rome", "Roma", "Paris", "0.5", "1/2")]


def scores(name: str, group: Group, **keys: Any) -> list[float]:
    section = {k: v for k, v in compose([f"reward={name}"])["reward"][name].items() if k not in ("weight", "on_error")}
    return [getattr(score, "total", score) for score in instantiate({**section, **keys}, f"reward.{name}")(group)]


def several(group: Group, *others: str) -> Group:
    return replace(group, prompt=replace(group.prompt, other_answers=others))


@each(
    ("name", "expected"),
    [("exact_match", [1, 1, 0, 1, 0]), ("math", [1, 1, 0, 1, 1])],
)
def test_each_of_several_answers_is_right(name: str, expected: list[float]) -> None:
    """Of `choice` all of them are, together (test_choice.py)."""
    group = several(make_group(CITIES, "Rome"), "Roma", "0.5")
    assert scores(name, group) == expected
    alone = replace(group, prompt=replace(group.prompt, other_answers=()))
    assert scores(name, alone) == [1, 0, 0, 0, 0]


def test_a_list_of_tests_in_the_answer_is_all_of_them() -> None:
    prompt = several(make_group([], "assert add(1, 2) == 3"), "assert add(0, 0) == 0").prompt
    assert prompt_tests(prompt, None) == ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
