"""The fused LoRA layer against PEFT's own, and what it leaves to it."""

import sys
from types import ModuleType, SimpleNamespace

import peft
import pytest
import torch
from in_one_test import each
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import model as peft_model
from torch import nn

from rlft.config.model import KernelChoice
from rlft.model.forward import Forward, open_prefix_cache
from rlft.model.kernels import lora_linear, selection
from rlft.model.kernels.lora_linear import LoraLinear


class Siblings(nn.Module):
    """Two layers that read the same x, one with a bias."""

    def __init__(self, dtype):
        super().__init__()
        self.wide = nn.Linear(6, 9, dtype=dtype)
        self.narrow = nn.Linear(6, 4, bias=False, dtype=dtype)


def siblings(targets=("wide", "narrow"), *, fused=True, dtype=torch.float64, autocast=False, **settings):
    """Those named have matrices that do something for two roles."""
    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=list(targets), **settings)
    if fused:
        lora_linear.install(config)
    model = get_peft_model(Siblings(dtype), config, autocast_adapter_dtype=autocast)
    model.add_adapter("sampler", config, autocast_adapter_dtype=autocast)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter)
    layers = model.base_model.model
    for layer in adapted_of(layers):
        assert isinstance(layer, LoraLinear) == fused
        for matrix in matrices_of(layer):
            matrix.requires_grad_(True)
    return layers


def adapted_of(layers):
    return [layer for layer in (layers.wide, layers.narrow) if isinstance(layer, peft.tuners.lora.layer.Linear)]


def matrices_of(layer, role="default"):
    return layer.lora_A[role].weight, layer.lora_B[role].weight


def inputs(*shape, dtype=torch.float64):
    return torch.randn(*shape, 6, dtype=dtype, generator=torch.Generator().manual_seed(2))


def of_both(layers, run, shape=(2, 5)):
    """Outputs of both layers, and the gradients of x and of all matrices."""
    x = inputs(*shape).requires_grad_()
    ys = run(x, layers.wide, layers.narrow)
    matrices = [m for layer in adapted_of(layers) for m in matrices_of(layer)]
    return *ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *matrices])


def apart(x, *layers):
    return [layer(x) for layer in layers]


