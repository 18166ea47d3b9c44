import math
from dataclasses import replace

import torch
from in_one_test import each

from rlft.types import Outputs


def test_rloo_by_hand(make, hand_batch, scale_of, close):
    # Rewards 1, 2, 6: less the mean of the other two, -3, -1.5, 4.5. Gradient -A / 3 on every token.
    batch = make("rloo").credit(hand_batch([2, 1, 1], [1, 2, 6], [0, 0, 0]))
    close(batch.advantages, [[0, -3, -3, 0], [0, -1.5, 0, 0], [0, 4.5, 0, 0]])
    outputs = Outputs(logprobs=batch.old_logprobs.clone().requires_grad_())
    loss = make("rloo").loss(outputs, batch, scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    close(loss.total.detach(), (-6 - 1.5 + 4.5) / 3)
    close(gradient, -batch.advantages / 3)


def test_reinforce_pp_by_hand(make, hand_batch, scale_of, close):
    # Returns 1, 1 and -1, -1: mean 0, deviation sqrt(4/3), so A = a, a, -a, -a with a = sqrt(3)/2. Ratios 1.5, 1 and
    # 0.5, 1 with the clip at 0.8 .. 1.2: terms -1.2 a, -a, 0.8 a, a over 4 tokens; gradient where nothing binds.
    batch = make("reinforce_pp").credit(hand_batch([2, 2], [1, -1], [0, 1]))
    a = math.sqrt(3) / 2
    close(batch.advantages, [[0, a, a, 0], [0, -a, -a, 0]], 1e-8)
    r = torch.tensor([[1, 1.5, 1, 1], [1, 0.5, 1, 1]], dtype=torch.float64)
    outputs = Outputs(logprobs=(batch.old_logprobs + r.log()).requires_grad_())
    loss = make("reinforce_pp").loss(outputs, batch, scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    close(loss.total.detach(), (-1.2 - 1 + 0.8 + 1) * a / 4, 1e-8)
    close(gradient, [[0, 0, -a / 4, 0], [0, 0, a / 4, 0]], 1e-8)
    close(loss.metrics["ratio/clip_high_fraction"], 1 / 4)
    close(loss.metrics["ratio/clip_low_fraction"], 1 / 4)


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
