import pytest
import torch

from rlft.ops.surrogate import clipped_surrogate


def at(r, a, dual_clip=None):
    ratio = torch.tensor([[r]], dtype=torch.float64, requires_grad=True)
    clipped = clipped_surrogate(
        ratio, torch.tensor([[a]], dtype=torch.float64), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
    )
    (gradient,) = torch.autograd.grad(clipped.loss.sum(), ratio)
    return clipped.loss.item(), gradient.item(), clipped.low.item(), clipped.high.item(), clipped.dual.item()


@pytest.mark.parametrize(
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
