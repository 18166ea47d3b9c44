"""Both branches against their formulas, written out in torch, with every adapter, bias and norm that they may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_one_test import each
from torch import Tensor, nn

from rlft.model.kernels import elementwise, layer_branches
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


def norm_by_formula(x: Tensor, norm: Norm) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.adds_one + norm.weight)


def linear_by_formula(x: Tensor, layer: Operands) -> Tensor:
    y = x @ layer.weight.t()
    if layer.bias is not None:
        y = y + layer.bias
    if layer.down is not None and layer.up is not None:
        y = y + layer.scale * (x @ layer.down.t()) @ layer.up.t()
    return y


def mlp_by_formula(x: Tensor, norm: Norm, layers: list[Operands]) -> Tensor:
    gate, up = (linear_by_formula(norm_by_formula(x, norm), layer) for layer in layers[:2])
    return x + linear_by_formula(gate / (1 + (-gate).exp()) * up, layers[2])


def seen() -> Tensor:
    """Bool `[N, N]`: which token sees which."""
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for start, length in [*PROMPTS, *COMPLETIONS]:
        mask[start : start + length, start : start + length] = torch.ones(length, length, dtype=torch.bool).tril()
    for (start, length), unit in zip(COMPLETIONS, OWNER, strict=True):
        prompt, size = PROMPTS[unit]
        mask[start : start + length, prompt : prompt + size] = True
    return mask


def attention_by_formula(x: Tensor, heads: elementwise.Heads, layers: list[Operands]) -> Tensor:
    inner = norm_by_formula(x, heads.norm)[0]
    q, k, v = (linear_by_formula(inner, layer).view(TOKENS, -1, SIZE) for layer in layers[:3])
    if heads.query_norm is not None and heads.key_norm is not None:
        q, k = norm_by_formula(q, heads.query_norm), norm_by_formula(k, heads.key_norm)
    cos, sin = heads.cos[0][:, None], heads.sin[0][:, None]
    q, k = (y * cos + torch.cat([-y[..., SIZE // 2 :], y[..., : SIZE // 2]], -1) * sin for y in (q, k))
    k, v = (y.repeat_interleave(HEADS // KEY_HEADS, dim=1) for y in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    out = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen(), -torch.inf).softmax(-1), v)
    return x + linear_by_formula(out.flatten(1), layers[3])[None]


def layers_of(branch: str, adapted: str, lent: bool) -> Layers:
    """adapted: a 1 for each layer that has an adapter; every other layer has a bias."""
    operands, learned = [], []
    for i, (out, into) in enumerate(SHAPES[branch]):
        layer = Operands(made(out, into), made(out) if i % 2 else None)
        if adapted[i] == "1":
            down, up = made(3, into).requires_grad_(), made(out, 3).requires_grad_()
            total = (layer.weight + 0.7 * up @ down).t().detach() if lent else None
            matrices = {"down": down.detach(), "up": up.detach()}
            layer = layer._replace(**matrices, total=total, scale=0.7, dtype=torch.float64)
            learned += [down, up]
        operands.append(layer)
    return Layers(operands, learned)


def learning(layers: Layers) -> list[Operands]:
    """The operands with the matrices that learn."""
    matrices = iter(layers.learned)
    return [
        layer if layer.down is None else layer._replace(down=next(matrices), up=next(matrices))
        for layer in layers.operands
    ]


def gradients_of(y: Tensor, x: Tensor, layers: Layers) -> tuple[Tensor, ...]:
    weights = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return torch.autograd.grad((weights * y).sum(), [x, *layers.learned])


def compared(found: Tensor, expected: Tensor, x: Tensor, layers: Layers) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        gradients_of(found, x, layers), gradients_of(expected, x, layers), rtol=1e-10, atol=1e-10
    )


@each("lent", [False, True])
@each("adapted", ["111", "100", "010", "001", "000"])
def test_an_mlp_is_its_formula(adapted: str, lent: bool) -> None:
    torch.manual_seed(0)
    x, norm, layers = made(2, 5, HIDDEN).requires_grad_(), Norm(made(HIDDEN), 1e-5), layers_of("mlp", adapted, lent)
    compared(layer_branches.mlp(x, norm, layers), mlp_by_formula(x, norm, learning(layers)), x, layers)
    with torch.no_grad():
        torch.testing.assert_close(
            layer_branches.mlp(x, norm, layers), mlp_by_formula(x, norm, learning(layers)), rtol=1e-11, atol=1e-11
        )


@each("lent", [False, True])
@each("head_norms", [False, True])
@each("adapted", ["1111", "1000", "0110", "0001", "0000"])
def test_attention_is_its_formula(adapted: str, head_norms: bool, lent: bool) -> None:
    torch.manual_seed(0)
    angles = made(1, TOKENS, SIZE // 2).repeat(1, 1, 2)
    heads = elementwise.Heads(
        norm=Norm(made(HIDDEN), 1e-5),
        query_norm=Norm(made(SIZE), 1e-5) if head_norms else None,
        key_norm=Norm(made(SIZE), 1e-6, adds_one=True) if head_norms else None,
        size=SIZE,
        cos=angles.cos(),
        sin=angles.sin(),
    )
    x, layers = made(1, TOKENS, HIDDEN).requires_grad_(), layers_of("attention", adapted, lent)
    compared(
        layer_branches.attention(x, heads, SPANS, SCALE, layers),
        attention_by_formula(x, heads, learning(layers)),
        x,
        layers,
    )
    with torch.no_grad():
        found, expected = (
            layer_branches.attention(x, heads, SPANS, SCALE, layers),
            attention_by_formula(x, heads, learning(layers)),
        )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_the_gradient_that_comes_in_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    x = made(1, 5, HIDDEN).requires_grad_()
    y = layer_branches.mlp(x, Norm(made(HIDDEN), 1e-6), layers_of("mlp", "111", lent=False))
    grad = torch.randn_like(y)
    before = grad.clone()
    y.backward(grad)
    assert torch.equal(grad, before)


def test_an_input_without_gradient_gets_none() -> None:
    """The first layer's, which comes from a frozen embedding."""
    torch.manual_seed(0)
    x, layers = made(1, 5, HIDDEN), layers_of("mlp", "111", lent=False)
    layer_branches.mlp(x, Norm(made(HIDDEN), 1e-6), layers).sum().backward()
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


