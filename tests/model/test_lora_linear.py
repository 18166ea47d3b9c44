"""The fused LoRA layer against PEFT's own, and what it leaves to it."""

from __future__ import annotations

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rlft.model import lora_linear
from rlft.model.lora_linear import LoraLinear


class Two(nn.Module):
    def __init__(self, bias, dtype):
        super().__init__()
        self.first = nn.Linear(6, 8, bias=bias, dtype=dtype)
        self.second = nn.Linear(8, 5, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def made(*, fused, bias=True, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    model = Two(bias, dtype)
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["first", "second"], **settings)
    if fused:
        lora_linear.install(config)
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter)
    assert isinstance(model.base_model.model.first, LoraLinear) == fused
    return model


def outputs_and_gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    parameters = [p for n, p in model.named_parameters() if "lora_" in n]
    return y, *torch.autograd.grad(y.square().sum(), [x, *parameters])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6)])
def test_outputs_and_gradients_are_pefts(shape, bias):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours, theirs = (outputs_and_gradients(made(fused=f, bias=bias), x) for f in (True, False))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(made(fused=True, bias=bias)(x), theirs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}], ids=str)
def test_what_it_does_not_know_is_pefts(settings, monkeypatch):
    x = torch.randn(4, 6, dtype=torch.float64)
    calls = []
    plain = peft.tuners.lora.layer.Linear.forward
    monkeypatch.setattr(
        peft.tuners.lora.layer.Linear, "forward", lambda self, x, *a, **k: calls.append(1) or plain(self, x, *a, **k)
    )
    made(fused=True, **settings).train()(x)
    assert len(calls) == 2
    calls.clear()
    made(fused=True, lora_dropout=0.5).eval()(x)
    assert not calls, "dropout that is off is none"


def test_the_base_alone_is_the_base_and_merging_is_left_to_peft():
    x, model = torch.randn(4, 6, dtype=torch.float64), made(fused=True)
    base = made(fused=False)
    with model.disable_adapter(), base.disable_adapter():
        assert torch.equal(model(x), base(x))
    expected = model(x)
    model.merge_adapter()
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_float32_matrices_on_a_16_bit_base_learn_in_float32():
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["first", "second"])
    lora_linear.install(config)
    model = get_peft_model(Two(True, torch.bfloat16), config)
    y = model(torch.randn(4, 6, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    found = {p.grad.dtype for n, p in model.named_parameters() if "lora_B" in n}
    assert found == {torch.float32}


def test_a_sum_gives_the_same_and_is_used_without_gradient_only():
    x, model = torch.randn(4, 6, dtype=torch.float64), made(fused=True)
    layer, expected = model.base_model.model.first, model.base_model.model.first(x)
    before = layer.base_layer.weight.clone()
    layer.add_up("default")
    assert torch.equal(layer.base_layer.weight, before)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
        layer.lora_B["default"].weight.mul_(2)
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)  # until it is added up again
    assert not torch.allclose(layer(x), expected), "with gradient the matrices themselves count"
    room = layer.sums["default"]
    layer.add_up("default")
    assert layer.sums["default"] is room
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.forward(x), rtol=0, atol=0)
        assert not torch.allclose(layer(x), expected)


def test_a_rounded_sum_is_that_of_the_rounded_operands():
    x, model = torch.randn(4, 6), made(fused=True, dtype=torch.float32)
    layer = model.base_model.model.first
    up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
    layer.add_up("default", torch.bfloat16)
    with torch.no_grad():
        rounded = torch.addmm(layer.base_layer.weight, up, down, alpha=3.0).bfloat16()  # lora_alpha / r
        assert torch.equal(layer.sums["default"].t(), rounded)
        expected = nn.functional.linear(x.bfloat16(), rounded).float() + layer.base_layer.bias
        found = layer(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_in_16_bits_nothing_is_added_up():
    layer = made(fused=True, dtype=torch.bfloat16).base_model.model.first
    layer.add_up("default")
    assert not layer.sums
