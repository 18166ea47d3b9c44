"""The losses of tokens, of the policy and of the critic."""

from __future__ import annotations

import math

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.surrogate import (
    cispo,
    clipped_surrogate,
    gmpo,
    importance,
    mirror_descent,
    policy_gradient,
    sapo,
    value_loss,
)

nan, inf = float("nan"), float("inf")


def close(value, expected):
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def at(r, a, dual_clip=None):
    ratio = torch.tensor([[r]], dtype=torch.float64, requires_grad=True)
    clipped = clipped_surrogate(
        ratio, torch.tensor([[a]], dtype=torch.float64), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
    )
    (gradient,) = torch.autograd.grad(clipped.loss.sum(), ratio)
    return clipped.loss.item(), gradient.item(), clipped.low.item(), clipped.high.item(), clipped.dual.item()


@each(
    ("r", "a", "loss", "gradient", "low", "high"),
    [
        (3.0, 1.0, -1.28, 0.0, False, True),  # above, and would gain: clipped
        (1.5, -1.0, 1.5, 1.0, False, False),  # above, but losing: the gradient flows
        (0.5, 1.0, -0.5, -1.0, False, False),  # below, but losing: the gradient flows
        (0.5, -2.0, 1.6, 0.0, True, False),  # below, and would gain: -0.8 * -2, clipped
        (1.1, 2.0, -2.2, -2.0, False, False),  # inside
        (1.5, 0.0, 0.0, 0.0, False, False),  # outside, but nothing binds without an advantage
    ],
)
def test_only_the_side_that_would_gain_is_clipped_and_counted(r, a, loss, gradient, low, high):
    got = at(r, a)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-12)
    assert got[2:] == (low, high, False)


def test_dual_clip_bounds_the_loss_of_a_bad_token_whose_ratio_exploded():
    assert at(1000.0, -2.0) == (2000.0, 2.0, False, False, False)
    assert at(1000.0, -2.0, dual_clip=3.0) == (6.0, 0.0, False, False, True)  # max(-2000, 3 * -2) = -6
    assert at(2.5, -2.0, dual_clip=3.0) == (5.0, 2.0, False, False, False)  # not reached
    assert at(1000.0, 2.0, dual_clip=3.0)[:2] == (-2.56, 0.0)  # says nothing about good tokens


def test_at_ratio_1_the_gradient_is_the_advantage():
    for a in (-1.5, 0.0, 2.5):
        assert at(1.0, a)[:2] == (-a, -a)


def test_policy_gradient_is_minus_advantage_times_log_prob_and_never_binds():
    logprobs = torch.tensor([[-2.0, -0.5, -3.0]], dtype=torch.float64, requires_grad=True)
    surrogate = policy_gradient(logprobs, torch.tensor([[1.5, -4.0, 0.0]], dtype=torch.float64))
    assert surrogate.loss.tolist() == [[3.0, -2.0, 0.0]]
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), logprobs)
    assert gradient.tolist() == [[-1.5, 4.0, 0.0]]
    assert not (surrogate.low | surrogate.high | surrogate.dual).any()


def test_importance_is_minus_ratio_times_advantage_at_any_ratio_and_never_binds():
    ratios = torch.tensor([[0.125, 1.0, 1000.0, 3.0]], dtype=torch.float64, requires_grad=True)
    surrogate = importance(ratios, torch.tensor([[-2.0, 1.5, 2.0, 0.0]], dtype=torch.float64))
    assert surrogate.loss.tolist() == [[0.25, -1.5, -2000.0, 0.0]]
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), ratios)
    assert gradient.tolist() == [[2.0, -1.5, -2.0, 0.0]]
    assert not (surrogate.low | surrogate.high | surrogate.dual).any()


# Ratios below, inside and above 0.75 .. 1.5, once for a good token and once for a bad one; then without an advantage.
RATIO = torch.tensor([[0.5, 1.25, 4.0, 0.5, 1.25, 4.0, 4.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, 2.0, 2.0, -1.0, -1.0, -1.0, 0.0]], dtype=torch.float64)


