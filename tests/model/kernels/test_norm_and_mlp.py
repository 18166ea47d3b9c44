"""Fused norms and MLPs against the modules they stand for, in every architecture that the packed forward knows."""

from __future__ import annotations

import pytest
import torch
from in_one_test import each
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


@each("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
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


@pytest.fixture
def compiled(monkeypatch):
    """The functions as torch compiles them for a GPU: no rounding between their steps."""

    def wide(x):
        return x.float() if isinstance(x, torch.Tensor) else x

    for name in ("normed", "silu_product"):
        plain = getattr(norm_and_mlp, name).__wrapped__

        def once_rounded(*args, plain=plain):
            out = plain(*map(wide, args))
            return (out[0].to(args[0].dtype), out[1]) if isinstance(out, tuple) else out.to(args[0].dtype)

        monkeypatch.setattr(norm_and_mlp, name, once_rounded)
    monkeypatch.setattr(norm_and_mlp, "serves", lambda x: True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_compiler_does_not_round_is_no_reason_to_keep_a_module(dtype, random_model, compiled):
    for kind, sizes in (("llama", {}), ("qwen2", {"hidden_size": 256, "intermediate_size": 700}), ("qwen3", {})):
        model = random_model(kind, dtype=dtype, **sizes)
        norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
        name = model.config.model_type.capitalize()
        assert norm_and_mlp.install(model) == f"fused: 3 {name}MLP, {norms} {name}RMSNorm"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_function_that_computes_something_else_is_found_in_every_dtype(dtype, random_model, compiled, monkeypatch):
    product, norm = norm_and_mlp.silu_product, norm_and_mlp.normed
    wrong = {
        "silu_product": [
            lambda gate, up: torch.nn.functional.gelu(gate) * up,
            lambda gate, up: 1.05 * product(gate, up),
            lambda gate, up: product(up, gate),
            lambda gate, up: product(gate, up).where(gate < 1, 0.0),
            lambda gate, up: product(gate, up) * torch.nan,
        ],
        "normed": [
            lambda x, weight, eps: norm(x, 1 + weight, eps),
            lambda x, weight, eps: norm(x - x.mean(-1, keepdim=True) / 2, weight, eps),
            lambda x, weight, eps: norm(x, weight, eps + 0.2),
        ],
    }
    for name, functions in wrong.items():
        for function in functions:
            model = random_model("llama", dtype=dtype)
            with monkeypatch.context() as patch:
                patch.setattr(norm_and_mlp, name, function)
                words = norm_and_mlp.install(model)
            kept = {"silu_product": "3 LlamaMLP", "normed": "7 LlamaRMSNorm"}[name]
            assert words.endswith(f"; as in transformers: {kept}"), (name, functions.index(function))


def test_a_gelu_of_small_numbers_is_not_taken_for_a_silu_in_16_bits(random_model, compiled):
    for act in ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"):
        model = random_model("llama", dtype=torch.bfloat16, hidden_act=act, initializer_range=1e-3)
        assert norm_and_mlp.install(model) == "fused: 7 LlamaRMSNorm"


def test_a_norm_in_16_bits_on_a_cpu_is_not_said_to_be_fused(random_model):
    words = norm_and_mlp.install(random_model("llama", dtype=torch.bfloat16))
    assert words == "fused: 3 LlamaMLP; as in transformers: 7 LlamaRMSNorm"


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
