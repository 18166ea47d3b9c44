"""Fused norms and MLPs against the modules they stand for, in every architecture that the packed forward knows."""

from __future__ import annotations

import pytest
import torch

from rlft.model import fused


def unfused_and_fused(model, name):
    module = model.get_submodule(name)
    plain = type(module).forward
    return module, lambda x: plain(module, x)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
def test_outputs_and_gradients_are_the_modules_own(kind, random_model):
    model = random_model(kind).double()
    fused.install(model)
    for name in ("model.layers.0.input_layernorm", "model.layers.0.mlp"):
        module, plain = unfused_and_fused(model, name)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        width = model.config.hidden_size
        x = torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True)
        ours, theirs = module(x), plain(x)
        # transformers' norms compute in float32 whatever they are given.
        near = {"rtol": 2e-6, "atol": 2e-6} if "norm" in name else {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(ours, theirs, **near)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-5 if "norm" in name else 1e-11, atol=1e-5)


def test_only_modules_that_give_the_same_are_replaced(random_model):
    replaced = {
        kind: {type(m).__name__ for m in _installed(random_model(kind)).modules() if "forward" in vars(m)}
        for kind in ("llama", "qwen2", "gemma", "gpt2")
    }
    assert replaced == {
        "llama": {"LlamaRMSNorm", "LlamaMLP"},
        "qwen2": {"Qwen2RMSNorm", "Qwen2MLP"},
        "gemma": set(),  # its norm adds 1 to the weight, its MLP's gate is a GELU
        "gpt2": set(),
    }


def _installed(model):
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    fused.install(model)
    return model


def test_a_norm_that_learns_is_its_own(random_model):
    model = _installed(random_model("llama"))
    norm = model.model.norm
    norm.weight.requires_grad_(True)
    (gradient,) = torch.autograd.grad(norm(torch.randn(1, 3, model.config.hidden_size)).sum(), norm.weight)
    assert gradient.abs().sum() > 0
