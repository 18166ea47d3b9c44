"""Faulty rewards are found and named, sound ones are not, and verdicts are functions of the scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import faulty_rewards
import pytest
from faulty_rewards import FAULTY
from in_one_test import each

from rlft.config.compose import compose
from rlft.config.resolved import with_token_budget
from rlft.plan.attack import Range
from rlft.reward.attacks import Family
from rlft.reward.verdicts import Row, Shot, Tried, Verdict
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.tokens.ends import turn_ends
from rlft.tokens.plain import PlainText
from rlft.types import Prompt, Sampling, UserError
from tests.helpers.family_tokenizers import family_tokenizer

TOKENIZER = family_tokenizer("qwen2.5")
MAX_TOKENS = 200


def prompt(name: str, question: str, answer: str, **fields: Any) -> Prompt:
    messages = ({"role": "user", "content": question},)
    return Prompt(id=name, messages=messages, answer=answer, token_ids=(1, 2), **fields)


NUMBERS = (prompt("a", "What is 56 - 15?", "41"), prompt("b", "What is 90 + 90?", "180"))
FORMULAS = (prompt("a", "A half of three?", "3/2"), prompt("b", "Expand it.", "x^2+1"))
NAMES = (prompt("a", "The capital of Peru?", "Lima"), prompt("b", "Whose machine is it?", "Alan Turing"))
CHOICES = tuple(prompt(letter, "Which? (A) Rome (B) Paris (C) Lima", letter) for letter in "BCA")


def tried(rewards: dict[str, RewardSpec], prompts: Iterable[Prompt], **limits: Any) -> Tried:
    keys = {"timeout_s": 10.0, "limit_s": 20.0, "is_isolated": False, **limits}
    sampling, ends = Sampling(max_tokens=MAX_TOKENS, temperature=1.0), turn_ends(TOKENIZER, "chat")
    shooting = Range(rewards=rewards, tokenizer=TOKENIZER, sampling=sampling, ends=ends, on_error="stop", **keys)
    return shooting.try_all(tuple(prompts))


def configured(*words: str) -> dict[str, RewardSpec]:
    return specs(with_token_budget(compose([*words, f"generation.max_tokens={MAX_TOKENS}"]))["reward"])


def mine(monkeypatch: pytest.MonkeyPatch, reward: Any, **keys: Any) -> dict[str, RewardSpec]:
    monkeypatch.setattr(faulty_rewards, "current", reward, raising=False)
    return {"mine": RewardSpec(name="mine", target="faulty_rewards.current", kwargs={}, weight=1.0, **keys)}


def faults(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.status is Verdict.wrong]


@each("name", FAULTY)
def test_a_faulty_reward_is_found_and_its_fault_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reward, row_name, words = FAULTY[name]
    limits = {"sleeps": {"limit_s": 0.3}, "hangs on long texts": {"timeout_s": 0.1}}.get(name, {})
    rows = tried(mine(monkeypatch, reward), NUMBERS[:1], **limits).rows(completions_per_step=256, workers=2)
    assert [row for row in faults(rows) if row_name in row.name and words in row.value and row.remedy], rows


def test_a_sound_reward_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tried(mine(monkeypatch, faulty_rewards.RIGHT), NUMBERS).rows(256, 2)
    assert faults(rows) == []
    assert [row.value for row in rows if row.name == "weights"] == ["being right is worth 1, the form 0"]


OWN = [
    (NUMBERS, "reward=[exact_match]", "reward.exact_match.answer_in=boxed", "reward.exact_match.which=last"),
    (NUMBERS, "reward=[exact_match]", "reward.exact_match.answer_in=hashes"),
    (NAMES, "reward=[exact_match]", "reward.exact_match.answer_in=text"),
    (NUMBERS, "reward=[exact_match,format,length,repetition,overlong]"),
    (NUMBERS, "reward=[exact_match,format,length]", "reward.format.mode=soft", "reward.length.mode=target",
     "reward.length.target=100"),
    (NUMBERS, "reward=[exact_match]", "reward.exact_match.answer_in=pattern",
     "reward.exact_match.pattern='(?m)^Answer: (-?[0-9]+)$'"),
    (NUMBERS[:1], "reward=[math,format]"),
    (CHOICES, "reward=[choice]"),
    (NUMBERS, "reward=[cosine]"),
    (NUMBERS, "reward=[equations]"),
]  # fmt: skip
MORE_OWN = [
    (FORMULAS, "reward=[math]", "reward.math.answer_in=boxed"),
    (NAMES, "reward=[math]", "reward.math.answer_in=text"),
    (FORMULAS, "reward=[exact_match]"),
    (CHOICES, "reward=[choice]", "reward.choice.answer_in=text"),
]


@each("case", OWN, ids=[" ".join(words) for _, *words in OWN])
def test_our_own_rewards_have_no_fault(case: Any) -> None:
    prompts, *words = case
    assert faults(tried(configured(*words), prompts).rows(1, 2)) == []


@pytest.mark.slow
@each("case", MORE_OWN)
def test_our_own_rewards_have_no_fault_wherever_they_look_for_the_answer(case: Any) -> None:
    prompts, *words = case
    assert faults(tried(configured(*words), prompts).rows(1, 2)) == []


LIMITS = {
    "a pattern that ends inside a number": (
        ["reward=[exact_match]", "reward.exact_match.answer_in=pattern",
         "reward.exact_match.pattern='Answer: (-?[0-9]+)'"],
        "exact_match: wrong answers in the right form", "rounded to the gold",
    ),
    "reasoning that counts": (
        ["reward=[exact_match]", "reward.exact_match.in_reasoning=true"],
        "exact_match: the answer only in the reasoning", "and no answer",
    ),
    "a form that is worth more than being right": (
        ["reward=[exact_match,format]", "reward.format.weight=1.5"], "weights", "gets as much as a right one",
    ),
    "nothing says what is right": (["reward=[format]"], "format: gold answers", "any answer"),
}  # fmt: skip


@each("name", LIMITS)
def test_what_keys_and_weights_allow_is_said(name: str) -> None:
    words, row_name, value = LIMITS[name]
    rows = faults(tried(configured(*words), NUMBERS).rows(256, 2))
    assert [row for row in rows if row.name == row_name and value in row.value], rows


def test_the_cheapest_text_has_nothing_left_that_could_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = faulty_rewards.reward(lambda text, gold, question: float(any(c.isdigit() for c in text)))
    cheapest = tried(mine(monkeypatch, digits), NUMBERS).cheapest
    assert cheapest is not None
    assert len(cheapest.text) == 1
    sound = tried(configured("reward=[exact_match,format]"), NUMBERS)
    assert sound.cheapest is not None
    assert sound.cheapest.text == "<think>-</think><answer>41</answer>"
    assert sound.summary()[1].endswith("being right is worth 1, the form 0.2")


def test_a_reward_that_compares_siblings_is_said_to_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tried(mine(monkeypatch, faulty_rewards.siblings), NUMBERS).rows(256, 2)
    [row] = [row for row in rows if row.name == "mine: steadiness"]
    assert (row.status, row.value) == (Verdict.limit, "the same text gets another score among siblings")


def test_a_failure_that_on_error_settles_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    crashing, _, _ = FAULTY["crashes on empty"]
    rows = tried(mine(monkeypatch, crashing, on_error=0.0), NUMBERS).rows(256, 2)
    [row] = [row for row in rows if row.name == "mine: failures"]
    assert row.status is Verdict.limit
    assert "IndexError" in row.value


def test_a_prompt_that_has_begun_to_reason_is_answered_behind_its_reasoning() -> None:
    prompts = [prompt(p.id, "What is it?", p.answer, tail="<think>\n") for p in NUMBERS]
    found = tried(configured("reward=[exact_match]"), prompts)
    assert found.form == "in a tag after reasoning"
    assert faults(found.rows(1, 2)) == []


def test_a_reward_that_fails_on_every_text_is_said_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(mine(monkeypatch, lambda group: [group.prompt.metadata["none"]]), NUMBERS)
    assert found.cheapest is None
    [row] = faults(found.rows(1, 2))
    assert (row.name, "KeyError" in row.value) == ("mine: failures", True)
    assert found.summary()[1].startswith("cheapest text: none has the full reward")


def test_rows_without_a_reference_answer_are_tried_on_what_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    crashing, _, _ = FAULTY["crashes on empty"]
    prompts = [prompt(p.id, "Say something.", "") for p in NUMBERS]
    rows = {row.name: row for row in tried(mine(monkeypatch, crashing), prompts).rows(1, 2)}
    assert "nothing said: empty" in rows["mine: failures"].value
    assert "mine: two answers" not in rows


def test_special_tokens_that_a_tokenizer_cannot_read_as_text_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said = PlainText.ids_said

    def refusing(text: PlainText, texts: list[str]) -> list[list[int]]:
        if any("<|" in each for each in texts):
            raise UserError("model.path", "its tokenizer makes a special token of a text", remedy="use another model")
        return said(text, texts)

    monkeypatch.setattr(PlainText, "ids_said", refusing)
    kinds = {shot.kind for shot in tried(mine(monkeypatch, faulty_rewards.RIGHT), NUMBERS[:1]).shots}
    assert "of others" not in kinds
    assert "characters that are not seen" in kinds


def shot(family: Family, kind: str, score: float, *, prompt: str = "a", seconds: float = 0.001) -> Shot:
    return Shot(family=family, kind=kind, form="alone", prompt=prompt, gold="41", text=kind, tokens=len(kind),
                scores={"mine": score}, seconds={"mine": seconds})  # fmt: skip


def verdicts(*shots: Shot) -> dict[str, Row]:
    ordinary = [shot(Family.gold, "alone", 1.0), shot(Family.wrong, "alone", 0.0)]
    given = Tried(shots=(*ordinary, *shots), weights={"mine": 1.0}, form="alone", forms={"mine": "alone"})
    return {row.name.removeprefix("mine: "): row for row in given.rows(completions_per_step=100, workers=2)}


@each(
    ("family", "score", "status"),
    [
        (Family.wrong, 0.5, Verdict.wrong),  # half of what being right is worth
        (Family.wrong, 0.49, None),
        (Family.nothing, 0.5, Verdict.wrong),
        (Family.endless, 0.0, None),
        (Family.reasoning, 1.0, Verdict.wrong),
        (Family.gold, 1.1, Verdict.wrong),  # more than the plain right answer
    ],
)
def test_a_text_is_accepted_from_half_of_what_being_right_is_worth(
    family: Family, score: float, status: Verdict | None
) -> None:
    rows = verdicts(shot(family, "some kind", score))
    found = [row.status for row in rows.values() if row.value == f"accepted: some kind{' (1.1)' * (score > 1)}"]
    assert found == ([] if status is None else [status])


@each(
    ("first", "last", "is_fault"),
    [(1.0, 1.0, True), (1.0, 0.0, True), (0.0, 1.0, False), (0.0, 0.0, False)],
)
def test_of_two_answers_only_the_last_may_count(first: float, last: float, is_fault: bool) -> None:
    both = (shot(Family.two, "gold, then a wrong one", first), shot(Family.two, "a wrong one, then gold", last))
    assert (Family.two in verdicts(*both)) is is_fault


def test_seconds_are_those_of_a_step_and_their_percentiles() -> None:
    # 98 texts of 0.1 s and two more of 0.001 s: 100 completions on two workers take about 50 x 0.098 = 4.9 s.
    row = verdicts(*(shot(Family.names, f"kind {k}", 0.0, seconds=0.1) for k in range(98)))["seconds"]
    assert row.status is Verdict.ok
    assert row.value == "p50 0.1 s, p99 0.1 s for a completion, about 4.9 s for a step"
    slow = verdicts(*(shot(Family.names, f"kind {k}", 0.0, seconds=0.5) for k in range(98)))["seconds"]
    assert slow.status is Verdict.wrong
