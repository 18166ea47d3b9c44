import pytest
from in_one_test import each
from reward_groups import TAGGED, sized_group

from rlft.reward.cosine import Cosine
from rlft.reward.length import Length, LengthMode
from rlft.reward.overlong import Overlong

RIGHT, WRONG = "<answer>18</answer>", "<answer>17</answer>"


def length(**keys):
    numbers = {"mode": LengthMode.kimi, "target": None, "limit": None, "penalty": 0.001}
    return Length(**{**TAGGED, "numeric": True, "ignore_case": False, **numbers, **keys})


def test_kimis_reward_falls_from_a_half_to_minus_a_half_and_is_no_gain_for_wrong_answers():
    # lambda = 0.5 - (n - 100) / 400 for n = 100, 200, 300, 500: 0.5, 0.25, 0, -0.5; wrong ones min(0, lambda).
    made = sized_group([RIGHT] * 4 + [WRONG] * 4, [100, 200, 300, 500] * 2)
    assert length()(made) == [0.5, 0.25, 0, -0.5, 0, 0, 0, -0.5]


def test_wrong_answers_count_among_the_lengths():
    # The shortest is a wrong one of 0 tokens: lambda of the right one, 0.5 - 50/100, is 0.
    assert length()(sized_group([WRONG, RIGHT, WRONG], [0, 50, 100])) == [0, 0, -0.5]


@pytest.mark.parametrize("texts", [[RIGHT, WRONG, RIGHT], [RIGHT]])
def test_equal_lengths_give_nothing(texts):
    assert length()(sized_group(texts, [7] * len(texts))) == [0.0] * len(texts)


def test_what_is_right_is_decided_as_in_exact_match():
    # The shorter of two completions: a right one gets 0.5, a wrong one nothing.
    for text, reference, right in (
        ("1,000", "1000", True),
        ("8 + 10", "18", False),
        ("18</answer><answer>18", "18", False),
    ):
        made = sized_group([f"<answer>{text}</answer>", "no answer"], [10, 20], answer=reference)
        assert length()(made) == [0.5 * right, -0.5]


def test_a_wished_length_is_missed_on_both_sides():
    # -|n - 40| / 40, at least -1.
    made = sized_group([RIGHT, WRONG] * 4, [40, 30, 50, 0, 80, 81, 4000, 41])
    assert length(mode=LengthMode.target, target=40)(made) == [0, -0.25, -0.25, -1, -1, -1, -1, -0.025]


def test_tokens_over_a_limit_cost_a_penalty_each():
    # -0.125 for each token over 40, at least -1: at 48.
    made = sized_group([RIGHT, WRONG] * 3, [0, 40, 41, 44, 48, 400])
    assert length(mode=LengthMode.limit, limit=40, penalty=0.125)(made) == [0, 0, -0.125, -0.5, -1, -1]


@pytest.mark.parametrize("keys", [{"mode": LengthMode.target, "target": 10}, {"mode": LengthMode.limit, "limit": 10}])
def test_only_kimis_reward_needs_a_reference_answer(keys):
    made = sized_group(["poem"], [10], answer="")
    assert length(**keys)(made) == [0.0]
    with pytest.raises(ValueError, match="'p0' has no reference answer"):
        length()(made)


COSINE = {"right_at_0": 2.0, "right_at_max": 1.0, "wrong_at_0": -10.0, "wrong_at_max": 0.0, "exceeded": -12.0}
REWARDS = [
    length(mode=LengthMode.target, target=40),
    Cosine(**TAGGED, numeric=True, ignore_case=False, max_tokens=100, **COSINE),
    Overlong(max_tokens=60, cache=20),
]


@each("reward", REWARDS)
def test_what_an_environment_said_does_not_lengthen_a_completion(reward):
    half = sized_group([RIGHT], [100], mask=(True, False) * 50)  # fifty of its hundred tokens were sampled
    assert reward(half) == reward(sized_group([RIGHT], [50])) != reward(sized_group([RIGHT], [100]))
