"""Faulty rewards are found and named, and sound ones are not."""

import re
import time
from dataclasses import replace
from itertools import count
from statistics import fmean, stdev
from types import SimpleNamespace

import faulty_rewards
import pytest
from faulty_rewards import FAULTY
from in_one_test import each
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.instantiate import from_mapping
from rlft.config.resolved import with_token_budget
from rlft.config.schema import RunConfig
from rlft.plan.rewards import tester
from rlft.plan.rewards.tester import (
    RewardTester,
    Writer,
    doubts,
    most_common_answer,
    paid_for,
    tried_completions,
    try_rewards,
)
from rlft.plan.rewards.verdicts import summary_of, verdicts_on
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.system.terminal import Status
from rlft.tokens.plain import PlainText
from rlft.tokens.text import turn_ends
from rlft.types import Prompt, Sampling, UserError
from tests.helpers.family_tokenizers import family_tokenizer

TOKENIZER = family_tokenizer("qwen2.5")
MAX_TOKENS = 200
WRITER = Writer(TOKENIZER, turn_ends(TOKENIZER, "chat"), Sampling(max_tokens=MAX_TOKENS, temperature=1.0))


def prompt(name, question, answer, **fields):
    messages = ({"role": "user", "content": question},)
    return Prompt(id=name, messages=messages, answer=answer, token_ids=(1, 2), **fields)


NUMBERS = (prompt("a", "What is 56 - 15?", "41"), prompt("b", "What is 90 + 90?", "180"))
FORMULAS = (prompt("a", "A half of three?", "3/2"), prompt("b", "Expand it.", "x^2+1"))
NAMES = (prompt("a", "The capital of Peru?", "Lima"), prompt("b", "Whose machine is it?", "Alan Turing"))
CHOICES = tuple(prompt(letter, "Which? (A) Rome (B) Paris (C) Lima", letter) for letter in "BCA")


def in_this_process(rewards, *, timeout=10.0, **keys):
    scoring = SimpleNamespace(timeout=timeout, on_error="stop")
    config = SimpleNamespace(scoring=scoring, environment=None, group_size=8, allows_unscorable=False)
    return RewardTester(config, rewards, WRITER, **{"limit_s": 1e6, "is_isolated": False, **keys})


def tried(rewards, prompts, **keys):
    return in_this_process(rewards, **keys).try_all(tuple(prompts))


def configured(*words):
    return specs(with_token_budget(compose([*words, f"generation.max_tokens={MAX_TOKENS}"]))["reward"])


def mine(monkeypatch, reward, **keys):
    monkeypatch.setattr(faulty_rewards, "current", reward, raising=False)
    return {"mine": RewardSpec(name="mine", target="faulty_rewards.current", kwargs={}, weight=1.0, **keys)}


def rows_of(found):
    return {row.name: row for row in verdicts_on(found, completions_per_step=1, workers=2)}


def faults(found):
    return [row for row in rows_of(found).values() if row.status is Status.wrong]


@each("name", FAULTY)
def test_a_faulty_reward_is_found_and_its_fault_named(name, monkeypatch):
    reward, row_name, words = FAULTY[name]
    keys = {"hangs on long texts": {"timeout": 0.1}}.get(name, {})
    rows = faults(tried(mine(monkeypatch, reward), NUMBERS[:1], **keys))
    assert [row for row in rows if row_name in row.name and words in row.value and row.remedy], rows


def test_a_sound_reward_has_no_fault(monkeypatch):
    found = tried(mine(monkeypatch, faulty_rewards.RIGHT), NUMBERS)
    assert faults(found) == []
    assert rows_of(found)["weights"].value == "being right is worth 1, the form 0"


OWN = [
    (NUMBERS, "exact_match reward.exact_match.answer_in=boxed reward.exact_match.which=last"),
    (NUMBERS, "[exact_match,format,length,repetition,overlong]"),
    (NUMBERS[:1], "[math,format]"),
    (CHOICES, "choice"),
]
MORE_OWN = [
    (NUMBERS, "exact_match reward.exact_match.answer_in=pattern"
              " reward.exact_match.pattern='(?m)^Answer:\\s(-?[0-9]+)$'"),
    (NUMBERS, "[exact_match,format,language] reward.language.target=en reward.language.min_words=3"),
    (NUMBERS, "exact_match reward.exact_match.answer_in=hashes"),
    (NAMES, "exact_match reward.exact_match.answer_in=text"),
    (NUMBERS, "[exact_match,format,length] reward.format.mode=soft reward.length.mode=target reward.length.target=100"),
    (NUMBERS, "cosine"),
    (NUMBERS, "equations"),
    (FORMULAS, "math reward.math.answer_in=boxed"),
    (NAMES, "math reward.math.answer_in=text"),
    (FORMULAS, "exact_match"),
    (CHOICES, "choice reward.choice.answer_in=text"),
]  # fmt: skip


