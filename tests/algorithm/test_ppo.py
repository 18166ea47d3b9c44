"""Proximal policy optimisation: its critic's loss beside the policy's; all else is in test_all_algorithms.py."""

from dataclasses import replace

import torch

from tests.algorithm.algorithm_steps import close, full_step, make, scale_of


def test_value_loss_alone_is_the_losss_term_with_its_gradient():
    outputs, batch = full_step()
    for name in ("ppo", "a2c"):
        algorithm = make(name, value_coef=0.7)
        batch = algorithm.credit(batch)
        scale = replace(scale_of(batch), value_scale=1.5)
        loss = algorithm.loss(outputs, batch, scale)
        alone = algorithm.value_loss(outputs.values, batch, scale)
        close(alone.detach(), loss.metrics["loss/value"])
        (wanted,) = torch.autograd.grad(loss.total, outputs.values)
        (gradient,) = torch.autograd.grad(alone, outputs.values)
        close(gradient, wanted)


def test_bootstrapping_without_a_discount_is_warned_of():
    # d = R + V - V at the last token: the advantage there is R whatever V is, and the value's target V + R.
    assert "its own target" in make("ppo", bootstrap_truncated=True).warnings[0]
    assert make("ppo", bootstrap_truncated=True, gamma=0.99).warnings == ()
