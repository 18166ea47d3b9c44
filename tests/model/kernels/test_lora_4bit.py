"""LoRA on a base in 4 bits: the products of a plain base with what bitsandbytes makes of its numbers.

Without bitsandbytes a stand-in takes its place, which has what is called of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from in_one_test import each
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import model as peft_model
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlft.config.model import KernelChoice
from rlft.model.forward import Forward, open_prefix_cache
from rlft.model.kernels import lora_linear, selection
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.types import Batch

LEVELS = 16


class Linear4bit(nn.Linear):
    """Numbers of 4 bits in bytes, a scale for all of them."""

    compute_dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, dequantize_4bit(self.weight, self.weight.quant_state), self.bias)


def dequantize_4bit(numbers: Tensor, state: Any) -> Tensor:
    return ((numbers.float() - (LEVELS - 1) / 2) * state.scale).view(state.shape).to(state.dtype)


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Linear], nn.Linear]:
    """Makes a layer of a plain one that has its weights in 4 bits."""
    try:
        import bitsandbytes  # pyright: ignore[reportMissingImports]
    except ImportError:
        stand_in: Any = ModuleType("bitsandbytes")
        stand_in.nn = SimpleNamespace(Linear4bit=Linear4bit)
        stand_in.functional = SimpleNamespace(dequantize_4bit=dequantize_4bit)
        monkeypatch.setitem(sys.modules, "bitsandbytes", stand_in)
        for name in ("is_bnb_available", "is_bnb_4bit_available"):
            monkeypatch.setattr(peft_model, name, lambda: False)
    else:

        def by_bitsandbytes(plain: nn.Linear) -> nn.Linear:
            bias, dtype = plain.bias is not None, plain.weight.dtype
            layer = bitsandbytes.nn.Linear4bit(*plain.weight.shape[::-1], bias, compute_dtype=dtype, quant_type="nf4")
            layer.load_state_dict(plain.state_dict())
            return layer.to(dtype).to("cpu").requires_grad_(False)

        return by_bitsandbytes

    def by_stand_in(plain: nn.Linear) -> nn.Linear:
        layer = Linear4bit(plain.in_features, plain.out_features, plain.bias is not None, dtype=plain.weight.dtype)
        weight, layer.bias, layer.compute_dtype = plain.weight.detach(), plain.bias, plain.weight.dtype
        scale = 2 * weight.abs().max().float() / (LEVELS - 1)
        numbers = (weight.float() / scale + (LEVELS - 1) / 2).round().clamp(0, LEVELS - 1).to(torch.uint8)
        layer.weight = nn.Parameter(numbers.view(-1, 1), requires_grad=False)
        layer.weight.quant_state = SimpleNamespace(scale=scale, shape=weight.shape, dtype=weight.dtype)
        return layer.requires_grad_(False)

    return by_stand_in


def weight_of(layer: Any) -> Tensor:
    return sys.modules["bitsandbytes"].functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


class One(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def adapted(model: Any, targets: Any, **settings: Any) -> Any:
    """With an adapter whose matrices are float32 and random."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings)
    lora_linear.install(config)
    model = get_peft_model(model, config)
    random = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=random) * 0.1
    return model


def model_on(quantized: Callable[[nn.Linear], nn.Linear], dtype: torch.dtype, *, in_4_bits: bool) -> Any:
    """A random model with rlft's kernels on a base in 4 bits, or on a plain one with the weights of these."""
    sizes = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, attention_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(sizes).to(dtype).requires_grad_(False).eval()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            layer: Any = quantized(module)
            if not in_4_bits:
                module.weight.data, layer = weight_of(layer), module
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer)
    selection.install(model, KernelChoice.auto, own_attention=True)
    return model