@pytest.mark.parametrize("cases", [OWN, slow(MORE_OWN)], ids=["as they are", "wherever they look for the answer"])
def test_our_own_rewards_have_no_fault(cases):
    assert {words: faults(tried(configured(*f"reward={words}".split()), prompts)) for prompts, words in cases} == {
        words: [] for _, words in cases
    }


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
def test_what_keys_and_weights_allow_is_said(name):
    words, row_name, value = LIMITS[name]
    rows = faults(tried(configured(*words), NUMBERS))
    assert [row for row in rows if row.name == row_name and value in row.value], rows


def test_the_cheapest_text_is_the_shortest_with_the_full_reward(monkeypatch):
    digits = faulty_rewards.reward(lambda text, gold, question: float(any(c.isdigit() for c in text)))
    cheapest = tried(mine(monkeypatch, digits), NUMBERS).cheapest
    assert len(cheapest.text) == 1
    sound = tried(configured("reward=[exact_match,format]"), NUMBERS)
    assert sound.cheapest.text == "<think>-</think><answer>41</answer>"
    assert summary_of(sound)[1].endswith("being right is worth 1, the form 0.2")


@each("number", [0, 1, 2])
def test_a_reward_that_reads_one_word_of_an_answer_is_wrong(number, monkeypatch):
    def score(text, gold, question):
        said = re.search("<answer>(.*)</answer>", text)
        due = gold.split()
        return float(said is not None and due[min(number, len(due) - 1)] in said[1].split())

    names = (NAMES[0], prompt("b", "Whose machine is it?", "Alan Mathison Turing"))
    kind = ("first", "middle", "last")[number]
    found = tried(mine(monkeypatch, faulty_rewards.reward(score)), names)
    rows = faults(found)
    assert [row for row in rows if f"its {kind} word alone" in row.value], rows
    alone = tried(mine(monkeypatch, faulty_rewards.reward(score)), names[1:]).cheapest
    assert not alone.gives_gold


def test_another_reference_answer_that_is_cheaper_is_no_fault(monkeypatch):
    both = faulty_rewards.reward(lambda text, gold, question: float(any(f">{a}<" in text for a in ("1000000", "M"))))
    millions = (prompt("a", "How many are they?", "1000000", other_answers=("M",)),)
    rows = verdicts_on(tried(mine(monkeypatch, both), millions), 8, 1)
    assert [row.status for row in rows if row.name == "cheapest text"] == [Status.ok]


def test_a_reward_that_compares_siblings_is_said_to_do_so(monkeypatch):
    rewards = {**configured("reward=[exact_match]"), **mine(monkeypatch, faulty_rewards.siblings)}
    rows = rows_of(tried(rewards, NUMBERS))
    row = rows["mine: steadiness"]
    assert (row.status, row.value) == (Status.limit, "the same text gets another score in a group")
    assert rows["weights"].value == "being right is worth 1, the form 0"


def test_a_failure_that_on_error_settles_is_a_limit(monkeypatch):
    crashing, _, _ = FAULTY["crashes on empty"]
    row = rows_of(tried(mine(monkeypatch, crashing, on_error=0.0), NUMBERS))["mine: failures"]
    assert row.status is Status.limit
    assert "IndexError" in row.value


def test_verdicts_are_made_of_what_was_tried_however_soon_the_time_is_over(monkeypatch):
    now = 0.0

    def slow(text, gold, question):
        nonlocal now
        now += 1.0
        return faulty_rewards.sound(text, gold, question)

    monkeypatch.setattr(tester, "time", SimpleNamespace(monotonic=lambda: now))
    for limit_s in (1.0, 7.0, 45.0, 60.0, 100.0, 200.0, 250.0):
        found = tried(mine(monkeypatch, faulty_rewards.reward(slow)), NUMBERS, limit_s=limit_s)
        rows = rows_of(found)
        untried = sum("mine" not in text.scores for text in found.texts)
        assert faults(found) == [], limit_s
        value = f"{untried} of {len(found.texts)} texts were not tried: its {limit_s:g} s were over"
        assert (rows["mine: untried"].status, rows["mine: untried"].value) == (Status.skipped, value)
        assert summary_of(found) == ["the rewards were not tried in whole: see rlft reward try"]
        # A row's 2 x 20 answers in all forms say which form it is; without them nothing is known of it.
        is_known = limit_s >= 45.0
        assert (found.forms["mine"] == "in a tag") is is_known
        assert ("mine: answers" in rows) is (rows["weights"].status is Status.skipped) is not is_known


