from dataclasses import replace

import pytest
import torch

from rlft.types import LossScale, Outputs

nan, inf = float("nan"), float("inf")


@pytest.fixture
def valued(hand_batch):
    """Builds a batch of one row with these old values of its tokens, anything elsewhere, and reward R."""

    def build(values, reward, *, truncated=False):
        batch = hand_batch([len(values)], [reward], [0])
        old_values = torch.tensor([[nan, *values, inf]], dtype=torch.float64)
        return replace(batch, old_values=old_values, truncated=torch.tensor([truncated]))

    return build


# --- the critic's loss ----------------------------------------------------------------------------------------------


@pytest.fixture
def critic_step(hand_batch):
    """Three tokens with returns 3, old values 0 and values 1, 0.1 and 5; nothing for the policy to do."""
    batch = hand_batch([3], [0], [0], advantages=[0])
    mask = batch.loss_mask.double()
    batch = replace(batch, returns=3 * mask, old_values=0 * mask)
    values = torch.tensor([[nan, 1, 0.1, 5, inf]], dtype=torch.float64, requires_grad=True)
    return Outputs(logprobs=batch.old_logprobs.clone().requires_grad_(), values=values), batch


@pytest.mark.parametrize(
    ("clip", "value_scale", "losses", "slopes", "binds"),
    [
        # Errors -2, -2.9, 2: half their squares.
        (None, 1, [2, 4.205, 2], [-2, -2.9, 2], None),
        # The clip brings 1 and 5 to 0.2, the error -2.8 is the larger one: 3.92, without gradient. 0.1 is inside.
        (0.2, 1, [3.92, 4.205, 3.92], [0, -2.9, 0], 2 / 3),
        # In units of 2 the clip reaches 0.4: -2.6 for both, squares over 4.
        (0.2, 2, [0.845, 4.205 / 4, 0.845], [0, -2.9 / 4, 0], 2 / 3),
        (None, 2, [0.5, 4.205 / 4, 0.5], [-0.5, -2.9 / 4, 0.5], None),
    ],
)
def test_value_loss_by_hand(make, critic_step, close, clip, value_scale, losses, slopes, binds):
    outputs, batch = critic_step
    scale = LossScale(num_tokens=3, num_sequences=1, max_completion_tokens=6, value_scale=value_scale)
    algorithm = make("ppo", value_clip=clip, value_coef=0.5)
    loss = algorithm.loss(outputs, batch, scale)
    (gradient,) = torch.autograd.grad(loss.total, outputs.values)
    close(loss.total.detach(), 0.5 * sum(losses) / 3)
    close(loss.metrics["loss/value"], 0.5 * sum(losses) / 3)
    close(gradient, [[0, *(0.5 * slope / 3 for slope in slopes), 0]])
    assert ("value/clip_fraction" in loss.metrics) is (binds is not None)
    if binds is not None:
        close(loss.metrics["value/clip_fraction"], binds)


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


def test_variants_differ_from_ppo_in_the_keys_they_say(make):
    penalty = {"kl_to": "old", "kl_in": "loss", "kl_coef": 1.0, "kl_controller": "adaptive", "kl_target": 0.01}
    assert make("ppo_penalty") == make("ppo", surrogate="importance", **penalty)
    assert make("ppo_ptx") == make("ppo", ptx_coef=1.0)
    keys = {"estimator": "n_step", "whiten": False, "surrogate": "policy_gradient", "value_clip": None}
    assert make("a2c") == make("ppo", entropy_coef=0.01, **keys)


def test_no_row_has_zero_gradient_and_no_siblings_are_needed(make, valued):
    assert not make("ppo").zero_gradient_rows(valued([0, 0], 0)).any()
    assert make("ppo").min_group_size == 1


def test_a_missing_tensor_is_named(make, full_step, scale_of):
    outputs, batch = full_step()
    algorithm = make("ppo")
    with pytest.raises(ValueError, match="old_values is None"):
        algorithm.credit(replace(batch, old_values=None))
    credited = algorithm.credit(batch)
    with pytest.raises(ValueError, match="values is None, but the critic's loss"):
        algorithm.loss(replace(outputs, values=None), credited, scale_of(batch))
    with pytest.raises(ValueError, match="returns is None"):
        algorithm.value_loss(outputs.values, replace(credited, returns=None), scale_of(batch))


def test_bootstrapping_without_a_discount_is_warned_of(make):
    # d = R + V - V at the last token: the advantage there is R whatever V is, and the value's target V + R.
    assert "its own target" in make("ppo", bootstrap_truncated=True).warnings[0]
    assert make("ppo", bootstrap_truncated=True, gamma=0.99).warnings == ()
