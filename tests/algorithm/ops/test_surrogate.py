"""The losses of tokens, of the policy and of the critic."""

import math

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.surrogate import (
    Mismatch,
    RatioLevel,
    cispo,
    clipped_surrogate,
    gmpo,
    mismatch_correction,
    ratio,
    sapo,
    sequence_ratio,
    token_ratio,
    value_loss,
)
from tests.algorithm.algorithm_steps import close

nan, inf = float("nan"), float("inf")


def at(r, a, dual_clip=None):
    ratio = torch.tensor([[r]], dtype=torch.float64, requires_grad=True)
    clipped = clipped_surrogate(
        ratio, torch.tensor([[a]], dtype=torch.float64), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
    )
    (gradient,) = torch.autograd.grad(clipped.loss.sum(), ratio)
    return clipped.loss.item(), gradient.item(), clipped.low.item(), clipped.high.item(), clipped.dual.item()


@each(("r", "a", "loss", "gradient", "low", "high"), [
    (3.0, 1.0, -1.28, 0.0, False, True),  # above, and would gain: clipped
    (1.5, -1.0, 1.5, 1.0, False, False),  # above, but losing: the gradient flows
    (0.5, 1.0, -0.5, -1.0, False, False),  # below, but losing: the gradient flows
    (0.5, -2.0, 1.6, 0.0, True, False),  # below, and would gain: -0.8 * -2, clipped
    (1.1, 2.0, -2.2, -2.0, False, False),  # inside
    (1.5, 0.0, 0.0, 0.0, False, False),  # outside, but nothing binds without an advantage
])  # fmt: skip
def test_only_the_side_that_would_gain_is_clipped_and_counted(r, a, loss, gradient, low, high):
    got = at(r, a)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-12)
    assert got[2:] == (low, high, False)


def test_dual_clip_bounds_the_loss_of_a_bad_token_whose_ratio_exploded():
    assert at(1000.0, -2.0) == (2000.0, 2.0, False, False, False)
    assert at(1000.0, -2.0, dual_clip=3.0) == (6.0, 0.0, False, False, True)  # max(-2000, 3 * -2) = -6
    assert at(2.5, -2.0, dual_clip=3.0) == (5.0, 2.0, False, False, False)  # not reached
    assert at(1000.0, 2.0, dual_clip=3.0)[:2] == (-2.56, 0.0)  # says nothing about good tokens


# Ratios below, inside and above 0.75 .. 1.5, once for a good token and once for a bad one; then without an advantage.
RATIO = torch.tensor([[0.5, 1.25, 4.0, 0.5, 1.25, 4.0, 4.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, 2.0, 2.0, -1.0, -1.0, -1.0, 0.0]], dtype=torch.float64)


def at_ratio(clip_low, clip_high):
    """CISPO where lp = log r (so old = 0) and r has a gradient of its own: (surrogate, its gradient in lp)."""
    logprobs = RATIO.log().requires_grad_()
    surrogate = cispo(logprobs, logprobs.exp(), ADVANTAGES, clip_low=clip_low, clip_high=clip_high)
    return surrogate, torch.autograd.grad(surrogate.loss.sum(), logprobs)[0]


def test_cispo_counts_a_cut_weight_on_either_side_of_either_sign_but_not_without_an_advantage():
    surrogate, _ = at_ratio(0.25, 0.5)
    assert surrogate.low.tolist() == [[True, False, False, True, False, False, False]]
    assert surrogate.high.tolist() == [[False, False, True, False, False, True, False]]
    assert not surrogate.dual.any()


def test_cispo_has_no_lower_clip_at_clip_low_1():
    surrogate, gradient = at_ratio(1.0, 0.5)
    assert not surrogate.low.any()
    torch.testing.assert_close(gradient[0, [0, 3]], torch.tensor([-1.0, 0.5], dtype=torch.float64), rtol=1e-15, atol=0)


def gated(ratio, advantages):
    """SAPO with tau 2 where A > 0 and 4 elsewhere: (surrogate, its gradient in the ratio)."""
    ratio = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    surrogate = sapo(ratio, torch.tensor([advantages], dtype=torch.float64), tau_positive=2.0, tau_negative=4.0)
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), ratio)
    return surrogate, gradient


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
    return loss.item(), values.grad.item(), binds.item()


