"""Fused norms and MLPs against the modules they stand for, in every architecture that the packed forward knows."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import SiLUActivation

from rlft.model.kernels import norm_and_mlp


def norm_by_formula(module, x):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), Gemma's with 1 + weight, all in float64."""
    weight = 1 + module.weight if "Gemma" in type(module).__name__ else module.weight
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def mlp_by_formula(module, x):
    gate = module.gate_proj(x)
    gate = (
        gate / (1 + (-gate).exp()) if isinstance(module.act_fn, torch.nn.SiLU | SiLUActivation) else module.act_fn(gate)
    )
    return module.down_proj(gate * module.up_proj(x))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
def test_outputs_and_gradients_are_the_modules_own(kind, random_model):
    model = random_model(kind).double()
    norm_and_mlp.install(model)
    for name, formula in (("model.layers.0.input_layernorm", norm_by_formula), ("model.layers.0.mlp", mlp_by_formula)):
        module = model.get_submodule(name)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        width = model.config.hidden_size
        x = torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True)
        ours, theirs = module(x), formula(module, x)
        # Gemma's norm stays its own, which computes in float32 whatever it is given.
        near = 2e-6 if kind == "gemma" and "norm" in name else 1e-11
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=5 * near, atol=5 * near)


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
    norm_and_mlp.install(model)
    return model


def test_a_norm_that_learns_is_its_own(random_model):
    model = _installed(random_model("llama"))
    norm = model.model.norm
    norm.weight.requires_grad_(True)
    (gradient,) = torch.autograd.grad(norm(torch.randn(1, 3, model.config.hidden_size)).sum(), norm.weight)
    assert gradient.abs().sum() > 0