def together(x, *layers):
    """As a branch of a decoder layer runs layers of one input (`model/kernels/decoder_layer.py`)."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, operands, *learned):
            ctx.operands = operands
            ys, *ctx.kept = lora_linear.products(x, operands)
            return tuple(ys)

        @staticmethod
        def backward(ctx, *grads):
            x_grad, found = lora_linear.gradients(ctx.operands, *ctx.kept, grads, ctx.needs_input_grad[0])
            return x_grad.view(*grads[0].shape[:-1], -1), None, *found

    fused = lora_linear.layers_of(x, layers)
    return Fused.apply(x, fused.operands, *fused.learned)


@each("shape", [(7,), (2, 5)])
@each("targets", [("wide", "narrow"), ("wide",), ("narrow",)])
def test_outputs_and_gradients_are_pefts_each_alone_and_together(targets, shape):
    theirs = of_both(siblings(targets, fused=False), apart, shape)
    for run in (apart, together):
        layers = siblings(targets)
        torch.testing.assert_close(of_both(layers, run, shape), theirs, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            found = run(inputs(*shape), layers.wide, layers.narrow)
        torch.testing.assert_close([*found], [*theirs[:2]], rtol=1e-12, atol=1e-12)


@each("settings", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}])
def test_what_it_does_not_know_is_pefts(settings, monkeypatch):
    x, calls = inputs(4), []
    layer = peft.tuners.lora.layer.Linear
    plain = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, x, *a, **k: calls.append(1) or plain(self, x, *a, **k))
    siblings(**settings).wide.train()(x)
    assert len(calls) == 1
    siblings(lora_dropout=0.5).wide.eval()(x)
    assert len(calls) == 1, "dropout that is off is none"


def test_the_base_alone_is_the_base_and_merging_is_left_to_peft():
    x, layer = inputs(4), siblings().wide
    expected = layer(x)
    layer.merge()
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    layer.unmerge()
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))


def test_float32_matrices_on_a_16_bit_base_learn_in_float32_and_nothing_is_added_up():
    layer = siblings(dtype=torch.bfloat16, autocast=True).wide
    y = layer(inputs(4, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert {matrix.grad.dtype for matrix in matrices_of(layer)} == {torch.float32}
    layer.add_up("default")
    assert not layer.sums


def test_a_sum_gives_the_same_and_is_used_without_gradient_only():
    x, layer = inputs(4), siblings().wide
    expected, before = layer(x), layer.base_layer.weight.clone()
    layer.add_up("default")
    assert torch.equal(layer.base_layer.weight, before)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
        layer.lora_B["default"].weight.mul_(2)
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)  # until it is added up again
    assert not torch.allclose(layer(x), expected), "with gradient the matrices themselves count"
    room = layer.sums["default"].values
    layer.add_up("default")
    assert layer.sums["default"].values is room
    with torch.no_grad():
        assert not torch.allclose(layer(x), expected)


def test_a_rounded_sum_is_that_of_the_rounded_operands():
    x, layer = inputs(4, dtype=torch.float32), siblings(dtype=torch.float32).wide
    down, up = matrices_of(layer)
    layer.add_up("default", torch.bfloat16)
    with torch.no_grad():
        rounded = torch.addmm(layer.base_layer.weight, up, down, alpha=2.0).bfloat16()  # lora_alpha / r
        assert torch.equal(layer.sums["default"].values.t(), rounded)
        expected = nn.functional.linear(x.bfloat16(), rounded).float() + layer.base_layer.bias
        found = layer(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_where_one_is_not_plain_there_are_no_fused_operands():
    layers, x = siblings(lora_dropout=0.5), inputs(4)
    assert lora_linear.layers_of(x, (layers.wide.eval(), layers.narrow.eval())) is not None
    assert lora_linear.layers_of(x, (layers.wide.train(), layers.narrow.eval())) is None
    assert lora_linear.layers_of(x, (layers.wide.eval(), nn.Tanh())) is None
    assert lora_linear.layers_of(x, (nn.Linear(6, 3, dtype=torch.float64),)) is None, "it learns"
    assert lora_linear.layers_of(x.float(), (layers.wide.eval(),)) is None, "PEFT casts"
    frozen = nn.Linear(6, 3, dtype=torch.float64).requires_grad_(False)
    assert lora_linear.layers_of(x, (frozen,)) is not None
    assert lora_linear.layers_of(x.float(), (frozen,)) is None


@each("targets", [("wide", "narrow"), ("narrow",)])
@each("settings", [{}, {"rank_pattern": {"narrow": 2}}, {"alpha_pattern": {"narrow": 5}}], ids=str)
@torch.no_grad()
def test_a_few_tokens_have_the_same_products_and_no_matrix_is_kept_twice(targets, settings):
    layers, x = siblings(targets, **settings), torch.randn(1, 3, 6, dtype=torch.float32)
    layers.float().requires_grad_(False)
    modules, roles = (layers.wide, layers.narrow), ("default", "sampler")
    adapted = {module for module in modules if isinstance(module, LoraLinear)}
    for module in adapted:  # in float32 a copy would be the matrix itself
        for role in roles:
            for matrix in module._matrices(role):
                matrix.data = matrix.data.double()
    for role, change in ((roles[0], 0.0), (roles[1], 0.0), (roles[1], 1.0), (roles[0], 0.0)):
        for module in adapted:
            module.set_adapter(role)
            for matrix in module._matrices(role):
                matrix.add_(change)
        operands = lora_linear.layers_of(x, modules).operands
        expected = lora_linear.products(x, operands)[0]
        found = lora_linear.products_of_few(x, operands)
        again = lora_linear.products_of_few(x, lora_linear.layers_of(x, modules).operands)
        torch.testing.assert_close(found, [y[0] for y in expected], rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, found, again))
        total = torch.zeros(1, 3, len(operands[0].weight))
        torch.testing.assert_close(lora_linear.add_product(total, x, operands[0])[0], found[0], rtol=1e-5, atol=1e-5)
        assert not any(module.differs(role) for module in adapted)
        downs = [operand.down for operand in operands if operand.down is not None]
        assert len({down.untyped_storage().data_ptr() for down in downs}) == min(1, len(downs))
        assert all(down.untyped_storage().nbytes() == sum(d.nbytes for d in downs) for down in downs)


# -- sums that are lent ------------------------------------------------------------------------------------------------
def lent(layers):
    """The policy's matrices become the sampler's, whose sums it borrows."""
    for layer in (layers.wide, layers.narrow):
        for ours, theirs in zip(matrices_of(layer), matrices_of(layer, "sampler"), strict=True):
            theirs.data.copy_(ours.data)
        layer.add_up("sampler")
        layer.lend("sampler", "default")
    return layers


@pytest.mark.parametrize("run", [apart, together])
def test_a_lent_sum_gives_the_same_outputs_and_gradients(run):
    expected = of_both(siblings(), apart)
    layers = lent(siblings())
    torch.testing.assert_close(of_both(layers, run), expected, rtol=1e-12, atol=1e-12)
    for layer in (layers.wide, layers.narrow):
        layer.sums["sampler"].values.zero_()
    with pytest.raises(AssertionError):  # so it is what was multiplied with
        torch.testing.assert_close(of_both(layers, run), expected, rtol=1e-12, atol=1e-12)


@each("matrix", [0, 1])
@each("run", [apart, together])
def test_a_matrix_that_changes_ends_the_loan(run, matrix):
    layers = lent(siblings())
    optimizer = torch.optim.AdamW([layers.narrow._matrices("default")[matrix]], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(optimizer.param_groups[0]["params"][0])
    optimizer.step()
    found = of_both(layers, run)
    layers.narrow.lent.clear()
    layers.wide.lent.clear()
    torch.testing.assert_close(found, of_both(layers, apart), rtol=1e-12, atol=1e-12)
    assert layers.narrow.operands(torch.randn(1, 6, dtype=torch.float64))[0].total is None


def test_only_a_sum_of_the_same_matrices_in_the_same_dtype_is_lent():
    layer = siblings().wide
    layer.add_up("sampler")
    layer.lend("sampler", "default")
    assert not layer.lent, "the matrices differ"
    layer = lent(siblings()).wide
    assert layer.lent
    layer.add_up("sampler")
    assert not layer.lent, "it was made anew, maybe of others"
    layer.scaling["sampler"] *= 2
    layer.add_up("sampler")
    layer.lend("sampler", "default")
    assert not layer.lent, "it is of another scale"
    layer.scaling["sampler"] /= 2
    layer.add_up("sampler", torch.bfloat16)
    layer.lend("sampler", "default")
    assert not layer.lent, "it is rounded"


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_base_that_computes_more_than_its_product_has_pefts_own_layer():
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["0"])
    lora_linear.install(config)
    base = Doubled(6, 8)
    model = get_peft_model(nn.Sequential(base), config)  # a new adapter, which adds 0
    x = torch.randn(3, 6)
    torch.testing.assert_close(model(x), base(x))
    assert not isinstance(model.base_model.model[0], LoraLinear)


# -- a base in 4 bits --------------------------------------------------------------------------------------------------
LEVELS = 16


class Linear4bit(nn.Linear):
    """Numbers of 4 bits in bytes, a scale for all of them."""

    compute_dtype: torch.dtype

    def forward(self, x):
        return nn.functional.linear(x, dequantize_4bit(self.weight, self.weight.quant_state), self.bias)


def dequantize_4bit(numbers, state):
    return ((numbers.float() - (LEVELS - 1) / 2) * state.scale).view(state.shape).to(state.dtype)


@pytest.fixture
def quantized(monkeypatch):
    """Makes a layer of a plain one that has its weights in 4 bits."""
    try:
        import bitsandbytes
    except ImportError:
        stand_in = ModuleType("bitsandbytes")
        stand_in.nn = SimpleNamespace(Linear4bit=Linear4bit)
        stand_in.functional = SimpleNamespace(dequantize_4bit=dequantize_4bit)
        monkeypatch.setitem(sys.modules, "bitsandbytes", stand_in)
        for name in ("is_bnb_available", "is_bnb_4bit_available"):
            monkeypatch.setattr(peft_model, name, lambda: False)
    else:

        def by_bitsandbytes(plain):
            bias, dtype = plain.bias is not None, plain.weight.dtype
            layer = bitsandbytes.nn.Linear4bit(*plain.weight.shape[::-1], bias, compute_dtype=dtype, quant_type="nf4")
            layer.load_state_dict(plain.state_dict())
            return layer.to(dtype).to("cpu").requires_grad_(False)

        return by_bitsandbytes

    def by_stand_in(plain):
        layer = Linear4bit(plain.in_features, plain.out_features, plain.bias is not None, dtype=plain.weight.dtype)
        weight, layer.bias, layer.compute_dtype = plain.weight.detach(), plain.bias, plain.weight.dtype
        scale = 2 * weight.abs().max().float() / (LEVELS - 1)
        numbers = (weight.float() / scale + (LEVELS - 1) / 2).round().clamp(0, LEVELS - 1).to(torch.uint8)
        layer.weight = nn.Parameter(numbers.view(-1, 1), requires_grad=False)
        layer.weight.quant_state = SimpleNamespace(scale=scale, shape=weight.shape, dtype=weight.dtype)
        return layer.requires_grad_(False)

    return by_stand_in


def weight_of(layer):
    return sys.modules["bitsandbytes"].functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def adapted(model, targets, **settings):
    """With an adapter whose matrices are float32 and random."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings)
    lora_linear.install(config)
    model = get_peft_model(model, config)
    random = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=random) * 0.1
    return model


