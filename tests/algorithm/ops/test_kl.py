"""Estimates of KL, its controllers, and comparisons with a teacher."""

import math
from itertools import pairwise
from math import log

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.kl import (
    Divergence,
    KLController,
    KLEstimator,
    agreement,
    k3,
    kl,
    log1mexp,
    next_coefficient,
    teacher_advantages,
    top_k_divergence,
)
from tests.algorithm.algorithm_steps import close, exact

# Policy twice and half as likely as the reference: d = log 2, -log 2, 0.
REFERENCE = torch.tensor([-2.0, -2.0, -2.0], dtype=torch.float64)
ESTIMATORS = [KLEstimator.k1, KLEstimator.k2, KLEstimator.k3, KLEstimator.k3_unbiased]


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


@pytest.mark.parametrize("estimator", [KLEstimator.auto, KLEstimator.exact])
def test_what_is_no_estimate_from_sampled_tokens_is_refused(estimator):
    with pytest.raises(ValueError, match=f"kl: {estimator} is no estimate"):
        kl(REFERENCE, REFERENCE, REFERENCE, estimator)


ADAPTIVE, PROPORTIONAL = KLController.adaptive, KLController.proportional


def after(controller, kl, *, coef=0.25, target=3.0, gain=0.5):
    return next_coefficient(controller, coef, kl, target=target, tolerance=1.5, gain=gain)


@each("kl", [0.0, 1.0, 3.0, 1e9])
def test_a_fixed_coefficient_never_moves(kl):
    assert after(KLController.fixed, kl) == 0.25


@each(("kl", "expected"), [
    (0.0, 0.125),
    (math.nextafter(2.0, 0), 0.125),  # below 3 / 1.5 = 2
    (2.0, 0.25),  # on the edge: strictly below is meant
    (3.0, 0.25),
    (4.5, 0.25),  # on the edge 1.5 * 3
    (math.nextafter(4.5, 5), 0.5),
    (math.inf, 0.5),
])  # fmt: skip
def test_adaptive_halves_below_the_band_and_doubles_above_it_strictly(kl, expected):
    assert after(ADAPTIVE, kl) == after(ADAPTIVE, kl, gain=7.0) == expected, "it knows no gain"


@each(("kl", "expected"), [
    (3.0, 0.25),
    (3.3, 0.25 * (1 + 0.5 * 0.1)),  # 10% too large
    (2.7, 0.25 * (1 - 0.5 * 0.1)),
    (3.6, 0.25 * 1.1),  # 20% too large: the end of the range
    (30.0, 0.25 * 1.1),
    (math.inf, 0.25 * 1.1),
    (2.4, 0.25 * 0.9),
    (0.0, 0.25 * 0.9),
    (-1.0, 0.25 * 0.9),  # an estimate of the KL may be negative
])  # fmt: skip
def test_proportional_follows_the_relative_error_clipped_to_a_fifth(kl, expected):
    assert after(PROPORTIONAL, kl) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("controller", [ADAPTIVE, PROPORTIONAL])
def test_a_controlled_process_whose_kl_falls_with_the_coefficient_settles_at_its_target(controller):
    # KL = 1 / beta, target 3: beta settles where 1 / beta is within the band 2 .. 4.5, or at 1/3 exactly.
    coef = 100.0
    for _ in range(500):
        coef = after(controller, 1 / coef, coef=coef)
    if controller == ADAPTIVE:
        assert 2 <= 1 / coef <= 4.5
    else:
        # The error shrinks by the factor 1 - gain = 1/2 a step once it is below a fifth.
        assert 1 / coef == pytest.approx(3, rel=1e-12)


STUDENT = [0.5, 0.3, 0.2]
TEACHER = [0.2, 0.3, 0.5]


