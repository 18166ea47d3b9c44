"""Norms, MLPs and rotary positions against the modules they stand for, and as torch compiles their chains of steps."""

import re

import pytest
import torch
from in_one_test import each
from slow_cases import slow
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.activations import SiLUActivation

from rlft.model.kernels import elementwise, flash_attention, lm_head
from rlft.model.kernels.elementwise import Norm


def norm_by_formula(module, x):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), Gemma's with 1 + weight, all in float64."""
    weight = 1 + module.weight if "Gemma" in type(module).__name__ else module.weight
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def mlp_by_formula(module, x):
    gate, is_silu = module.gate_proj(x), isinstance(module.act_fn, torch.nn.SiLU | SiLUActivation)
    gate = gate / (1 + (-gate).exp()) if is_silu else module.act_fn(gate)
    return module.down_proj(gate * module.up_proj(x))


@each("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2"])
def test_outputs_and_gradients_are_the_modules_own(kind, random_model):
    model = random_model(kind).double()
    elementwise.install(model)
    for name, formula in (("model.layers.0.input_layernorm", norm_by_formula), ("model.layers.0.mlp", mlp_by_formula)):
        module = model.get_submodule(name)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        width = model.config.hidden_size
        x = torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True)
        ours, theirs = module(x), formula(module, x)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=5e-11, atol=5e-11)


@each(("kind", "dtype", "expected"), [
    ("llama", torch.float32, "fused: 3 LlamaMLP, 7 LlamaRMSNorm"),
    ("llama", torch.bfloat16, "fused: 3 LlamaMLP; as in transformers: 7 LlamaRMSNorm"),  # on a CPU
    ("qwen2", torch.float32, "fused: 3 Qwen2MLP, 7 Qwen2RMSNorm"),
    ("gemma", torch.float32, "fused: 7 GemmaRMSNorm"),  # its MLP's gate is a GELU
    ("gpt2", torch.float32, ""),
])  # fmt: skip
def test_only_modules_that_give_the_same_are_replaced(kind, dtype, expected, random_model):
    model = random_model(kind, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    words = elementwise.install(model)
    assert words == expected
    assert {type(m).__name__ for m in model.modules() if "forward" in vars(m)} == set(re.findall(r"\d (\w+)", words))


@pytest.fixture
def compiled(monkeypatch):
    """The functions as torch compiles them for a GPU: no rounding between their steps."""

    def wide(x):
        return x.float() if isinstance(x, torch.Tensor) else x

    for name in ("normed", "silu_product"):
        plain = getattr(elementwise, name).__wrapped__

        def once_rounded(*args, plain=plain):
            out = plain(*map(wide, args))
            return (out[0].to(args[0].dtype), out[1]) if isinstance(out, tuple) else out.to(args[0].dtype)

        monkeypatch.setattr(elementwise, name, once_rounded)
    monkeypatch.setattr(elementwise, "serves", lambda x: True)


@each("dtype", [torch.bfloat16, torch.float16])
def test_what_a_compiler_does_not_round_is_no_reason_to_keep_a_module(dtype, random_model, compiled):
    for kind, sizes in (("llama", {}), ("qwen2", {"hidden_size": 256, "intermediate_size": 700}), ("qwen3", {})):
        model = random_model(kind, dtype=dtype, **sizes)
        norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
        name = model.config.model_type.capitalize()
        assert elementwise.install(model) == f"fused: 3 {name}MLP, {norms} {name}RMSNorm"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_function_that_computes_something_else_is_found_in_every_dtype(dtype, random_model, compiled, monkeypatch):
    product, norm = elementwise.silu_product, elementwise.normed
    wrong = {
        "silu_product": [
            lambda gate, up: torch.nn.functional.gelu(gate) * up,
            lambda gate, up: 1.05 * product(gate, up),
            lambda gate, up: product(up, gate),
            lambda gate, up: product(gate, up).where(gate < 1, 0.0),
            lambda gate, up: product(gate, up) * torch.nan,
        ],
        "normed": [
            lambda x, weight, eps, adds_one: norm(x, 1 + weight, eps, adds_one),
            lambda x, *rest: norm(x - x.mean(-1, keepdim=True) / 2, *rest),
            lambda x, weight, eps, adds_one: norm(x, weight, eps + 0.2, adds_one),
        ],
    }
    for name, functions in wrong.items():
        for function in functions:
            model = random_model("llama", dtype=dtype)
            with monkeypatch.context() as patch:
                patch.setattr(elementwise, name, function)
                words = elementwise.install(model)
            kept = {"silu_product": "3 LlamaMLP", "normed": "7 LlamaRMSNorm"}[name]
            assert words.endswith(f"; as in transformers: {kept}"), (name, functions.index(function))


def test_a_gelu_of_small_numbers_is_not_taken_for_a_silu_in_16_bits(random_model, compiled):
    for act in ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"):
        model = random_model("llama", dtype=torch.bfloat16, hidden_act=act, initializer_range=1e-3)
        assert elementwise.install(model) == "fused: 7 LlamaRMSNorm"


@pytest.mark.parametrize("adds_one", [False, True])
def test_norms_in_16_bits_are_rounded_where_transformers_rounds_them_and_nowhere_else(adds_one):
    dice = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(n, 48, generator=dice).bfloat16() for n in (50, 1, 50))
    norm = Norm(weight[0], 1e-6, adds_one)
    wide, factor = x.double().requires_grad_(), weight[0].double() + adds_one
    by_formula = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * factor
    y, scale = elementwise.normed(x, *norm)
    assert scale.dtype == torch.float32
    # Each rounding is by at most half a unit of the last of 8 bits, 2^-8 of the number; a plain weight comes after one.
    roundings = 1 if adds_one else 2
    assert ((y.double() - by_formula).abs() <= 1.005 * roundings * 2**-8 * by_formula.abs() + 1e-6).all()
    weighted = grad.double() if adds_one else (grad * weight[0]).double() / factor
    [slope] = torch.autograd.grad(by_formula, wide, weighted)
    found = elementwise.norm_gradient(grad.clone(), norm, x, scale)
    # Rounded once; its two terms, made in float32, may cancel.
    assert ((found.double() - slope).abs() <= 1.01 * 2**-8 * slope.abs() + 1e-5).all()