def at_ratio(clip_low, clip_high):
    """CISPO where lp = log r (so old = 0) and r has a gradient of its own: (surrogate, its gradient in lp)."""
    logprobs = RATIO.log().requires_grad_()
    surrogate = cispo(logprobs, logprobs.exp(), ADVANTAGES, clip_low=clip_low, clip_high=clip_high)
    return surrogate, torch.autograd.grad(surrogate.loss.sum(), logprobs)[0]


def test_cispo_weighs_the_log_prob_by_the_clamped_ratio_and_keeps_every_tokens_gradient():
    surrogate, gradient = at_ratio(0.25, 0.5)
    # -sg[clamp(r)] A: beyond the clip it is 1.5 or 0.75 times the advantage, not 0, and inside it is exactly r A.
    weight = torch.tensor([[0.75, 1.25, 1.5, 0.75, 1.25, 1.5, 1.5]], dtype=torch.float64)
    torch.testing.assert_close(gradient, -weight * ADVANTAGES, rtol=1e-15, atol=0)
    torch.testing.assert_close(surrogate.loss.detach(), -weight * ADVANTAGES * RATIO.log(), rtol=1e-15, atol=0)


def test_cispo_counts_a_cut_weight_on_either_side_of_either_sign_but_not_without_an_advantage():
    surrogate, _ = at_ratio(0.25, 0.5)
    assert surrogate.low.tolist() == [[True, False, False, True, False, False, False]]
    assert surrogate.high.tolist() == [[False, False, True, False, False, True, False]]
    assert not surrogate.dual.any()


def test_cispo_has_no_lower_clip_at_clip_low_1():
    surrogate, gradient = at_ratio(1.0, 0.5)
    assert not surrogate.low.any()
    torch.testing.assert_close(gradient[0, [0, 3]], torch.tensor([-1.0, 0.5], dtype=torch.float64), rtol=1e-15, atol=0)


# Row 0: three tokens with a gap, moved by 1, -3 and 4 nats (together 2). Row 1: one token, moved by -2. Row 2: none.
MASK = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
OLD = torch.tensor([[-2.0, nan, -1.0, -5.0], [inf, -1.0, nan, 0.0], [nan] * 4], dtype=torch.float64)
NEW = torch.tensor([[-1.0, inf, -4.0, -1.0], [nan, -3.0, 0.0, inf], [-inf] * 4], dtype=torch.float64)
CENTRED = torch.tensor([[3.0, nan, 3.0, 3.0], [inf, -1.0, 0.0, 0.0], [nan] * 4], dtype=torch.float64)
TAU = 0.5


def test_mirror_descent_rows_sum_to_the_surrogate_over_2_tau():
    loss = mirror_descent(NEW, OLD, CENTRED, MASK, TAU)
    # Row 0: -3 * (-1 - 4 - 1) + 0.25 * 2^2 = 19. Row 1: 1 * (-3) + 0.25 * 2^2 = -2. Row 2: 0.
    torch.testing.assert_close(loss.sum(-1), torch.tensor([19.0, -2.0, 0.0], dtype=torch.float64), rtol=1e-12, atol=0)
    assert (loss[~MASK] == 0).all()
    # The same from (R - b - tau L)^2 / (2 tau): less its part without L, that is (3 - 1)^2 - 9 = -5 and
    # (-1 + 1)^2 - 1 = -1 over 2 tau; then -(R - b) lp_old, from lp = L + lp_old: -3 * -8 = 24 and 1 * -1 = -1.
    assert loss.sum(-1).tolist() == pytest.approx([-5 / (2 * TAU) + 24, -1 / (2 * TAU) - 1, 0], abs=1e-12)


def test_mirror_descent_gradient_is_minus_advantage_plus_tau_times_the_whole_rows_log_ratio():
    new = NEW.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mirror_descent(new, OLD, CENTRED, MASK, TAU).sum(), new)
    # Row 0: -3 + 0.5 * 2 = -2 on each of its tokens; row 1: 1 + 0.5 * -2 = 0.
    assert gradient[MASK].tolist() == pytest.approx([-2.0, -2.0, -2.0, 0.0], abs=1e-12)
    assert (gradient[~MASK] == 0).all()


