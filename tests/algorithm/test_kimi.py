import math
from dataclasses import replace

import pytest
import torch

from rlft.algorithm.kimi import soft_mean
from rlft.types import Outputs
from tests.algorithm.algorithm_steps import close, full_step, hand_batch, make, scale_of


def test_the_soft_baseline_lies_between_mean_and_maximum_and_never_overflows():
    scores, ids = torch.tensor([1000.0, 1004.0, -9.0], dtype=torch.float64), torch.tensor([0, 0, 1])
    # Small tau: 1004 + tau log(1/2). Large tau: mean + variance / (2 tau) = 1002 + 4 / (2e6).
    close(soft_mean(scores, ids, 0.001), [1004 - 0.001 * math.log(2)] * 2 + [-9], 1e-12)
    close(soft_mean(scores, ids, 1e6), [1002 + 2e-6] * 2 + [-9], 1e-12)


def test_its_gradient_is_the_papers_squared_surrogates_over_2_tau():
    outputs, batch = full_step()
    algorithm = make("kimi", tau=0.3)
    batch = algorithm.credit(batch)
    ours = algorithm.loss(outputs, batch, scale_of(batch)).total
    log_ratio_B = torch.where(batch.loss_mask, outputs.logprobs - batch.old_logprobs, 0.0).sum(-1)
    advantages_B = batch.advantages.sum(-1) / batch.loss_mask.sum(-1).clamp(min=1)
    paper = ((advantages_B - 0.3 * log_ratio_B).square() / (2 * 0.3)).mean()
    (wanted,), (gradient,) = (torch.autograd.grad(x, outputs.logprobs) for x in (paper, ours))
    close(gradient, wanted)


@pytest.mark.parametrize("baseline", ["mean", "soft"])
def test_equal_groups_have_advantage_0_exactly_but_are_pulled_back_to_the_old_policy(baseline):
    # L = 0.6: tau L = 0.06 on both tokens, over 3 rows. Nothing of it at the first update, where L = 0.
    algorithm = make("kimi", baseline=baseline)
    batch = algorithm.credit(hand_batch([2, 1, 1], [0.1, 0.1, 0.1], [0, 0, 0], padding=0))
    assert (batch.advantages == 0).all()
    assert not algorithm.zero_gradient_rows(batch).any()
    moved = torch.tensor([[0, 0.2, 0.4], [0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    outputs = Outputs(logprobs=(batch.old_logprobs + moved).requires_grad_())
    (gradient,) = torch.autograd.grad(algorithm.loss(outputs, batch, scale_of(batch)).total, outputs.logprobs)
    close(gradient, [[0, 0.02, 0.02], [0, 0, 0], [0, 0, 0]])
    first = algorithm.loss(outputs, replace(batch, old_logprobs=None), scale_of(batch)).total
    assert (torch.autograd.grad(first, outputs.logprobs)[0] == 0).all()


def test_equal_groups_have_zero_gradient_without_tau_kl_and_entropy():
    batch = hand_batch([1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 1, 1])
    assert make("kimi", tau=0.0).zero_gradient_rows(batch).tolist() == [True, True, False, False]
    assert not make("kimi", tau=0.0, kl_coef=0.1).zero_gradient_rows(batch).any()
    assert not make("kimi", tau=0.0, entropy_coef=0.1).zero_gradient_rows(batch).any()