@each(("value", "target", "loss", "gradient", "binds"), CASES)
def test_the_larger_of_the_plain_and_the_clipped_error_by_hand(value, target, loss, gradient, binds):
    assert value_loss_at(value, target, 10.0, 2.0, 1.0) == (loss, gradient, binds)


def test_nothing_binds_by_rounding_where_no_value_has_left_the_range():
    # old + (V - old) is not V in floating point: some of these would look clipped.
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 1, 1000, generator=generator, dtype=torch.float64).clamp(-1, 1).unbind()
    values, old = 0.1 * values, 0.01 * old
    assert (old + (values - old) != values).any()
    loss, binds = value_loss(values, returns, old, 0.2, 1.0)
    assert not binds.any()
    assert torch.equal(loss, 0.5 * (values - returns).square())


# -- ratios ------------------------------------------------------------------------------------------------------------
LOG2, LOG8 = math.log(2), math.log(8)
OLD = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
NEW = OLD + torch.tensor([[LOG2, LOG8, 50.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False]])


def test_token_ratio_is_finite_with_finite_gradient_at_any_distance():
    new = (OLD + torch.tensor([[100.0, -100.0, 0.0]], dtype=torch.float64)).requires_grad_()
    r = token_ratio(new, OLD)
    close(r.detach(), [[math.exp(20), math.exp(-20), 1.0]])
    r.sum().backward()
    assert new.grad.isfinite().all()


def test_sequence_ratio_of_an_empty_row_is_1():
    close(sequence_ratio(NEW, OLD, torch.zeros_like(MASK)), [[1.0]])


@pytest.mark.parametrize("level", RatioLevel)
def test_every_level_gives_one_value_a_token_and_1_at_the_old_policy(level):
    assert torch.equal(ratio(OLD, OLD, MASK, level), torch.ones_like(OLD))


# The trainer finds the sampled tokens 4, 1 and 0.25 times as likely as the generator did (geometric mean 1), and in the
# second row 4, 4 times (geometric mean 4). Junk outside the mask.
SAMPLED = torch.tensor([[-3.0, -3.0, -3.0], [-3.0, -3.0, 9.0]], dtype=torch.float64)
TRAINER = SAMPLED + torch.tensor([[4.0, 1.0, 0.25], [4.0, 4.0, 1e6]], dtype=torch.float64).log()
SAMPLED_MASK = torch.tensor([[True, True, True], [True, True, False]])


def correct(mode, old=TRAINER, sampled=SAMPLED, mask=SAMPLED_MASK):
    return mismatch_correction(old, sampled, mask, mode, low=0.5, high=2.0)


@each(("mode", "weight", "dropped", "capped"), [
    (Mismatch.off, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    (Mismatch.auto, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    (Mismatch.token_truncate, [2, 1, 0.25, 2, 2], [0, 0, 0, 0, 0], [1, 0, 0, 1, 1]),
    (Mismatch.token_mask, [0, 1, 0, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]),
    (Mismatch.sequence_truncate, [1, 1, 1, 2, 2], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]),
    (Mismatch.sequence_mask, [1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]),
    # products: 4 * 1 * 0.25 = 1, and 4 * 4 = 16
    (Mismatch.sequence_product_truncate, [1, 1, 1, 2, 2], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]),
    (Mismatch.sequence_product_mask, [1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]),
])  # fmt: skip
def test_weights_by_hand(mode, weight, dropped, capped):
    correction = correct(mode)
    assert correction.weight[SAMPLED_MASK].tolist() == pytest.approx(weight, abs=1e-12)
    assert correction.dropped[SAMPLED_MASK].tolist() == dropped
    assert correction.capped[SAMPLED_MASK].tolist() == capped
    assert not correction.dropped[~SAMPLED_MASK].any()
    assert not correction.capped[~SAMPLED_MASK].any()


def test_a_product_of_any_length_stays_a_number():
    for sign in (1, -1):
        sampled = torch.full((1, 5000), -1.0)
        mask = torch.ones_like(sampled, dtype=torch.bool)
        for mode in (Mismatch.sequence_product_truncate, Mismatch.sequence_product_mask):
            assert correct(mode, sampled + sign, sampled, mask).weight.isfinite().all()


@each("mode", Mismatch)
def test_no_gradient_flows_through_the_weight(mode):
    assert not correct(mode, old=TRAINER.clone().requires_grad_()).weight.requires_grad