@each("size", [1, 8])  # 8: the group of the run, and no completion alone
def test_a_reward_that_exceeds_the_runs_time_limit_on_right_answers_is_wrong(size, monkeypatch):
    def hang(group):
        while len(group.rollouts) >= size:
            time.sleep(0.01)
        return faulty_rewards.RIGHT(group)

    found = tried(mine(monkeypatch, hang, on_error=0.0), NUMBERS[:1], timeout=0.2)
    rows = rows_of(found)
    assert rows["mine: seconds"].status is Status.wrong
    assert "longer than scoring.timeout" in rows["mine: seconds"].value


def test_a_reward_that_fails_on_a_group_or_on_a_completion_alone_is_told_from_one_that_fails(monkeypatch):
    def relative(group):
        scores = faulty_rewards.RIGHT(group)
        return [(score - fmean(scores)) / stdev(scores) for score in scores]  # of one score there is no deviation

    found = tried(mine(monkeypatch, relative), NUMBERS)
    reward, weights = rows_of(found).values()
    assert (reward.name, reward.status, weights.status) == ("mine", Status.skipped, Status.skipped)
    assert "StatisticsError" in reward.value
    assert weights.value.endswith("without mine")
    reward, weights = rows_of(tried(mine(monkeypatch, faulty_rewards.siblings), NUMBERS)).values()
    assert (reward.name, reward.status, weights.status) == ("mine", Status.skipped, Status.skipped)
    assert reward.value.startswith("compares the completions of a group")
    [row] = faults(tried(mine(monkeypatch, lambda group: faulty_rewards.RIGHT(group)[:1]), NUMBERS))
    assert row.name == "mine: groups"
    assert row.value.startswith("fails on a whole group: returned 1 score for ")


def test_a_right_reward_with_some_noise_has_no_fault_but_that(monkeypatch):
    calls = count()  # the multiples of 0.618, without their whole part, are far from each other
    scores = faulty_rewards.reward(lambda *texts: faulty_rewards.sound(*texts) + next(calls) * 0.618 % 1 / 100)
    assert [row.name for row in faults(tried(mine(monkeypatch, scores), NUMBERS))] == ["mine: steadiness"]


@each(("weight", "num_faults"), [(-1.0, 0), (1.0, 1), (0.0, 0)])
def test_the_sign_of_a_weight_turns_scores_round_and_a_weight_of_0_makes_no_fault_of_a_reward(
    weight, num_faults, monkeypatch
):
    penalty = faulty_rewards.reward(lambda *texts: 1.0 - faulty_rewards.sound(*texts))
    [spec] = mine(monkeypatch, penalty).values()
    found = faults(tried({"mine": replace(spec, weight=weight)}, NUMBERS))
    assert len([row for row in found if row.name == "mine: gold answers"]) == num_faults


def test_a_plan_calls_rules_of_our_own_alone(monkeypatch):
    def never(group):
        raise AssertionError("it was called")

    own = configured("reward=[exact_match,format]")
    config = in_this_process(own).config
    accepted, cheapest = paid_for(config, own, NUMBERS, WRITER)
    assert accepted == "gold answers accepted in 5 of 18 forms; wrong texts accepted: none"
    assert cheapest.endswith("being right is worth 1, the form 0.2")
    both = {**own, **mine(monkeypatch, never)}
    assert paid_for(config, both, NUMBERS, WRITER) == []


def test_a_prompt_that_has_begun_to_reason_is_answered_behind_its_reasoning():
    prompts = [prompt(p.id, "What is it?", p.answer, tail="<think>\n") for p in NUMBERS]
    found = tried(configured("reward=[exact_match]"), prompts)
    assert found.form == "in a tag after reasoning"
    assert faults(found) == []


def test_a_reward_that_fails_on_every_text_is_said_to_fail(monkeypatch):
    found = tried(mine(monkeypatch, lambda group: [group.prompt.metadata["none"]]), NUMBERS)
    assert found.cheapest is None
    [row] = faults(found)
    assert (row.name, "KeyError" in row.value) == ("mine: failures", True)
    assert summary_of(found) == ["right answers have no score: see rlft reward try"]


def test_rows_without_a_reference_answer_are_tried_on_what_answers_nothing(monkeypatch):
    crashing, _, _ = FAULTY["crashes on empty"]
    prompts = [prompt(p.id, "Say something.", "") for p in NUMBERS]
    rows = rows_of(tried(mine(monkeypatch, crashing), prompts))
    assert "nothing said: empty" in rows["mine: failures"].value
    assert "mine: two answers" not in rows


