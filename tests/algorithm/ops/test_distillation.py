"""What a teacher's log-probs make of a student's tokens, against numbers derived by hand and sums over vocabularies."""

from itertools import pairwise
from math import log

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.distillation import Divergence, agreement, log1mexp, teacher_advantages, top_k_divergence

STUDENT = [0.5, 0.3, 0.2]
TEACHER = [0.2, 0.3, 0.5]


def exact(values):
    return torch.tensor(values, dtype=torch.float64)


def close(value, expected, tol=1e-12):
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=torch.float64), rtol=tol, atol=tol)


def test_an_advantage_is_the_teachers_log_prob_minus_the_students():
    # log(0.5) - log(0.25) = log 2 where the teacher is surer, -log 2 where the student is; nothing outside the mask.
    student, teacher = exact([[0.25, 0.5, 0.3]]).log(), exact([[0.5, 0.25, 0.9]]).log()
    mask = torch.tensor([[True, True, False]])
    close(teacher_advantages(student, teacher, mask), [[log(2), -log(2), 0.0]])


def test_what_lies_outside_the_mask_does_not_matter():
    mask = torch.tensor([[True, False]])
    junk = exact([[-1.0, float("nan")]])
    assert torch.equal(teacher_advantages(junk, junk - 1, mask), exact([[-1.0, 0.0]]))


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


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        # Two tokens and the rest: p = (0.5, 0.3, 0.2), q = (0.6, 0.1, 0.3), M = 0.3 q + 0.7 p = (0.53, 0.24, 0.23)
        (Divergence.reverse, 0.5 * log(0.5 / 0.6) + 0.3 * log(0.3 / 0.1) + 0.2 * log(0.2 / 0.3)),
        (Divergence.forward, 0.6 * log(0.6 / 0.5) + 0.1 * log(0.1 / 0.3) + 0.3 * log(0.3 / 0.2)),
        (
            Divergence.jensen_shannon,
            0.3 * (0.6 * log(0.6 / 0.53) + 0.1 * log(0.1 / 0.24) + 0.3 * log(0.3 / 0.23))
            + 0.7 * (0.5 * log(0.5 / 0.53) + 0.3 * log(0.3 / 0.24) + 0.2 * log(0.2 / 0.23)),
        ),
    ],
)
def test_divergences_of_two_tokens_and_the_rest_are_those_worked_out_by_hand(divergence, expected):
    student, teacher = exact([[[0.5, 0.3]]]).log(), exact([[[0.6, 0.1]]]).log()
    close(top_k_divergence(student, teacher, divergence, 0.3), [[expected]])


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


def test_what_the_student_gives_to_tokens_that_the_teacher_does_not_is_counted():
    """Six tokens, the two most likely of which the teacher gives 0.495 each and the four others 0.0025 each; the
    student gives one of those 0.99 and the rest 0.002 each. The full reverse KL is 0.99 log(0.99 / 0.0025) + 2 x 0.002
    log(0.002 / 0.495) + 3 x 0.002 log(0.002 / 0.0025) = 5.898 nats; with all others together it is 0.996 log(0.996 /
    0.01) + 0.004 log(0.002 / 0.495) = 4.561, and descends on the wrong token's logit.
    """
    teacher = exact([0.495, 0.495, 0.0025, 0.0025, 0.0025, 0.0025]).log()
    logits = exact([0.002, 0.002, 0.99, 0.002, 0.002, 0.002]).log().requires_grad_()
    student = logits.log_softmax(-1)
    value = top_k_divergence(student[:2], teacher[:2], Divergence.reverse)
    close(value.detach(), 0.996 * log(0.996 / 0.01) + 0.004 * log(0.002 / 0.495))
    # d KL / d logit_j = p_j (log(p / q of j's outcome) - KL), of the wrong token 0.99 (log(0.996 / 0.01) - 4.561).
    (slope,) = torch.autograd.grad(value, logits)
    close(slope[2], 0.99 * (log(0.996 / 0.01) - value.item()))
    assert slope[2] > 0.01


@pytest.mark.parametrize("divergence", Divergence)
def test_equal_distributions_have_no_divergence_and_no_gradient(divergence):
    student = exact([[STUDENT[:2]]]).log().requires_grad_()
    value = top_k_divergence(student, student.detach(), divergence)
    close(value.detach(), [[0.0]])
    close(torch.autograd.grad(value.sum(), student)[0], [[[0.0, 0.0]]])


def test_jensen_shannon_goes_to_either_kl_at_its_ends():
    """JSD / beta -> forward for beta -> 0, JSD / (1 - beta) -> reverse for beta -> 1; both are off by O(beta)."""
    student, teacher = exact([[STUDENT[:2]]]).log(), exact([[TEACHER[:2]]]).log()
    forward, reverse = (top_k_divergence(student, teacher, kind) for kind in (Divergence.forward, Divergence.reverse))
    near = 1e-6
    close(top_k_divergence(student, teacher, Divergence.jensen_shannon, near) / near, forward, tol=1e-5)
    close(top_k_divergence(student, teacher, Divergence.jensen_shannon, 1 - near) / near, reverse, tol=1e-5)
    # At a half it is symmetric.
    half = top_k_divergence(student, teacher, Divergence.jensen_shannon)
    close(top_k_divergence(teacher, student, Divergence.jensen_shannon), half)


@each("divergence", Divergence)
@each("rest", [3.0, -5.0])
def test_gradients_agree_with_finite_differences(divergence, rest):
    """Of logits of four tokens and one that is not among the most likely, of probability about 0.8 and 1e-3."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    logits[..., 4] = rest
    teacher = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).log_softmax(-1)[..., :4]
    function = lambda x: top_k_divergence(x.log_softmax(-1)[..., :4], teacher, divergence, 0.3)  # noqa: E731
    assert torch.autograd.gradcheck(function, logits.requires_grad_(), atol=1e-8, rtol=1e-6)


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