def test_a_norm_outside_a_branch_is_one_function_in_16_bits_too(random_model, gpu):
    model = random_model("llama", dtype=torch.bfloat16)
    elementwise.install(model)
    x = torch.ones(1, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    assert type(model.base_model.norm(x).grad_fn).__name__ == "_RMSNormBackward"


def fused_calls(dtype):
    """Arguments of every function that is compiled on a GPU, in this dtype, by its name."""
    dice = torch.Generator().manual_seed(0)

    def made(*shape):
        return torch.randn(shape, generator=dice, dtype=torch.float64).to(dtype)

    x, weight, angles = made(1, 9, 16), torch.nn.Parameter(made(16)), made(9, 1, 8)
    scale = elementwise.normed(x, weight, 1e-6)[1].detach()
    probs = torch.rand(5, 30, generator=dice) + 0.1
    targets = torch.randint(30, (5,), generator=dice)
    return {
        "normed": (elementwise.normed, x, weight, 1e-6),
        "normed by 1 + weight": (elementwise.normed, x, weight, 1e-6, True),
        "norm_gradient": (elementwise.norm_gradient, made(1, 9, 16), Norm(weight, 1e-6), x, scale),
        "norm_gradient by 1 + weight": (elementwise.norm_gradient, made(1, 9, 16), Norm(weight, 1e-6, True), x, scale),
        "norm_gradient and another": (elementwise.norm_gradient, x.clone(), Norm(weight, 1e-6), x, scale, x.clone()),
        "silu_product": (elementwise.silu_product, made(9, 12), made(9, 12)),
        "_silu_gradients": (elementwise._silu_gradients, made(9, 12), made(9, 12), made(9, 12)),
        "merge_into": (flash_attention.merge_into, *(x for _ in "ab" for x in (made(9, 4, 8), made(4, 9).float()))),
        "turned": (elementwise.turned, made(9, 4, 8), angles, angles),
        "turned_back": (elementwise.turned_back, made(9, 4, 8), angles, angles),
        "_logprobs": (lm_head._logprobs, made(5, 30), targets, 0.7, torch.float32),
        "_softmax": (lm_head._softmax, made(5, 30), targets, 1.0, torch.float32, dtype),
        "_softmax with logarithms": (lm_head._softmax, made(5, 30), targets, 0.7, torch.float32, None),
        "_entropy": (lm_head._entropy, probs, probs.log(), probs.sum(1), True),
    }


OF_EACH_KIND = ("norm_gradient and another", "merge_into", "_logprobs")


@pytest.mark.parametrize("name", [name if name in OF_EACH_KIND else slow(name) for name in fused_calls(torch.bfloat16)])
def test_fused_steps_are_one_graph_and_give_the_same(name):
    """Traced as for a GPU, without generating its code: nothing breaks the graph, and what is done in place stays
    right. Two numbers rounded once more or once less: two units of bfloat16's last place."""
    function, *args = fused_calls(torch.bfloat16)[name]
    plain = function.__wrapped__
    with torch.no_grad():
        written, compiled = ([arg.clone() if type(arg) is Tensor else arg for arg in args] for _ in range(2))
        expected = plain(*written)
        found = torch.compile(plain, dynamic=True, fullgraph=True, backend="aot_eager")(*compiled)
    results = [(found, expected)] if isinstance(found, Tensor) else zip(found or (), expected or (), strict=True)
    in_place = [pair for pair in zip(compiled, written, strict=True) if name == "merge_into"]
    for one, other in [*results, *in_place]:
        torch.testing.assert_close(one, other, rtol=0, atol=0 if one is None else 2**-7 * float(other.abs().max()))


def test_a_function_is_compiled_once_for_all_numbers_of_tokens_and_anew_for_another_width(monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiler(function, backend=counter))
    monkeypatch.setattr(elementwise, "is_fused", lambda device: True)
    function = elementwise.fused(elementwise.as_written(elementwise.normed))
    with torch._dynamo.config.patch(recompile_limit=1):  # 8 by default, of all models of a process
        for graphs, width in enumerate((16, 24), start=1):
            weight = torch.nn.Parameter(torch.randn(width))
            for tokens in (7, 9, 31):
                function(torch.randn(1, tokens, width), weight, 1e-6)
            assert counter.frame_count == graphs


def test_a_function_is_compiled_for_a_gpu_alone_and_once(monkeypatch):
    made = []

    def compiler(function, **_):
        made.append(function.__name__)
        return lambda *args: "compiled"

    monkeypatch.setattr(torch, "compile", compiler)

    @elementwise.fused
    def plain(x):
        return "plain"

    assert plain(torch.zeros(1)) == "plain"
    assert made == []
    monkeypatch.setattr(elementwise, "is_fused", lambda device: True)
    assert [plain(torch.zeros(1)) for _ in range(2)] == ["compiled"] * 2
    assert made == ["plain"]


def test_a_gpu_that_torch_cannot_compile_for_is_named_and_computes_step_by_step(monkeypatch):
    def broken(*args, **_):
        raise RuntimeError("Cannot find a working triton installation.\nmore")

    elementwise.obstacle.cache_clear()
    monkeypatch.setattr(torch, "compile", broken)
    gpu = torch.device("cuda", 7)
    assert not elementwise.is_fused(gpu)
    assert elementwise.obstacle(gpu) == "torch.compile failed: RuntimeError: Cannot find a working triton installation."
    elementwise.obstacle.cache_clear()


def test_a_gpu_without_memory_is_no_reason_to_compute_step_by_step(monkeypatch):
    def full(*args, **_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    elementwise.obstacle.cache_clear()
    monkeypatch.setattr(torch, "compile", full)
    with pytest.raises(torch.OutOfMemoryError):
        elementwise.is_fused(torch.device("cuda", 7))