def test_special_tokens_that_a_tokenizer_cannot_read_as_text_are_left_out(monkeypatch):
    said = PlainText.ids_said

    def refusing(text, texts):
        if any("<|" in each for each in texts):
            raise UserError("model.path", "its tokenizer makes a special token of a text", remedy="use another model")
        return said(text, texts)

    monkeypatch.setattr(PlainText, "ids_said", refusing)
    kinds = {text.kind for text in tried(mine(monkeypatch, faulty_rewards.RIGHT), NUMBERS[:1]).texts}
    assert "of others" not in kinds
    assert "characters that are not seen" in kinds


# -- the brief of rlft plan --------------------------------------------------------------------------------------------
SHORT_WRITER = replace(WRITER, sampling=Sampling(max_tokens=64, temperature=1.0))
PROMPTS = (prompt("a", "a?", "12"), prompt("b", "b?", "7"))


def scores_of(*words, prompts=PROMPTS):
    config = from_mapping(RunConfig, with_token_budget(compose(list(words))), "")
    return try_rewards(config, specs(config.reward), prompts, SHORT_WRITER)


def test_each_reward_says_what_it_gives_each_completion():
    found = scores_of("reward=[exact_match,format,learned]")
    scores = {(t.reward, t.prompt, t.kind): t.score for t in found}
    assert len(scores) == 2 * 2 * 5, "those that need weights are left out"
    assert doubts(found) == []
    for name in ("a", "b"):
        assert scores["exact_match", name, "reference, in tags"] == 1
        assert scores["exact_match", name, "wrong, in tags"] == scores["exact_match", name, "empty"] == 0
        assert scores["format", name, "wrong, in tags"] == 1
        assert scores["format", name, "reference"] == 0


@pytest.mark.parametrize(("words", "form"), [("hashes", "#### 12"), ("boxed", "\\boxed{12}")])
def test_answers_are_tried_in_the_form_that_a_reward_reads(words, form):
    found = scores_of("reward=exact_match", f"reward.exact_match.answer_in={words}")
    scores = {(t.prompt, t.kind): t.score for t in found}
    for name in ("a", "b"):
        assert scores[name, "reference, as exact_match reads it"] == 1
        assert scores[name, "wrong, as exact_match reads it"] == scores[name, "reference, in tags"] == 0
    assert form in {t.completion for t in found}
    assert doubts(found) == []


def test_a_wrong_answer_is_another_prompts_or_made_up():
    assert dict(tried_completions(PROMPTS[0], PROMPTS))["wrong"] == "7"
    assert dict(tried_completions(PROMPTS[0], PROMPTS[:1]))["wrong"] == "120"


@pytest.mark.parametrize(
    ("function", "doubt"),
    [
        ("always_right", "reward.mine gave all of these 1: it may read something that they do not have"),
        slow("contrary", "reward.mine gives a wrong answer more than the reference, in both forms"),
        slow("broken", "reward.mine failed: .*no such thing"),
    ],
)
def test_rewards_that_cannot_teach_raise_one_and_hide_no_other(function, doubt):
    trials = scores_of("reward=[exact_match]", f"+reward.mine={{_target_: naughty.{function}, weight: 1.0}}")
    [told] = doubts(trials)
    assert re.match(doubt, told)
    assert all(t.score is not None for t in trials if t.reward == "exact_match")
    if function == "broken":
        assert {t.score for t in trials if t.reward == "mine"} == {None}


BROKEN = "+reward.mine={_target_: naughty.broken, weight: 1.0%s}"


@pytest.mark.parametrize(
    ("words", "name", "error"),
    [
        (["reward=[exact_match]", BROKEN % ", on_error: 0.0"], "mine", "no such thing"),
        (["reward=[exact_match]", BROKEN % "", "scoring.on_error=0"], "mine", "no such thing"),
        (["reward=[choice]", "data.allow_unscorable=true"], "choice", "is not a letter"),
    ],
)
def test_the_error_of_a_reward_that_gets_a_number_in_the_run_is_said_and_not_taken_for_its_score(words, name, error):
    trials = scores_of(*words)
    [told] = doubts(trials)
    assert told.startswith(f"reward.{name} failed: ")
    assert error in told
    assert {t.score for t in trials if t.reward == name} == {0.0}  # as the run would score them


def test_the_most_common_answer_is_named_where_two_prompts_have_the_same():
    assert most_common_answer(["4", "1", "4", "2"]) == [
        "most common answer: '4', of 50.0% of the 4 prompts: always written, it is right as often"
    ]
    assert most_common_answer(["4", "1"]) == most_common_answer(["4"]) == []