def test_the_policy_gradient_of_the_advantages_is_minus_the_gradient_of_the_reverse_kl():
    """Over a whole vocabulary: sum_v p_v A_v grad log p_v = -grad KL(p || q), since sum_v grad p_v = 0."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    advantages = teacher_advantages(student.detach(), teacher, torch.ones(7, dtype=torch.bool))
    (of_samples,) = torch.autograd.grad(
        (student.detach().exp() * advantages * student).sum(), logits, retain_graph=True
    )
    (of_kl,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits)
    close(of_samples, -of_kl)


def test_the_mean_agreement_is_what_both_distributions_have_in_common():
    # sum_v min(p, q) = 0.2 + 0.3 + 0.2 = 0.7; by samples of p: 0.5 x 0.4 + 0.3 x 1 + 0.2 x 1 = 0.7
    student, teacher = exact(STUDENT), exact(TEACHER)
    close((student * agreement(student.log(), teacher.log())).sum(), 0.7)
    assert torch.equal(agreement(student.log(), student.log()), torch.ones(3, dtype=torch.float64))


def test_agreement_stays_finite_however_far_apart_they_are():
    assert agreement(exact([-1e4, 0.0]), exact([0.0, -1e4])).tolist() == [1.0, 0.0]


def over_the_vocabulary(logp, logq, divergence, beta=0.5):
    """The divergence of whole distributions `[V]`, `[]`."""
    logm = (beta * logq.exp() + (1 - beta) * logp.exp()).log()
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
    return {
        Divergence.reverse: kl(logp, logq),
        Divergence.forward: kl(logq, logp),
        Divergence.jensen_shannon: beta * kl(logq, logm) + (1 - beta) * kl(logp, logm),
    }[divergence]


def distributions(seed, size):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))


@each("divergence", Divergence)
@each("of_rest", [-2.0, -20.0])
def test_a_rest_of_one_token_gives_the_divergence_over_the_whole_vocabulary_and_its_gradient(divergence, of_rest):
    """Also where the student gives that token 1e-9: 1 - sum keeps 7 digits of it then."""
    logits, teacher = distributions(0, 7)
    top = teacher.topk(6).indices
    logits[teacher.argmin()] = of_rest
    student = logits.requires_grad_().log_softmax(-1)
    whole = over_the_vocabulary(student, teacher, divergence, 0.3)
    of_top = top_k_divergence(student[top], teacher[top], divergence, 0.3)
    close(of_top.detach(), whole.detach(), tol=1e-12 if of_rest > -10 else 1e-7)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (of_top, whole)]
    close(*gradients, tol=1e-12 if of_rest > -10 else 1e-7)


@pytest.mark.parametrize("divergence", Divergence)
def test_fewer_tokens_never_say_more_than_the_whole_vocabulary_does(divergence):
    """Data-processing inequality: joining outcomes cannot raise a divergence; it rises with k up to the whole."""
    for seed in range(20):
        student, teacher = distributions(seed, 9)
        order = teacher.argsort(descending=True)
        of_k = [top_k_divergence(student[order[:k]], teacher[order[:k]], divergence, 0.3) for k in range(1, 9)]
        values = [0.0, *of_k, over_the_vocabulary(student, teacher, divergence, 0.3) + 1e-12]
        assert all(low <= high for low, high in pairwise(values))


@pytest.mark.parametrize("divergence", Divergence)
def test_equal_distributions_have_no_divergence_and_no_gradient(divergence):
    student = exact([[STUDENT[:2]]]).log().requires_grad_()
    value = top_k_divergence(student, student.detach(), divergence)
    close(value.detach(), [[0.0]])
    close(torch.autograd.grad(value.sum(), student)[0], [[[0.0, 0.0]]])


@each("dtype", [torch.float32, torch.float64])
@each("divergence", Divergence)
def test_where_the_tokens_have_all_of_the_probability_numbers_and_gradients_stay_finite(divergence, dtype):
    """A sum above 1 by rounding, 1 to the last digit, and a student that rules a token out."""
    for student in ([1e-6, -20.0], [0.0, -1e3], [-1e3, 0.0]):
        for teacher in ([1e-6, -20.0], [0.0, -1e3], [log(0.5), log(0.25)]):
            logits = torch.tensor([[student]], dtype=dtype, requires_grad=True)
            value = top_k_divergence(logits, torch.tensor([[teacher]], dtype=dtype), divergence)
            assert value.isfinite().all()
            assert value >= -torch.finfo(dtype).eps  # of the sum's rounding
            slope = torch.autograd.grad(value.sum(), logits)[0]
            assert slope.isfinite().all()
            assert slope.abs().max() < 1e4


def test_in_float32_a_rest_that_rounding_decides_is_at_most_left_out_of_the_gradient():
    """KL(q || p) with q_rest = 0.25, p_rest from 1e-4 down to 1e-9: d / d logit_j = p_j - q_j, and p_j q_rest of it is
    the rest's pull on token j, which is gone below 1e-6 and never more than itself.
    """
    generator = torch.Generator().manual_seed(0)
    for below in torch.linspace(9, 21, 200):
        logits = torch.randn(3, generator=generator) + 20
        logits[2] = logits[:2].max() - below
        student, teacher = logits.requires_grad_().log_softmax(-1)[:2], torch.tensor([0.5, 0.25]).log()
        (slope,) = torch.autograd.grad(top_k_divergence(student, teacher, Divergence.forward), logits)
        p = logits.detach().double().softmax(-1)[:2]
        assert ((slope[:2] - (p - exact([0.5, 0.25]))).abs() <= 0.25 * p + 1e-6).all()


def test_the_log_of_what_is_left_of_one_keeps_its_digits_at_both_ends():
    # 1 - exp(-1e-12) = 1e-12 - 5e-25; 1 - exp(-40) = 1 - 4.248e-18, whose log is -4.248e-18
    x = exact([-1e-12, -log(2), -40.0])
    close(log1mexp(x), [log(1e-12), -log(2), -4.248354255291589e-18], tol=1e-13)
    assert log1mexp(x)[2] < 0
