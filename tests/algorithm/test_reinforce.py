from dataclasses import replace

import torch
from in_one_test import each


@each("baseline", ["group", "leave_one_out"])
@each("to_go", [True, False])
def test_equal_groups_get_exactly_0_and_zero_gradient(make, hand_batch, baseline, to_go):
    # Three times 0.1 is not 0.3 in floating point.
    batch = hand_batch([2, 3, 1, 1, 2], [0.1, 0.1, 0.1, 0, 1], [0, 0, 0, 1, 1])
    algorithm = make("reinforce", baseline=baseline, reward_to_go=to_go)
    assert (algorithm.credit(batch).advantages[:3] == 0).all()
    assert algorithm.zero_gradient_rows(batch).tolist() == [True, True, True, False, False]
    assert not make("reinforce", baseline=baseline, kl_coef=0.1).zero_gradient_rows(batch).any()
    assert not make("reinforce", baseline=baseline, entropy_coef=0.1).zero_gradient_rows(batch).any()


def test_rows_that_have_earned_nothing_have_zero_gradient_without_a_baseline(make, hand_batch):
    batch = hand_batch([2, 1, 0], [0, 1, 1], [0, 0, 0])
    assert make("reinforce").zero_gradient_rows(batch).tolist() == [True, False, True]
    assert make("reinforce", baseline="batch").zero_gradient_rows(batch).tolist() == [False, False, True]
    assert make("reinforce", whiten=True).zero_gradient_rows(batch).tolist() == [False, False, True]
    # A step that went well and one that went badly: 0 in all, but not from the second token on.
    scores = torch.tensor([[0, 1, -1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    assert not make("reinforce").zero_gradient_rows(replace(batch, token_rewards=scores))[0]


def test_only_who_compares_siblings_needs_them(make):
    sizes = {b: make("reinforce", baseline=b).min_group_size for b in ("none", "batch", "group", "leave_one_out")}
    assert sizes == {"none": 1, "batch": 1, "group": 2, "leave_one_out": 2}
    assert make("rloo").min_group_size == 2
    assert make("reinforce_pp").min_group_size == 1


def test_kl_in_the_reward_needs_the_reference_and_the_old_policy_before_credit(make):
    for name in ("reinforce", "rloo", "reinforce_pp"):
        assert make(name, kl_coef=0.1).needs_reference
        assert make(name, kl_coef=0.1).needs_old_in_credit
        assert not make(name, kl_coef=0.1, kl_in="loss").needs_old_in_credit


def test_variants_differ_from_reinforce_in_the_keys_they_say(make):
    assert make("rloo") == make("reinforce", reward_to_go=False, baseline="leave_one_out")
    keys = {"whiten": True, "surrogate": "clipped", "aggregate": "token_mean"}
    assert make("reinforce_pp") == make("reinforce", **keys)
