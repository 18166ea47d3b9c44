import math
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


# --- credit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truncated", "bootstrap", "advantages"),
    [
        # V = 1, 2, 3, R = 6, lam = 1/2. d = 2 - 1, 3 - 2, 6 - 3; from the end 3, 1 + 3/2, 1 + 2.5/2.
        (False, True, [2.25, 2.5, 3]),
        # Cut off, V past the end is 3: d = 1, 1, 6 + 3 - 3; 6, 1 + 3, 1 + 2.
        (True, True, [3, 4, 6]),
        (True, False, [2.25, 2.5, 3]),
    ],
)
def test_generalised_advantages_and_returns_by_hand(make, valued, close, truncated, bootstrap, advantages):
    algorithm = make("ppo", lam=0.5, whiten=False, bootstrap_truncated=bootstrap)
    batch = algorithm.credit(valued([1, 2, 3], 6, truncated=truncated))
    close(batch.advantages, [[0, *advantages, 0]])
    close(batch.returns, [[0, *(a + v for a, v in zip(advantages, (1, 2, 3), strict=True)), 0]])


def test_n_step_advantages_by_hand(make, valued, close):
    # n = 2, gamma = 1/2, V = 1, 2, 3, R = 8: token 0 sees V_2 / 4 = 0.75, token 1 sees R / 2 = 4, token 2 sees 8.
    batch = make("a2c", n_steps=2, gamma=0.5).credit(valued([1, 2, 3], 8))
    close(batch.advantages, [[0, -0.25, 2, 5, 0]])
    close(batch.returns, [[0, 0.75, 4, 8, 0]])
    # Cut off: V past the end is 3. Token 1: 4 + 3 / 4. Token 2: 8 + 3 / 2.
    bootstrapping = make("a2c", n_steps=2, gamma=0.5, bootstrap_truncated=True)
    batch = bootstrapping.credit(valued([1, 2, 3], 8, truncated=True))
    close(batch.advantages, [[0, -0.25, 2.75, 6.5, 0]])


def test_whitening_leaves_the_returns_alone(make, valued, close):
    # lam 1, V = 0, 2, R = 2: advantages 2 and 0, mean 1, deviation sqrt(2); returns 2 and 2.
    batch = make("ppo", lam=1.0).credit(valued([0, 2], 2))
    close(batch.advantages, [[0, math.sqrt(0.5), -math.sqrt(0.5), 0]], 1e-7)
    close(batch.returns, [[0, 2, 2, 0]])


def test_kl_and_steps_are_rewards_of_their_tokens(make, valued, close):
    # V = 0 and lam = 1: A is what is still to come. beta 1/2 times old - reference = 0.2, 0.6; a step of 3 at token 0.
    batch = valued([0, 0], 1)
    reference = batch.old_logprobs - torch.tensor([[nan, 0.2, 0.6, nan]], dtype=torch.float64)
    scores = torch.tensor([[nan, 3, 0, nan]], dtype=torch.float64)
    batch = replace(batch, reference_logprobs=reference, token_rewards=scores)
    credited = make("ppo", lam=1.0, whiten=False, kl_coef=0.5).credit(batch)
    close(credited.advantages, [[0, 3 - 0.1 + 0.7, 0.7, 0]])


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


def test_ppo_clips_by_hand(make, hand_batch, scale_of, close):
    # A = 1 with ratios 1.5 and 0.5: 1.2 without gradient, 0.5. Errors of values are 0. Mean over 2 tokens.
    batch = hand_batch([2], [0], [0], advantages=[1])
    zero = torch.zeros_like(batch.old_logprobs)
    r = torch.tensor([[1, 1.5, 0.5, 1]], dtype=torch.float64)
    outputs = Outputs(logprobs=(batch.old_logprobs + r.log()).requires_grad_(), values=zero)
    loss = make("ppo").loss(outputs, replace(batch, returns=zero, old_values=zero), scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    close(loss.total.detach(), -(1.2 + 0.5) / 2)
    close(gradient, [[0, 0, -0.5 / 2, 0]])
    close(loss.metrics["ratio/clip_high_fraction"], 1 / 2)


def test_ppo_penalty_has_no_clip_but_a_price_on_the_distance_to_the_old_policy(make, hand_batch, scale_of, close):
    # A = 1, r = 2 and 1/2, beta 3. -r A = -2, -1/2. KL(old || policy) = r - 1 - log r: 1 - log 2, log 2 - 1/2.
    # Gradients -r A = -2, -1/2 and beta (r - 1) = 3, -3/2. Means over 2 tokens.
    batch = hand_batch([2], [0], [0], advantages=[1])
    zero = torch.zeros_like(batch.old_logprobs)
    r = torch.tensor([[1, 2, 0.5, 1]], dtype=torch.float64)
    outputs = Outputs(logprobs=(batch.old_logprobs + r.log()).requires_grad_(), values=zero)
    algorithm = make("ppo_penalty", kl_coef=3.0)
    loss = algorithm.loss(outputs, replace(batch, returns=zero, old_values=zero), scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    close(loss.metrics["loss/policy"], -2.5 / 2)
    close(loss.metrics["loss/kl"], 3 * 0.5 / 2)
    close(loss.total.detach(), (-2.5 + 1.5) / 2)
    close(gradient, [[0, (-2 + 3) / 2, (-0.5 - 1.5) / 2, 0]])
    close(loss.metrics["ratio/clip_high_fraction"], 0.0)
    assert not algorithm.needs_reference


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


def test_a2c_by_hand(make, hand_batch, scale_of, close):
    # Two tokens, A = 2, lp = -1 at ratio e to the old policy, which has no say: -A lp = 2. Entropies 1 and 3, mean 2,
    # times -0.01. Values 1 and return 4: 0.5 * 0.5 * 9, unclipped.
    batch = hand_batch([2], [0], [0], advantages=[2])
    ones = torch.ones_like(batch.old_logprobs)
    batch = replace(batch, old_logprobs=batch.old_logprobs - 1, returns=4 * ones, old_values=0 * ones)
    entropy = torch.tensor([[nan, 1, 3, nan]], dtype=torch.float64, requires_grad=True)
    outputs = Outputs(logprobs=batch.sampled_logprobs.clone().requires_grad_(), entropy=entropy, values=ones)
    loss = make("a2c").loss(outputs, batch, scale_of(batch))
    policy, bonus = torch.autograd.grad(loss.total, [outputs.logprobs, entropy])
    close(loss.total.detach(), 2 - 0.02 + 2.25)
    close(policy, [[0, -1, -1, 0]])
    close(bonus, [[0, -0.005, -0.005, 0]])
    assert "value/clip_fraction" not in loss.metrics


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
