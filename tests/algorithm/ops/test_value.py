import torch
from in_one_test import each

from rlft.algorithm.ops.value import value_loss

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


def at(value, target, old, clip, scale):
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
    assert at(value, target, 10.0, 2.0, 1.0) == (loss, gradient, binds)


@each(("value", "target", "loss", "gradient", "binds"), CASES)
def test_in_units_of_4_times_the_scale_the_loss_is_the_same_and_the_gradient_a_quarter(
    value, target, loss, gradient, binds
):
    assert at(4 * value, 4 * target, 40.0, 2.0, 4.0) == (loss, gradient / 4, binds)


@each(("value", "target"), [case[:2] for case in CASES])
@each(("old", "clip"), [(10.0, None), (None, 2.0), (None, None)])
def test_without_a_clip_or_old_values_it_is_half_the_squared_error(value, target, old, clip):
    error = value - target
    assert at(value, target, old, clip, 1.0) == (error**2 / 2, error, False)
    assert at(value, target, old, clip, 2.0) == (error**2 / 8, error / 4, False)


def test_nothing_binds_by_rounding_where_no_value_has_left_the_range():
    # old + (V - old) is not V in floating point: some of these would look clipped.
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 1, 1000, generator=generator, dtype=torch.float64).clamp(-1, 1).unbind()
    values, old = 0.1 * values, 0.01 * old
    assert (old + (values - old) != values).any()
    loss, binds = value_loss(values, returns, old, 0.2, 1.0)
    assert not binds.any()
    assert torch.equal(loss, 0.5 * (values - returns).square())


def test_gradient_agrees_with_central_differences_wherever_the_clip_stands():
    generator = torch.Generator().manual_seed(1)
    values, returns, old = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64).unbind()
    values.requires_grad_()
    loss, binds = value_loss(values, returns, old, 0.5, 1.3)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert binds.any()
    assert not binds.all()
    assert (gradient[binds] == 0).all()
    # Each token's loss is its own, so all move at once. Quadratic on both sides: only rounding, 1e-16 * 10 / 1e-5.
    up, down = (value_loss(values.detach() + h, returns, old, 0.5, 1.3)[0] for h in (1e-5, -1e-5))
    torch.testing.assert_close((up - down) / 2e-5, gradient, rtol=0, atol=1e-9)