@pytest.mark.usefixtures("traced")
@pytest.mark.slow
@pytest.mark.parametrize("head_norms", [False, True])
def test_branches_are_compiled_for_all_numbers_of_tokens_and_are_their_formulas(head_norms: bool) -> None:
    """In float64: a compiled branch leaves its low-rank products to the next sum, which rounds elsewhere."""
    torch.manual_seed(0)
    norm = Norm(nn.Parameter(made(HIDDEN), requires_grad=False), 1e-5)
    head_norm = Norm(nn.Parameter(made(SIZE), requires_grad=False), 1e-5) if head_norms else None
    angles = made(1, TOKENS, SIZE // 2).repeat(1, 1, 2)
    heads = elementwise.Heads(norm, head_norm, head_norm, SIZE, angles.cos(), angles.sin())
    x, layers = made(1, TOKENS, HIDDEN).requires_grad_(), layers_of("attention", "1111", lent=False)
    compared(
        layer_branches.attention(x, heads, SPANS, SCALE, layers),
        attention_by_formula(x, heads, learning(layers)),
        x,
        layers,
    )
    layers = layers_of("mlp", "111", lent=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (TOKENS, 5, 11):
            x = made(1, tokens, HIDDEN).requires_grad_()
            compared(layer_branches.mlp(x, norm, layers), mlp_by_formula(x, norm, learning(layers)), x, layers)
