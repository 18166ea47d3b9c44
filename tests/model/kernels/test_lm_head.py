"""Log-probs and entropies through the LM head, with gradients known in the forward, against plain autograd."""

from __future__ import annotations

from itertools import product

import torch
from in_one_test import each
from torch import nn

from rlft.model import activations
from rlft.model.kernels.lm_head import Head, head_logprobs


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
    ours = head_logprobs(Head(head, *behind), hidden, target, temperature, True)
    theirs = plain(head, hidden, target, temperature, *behind)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
    gradients = [
        torch.autograd.grad((weights[0] * logp).sum() + (weights[1] * entropy).sum(), hidden)[0]
        for logp, entropy in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_without_entropy_the_same_and_none():
    head, hidden, target = made()
    logp, entropy = head_logprobs(Head(head), hidden, target, 1.0, False)
    assert entropy is None
    expected = plain(head, hidden, target, 1.0)[0]
    torch.testing.assert_close(logp, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x.square().sum(), hidden)[0] for x in (logp, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_a_head_that_learns_gets_its_gradient():
    head, hidden, target = made()
    head.requires_grad_(True)
    (gradient,) = torch.autograd.grad(head_logprobs(Head(head), hidden, target, 1.0, False)[0].sum(), head.weight)
    (expected,) = torch.autograd.grad(plain(head, hidden, target, 1.0)[0].sum(), head.weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)


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
    def kept(vocabulary):
        head = nn.Linear(8, vocabulary, bias=bias).requires_grad_(False)
        hidden, sizes = torch.randn(50, 8, requires_grad=True), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            head_logprobs(Head(head), hidden, torch.zeros(50, dtype=torch.int64), 1.0, True)
        return sum(sizes)

    assert kept(100) == kept(10_000) == 2 * 50 * 8
