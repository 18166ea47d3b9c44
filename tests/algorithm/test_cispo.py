import math
from dataclasses import replace

import torch

from rlft.types import Outputs


def test_every_token_keeps_its_gradient_and_the_weight_has_an_upper_end_only(make, hand_batch, scale_of, close):
    # Ratios 8 and 0.1 with A = 1, 8 and 2 with A = -2; every old log-prob is -1. w = min(r, 5): 5, 0.1, 5, 2.
    # Loss -w A lp over 4 tokens, gradient -w A / 4: nothing is cut off on either side.
    batch = hand_batch([2, 2], [0, 0], [0, 0], advantages=[1, -2])
    r = torch.tensor([[1, 8, 0.1, 1], [1, 8, 2, 1]], dtype=torch.float64)
    outputs = Outputs(logprobs=(batch.old_logprobs + r.log()).requires_grad_())
    loss = make("cispo").loss(outputs, batch, scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    lp = {ratio: math.log(ratio) - 1 for ratio in (8, 0.1, 2)}
    close(loss.total.detach(), (-5 * lp[8] - 0.1 * lp[0.1] + 10 * lp[8] + 4 * lp[2]) / 4)
    close(gradient, [[0, -5 / 4, -0.1 / 4, 0], [0, 10 / 4, 4 / 4, 0]])
    close(loss.metrics["ratio/clip_high_fraction"], 2 / 4)
    close(loss.metrics["ratio/clip_low_fraction"], 0.0)


def test_its_gradient_is_that_of_a_weighted_log_likelihood(make, full_step, scale_of, close):
    outputs, batch = full_step()
    algorithm = make("cispo", clip_low=0.3, clip_high=0.2)
    batch = algorithm.credit(batch)
    loss = algorithm.loss(outputs, batch, scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    weight = (outputs.logprobs.detach() - batch.old_logprobs).exp().clamp(0.7, 1.2)
    close(gradient, -weight * batch.advantages / batch.loss_mask.sum())
    assert loss.metrics["ratio/clip_low_fraction"] > 0
    assert loss.metrics["ratio/clip_high_fraction"] > 0


def test_advantages_are_grpos(make, full_step):
    _, batch = full_step()
    batch = replace(batch, token_rewards=None, step_ends=None)
    assert torch.equal(make("cispo").credit(batch).advantages, make("grpo").credit(batch).advantages)


def test_cispo_differs_from_grpo_in_four_keys_only(make):
    assert make("cispo") == make("grpo", surrogate="cispo", clip_low=1.0, clip_high=4.0, aggregate="token_mean")