def gated(ratio, advantages):
    """SAPO with tau 2 where A > 0 and 4 elsewhere: (surrogate, its gradient in the ratio)."""
    ratio = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    surrogate = sapo(ratio, torch.tensor([advantages], dtype=torch.float64), tau_positive=2.0, tau_negative=4.0)
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), ratio)
    return surrogate, gradient


def test_sapos_gate_is_a_sigmoid_whose_temperature_is_that_of_the_advantages_sign():
    # tau (r - 1) = ln 3, -ln 3, 0: sigmoid 3/4, 1/4, 1/2. Gate 4 / tau * sigmoid, slope 4 p (1 - p) = 3/4, 3/4, 1.
    r = [1 + math.log(3) / 2, 1 - math.log(3) / 2, 1.0, 1 + math.log(3) / 4, 1 - math.log(3) / 4, 1.0, 1.5]
    surrogate, gradient = gated(r, [2.0, 2.0, 2.0, -1.0, -1.0, -1.0, 0.0])
    assert surrogate.loss[0].tolist() == pytest.approx([-3.0, -1.0, -2.0, 0.75, 0.25, 0.5, 0.0], abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([-1.5, -1.5, -2.0, 0.75, 0.75, 1.0, 0.0], abs=1e-12)
    assert not (surrogate.low | surrogate.high | surrogate.dual).any()


def test_sapos_gate_closes_far_from_ratio_1_and_its_loss_stays_finite():
    # A gate that is wide open is 4 / tau = 1, one that is shut 0; e^20 is the largest ratio there is.
    surrogate, gradient = gated([math.exp(20), math.exp(20), 0.0], [-1.0, 1.0, -1.0])
    shut = 1 / (1 + math.exp(4))
    assert surrogate.loss[0].tolist() == pytest.approx([1.0, -2.0, shut], abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([0.0, 0.0, 4 * shut * (1 - shut)], abs=1e-12)


def geometric(log_ratio, advantages, mask):
    """GMPO with the range exp(-0.5) .. exp(0.4), where every old log-prob is -1: (surrogate, its gradient in lp)."""
    old = torch.full((len(log_ratio), len(log_ratio[0])), -1.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    advantages, mask = torch.tensor(advantages, dtype=torch.float64), torch.tensor(mask)
    surrogate = gmpo(logprobs, old, advantages, mask, clip_low=0.5, clip_high=0.4)
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), logprobs)
    return surrogate, gradient


def test_gmpo_is_the_geometric_mean_of_token_ratios_each_clipped_on_the_side_that_would_gain():
    # Row 0, A = 1: 0.1, 0.7, -0.9 become 0.1, 0.4, -0.9, mean -0.4 / 3. Row 1, A = -2: 0.1, 0.7, -0.5, mean 0.3 / 3.
    # Row 2 has no advantage. A token that is not clipped has 1 / 3 of the gradient of each of its row's three losses.
    rows = [[0.1, 0.7, -0.9]] * 3
    surrogate, gradient = geometric(rows, [[1.0] * 3, [-2.0] * 3, [0.0] * 3], [[True] * 3] * 3)
    good, bad = math.exp(-0.4 / 3), 2 * math.exp(0.1)
    close(surrogate.loss, [[-good] * 3, [bad] * 3, [0.0] * 3])
    close(gradient, [[-good, 0.0, -good], [bad, bad, 0.0], [0.0] * 3])
    assert surrogate.high.tolist() == [[False, True, False], [False] * 3, [False] * 3]
    assert surrogate.low.tolist() == [[False] * 3, [False, False, True], [False] * 3]
    assert not surrogate.dual.any()


def test_gmpo_gives_each_token_the_mean_that_its_own_advantage_asks_for():
    # Means of the row: clipped above (0.4 - 0.9) / 2 = -0.25, clipped below (0.7 - 0.5) / 2 = 0.1.
    surrogate, _ = geometric([[0.7, -0.9]], [[3.0, -2.0]], [[True, True]])
    close(surrogate.loss, [[-3 * math.exp(-0.25), 2 * math.exp(0.1)]])
    assert surrogate.high.tolist() == [[True, False]]
    assert surrogate.low.tolist() == [[False, True]]


@each("junk", [nan, inf, -inf, 1e308])
def test_gmpo_is_exactly_0_outside_the_mask_and_does_not_look_there(junk):
    # The mean is over the two masked tokens: (0.1 + 0.3) / 2. The second row has none.
    surrogate, gradient = geometric([[0.1, junk, 0.3], [junk] * 3], [[1.0] * 3] * 2, [[True, False, True], [False] * 3])
    s = math.exp(0.2)
    close(surrogate.loss, [[-s, 0.0, -s], [0.0] * 3])
    close(gradient, [[-s, 0.0, -s], [0.0] * 3])
    assert surrogate.loss[0, 1] == gradient[0, 1] == 0
    assert not surrogate.high.any()


def test_gmpo_stays_finite_where_a_ratio_explodes():
    # 1000 nats count as 20, and clipped below nothing holds them back: mean (20 - 0.5) / 2.
    surrogate, gradient = geometric([[1000.0, -1000.0]], [[-1.0, -1.0]], [[True, True]])
    close(surrogate.loss, [[math.exp(9.75)] * 2])
    assert gradient.isfinite().all()


# Around the old value 10: V inside the clip, above and below it, on its edge; the return beyond V or on the way back.
CASES = [
    # V, ret, loss, gradient, binds; c = 2, scale 1
    (11.0, 14.0, 4.5, -3.0, False),  # inside 8 .. 12: 0.5 * 3^2
    (13.0, 14.0, 2.0, 0.0, True),  # clipped to 12, which is farther from 14: 0.5 * 2^2
    (13.0, 9.0, 8.0, 4.0, False),  # clipped to 12, nearer to 9: the plain 0.5 * 4^2 is larger, and its gradient flows
    (7.0, 6.0, 2.0, 0.0, True),  # clipped to 8, farther from 6
    (7.0, 12.0, 12.5, -5.0, False),  # clipped to 8, nearer to 12
    (12.0, 14.0, 2.0, -2.0, False),  # on the edge
    (20.0, 16.0, 8.0, 4.0, False),  # clipped to 12, as far from 16 as 20 is: the plain branch
]


def value_loss_at(value, target, old, clip, scale):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[target]], dtype=torch.float64, requires_grad=True)
    olds = None if old is None else torch.tensor([[old]], dtype=torch.float64, requires_grad=True)
    loss, binds = value_loss(values, targets, olds, clip, scale)
    loss.sum().backward()
    assert targets.grad is None
    assert olds is None or olds.grad is None
    assert values.grad is not None
    return loss.item(), values.grad.item(), binds.item()


