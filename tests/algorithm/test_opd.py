"""On-policy distillation, against numbers derived by hand."""

from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.types import LossScale, Outputs
from tests.algorithm.algorithm_steps import close, exact, full_step, hand_batch, make, rows_of, scale_of

SCALE = LossScale(num_tokens=3, num_sequences=2, max_completion_tokens=4)


@pytest.fixture
def batch():
    """Completions of two and one tokens of one group, rewards 1 and 0; the teacher is off by 0.5, -0.25 and 1."""
    made = hand_batch([2, 1], [1.0, 0.0], [0, 0], padding=0)
    return replace(made, teacher_logprobs=exact([[9.0, -0.5, -1.25], [9.0, 0.0, 9.0]]))


def test_metrics_say_how_far_the_teacher_is_and_how_much_both_agree(batch):
    # d = lp - lp_teacher = -0.5, 0.25, -1. k3 = exp(-d) - 1 + d; agreement = exp(min(-d, 0)) = 1, exp(-0.25), 1.
    algorithm = make("opd")
    metrics = algorithm.loss(Outputs(logprobs=batch.old_logprobs), algorithm.credit(batch), SCALE).metrics
    close(metrics["kl/teacher"], sum(torch.exp(exact(-d)) - 1 + d for d in (-0.5, 0.25, -1.0)) / 3)
    close(metrics["teacher/agreement"], (2 + torch.exp(exact(-0.25))) / 3)


def test_masked_tokens_do_not_matter_to_the_divergence(batch):
    algorithm = make("opd", teacher_in="loss")
    outside = ~batch.loss_mask
    student, teacher = exact([[0.5, 0.3]]).log().repeat(6, 1).view(2, 3, 2), exact([0.6, 0.1]).log().repeat(2, 3, 1)

    def total(junk):
        soiled = student.clone(), teacher.clone()
        for tensor in soiled:
            tensor[outside] = junk
        outputs = Outputs(logprobs=batch.old_logprobs, top_k_logprobs=soiled[0].requires_grad_())
        credited = algorithm.credit(replace(batch, teacher_top_k_logprobs=soiled[1]))
        loss = algorithm.loss(outputs, credited, SCALE).total
        return loss.detach(), torch.autograd.grad(loss, outputs.top_k_logprobs)[0]

    clean, soiled = total(-3.0), total(float("nan"))
    assert torch.equal(clean[0], soiled[0])
    assert torch.equal(clean[1], soiled[1])
    assert (soiled[1][outside] == 0).all()


def test_any_split_into_micro_batches_gives_a_divergence_the_same_gradient():
    outputs, batch = full_step()
    algorithm = make("opd", teacher_in="loss", divergence="jensen_shannon", reward_coef=0.5)
    batch, scale = algorithm.credit(batch), scale_of(batch)

    def gradients(some, rows):
        total = algorithm.loss(some, rows, scale).total
        return torch.autograd.grad(total, (some.logprobs, some.top_k_logprobs))

    whole = gradients(outputs, batch)
    for index in torch.randperm(10, generator=torch.Generator().manual_seed(0)).split([3, 1, 6]):
        parts = gradients(rows_of(outputs, index), rows_of(batch, index))
        for part, of_all in zip(parts, whole, strict=True):
            close(part, of_all[index])


@each(("keys", "key"), [
    ({"ratio": "sequence"}, "algorithm.ratio"),
    ({"surrogate": "gmpo"}, "algorithm.surrogate"),
    ({"ratio": "sequence_token"}, None),
    ({"ratio": "sequence", "surrogate": "policy_gradient"}, None),
    ({"ratio": "sequence", "teacher_in": "loss"}, None),
    ({}, None),
])  # fmt: skip
def test_what_mixes_the_teachers_signal_of_single_tokens_is_warned_of(keys, key):
    warnings = make("opd", **keys).warnings
    assert [text.partition(":")[0] for text in warnings] == ([key] if key else [])
    assert all("ratio=sequence_token" in text for text in warnings)
