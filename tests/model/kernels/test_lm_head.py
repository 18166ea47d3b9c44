"""Log-probs and entropies through the LM head, with gradients known in the forward, against plain autograd."""

from itertools import product

import torch
from in_one_test import each
from torch import nn

from rlft.algorithm.ops.kl import KLEstimator, kl
from rlft.model import activations
from rlft.model.kernels.lm_head import Head, anchor_of, head_kl, head_logprobs


def made(dtype=torch.float64, bias=False):
    torch.manual_seed(0)
    head = nn.Linear(6, 40, bias=bias, dtype=dtype).requires_grad_(False)
    hidden = (3 * torch.randn(11, 6, dtype=dtype)).requires_grad_()
    return head, hidden, torch.randint(0, 40, (11,))


def plain(head, hidden, target, temperature, scale=1.0, cap=None):
    logits = head(hidden) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@each(
    ("bias", "temperature", "rows", "behind"),
    product((False, True), (1.0, 0.6), (1, 4, 100), ((1.0, None), (0.3, None), (1.0, 2.0), (0.3, 2.0))),
)
def test_values_and_gradients_are_autograds(bias, temperature, rows, behind, monkeypatch):
    monkeypatch.setattr(activations, "LOGIT_CHUNK", {"cpu": rows * 40})
    head, hidden, target = made(bias=bias)
    weights = torch.randn(2, 11, dtype=torch.float64)
    for entropy, learns in ((True, False), (False, False), (False, True)):
        head.requires_grad_(learns)
        ours = head_logprobs(Head(head, *behind), hidden, target, temperature, entropy)
        assert (ours[1] is not None) == entropy
        pairs = list(zip(ours[: 1 + entropy], plain(head, hidden, target, temperature, *behind), strict=False))
        torch.testing.assert_close(*map(list, zip(*pairs, strict=True)), rtol=1e-12, atol=1e-12)
        losses = [sum((w * x).sum() for w, x in zip(weights, side, strict=False)) for side in zip(*pairs, strict=True)]
        inputs = [hidden, *head.parameters()] if learns else [hidden]
        gradients = [torch.autograd.grad(loss, inputs, retain_graph=True) for loss in losses]
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


@each(
    ("bias", "temperature", "rows", "behind", "anchor_is_first"),
    product((False, True), (1.0, 0.6), (1, 4, 100), ((1.0, None), (0.3, 2.0)), (False, True)),
)
def test_the_kl_over_the_vocabulary_is_the_dense_one_in_value_and_gradient(
    bias, temperature, rows, behind, anchor_is_first, monkeypatch
):
    monkeypatch.setattr(activations, "LOGIT_CHUNK", {"cpu": rows * 40})
    linear, hidden, _ = made(bias=bias)
    head, other = Head(linear, *behind), torch.randn(11, 6, dtype=torch.float64)
    anchor = anchor_of(head, other)._replace(is_first=anchor_is_first)
    linear.weight.data = linear.weight * 1.5  # as the weights of a role are replaced by another's
    linear.requires_grad_(True)
    ours = head_kl(head, hidden, anchor, temperature)
    numbers = nn.functional.linear(other, anchor.weights["weight"], anchor.weights.get("bias"))
    logp, logq = ((x / temperature).log_softmax(-1) for x in (head.logits(hidden), head.made_of(numbers)))
    first, second = (logq, logp) if anchor_is_first else (logp, logq)
    dense = (first.exp() * (first - second)).sum(-1)
    torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)
    assert ours.min() > 1e-3
    weights = torch.randn(11, dtype=torch.float64)
    gradients = [torch.autograd.grad((weights * kl).sum(), (hidden, *linear.parameters())) for kl in (ours, dense)]
    for mine, its in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-11)


def test_it_is_the_expectation_of_k1_over_samples_of_the_policy():
    """Every token of the vocabulary is drawn once at each place, and counts with its probability."""
    linear, hidden, _ = made()
    head, other, every = Head(linear), torch.randn(11, 6, dtype=torch.float64), torch.arange(40).repeat(11)
    logp, logq = (
        head_logprobs(head, states.repeat_interleave(40, 0), every, 0.7, False)[0].view(11, 40)
        for states in (hidden.detach(), other)
    )
    expected = (logp.exp() * kl(logp, logq, logp, KLEstimator.k1)).sum(-1)
    found = head_kl(head, hidden, anchor_of(head, other), 0.7)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-12)


def test_the_kl_of_equal_policies_is_0_without_gradient_and_of_far_ones_finite():
    linear, hidden, _ = made()
    for factor in (1, 1000):
        for first in (False, True):
            anchor = anchor_of(Head(linear), hidden.detach())._replace(is_first=first)
            found = head_kl(Head(linear), hidden * factor, anchor, 1.0)
            (gradient,) = torch.autograd.grad(found.sum(), hidden)
            assert found.isfinite().all()
            assert gradient.isfinite().all()
            assert factor > 1 or (found.abs().max() < 1e-14 and gradient.abs().max() < 1e-14)


def test_16_bits_give_float32_and_huge_logits_no_nan():
    head, hidden, target = made(torch.bfloat16)
    logp, entropy = head_logprobs(Head(head), hidden * 1000, target, 1.0, True)
    assert logp.dtype == entropy.dtype == torch.float32
    (logp.sum() + entropy.sum()).backward()
    assert logp.isfinite().all()
    assert entropy.isfinite().all()
    assert hidden.grad.isfinite().all()


@each("bias", (False, True))
def test_what_is_kept_for_backward_does_not_grow_with_the_vocabulary(bias):
    def kept(vocabulary, run):
        head = nn.Linear(8, vocabulary, bias=bias).requires_grad_(False)
        hidden, sizes = torch.randn(50, 8, requires_grad=True), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            run(Head(head), hidden)
        return sum(sizes)

    def logprobs(head, hidden):
        head_logprobs(head, hidden, torch.zeros(50, dtype=torch.int64), 1.0, True)

    assert kept(100, logprobs) == kept(10_000, logprobs) == 2 * 50 * 8
    anchored = torch.randn(50, 8)
    assert kept(10_000, lambda head, hidden: head_kl(head, hidden, anchor_of(head, anchored), 1.0)) <= 2 * 50 * 8
