"""Steps that a CUDA GPU does in one pass: that torch can compile each chain of them, and when it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlft.model.kernels import fusion, layer_branches, lm_head, norm_and_mlp, rotary


def fused_calls(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of every function that is compiled on a GPU, in this dtype, by its name."""
    dice = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice, dtype=torch.float64).to(dtype)

    x, weight, angles = made(1, 9, 16), made(16), made(9, 1, 8)
    scale = norm_and_mlp.normed(x, weight, 1e-6)[1]
    probs = torch.rand(5, 30, generator=dice) + 0.1
    targets = torch.randint(30, (5,), generator=dice)
    return {
        "normed": (norm_and_mlp.normed, x, weight, 1e-6),
        "norm_gradient": (norm_and_mlp.norm_gradient, made(1, 9, 16), x, scale),
        "silu_product": (norm_and_mlp.silu_product, made(9, 12), made(9, 12)),
        "_silu_gradients": (norm_and_mlp._silu_gradients, made(9, 12), made(9, 12), made(9, 12)),
        "_product_gradients": (layer_branches._product_gradients, *(made(9, 12) for _ in range(5))),
        "turned": (rotary.turned, made(9, 4, 8), angles, angles),
        "turned_back": (rotary.turned_back, made(9, 4, 8), angles, angles),
        "_logprobs": (lm_head._logprobs, made(5, 30), targets, 0.7, torch.float32),
        "_softmax": (lm_head._softmax, made(5, 30), targets, 1.0, torch.float32, dtype),
        "_softmax with logarithms": (lm_head._softmax, made(5, 30), targets, 0.7, torch.float32, None),
        "_entropy": (lm_head._entropy, probs, probs.log(), probs.sum(1), True),
    }


@pytest.mark.parametrize("name", fused_calls(torch.bfloat16))
def test_fused_steps_are_one_graph_and_give_the_same(name) -> None:
    """Traced as for a GPU, without generating its code: nothing breaks the graph, and what is done in place stays
    right. Two numbers rounded once more or once less: two units of bfloat16's last place."""
    function, *args = fused_calls(torch.bfloat16)[name]
    plain = function.__wrapped__
    with torch.no_grad():
        expected = plain(*copies(args))
        found = torch.compile(plain, dynamic=True, fullgraph=True, backend="aot_eager")(*copies(args))
    for one, other in zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]:
        torch.testing.assert_close(one, other, rtol=0, atol=0 if one is None else 2**-7 * float(other.abs().max()))


def copies(args: list[Any]) -> list[Any]:
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]


def test_a_function_is_compiled_for_a_gpu_alone_and_once(monkeypatch) -> None:
    made: list[str] = []

    def compiler(function: Any, **_: Any) -> Any:
        made.append(function.__name__)
        return lambda *args: "compiled"

    monkeypatch.setattr(torch, "compile", compiler)

    @fusion.fused
    def plain(x: Tensor) -> str:
        return "plain"

    assert plain(torch.zeros(1)) == "plain"
    assert made == []
    monkeypatch.setattr(fusion, "is_fused", lambda device: True)
    assert [plain(torch.zeros(1)) for _ in range(2)] == ["compiled"] * 2
    assert made == ["plain"]


def test_a_gpu_that_torch_cannot_compile_for_is_named_and_computes_step_by_step(monkeypatch) -> None:
    def broken(*args: Any, **_: Any) -> Any:
        raise RuntimeError("Cannot find a working triton installation.\nmore")

    fusion.obstacle.cache_clear()
    monkeypatch.setattr(torch, "compile", broken)
    gpu = torch.device("cuda", 7)
    assert not fusion.is_fused(gpu)
    assert fusion.obstacle(gpu) == "torch.compile failed: RuntimeError: Cannot find a working triton installation."
    fusion.obstacle.cache_clear()


def test_a_gpu_without_memory_is_no_reason_to_compute_step_by_step(monkeypatch) -> None:
    def full(*args: Any, **_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fusion.obstacle.cache_clear()
    monkeypatch.setattr(torch, "compile", full)
    with pytest.raises(torch.OutOfMemoryError):
        fusion.is_fused(torch.device("cuda", 7))
