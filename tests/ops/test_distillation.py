"""What a teacher's log-probs make of a student's tokens, against numbers derived by hand and sums over vocabularies."""

from math import log

import pytest
import torch

from rlft.ops.distillation import Divergence, agreement, teacher_advantages, top_k_divergence

STUDENT = [0.5, 0.3, 0.2]
TEACHER = [0.2, 0.3, 0.5]


def exact(values):
    return torch.tensor(values, dtype=torch.float64)


def close(value, expected, tol=1e-12):
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=torch.float64), rtol=tol, atol=tol)


def test_an_advantage_is_what_the_teacher_finds_a_token_likelier():
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
        # p = (0.5, 0.5), q = (0.8, 0.2), M = 0.3 q + 0.7 p = (0.59, 0.41)
        (Divergence.reverse, 0.5 * log(0.5 / 0.8) + 0.5 * log(0.5 / 0.2)),
        (Divergence.forward, 0.8 * log(0.8 / 0.5) + 0.2 * log(0.2 / 0.5)),
        (
            Divergence.jensen_shannon,
            0.3 * (0.8 * log(0.8 / 0.59) + 0.2 * log(0.2 / 0.41))
            + 0.7 * (0.5 * log(0.5 / 0.59) + 0.5 * log(0.5 / 0.41)),
        ),
    ],
)
def test_divergences_of_two_tokens_are_those_worked_out_by_hand(divergence, expected):
    student, teacher = exact([[[0.5, 0.5]]]).log(), exact([[[0.8, 0.2]]]).log()
    close(top_k_divergence(student, teacher, divergence, 0.3), [[expected]])


@pytest.mark.parametrize("divergence", Divergence)
def test_both_are_renormalised_over_the_k_tokens(divergence):
    # Half and a tenth of the probability lie in the two tokens: what is compared is the same as above.
    student, teacher = exact([[[0.5, 0.5]]]).log(), exact([[[0.8, 0.2]]]).log()
    whole = top_k_divergence(student, teacher, divergence, 0.3)
    close(top_k_divergence(student + log(0.5), teacher + log(0.1), divergence, 0.3), whole)


@pytest.mark.parametrize("divergence", Divergence)
def test_equal_distributions_have_no_divergence_and_no_gradient(divergence):
    student = exact([[STUDENT]]).log().requires_grad_()
    value = top_k_divergence(student, student.detach(), divergence)
    close(value.detach(), [[0.0]])
    close(torch.autograd.grad(value.sum(), student)[0], [[[0.0, 0.0, 0.0]]])


def test_jensen_shannon_goes_to_either_kl_at_its_ends():
    """JSD / beta -> forward for beta -> 0, JSD / (1 - beta) -> reverse for beta -> 1; both are off by O(beta)."""
    student, teacher = exact([[STUDENT]]).log(), exact([[TEACHER]]).log()
    forward, reverse = (top_k_divergence(student, teacher, kind) for kind in (Divergence.forward, Divergence.reverse))
    near = 1e-6
    close(top_k_divergence(student, teacher, Divergence.jensen_shannon, near) / near, forward, tol=1e-5)
    close(top_k_divergence(student, teacher, Divergence.jensen_shannon, 1 - near) / near, reverse, tol=1e-5)
    # At a half it is symmetric.
    half = top_k_divergence(student, teacher, Divergence.jensen_shannon)
    close(top_k_divergence(teacher, student, Divergence.jensen_shannon), half)


@pytest.mark.parametrize("divergence", Divergence)
def test_gradients_agree_with_finite_differences(divergence):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    function = lambda x: top_k_divergence(x, teacher, divergence, 0.3)  # noqa: E731
    assert torch.autograd.gradcheck(function, student.requires_grad_(), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("divergence", Divergence)
def test_a_student_that_rules_a_token_out_gives_finite_numbers(divergence):
    student = exact([[[0.0, -1e3]]]).requires_grad_()
    value = top_k_divergence(student, exact([[[-1e3, 0.0]]]), divergence)
    assert value.isfinite().all()
    assert torch.autograd.grad(value.sum(), student)[0].isfinite().all()