@each(("value", "target", "loss", "gradient", "binds"), CASES)
def test_the_larger_of_the_plain_and_the_clipped_error_by_hand(value, target, loss, gradient, binds):
    assert value_loss_at(value, target, 10.0, 2.0, 1.0) == (loss, gradient, binds)


@each(("value", "target", "loss", "gradient", "binds"), CASES)
def test_in_units_of_4_times_the_scale_the_loss_is_the_same_and_the_gradient_a_quarter(
    value, target, loss, gradient, binds
):
    assert value_loss_at(4 * value, 4 * target, 40.0, 2.0, 4.0) == (loss, gradient / 4, binds)


@each(("value", "target"), [case[:2] for case in CASES])
@each(("old", "clip"), [(10.0, None), (None, 2.0), (None, None)])
def test_without_a_clip_or_old_values_it_is_half_the_squared_error(value, target, old, clip):
    error = value - target
    assert value_loss_at(value, target, old, clip, 1.0) == (error**2 / 2, error, False)
    assert value_loss_at(value, target, old, clip, 2.0) == (error**2 / 8, error / 4, False)


def test_nothing_binds_by_rounding_where_no_value_has_left_the_range():
    # old + (V - old) is not V in floating point: some of these would look clipped.
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 1, 1000, generator=generator, dtype=torch.float64).clamp(-1, 1).unbind()
    values, old = 0.1 * values, 0.01 * old
    assert (old + (values - old) != values).any()
    loss, binds = value_loss(values, returns, old, 0.2, 1.0)
    assert not binds.any()
    assert torch.equal(loss, 0.5 * (values - returns).square())
