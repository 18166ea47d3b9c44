"""Rewards tried before a run: what they say of an empty, a wrong and the right answer, and what that gives away."""

from __future__ import annotations

import pytest
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.resolved import with_token_budget
from rlft.plan.reward_trial import completions, doubts, try_rewards
from rlft.reward.workers.reward_spec import specs
from rlft.tokens.ends import turn_ends
from rlft.types import Prompt, Sampling
from tests.helpers.family_tokenizers import family_tokenizer


def prompt(name, answer):
    return Prompt(id=name, messages=({"role": "user", "content": f"{name}?"},), answer=answer, token_ids=(1, 2))


TOKENIZER = family_tokenizer("qwen2.5")
SAMPLING = Sampling(max_tokens=64, temperature=1.0)
PROMPTS = (prompt("a", "12"), prompt("b", "7"))


def tried(*words):
    rewards = specs(with_token_budget(compose(list(words)))["reward"])
    return try_rewards(rewards, PROMPTS, TOKENIZER, SAMPLING, turn_ends(TOKENIZER, "chat"), 10.0)


def always(group, value=1.0):
    return [value for _ in group.rollouts]


def contrary(group):
    return [float(group.prompt.answer not in r.completion.text) for r in group.rollouts]


def broken(group):
    raise ValueError("no such thing")


def test_each_reward_says_what_it_gives_each_completion():
    scores = {(t.reward, t.prompt, t.kind): t.score for t in tried("reward=[exact_match,format]")}
    assert len(scores) == 2 * 2 * 5
    for name in ("a", "b"):
        assert scores["exact_match", name, "reference, in tags"] == 1
        assert scores["exact_match", name, "wrong, in tags"] == scores["exact_match", name, "empty"] == 0
        assert scores["format", name, "wrong, in tags"] == 1
        assert scores["format", name, "reference"] == 0


def test_a_wrong_answer_is_another_prompts_or_made_up():
    assert dict(completions(PROMPTS[0], PROMPTS))["wrong"] == "7"
    assert dict(completions(PROMPTS[0], PROMPTS[:1]))["wrong"] == "120"


def test_sound_rewards_raise_no_doubt():
    assert doubts(tried("reward=[exact_match,format]")) == []


@pytest.mark.parametrize(
    ("function", "doubt"),
    [
        ("always", "reward.mine gave all of these 1: it may read something that they do not have"),
        slow("contrary", "reward.mine gives a wrong answer more than the reference, in both forms"),
        slow("broken", "reward.mine failed: "),
    ],
)
def test_rewards_that_cannot_teach_raise_one_and_hide_no_other(function, doubt):
    mine = f"+reward.mine={{_target_: {__name__}.{function}, weight: 1.0}}"
    trials = tried("reward=[exact_match]", mine)
    [told] = doubts(trials)
    assert told.startswith(doubt)
    assert all(t.score is not None for t in trials if t.reward == "exact_match")
    if function == "broken":
        assert "no such thing" in told
        assert {t.score for t in trials if t.reward == "mine"} == {None}


def raises_on_answers(group):
    raise ValueError("no such thing")


def test_the_error_of_a_reward_whose_on_error_is_a_number_is_said_and_not_taken_for_its_score():
    mine = f"+reward.mine={{_target_: {__name__}.raises_on_answers, weight: 1.0, on_error: 0.0}}"
    trials = tried("reward=[exact_match]", mine)
    [told] = doubts(trials)
    assert told.startswith("reward.mine failed: ")
    assert "no such thing" in told
    assert {t.score for t in trials if t.reward == "mine"} == {0.0}  # as the run would score them


def test_rewards_that_need_weights_are_left_out():
    assert {t.reward for t in tried("reward=[exact_match,learned]")} == {"exact_match"}
