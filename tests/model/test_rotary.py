"""Rotary positions in place of transformers' own: the same numbers, in the modules that call it by its name alone."""

from __future__ import annotations

import importlib

import pytest
import torch

from rlft.model import rotary

KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma"]


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", [*KINDS, "falcon"])
def test_a_model_says_the_same_with_it_and_another_keeps_its_own(kind, random_model, monkeypatch):
    calls, plain = [], rotary.apply
    monkeypatch.setattr(rotary, "apply", lambda *args: calls.append(1) or plain(*args))
    model, other = random_model(kind), random_model(kind)
    rotary.install(model)
    calls.clear()  # of the probe
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(model(input_ids=ids).logits, other(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert len(calls) == 3, "once in each layer of the one model"


def test_a_model_without_that_function_stays_as_it_is(random_model):
    model = random_model("gpt2")
    rotary.install(model)
    assert not [m for m in model.modules() if "forward" in vars(m)]


def test_a_function_that_turns_otherwise_is_kept(random_model, monkeypatch):
    model = random_model("llama")
    module = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos.unsqueeze(1), k))
    rotary.install(model)
    assert not [m for m in model.modules() if "forward" in vars(m)]