@pytest.fixture
def on_both_bases(quantized, random_model):
    """Builds a random model with rlft's kernels on a base in 4 bits, and on a plain one with the weights of these."""

    def build(dtype):
        models = []
        for in_4_bits in (True, False):
            model = random_model("qwen3", dtype, attention_bias=True, hidden_size=64, intermediate_size=128)
            for name, module in list(model.named_modules()):
                if type(module) is nn.Linear and name != "lm_head":
                    layer = quantized(module)
                    if not in_4_bits:
                        module.weight.data, layer = weight_of(layer), module
                    parent, _, last = name.rpartition(".")
                    setattr(model.get_submodule(parent), last, layer)
            selection.install(model, KernelChoice.auto, own_attention=True)
            # Layers without an adapter have 4 bits as well.
            adapted(model, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
            models.append(model)
        return models

    return build


@each("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_and_gradients_are_the_formulas_to_a_few_roundings_of_the_dtype_that_it_computes_in(dtype, quantized):
    """y = x W' + b + s (x A') B', with W of the 4-bit numbers and A and B rounded. Sums are rounded once, in
    float32 once a term; at most four such numbers are chained: bounds are four epsilons of the sums of the terms' sizes
    (and one a term). For the backward nothing is kept but x and x A' in that dtype, and the 4-bit numbers."""
    random = torch.Generator().manual_seed(0)
    plain = nn.Linear(64, 96, dtype=dtype)
    layer = adapted(nn.Sequential(quantized(plain)), ["0"]).base_model.model[0]
    assert isinstance(layer, LoraLinear)
    w, b = weight_of(layer.base_layer).double(), layer.base_layer.bias.double()
    masters = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    down, up = (matrix.detach().to(dtype).double() for matrix in masters)
    x = torch.randn(7, 64, generator=random).to(dtype).requires_grad_()
    g = torch.randn(7, 96, generator=random).to(dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert {(tuple(t.shape), t.dtype) for t in kept} == {((7, 64), dtype), ((7, 4), dtype)}
    grads = torch.autograd.grad(y, [x, *masters], g)
    with torch.no_grad():
        rows = layer(x)
    x64, g64 = x.detach().double(), g.double()

    def results(x, g, w, b, down, up):
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
def test_whole_layers_are_those_of_a_plain_base_with_the_same_weights_bit_for_bit(dtype, on_both_bases, make_batch):
    """Log-probs and gradients of a packed row, in float32 with fused functions on a CPU, too."""
    batch = make_batch([(0, [5, 6, 7], [8, 9]), (0, [5, 6, 7], [10, 11, 12]), (1, [9, 4], [13])])
    found = []
    for model in on_both_bases(dtype):
        logprobs = Forward(model=model, packed=True, reason="")(batch, 1.0).logprobs
        logprobs.sum().backward()
        grads = [p.grad for n, p in model.named_parameters() if "lora_" in n]
        found.append([logprobs.detach(), *grads])
    assert len(found[0]) == 1 + 3 * 2 * 5
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_tokens_are_decoded_as_on_a_plain_base_with_the_same_weights(on_both_bases, gpu):
    """As on a GPU, in float32; the layers of a base in 4 bits multiply for themselves, with other sums."""
    found = []
    for model, decodes_whole in zip(on_both_bases(torch.float32), (False, True), strict=True):
        gpu.clear()
        with torch.no_grad():
            cache = open_prefix_cache(Forward(model=model, packed=True, reason=""), [[5, 6, 7]], 3)
            steps = [cache.prefill(2), cache.step(torch.tensor([8, 9])), cache.step(torch.tensor([10, 11]))]
        assert bool(gpu["decoded_mlp"]) is decodes_whole
        found.append(torch.stack(steps))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert (found[1][1] - found[1][2]).abs().max() > 0.1, "tokens say something"


def test_what_it_cannot_multiply_with_is_left_to_the_layers_themselves(quantized):
    """Dropout, and a base that computes in another dtype or has packed its numbers in another way."""
    x = torch.randn(3, 64)
    plain = nn.Linear(64, 32)
    for spoil, settings in (
        (lambda base: None, {"lora_dropout": 0.5}),
        (lambda base: setattr(base, "compute_dtype", torch.bfloat16), {}),
        (lambda base: setattr(base.weight.quant_state, "packing_format_for_cpu", True), {}),
    ):
        layer = adapted(nn.Sequential(quantized(plain)), ["0"], **settings).train().base_model.model[0]
        spoil(layer.base_layer)
        assert lora_linear.layers_of(x, [layer]) is None
        assert lora_linear.layers_of(x, [layer.base_layer]) is None or settings
