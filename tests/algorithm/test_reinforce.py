from dataclasses import replace

import torch
from in_one_test import each

from tests.algorithm.algorithm_steps import hand_batch, make


@each("baseline", ["group", "leave_one_out"])
@each("to_go", [True, False])
def test_equal_groups_get_exactly_0_and_zero_gradient(baseline, to_go):
    # Three times 0.1 is not 0.3 in floating point.
    batch = hand_batch([2, 3, 1, 1, 2], [0.1, 0.1, 0.1, 0, 1], [0, 0, 0, 1, 1])
    algorithm = make("reinforce", baseline=baseline, reward_to_go=to_go)
    assert (algorithm.credit(batch).advantages[:3] == 0).all()
    assert algorithm.zero_gradient_rows(batch).tolist() == [True, True, True, False, False]
    assert not make("reinforce", baseline=baseline, kl_coef=0.1).zero_gradient_rows(batch).any()
    assert not make("reinforce", baseline=baseline, entropy_coef=0.1).zero_gradient_rows(batch).any()


def test_rows_that_have_earned_nothing_have_zero_gradient_without_a_baseline():
    batch = hand_batch([2, 1, 0], [0, 1, 1], [0, 0, 0])
    assert make("reinforce").zero_gradient_rows(batch).tolist() == [True, False, True]
    assert make("reinforce", baseline="batch").zero_gradient_rows(batch).tolist() == [False, False, True]
    assert make("reinforce", whiten=True).zero_gradient_rows(batch).tolist() == [False, False, True]
    # A step that went well and one that went badly: 0 in all, but not from the second token on.
    scores = torch.tensor([[0, 1, -1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    assert not make("reinforce").zero_gradient_rows(replace(batch, token_rewards=scores))[0]
