"""What `rlft plan` says of rewards: scores of a few completions, doubts about them, and the most common answer."""

from __future__ import annotations

import pytest
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.instantiate import from_mapping
from rlft.config.resolved import with_token_budget
from rlft.config.schema import RunConfig
from rlft.plan.rewards.brief import doubts, most_common_answer, tried_completions, try_rewards
from rlft.plan.rewards.writer import Writer
from rlft.reward.workers.reward_spec import specs
from rlft.tokens.ends import turn_ends
from rlft.types import Prompt, Sampling
from tests.helpers.family_tokenizers import family_tokenizer


def prompt(name, answer):
    return Prompt(id=name, messages=({"role": "user", "content": f"{name}?"},), answer=answer, token_ids=(1, 2))


TOKENIZER = family_tokenizer("qwen2.5")
WRITER = Writer(TOKENIZER, turn_ends(TOKENIZER, "chat"), Sampling(max_tokens=64, temperature=1.0))
PROMPTS = (prompt("a", "12"), prompt("b", "7"))


def tried(*words, prompts=PROMPTS):
    config = from_mapping(RunConfig, with_token_budget(compose(list(words))), "")
    return try_rewards(config, specs(config.reward), prompts, WRITER)


def test_each_reward_says_what_it_gives_each_completion():
    found = tried("reward=[exact_match,format,learned]")
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
    found = tried("reward=exact_match", f"reward.exact_match.answer_in={words}")
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
        slow("broken", "reward.mine failed: "),
    ],
)
def test_rewards_that_cannot_teach_raise_one_and_hide_no_other(function, doubt):
    mine = f"+reward.mine={{_target_: naughty.{function}, weight: 1.0}}"
    trials = tried("reward=[exact_match]", mine)
    [told] = doubts(trials)
    assert told.startswith(doubt)
    assert all(t.score is not None for t in trials if t.reward == "exact_match")
    if function == "broken":
        assert "no such thing" in told
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
    trials = tried(*words)
    [told] = doubts(trials)
    assert told.startswith(f"reward.{name} failed: ")
    assert error in told
    assert {t.score for t in trials if t.reward == name} == {0.0}  # as the run would score them


def test_the_most_common_answer_is_named_where_two_prompts_have_the_same() -> None:
    assert most_common_answer(["4", "1", "4", "2"]) == [
        "most common answer: '4', of 50.0% of the 4 prompts: always written, it is right as often"
    ]
    assert most_common_answer(["4", "1"]) == most_common_answer(["4"]) == []
