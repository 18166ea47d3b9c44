from dataclasses import replace

import torch

nan, inf = float("nan"), float("inf")


# --- the critic's loss ----------------------------------------------------------------------------------------------


def test_value_loss_alone_is_the_losss_term_with_its_gradient(make, full_step, scale_of, close):
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


def test_values_and_policy_have_separate_gradients(make, full_step, scale_of):
    outputs, batch = full_step()
    algorithm = make("ppo")
    batch = algorithm.credit(batch)
    detached = replace(outputs, values=outputs.values.detach())
    both = torch.autograd.grad(algorithm.loss(outputs, batch, scale_of(batch)).total, outputs.logprobs)
    policy = torch.autograd.grad(algorithm.loss(detached, batch, scale_of(batch)).total, outputs.logprobs)
    assert torch.equal(both[0], policy[0])
    assert algorithm.loss(detached, batch, scale_of(batch)).metrics["loss/value"] > 0


# --- the variants ---------------------------------------------------------------------------------------------------


def test_text_adds_its_mean_negative_log_likelihood(make, close):
    # Log-probs -1, -2, -4 of text among 5 tokens of the whole update: 2 * 7 / 5, gradient -2 / 5 on each.
    logprobs = torch.tensor([[nan, -1, -2], [-4, inf, nan]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False, True, True], [True, False, False]])
    loss = make("ppo_ptx", ptx_coef=2.0).text_loss(logprobs, mask, num_tokens=5)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    close(loss.detach(), 14 / 5)
    close(gradient, [[0, -0.4, -0.4], [-0.4, 0, 0]])
    assert make("ppo_ptx").needs_text
    assert not make("ppo").needs_text
    assert make("ppo").text_loss(logprobs, mask, num_tokens=5) == 0


def test_bootstrapping_without_a_discount_is_warned_of(make):
    # d = R + V - V at the last token: the advantage there is R whatever V is, and the value's target V + R.
    assert "its own target" in make("ppo", bootstrap_truncated=True).warnings[0]
    assert make("ppo", bootstrap_truncated=True, gamma=0.99).warnings == ()
