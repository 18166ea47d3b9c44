import math

import pytest
from in_one_test import each
from reward_groups import TAGGED, sized_group

from rlft.reward.cosine import Cosine
from rlft.types import FinishReason, UserError

RIGHT, WRONG = "<answer>18</answer>", "<answer>17</answer>"


def cosine(**keys):
    values = {"right_at_0": 2.0, "right_at_max": 1.0, "wrong_at_0": -10.0, "wrong_at_max": 0.0, "exceeded": -12.0}
    return Cosine(**{**TAGGED, "numeric": True, "ignore_case": False, "max_tokens": 100, **values, **keys})


# 1 + 0.5 * (2 - 1) * (1 + cos(pi n / 100)) and 0.5 * (-10) * (..): cos is 1, sqrt(1/2), 0, -1 at n = 0, 25, 50, 100.
@each(
    ("text", "scores"),
    [(RIGHT, [2, 1.5 + math.sqrt(0.5) / 2, 1.5, 1]), (WRONG, [-10, -5 - 5 * math.sqrt(0.5), -5, 0])],
)
def test_right_answers_earn_less_and_wrong_ones_lose_less_the_longer_they_are(text, scores):
    assert cosine()(sized_group([text] * 4, [0, 25, 50, 100])) == pytest.approx(scores, abs=1e-12)


def test_what_exceeds_the_limit_loses_a_fixed_value_right_or_wrong():
    assert cosine()(sized_group([RIGHT, WRONG], [101, 5000])) == [-12, -12]
    # Cut off by a limit of generation below max_tokens.
    assert cosine()(sized_group([RIGHT, WRONG], [60, 60], finish_reason=FinishReason.length)) == [-12, -12]


@each(("key", "value"), [("wrong_at_0", 1.0), ("wrong_at_max", 1.5), ("exceeded", 1.0), ("right_at_max", -0.5)])
def test_values_with_which_a_wrong_answer_may_earn_as_much_as_a_right_one_are_refused(key, value):
    # The least that a right answer earns is 1; with right_at_max=-0.5 it is that, and wrong_at_max=0 is more.
    refused = "wrong_at_max" if key == "right_at_max" else key
    with pytest.raises(UserError, match=f"{refused}: must be less than a right answer earns at least, "):
        cosine(**{key: value})
