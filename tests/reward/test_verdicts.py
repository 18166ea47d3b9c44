"""The answers that rewards read, in normal form: the same answer is the same text, whatever scored it and where."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import pytest
from in_one_test import each
from reward_groups import TAGGED, make_group

from rlft.loop.evaluations import compared
from rlft.loop.metrics import summarise
from rlft.reward.answer import AnswerKeys
from rlft.reward.choice import Choice
from rlft.reward.cosine import Cosine
from rlft.reward.exact_match import ExactMatch
from rlft.reward.math import Math
from rlft.reward.workers.scorer import Scorer, specs
from rlft.reward.workers.worker import Failure, checked
from rlft.types import Verdict

EXACT = ExactMatch(**TAGGED, numeric=True, ignore_case=False)
MATH = Math(**TAGGED, unevaluated=False, max_chars=200)


def read(reward: AnswerKeys, answers: list[str], reference: str, **metadata: object) -> list[tuple[float, str | None]]:
    """(score, the answer that it read) for each of these answers."""
    group = make_group([f"<answer>{answer}</answer>" for answer in answers], answer=reference)
    group = replace(group, prompt=replace(group.prompt, metadata=metadata))
    return [(float(verdict), verdict.answer) for verdict in reward(group)]


def numerals(rng: random.Random) -> Iterator[tuple[str, Fraction]]:
    """Plain numbers as they are written, with their values: few values, many forms."""
    for _ in range(400):
        whole, cents = rng.choice([0, 1, 7, 1000, 12345]), rng.choice(["", ".0", ".50", ".5", ".25"])
        sign = rng.choice(["", "+", "-"])
        zeros = rng.choice(["", "0"])
        digits = f"{whole:,}" if rng.random() < 0.3 else f"{zeros}{whole}"
        yield f"{sign}{digits}{cents}", Fraction(f"{sign}{whole}{cents}")


def test_numbers_have_one_form_if_and_only_if_they_are_equal() -> None:
    written = list(numerals(random.Random(1)))
    assert len({value for _, value in written}) > 20
    for reward in (EXACT, MATH):
        forms: dict[str, set[Fraction]] = {}
        for text, value in written:
            forms.setdefault(reward.normal(text), set()).add(value)
        assert all(len(values) == 1 for values in forms.values())
        assert len(forms) == len({value for _, value in written})
    for (one, a), (other, b) in zip(written, random.Random(2).sample(written, len(written)), strict=True):
        assert EXACT.is_right(one, other) == (a == b)


def test_mathematical_answers_have_one_form_in_any_notation() -> None:
    rng, forms = random.Random(3), {}
    around = ["{}", "${}$", r"\({}\)", "**{}**", r"\boxed{{{}}}", "{}.", " {} "]
    for _ in range(300):
        value = Fraction(rng.randint(-30, 30), rng.choice([1, 3, 7]))
        sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
        ways = [
            f"{sign}{top}/{bottom}",
            rf"{sign}\frac{{{top}}}{{{bottom}}}",
            rf"{sign}\dfrac{{{2 * top}}}{{{2 * bottom}}}",
        ]
        if bottom == 1:
            ways = [str(value), f"{value}.0", f"x = {value}", f"{value} cm", rf"{value}\text{{ apples}}"]
        forms.setdefault(value, set()).add(MATH.normal(rng.choice(around).format(rng.choice(ways))))
    assert len(forms) > 80
    assert {value: {str(value)} for value in forms} == forms


@each(
    ("reference", "answers", "expected"),
    [
        # A percentage is the fraction that it is, and its own number: the reference decides.
        ("0.5", ["50%", "0.5", "50"], [(1.0, "1/2"), (1.0, "1/2"), (0.0, "50")]),
        ("50", ["50%", "0.5", "50"], [(1.0, "50"), (0.0, "1/2"), (1.0, "50")]),
        # A unit that only one of two answers has makes no difference, and the form of neither has it.
        ("18 cm", ["18", "18 cm", "18 kg", "19 kg"], [(1.0, "18"), (1.0, "18"), (0.0, "18 kg"), (0.0, "19")]),
        # An expression is only evaluated to be compared.
        ("x+1", ["1 + x", "x + 2", "x+2", "2+x"], [(1.0, "x+1"), (0.0, "x+2"), (0.0, "x+2"), (0.0, "2+x")]),
        ("18", ["36/2", "20 - 2", ""], [(0.0, "36/2"), (0.0, "20-2"), (0.0, None)]),
        ("Monday", ["monday", r"\text{Monday}", "Friday"], [(1.0, "monday"), (1.0, "monday"), (0.0, "friday")]),
    ],
)
def test_a_right_answer_has_the_form_of_its_reference_and_no_other_has(
    reference: str, answers: list[str], expected: list[tuple[float, str | None]]
) -> None:
    assert read(MATH, answers, reference) == expected


def test_a_choice_is_its_letter_and_what_names_none_is_no_answer() -> None:
    choice = Choice(**TAGGED, ignore_case=True, choices_field="choices")
    answers = ["B", "(b)", "Paris", "**B) Paris**", "A", "Berlin", "B or A", ""]
    expected = [(1.0, "B")] * 4 + [(0.0, "A")] + [(0.0, None)] * 3
    assert read(choice, answers, "Paris", choices=["Rome", "Paris"]) == expected
    assert read(choice, ["B, A", "(A)(B)", "A"], "A, B", choices=["Rome", "Paris"]) == [
        (1.0, "A, B"), (1.0, "A, B"), (0.0, "A"),
    ]  # fmt: skip


def test_a_reward_of_more_than_rightness_reads_the_same_answers() -> None:
    keys = {"right_at_0": 2.0, "right_at_max": 1.0, "wrong_at_0": -2.0, "wrong_at_max": -1.0, "exceeded": -9.0}
    cosine = Cosine(**TAGGED, numeric=True, ignore_case=False, max_tokens=10, **keys)
    found = read(cosine, ["18.0", "17", ""], "18")
    assert [answer for _, answer in found] == ["18", "17", None]
    assert found[0][0] > 1 > -1 > found[1][0]


# -- from the worker to the trainer ------------------------------------------------------------------------------------
def test_a_verdict_is_its_score_and_keeps_its_answer_on_the_way() -> None:
    verdict = pickle.loads(pickle.dumps(Verdict(1, "18")))
    assert (verdict, verdict.answer) == (1.0, "18")
    found = checked([Verdict(0.5, "a"), 0.5], 2)
    assert found == [0.5, 0.5]
    assert [getattr(score, "answer", "none") for score in found] == ["a", "none"]
    assert isinstance(checked([Verdict(float("nan"), "a")], 1), Failure)
    assert isinstance(checked([Verdict(10.0, "a")], 1, largest=1.0), Failure)
    with pytest.raises(TypeError, match="is text or None, got 18"):
        Verdict(1.0, 18)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1])
def test_scores_have_the_answers_of_rewards_that_read_them(workers: int) -> None:
    rewards = {
        "exact_match": {"_target_": "rlft.reward.exact_match.ExactMatch", "weight": 1.0, **TAGGED, "numeric": True,
                        "ignore_case": False},
        "verdicts": {"_target_": "naughty.verdicts", "weight": 1.0, "on_error": 0.0},
        "length": {"_target_": "naughty.length", "weight": 1.0},
    }  # fmt: skip
    groups = [make_group(["<answer>18.0</answer>", "raise"]), make_group(["AB", "</think><answer>7</answer>"])]
    groups[1] = replace(groups[1], prompt=replace(groups[1].prompt, tail="<think>"))
    scorer = Scorer(specs(rewards), workers, 10.0, "stop")
    try:
        scores = scorer(groups)
    finally:
        scorer.close()
    # What the prompt has begun to say belongs to the text that is read; a failed completion has a score alone.
    assert scores.answers == {
        "exact_match": [["18", None], [None, "7"]],
        "verdicts": [["<answer>18.0</answer>", None], ["<think>ab", "<think></think><answer>7</answer>"]],
    }
    assert scores.by_reward["exact_match"].tolist() == [[1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(("target", "has_it"), [("naughty.verdicts", True), ("naughty.naughty", False)])
def test_an_evaluation_whose_groups_all_failed_has_the_metrics_that_a_study_expects(target: str, has_it: bool) -> None:
    """A reward says whether it reads answers: what came of an evaluation does not decide which metrics it has."""
    reward = {"first": {"_target_": target, "weight": 1.0, "on_error": 0.0}}
    groups = [make_group(["raise", "raise"])] * 2
    with closing(Scorer(specs(reward), 0, 10.0, "stop")) as scorer:
        scores = scorer(groups)
    assert scorer.num_failures == 4
    metrics = summarise(groups, scores, step=0, correct_at=1.0, num_examples=0).metrics
    expected = compared({"command": "train", "eval": {"num_samples": 2}, "reward": reward})
    assert ("eval/maj@2" in metrics, "eval/maj@2" in expected) == (has_it, has_it)
