"""Rotary positions in one pass: the same numbers as transformers' own."""

from __future__ import annotations

import importlib

import torch
from in_one_test import each

from rlft.model.kernels import rotary

KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma"]


@each("kind", KINDS)
def test_outputs_and_gradients_are_transformers_own(kind, random_model):
    model = random_model(kind).double()
    theirs = importlib.import_module(type(model).__module__).apply_rotary_pos_emb
    q, k = (torch.randn(2, heads, 5, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2))
    cos, sin = (torch.randn(2, 5, 16, dtype=torch.float64) for _ in range(2))
    found = []
    for function in (rotary.apply, theirs):
        turned = function(q, k, cos, sin)
        gradients = torch.autograd.grad(sum(x.square().sum() for x in turned), (q, k))
        found.append((*turned, *gradients))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(rotary.apply(q, k, cos, sin), found[1][:2], rtol=1e-12, atol=1e-12)