@each("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_and_gradients_are_the_formulas_to_a_few_roundings_of_the_dtype_that_it_computes_in(
    dtype: torch.dtype, quantized: Callable[[nn.Linear], nn.Linear]
) -> None:
    """y = x W' + b + s (x A') B', with W of the 4-bit numbers and A and B rounded. Sums are rounded once, in
    float32 once a term; at most four such numbers are chained: bounds are four epsilons of the sums of the terms' sizes
    (and one a term). For the backward nothing is kept but x and x A' in that dtype, and the 4-bit numbers."""
    random = torch.Generator().manual_seed(0)
    plain = nn.Linear(64, 96, dtype=dtype)
    layer: Any = adapted(One(quantized(plain)), ["layer"]).base_model.model.layer
    assert isinstance(layer, LoraLinear)
    w, b = weight_of(layer.base_layer).double(), layer.base_layer.bias.double()
    masters = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    down, up = (matrix.detach().to(dtype).double() for matrix in masters)
    x = torch.randn(7, 64, generator=random).to(dtype).requires_grad_()
    g = torch.randn(7, 96, generator=random).to(dtype)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert {(tuple(t.shape), t.dtype) for t in kept} == {((7, 64), dtype), ((7, 4), dtype)}
    grads = torch.autograd.grad(y, [x, *masters], g)
    with torch.no_grad():
        rows = layer(x)
    x64, g64 = x.detach().double(), g.double()

    def results(x: Tensor, g: Tensor, w: Tensor, b: Tensor, down: Tensor, up: Tensor) -> list[Tensor]:
        low_grad = 2 * g @ up
        return [
            x @ w.t() + b + 2 * (x @ down.t()) @ up.t(),
            g @ w + low_grad @ down,
            low_grad.t() @ x,
            2 * g.t() @ (x @ down.t()),
        ]

    operands = (x64, g64, w, b, down, up)
    expected, sizes = results(*operands), results(*(t.abs() for t in operands))
    bound = (4 + (96 if dtype == torch.float32 else 0)) * torch.finfo(dtype).eps
    for found, value, size in zip((y, *grads, rows), [*expected, expected[0]], [*sizes, sizes[0]], strict=True):
        assert ((found.double() - value).abs() <= bound * size).all()
    assert [y.dtype, *(grad.dtype for grad in grads)] == [dtype, dtype, torch.float32, torch.float32]


@each("dtype", [torch.float32, torch.bfloat16])
def test_whole_layers_are_those_of_a_plain_base_with_the_same_weights_bit_for_bit(
    dtype: torch.dtype, quantized: Callable[[nn.Linear], nn.Linear], make_batch: Callable[..., Batch]
) -> None:
    """Log-probs and gradients of a packed row, in float32 with fused functions on a CPU, too; layers without an adapter
    have 4 bits as well."""
    batch = make_batch([(0, [5, 6, 7], [8, 9]), (0, [5, 6, 7], [10, 11, 12]), (1, [9, 4], [13])])
    found = []
    for in_4_bits in (True, False):
        model = model_on(quantized, dtype, in_4_bits=in_4_bits)
        with_adapter = adapted(model, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
        logprobs = Forward(model=model, packed=True, reason="")(batch, 1.0).logprobs
        logprobs.sum().backward()
        grads = [p.grad for n, p in with_adapter.named_parameters() if "lora_" in n]
        found.append([logprobs.detach(), *grads])
    assert len(found[0]) == 1 + 2 * 2 * 5
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_tokens_are_decoded_as_on_a_plain_base_with_the_same_weights(
    quantized: Callable[[nn.Linear], nn.Linear], gpu: Counter[str]
) -> None:
    """As on a GPU, in float32; the layers of a base in 4 bits multiply for themselves, with other sums."""
    found = []
    for in_4_bits in (True, False):
        gpu.clear()
        model = model_on(quantized, torch.float32, in_4_bits=in_4_bits)
        adapted(model, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
        with torch.no_grad():
            cache = open_prefix_cache(Forward(model=model, packed=True, reason=""), [[5, 6, 7]], 3)
            assert cache is not None
            steps = [cache.prefill(2), cache.step(torch.tensor([8, 9])), cache.step(torch.tensor([10, 11]))]
        assert bool(gpu["decoded_mlp"]) is not in_4_bits
        found.append(torch.stack(steps))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert (found[1][1] - found[1][2]).abs().max() > 0.1, "tokens say something"


def test_what_it_cannot_multiply_with_is_left_to_the_layers_themselves(
    quantized: Callable[[nn.Linear], nn.Linear],
) -> None:
    """Dropout, and a base that computes in another dtype or has packed its numbers in another way."""
    x = torch.randn(3, 64)
    plain = nn.Linear(64, 32)
    for spoil, settings in (
        (lambda base: None, {"lora_dropout": 0.5}),
        (lambda base: setattr(base, "compute_dtype", torch.bfloat16), {}),
        (lambda base: setattr(base.weight.quant_state, "packing_format_for_cpu", True), {}),
    ):
        layer: Any = adapted(One(quantized(plain)), ["layer"], **settings).train().base_model.model.layer
        spoil(layer.base_layer)
        assert lora_linear.layers_of(x, [layer]) is None
        assert lora_linear.layers_of(x, [layer.base_layer]) is None or settings
