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


TARGET, LIMIT = {"mode": LengthMode.target, "target": 40}, {"mode": LengthMode.limit, "limit": 40, "penalty": 0.125}
REWARDED = {  # {what: (keys, texts, their lengths, their rewards)}
    # lambda = 0.5 - (n - 100) / 400 for n = 100, 200, 300, 500: 0.5, 0.25, 0, -0.5; wrong ones min(0, lambda).
    "kimi's reward falls from a half to minus a half and is no gain for wrong answers": (
        {}, [RIGHT] * 4 + [WRONG] * 4, [100, 200, 300, 500] * 2, [0.5, 0.25, 0, -0.5, 0, 0, 0, -0.5]
    ),
    # The shortest is a wrong one of 0 tokens: lambda of the right one, 0.5 - 50/100, is 0.
    "wrong answers count among the lengths": ({}, [WRONG, RIGHT, WRONG], [0, 50, 100], [0, 0, -0.5]),
    "equal lengths give nothing": ({}, [RIGHT, WRONG, RIGHT], [7, 7, 7], [0, 0, 0]),
    "nor does a length alone": ({}, [RIGHT], [7], [0]),
    # -|n - 40| / 40, at least -1.
    "a wished length is missed on both sides": (
        TARGET, [RIGHT, WRONG] * 4, [40, 30, 50, 0, 80, 81, 4000, 41], [0, -0.25, -0.25, -1, -1, -1, -1, -0.025]
    ),
    # -0.125 for each token over 40, at least -1: at 48.
    "tokens over a limit cost a penalty each": (
        LIMIT, [RIGHT, WRONG] * 3, [0, 40, 41, 44, 48, 400], [0, 0, -0.125, -0.5, -1, -1]
    ),
}  # fmt: skip


@each(("keys", "texts", "lengths", "rewards"), REWARDED.values(), ids=list(REWARDED))
def test_the_reward_of_a_length_is_that_of_its_mode(keys, texts, lengths, rewards):
    assert length(**keys)(sized_group(texts, lengths)) == rewards


def test_what_is_right_is_decided_as_in_exact_match():
    # The shorter of two completions: a right one gets 0.5, a wrong one nothing.
    answers = [("1,000", "1000", True), ("8 + 10", "18", False), ("18</answer><answer>18", "18", False)]
    for text, reference, right in answers:
        made = sized_group([f"<answer>{text}</answer>", "no answer"], [10, 20], answer=reference)
        assert length()(made) == [0.5 * right, -0.5]


def test_only_kimis_reward_needs_a_reference_answer():
    made = sized_group(["poem"], [40], answer="")
    assert length(**TARGET)(made) == length(**LIMIT)(made) == [0.0]
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
