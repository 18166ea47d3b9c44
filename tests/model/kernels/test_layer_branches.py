"""Both branches with the adapters, biases and norms that they may have; test_decoder_layer.py compares whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_one_test import each
from torch import Tensor, nn

from rlft.model.kernels import decoder_layer, elementwise
from rlft.model.kernels.elementwise import Norm
from rlft.model.kernels.lora_linear import Layers, Operands
from rlft.model.kernels.split_attention import make_blocks

HIDDEN, HEADS, KEY_HEADS, SIZE, INNER = 12, 6, 2, 4, 10
PROMPTS, COMPLETIONS, OWNER = [(0, 4), (9, 2)], [(4, 3), (7, 2), (11, 5)], [0, 0, 1]
TOKENS, SCALE = 16, 0.3
SPANS = make_blocks(PROMPTS, COMPLETIONS, OWNER, torch.device("cpu"))
SHAPES = {  # (out, in)
    "attention": [
        (HEADS * SIZE, HIDDEN),
        (KEY_HEADS * SIZE, HIDDEN),
        (KEY_HEADS * SIZE, HIDDEN),
        (HIDDEN, HEADS * SIZE),
    ],
    "mlp": [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)],
}


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def frozen(size: int) -> nn.Parameter:
    return nn.Parameter(made(size), requires_grad=False)


def layers_of(branch: str, adapted: str) -> tuple[Layers, Layers]:
    """adapted: a 1 for each layer that has an adapter; every other layer has a bias. The same without and with sums of
    the base and the adapter's product."""
    plain, summed, learned = [], [], []
    for i, (out, into) in enumerate(SHAPES[branch]):
        layer = total = Operands(made(out, into), made(out) if i % 2 else None)
        if adapted[i] == "1":
            down, up = made(3, into).requires_grad_(), made(out, 3).requires_grad_()
            matrices = {"down": down.detach(), "up": up.detach(), "scale": 0.7, "dtype": torch.float64}
            layer = layer._replace(**matrices)
            total = layer._replace(total=(layer.weight + 0.7 * up @ down).t().detach())
            learned += [down, up]
        plain.append(layer)
        summed.append(total)
    return Layers(plain, learned), Layers(summed, learned)


def gradients_of(y: Tensor, x: Tensor, layers: Layers) -> tuple[Tensor, ...]:
    weights = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return torch.autograd.grad((weights * y).sum(), [x, *layers.learned])


def heads_of(head_norms: bool) -> elementwise.Heads:
    angles = made(1, TOKENS, SIZE // 2).repeat(1, 1, 2)
    query_norm, key_norm = Norm(frozen(SIZE), 1e-5), Norm(frozen(SIZE), 1e-6, adds_one=True)
    of_heads = (query_norm, key_norm) if head_norms else (None, None)
    return elementwise.Heads(Norm(frozen(HIDDEN), 1e-5), *of_heads, SIZE, angles.cos(), angles.sin())


def branch_of(name: str, head_norms: bool = False) -> Callable[[Tensor, Layers], Tensor]:
    """The attention or the MLP of a layer, whose norms and positions are the same in each call."""
    if name == "mlp":
        norm = Norm(frozen(HIDDEN), 1e-5)
        return lambda x, layers: decoder_layer.mlp_branch(x, norm, layers)
    heads = heads_of(head_norms)
    return lambda x, layers: decoder_layer.attention_branch(x, heads, SPANS, SCALE, layers)


CASES = [
    *(("mlp", adapted, False) for adapted in ("111", "100", "010", "001")),
    *(("attention", adapted, norms) for adapted in ("1111", "1000", "0110", "0001") for norms in (False, True)),
]


@each(("branch", "adapted", "head_norms"), CASES)
def test_sums_that_are_lent_and_passes_without_gradient_give_the_same(
    branch: str, adapted: str, head_norms: bool
) -> None:
    torch.manual_seed(0)
    x, compute = made(1, TOKENS, HIDDEN).requires_grad_(), branch_of(branch, head_norms)
    plain, lent = layers_of(branch, adapted)
    expected, found = compute(x, plain), compute(x, lent)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    gradients = gradients_of(found, x, lent), gradients_of(expected, x, plain)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(compute(x, plain), expected, rtol=1e-11, atol=1e-11)


def test_the_gradient_that_comes_in_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    x = made(1, 5, HIDDEN).requires_grad_()
    y = decoder_layer.mlp_branch(x, Norm(made(HIDDEN), 1e-6), layers_of("mlp", "111")[0])
    grad = torch.randn_like(y)
    before = grad.clone()
    y.backward(grad)
    assert torch.equal(grad, before)


def test_an_input_without_gradient_gets_none() -> None:
    """The first layer's, which comes from a frozen embedding."""
    torch.manual_seed(0)
    x, layers = made(1, 5, HIDDEN), layers_of("mlp", "111")[0]
    decoder_layer.mlp_branch(x, Norm(made(HIDDEN), 1e-6), layers).sum().backward()
    assert x.grad is None
    assert all(down.grad.abs().sum() > 0 for down in layers.learned[::2])


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused functions are compiled as for a GPU, each as one graph, whose operations then run one by one."""
    compiler = torch.compile

    def compile_whole(function: Any, **_: Any) -> Any:
        return compiler(function, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", compile_whole)
    monkeypatch.setattr(elementwise, "is_fused", lambda device: True)


@pytest.mark.slow
@pytest.mark.parametrize(("branch", "head_norms"), [("mlp", False), ("attention", False), ("attention", True)])
def test_branches_are_compiled_for_all_numbers_of_tokens_and_compute_the_same(
    branch: str, head_norms: bool, request: pytest.FixtureRequest
) -> None:
    """In float64: a compiled branch leaves its low-rank products to the next sum, which rounds elsewhere."""
    torch.manual_seed(0)
    compute, (layers, _) = branch_of(branch, head_norms), layers_of(branch, "1111")
    inputs = [made(1, n, HIDDEN).requires_grad_() for n in ((TOKENS, 5, 11) if branch == "mlp" else (TOKENS,))]

    def results() -> list[tuple[Tensor, ...]]:
        outputs = [(x, compute(x, layers)) for x in inputs]
        return [(y.detach(), *gradients_of(y, x, layers)) for x, y in outputs]

    expected = results()
    request.getfixturevalue("traced")
    with torch._dynamo.config.patch(error_on_recompile=branch == "mlp"):
        torch.testing.assert_close(results(), expected, rtol=1e-10, atol=1e-10)
