import math

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.kl import KLEstimator, k1, k2, k3, k3_unbiased, kl

# Policy twice and half as likely as the reference: d = log 2, -log 2, 0.
REFERENCE = torch.tensor([-2.0, -2.0, -2.0], dtype=torch.float64)
D = torch.tensor([math.log(2), -math.log(2), 0.0], dtype=torch.float64)
ESTIMATORS = [KLEstimator.k1, KLEstimator.k2, KLEstimator.k3, KLEstimator.k3_unbiased]


def close(value, expected, tol=1e-12):
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=torch.float64), rtol=tol, atol=tol)


def test_k1_is_the_log_ratio_and_k2_half_its_square():
    close(k1(REFERENCE + D, REFERENCE), D)
    # log(2)^2 / 2 = 0.2402265069591007
    close(k2(REFERENCE + D, REFERENCE), [0.2402265069591007, 0.2402265069591007, 0.0])


def test_k3_has_the_reference_over_the_policy_in_its_exponential():
    # exp(-d) - 1 + d: 1/2 - 1 + log 2 = 0.19314718..., 2 - 1 - log 2 = 0.30685281... (upside down they would swap), 0.
    close(k3(REFERENCE + D, REFERENCE), [math.log(2) - 0.5, 1 - math.log(2), 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_never_negative_not_even_by_rounding(dtype):
    size = torch.logspace(-20, 2, 20_000, dtype=dtype)
    d = torch.cat([size, -size])
    assert k3(d, torch.zeros_like(d)).min() >= 0


def test_k3_has_finite_value_and_gradient_100_nats_away():
    d = torch.tensor([100.0, -100.0], dtype=torch.float64, requires_grad=True)
    value = k3(d, torch.zeros_like(d))
    # At 100: e^-100 - 1 + 100 = 99, slope 1 - e^-100 = 1. At -100, clamped to -20: e^20 - 1 - 20.
    close(value.detach(), [99.0, math.exp(20) - 21])
    (gradient,) = torch.autograd.grad(value.sum(), d)
    close(gradient, [1.0, 0.0])


def test_k3_unbiased_weighs_k3_by_the_ratio_and_its_gradient_is_ratio_times_log_ratio():
    # r = exp(lp - old) = 3, d = log 2: value 3 (1/2 - 1 + log 2). Gradient r k3 + r (1 - e^-d) = r d = 3 log 2.
    logprobs = (REFERENCE + D)[:1].requires_grad_()
    value = k3_unbiased(logprobs, REFERENCE[:1], (REFERENCE + D)[:1] - math.log(3))
    close(value.detach(), [3 * (math.log(2) - 0.5)])
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    close(gradient, [3 * math.log(2)])


@each("estimator", ESTIMATORS)
def test_every_estimator_is_0_with_finite_gradient_at_the_reference(estimator):
    logprobs = REFERENCE.clone().requires_grad_()
    value = kl(logprobs, REFERENCE, REFERENCE, estimator)
    assert torch.equal(value, torch.zeros(3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert gradient.isfinite().all()


def exact_sides(estimator, old_logits):
    """Expectations under `old` of an estimate and of its gradient in the policy's logits, over a 3-word vocabulary."""
    logits = torch.tensor([0.3, -0.7, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    old = logprobs.detach() if old_logits is None else old_logits.log_softmax(-1)
    expected = (old.exp() * kl(logprobs, reference, old, estimator)).sum()
    (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    reverse = (logprobs.exp() * (logprobs - reference)).sum()
    (reverse_gradient,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (forward_gradient,) = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), logits)
    return expected.detach(), gradient, reverse.detach(), reverse_gradient, forward_gradient


@pytest.mark.parametrize("estimator", [KLEstimator.k1, KLEstimator.k3, KLEstimator.k3_unbiased])
def test_k1_k3_and_k3_unbiased_have_the_kl_as_expected_value(estimator):
    value, _, reverse, _, _ = exact_sides(estimator, None)
    close(value, reverse)


def test_as_a_loss_k1_has_no_gradient_k2_the_reverse_and_k3_the_forward_kls():
    _, of_k1, _, reverse, forward = exact_sides(KLEstimator.k1, None)
    close(of_k1, torch.zeros(3))
    close(exact_sides(KLEstimator.k2, None)[1], reverse)
    close(exact_sides(KLEstimator.k3, None)[1], forward)


def test_k3_unbiased_has_the_kls_value_and_gradient_also_off_policy():
    old_logits = torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)
    value, gradient, reverse, reverse_gradient, _ = exact_sides(KLEstimator.k3_unbiased, old_logits)
    close(value, reverse)
    close(gradient, reverse_gradient)


def test_auto_must_be_resolved_first():
    with pytest.raises(ValueError, match="auto"):
        kl(REFERENCE, REFERENCE, REFERENCE, KLEstimator.auto)
