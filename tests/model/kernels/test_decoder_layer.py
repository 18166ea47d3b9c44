"""Decoder layers over a packed row: the log-probs and gradients of the modules called one by one, from fewer tensors
and, in the last layer, fewer rows; layers and modules that do more are left alone."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_one_test import each
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rlft.config.model import KernelChoice
from rlft.model import activations
from rlft.model.activations import set_checkpointing
from rlft.model.forward import packed_forward
from rlft.model.kernels import decoder_layer, elementwise, lora_linear, selection
from rlft.model.kernels.decoder_layer import FAMILIES
from rlft.model.kernels.elementwise import Norm
from rlft.model.kernels.lora_linear import Layers, Operands
from rlft.model.kernels.split_attention import make_blocks
from rlft.model.packing import pack

LAYERS = 3
SERVED = ["llama", "llama_one_kv_head", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl", "mistral"]
"""Families whose branches are one function each."""


@pytest.fixture
def calls(monkeypatch):
    """How often each branch was one function."""
    counted = Counter()
    for name in ("attention", "mlp"):
        plain = getattr(decoder_layer, f"{name}_branch")
        count = lambda *a, name=name, plain=plain, **k: counted.update([name]) or plain(*a, **k)  # noqa: E731
        monkeypatch.setattr(decoder_layer, f"{name}_branch", count)
    return counted


def adapted(model, targets="all-linear", **settings):
    """The model with an adapter that does something, in our layers; its parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False, **settings)
        lora_linear.install(config)
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    return wrapped, [p for p in wrapped.parameters() if p.requires_grad]


def installed(model):
    """As `load_backbone` does it."""
    selection.install(model, KernelChoice.auto, own_attention=True)
    return model


def weighted(logprobs):
    """A loss in which every token has its own weight, so that no error can cancel another."""
    dice = torch.Generator().manual_seed(3)
    return (torch.randn(logprobs.shape, generator=dice, dtype=torch.float64) * logprobs).sum()


def results(model, batch, parameters):
    """Log-probs and gradients of the packed forward, which tests/model/test_forward.py holds to rows run one by one."""
    outputs = packed_forward(model, batch, 1.0, False)
    return outputs.logprobs.detach(), torch.autograd.grad(weighted(outputs.logprobs), parameters)


def both(random_model, batch, kind, targets="all-linear", keys=None, **settings):
    """Results of transformers' layers, all on all positions, and of ours.

    Both with the norms that test_elementwise.py holds to their formula: transformers' are in float32 in any model.
    """
    found = []
    for install in (elementwise.install, installed):
        model = random_model(kind, dtype=torch.float64, **(keys or {}))
        install(model)
        wrapped, parameters = adapted(model, targets, **settings)
        found.append(results(wrapped.base_model.model, batch, parameters))
    return found


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "v_proj"], ["k_proj", "down_proj"], ["gate_proj", "o_proj"]]
)
@pytest.mark.parametrize("kind", SERVED)
def test_log_probs_and_gradients_are_those_of_the_modules(kind, targets, random_model, awkward_batch, calls):
    theirs, ours = both(random_model, awkward_batch, kind, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert calls == {"attention": LAYERS, "mlp": LAYERS}


@pytest.mark.parametrize("kind", SERVED)
def test_without_gradient_they_are_the_same(kind, random_model, awkward_batch, calls):
    wrapped, _ = adapted(installed(random_model(kind, dtype=torch.float64)))
    expected = packed_forward(wrapped.base_model.model, awkward_batch, 1.0, False).logprobs
    calls.clear()
    with torch.no_grad():
        found = packed_forward(wrapped.base_model.model, awkward_batch, 1.0, False).logprobs
    assert calls == {"attention": LAYERS, "mlp": LAYERS}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_base_alone_takes_them_too(random_model, awkward_batch, calls):
    plain, ours = (random_model("qwen3", dtype=torch.float64) for _ in range(2))
    elementwise.install(plain)
    expected, found = (packed_forward(m, awkward_batch, 1.0, False).logprobs for m in (plain, installed(ours)))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert calls == {"attention": LAYERS, "mlp": LAYERS}


def test_a_second_backward_gives_the_same(random_model, awkward_batch):
    """What one gradient writes over is nobody else's: neither kept for the next nor the gradient of something else."""
    wrapped, parameters = adapted(installed(random_model("qwen3")))
    loss = weighted(packed_forward(wrapped.base_model.model, awkward_batch, 1.0, False).logprobs)
    first, second = (torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(second, first, rtol=0, atol=0)


# -- what is left alone ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "keys", "left"),
    [
        ("gemma", {}, {"attention": LAYERS}),  # its MLP's gate is a GELU
        ("llama", {"hidden_act": "gelu"}, {"attention": LAYERS}),
        ("smollm3", {}, {"mlp": LAYERS}),  # layers without rotary positions
    ],
)
def test_a_part_that_computes_something_else_is_its_own(kind, keys, left, random_model, awkward_batch, calls):
    theirs, ours = both(random_model, awkward_batch, kind, keys=keys)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert calls == left


@each("kind", ["granite", "gemma2_full", "gpt_oss", "gpt2", "falcon"])
def test_layers_that_do_more_are_left_as_they_are(kind, random_model):
    assert not decoder_layer.narrows(installed(random_model(kind)))


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"lora_dropout": 0.5, "targets": ["q_proj"]}, {"mlp": LAYERS}),
        ({"use_dora": True, "targets": ["up_proj"]}, {"attention": LAYERS}),
        ({"lora_bias": True, "targets": ["q_proj"]}, {"mlp": LAYERS}),
    ],
)
def test_adapters_that_do_more_have_their_branch_called_by_modules(settings, left, random_model, awkward_batch, calls):
    wrapped, _ = adapted(installed(random_model("qwen2")), **settings)
    packed_forward(wrapped.base_model.model.train(), awkward_batch, 1.0, False)
    assert calls == left


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("input_layernorm", {"attention": LAYERS - 1, "mlp": LAYERS}),
        ("self_attn.q_norm", {"attention": LAYERS - 1, "mlp": LAYERS}),
        ("post_attention_layernorm", {"attention": LAYERS, "mlp": LAYERS - 1}),
        ("mlp.up_proj", {"attention": LAYERS, "mlp": LAYERS - 1}),
    ],
)
def test_a_weight_that_learns_has_its_gradient(name, left, random_model, awkward_batch, calls):
    model = installed(random_model("qwen3"))
    weight = model.model.layers[1].get_submodule(name).weight.requires_grad_(True)
    [gradient] = torch.autograd.grad(packed_forward(model, awkward_batch, 1.0, False).logprobs.sum(), weight)
    assert gradient.abs().sum() > 0
    assert calls == left


def test_in_16_bits_the_modules_round_as_they_always_did(random_model, awkward_batch, calls):
    packed_forward(installed(random_model("llama", dtype=torch.bfloat16)), awkward_batch, 1.0, False)
    assert not calls


def test_without_a_packed_row_the_layer_is_its_own(random_model):
    model, ids = random_model("qwen2"), torch.tensor([[3, 17, 5, 99]])
    expected = model(input_ids=ids).logits
    decoder_layer.install(model)
    assert torch.equal(model(input_ids=ids).logits, expected)


# -- the last layer ----------------------------------------------------------------------------------------------------
def test_its_mlp_sees_the_predicting_positions_alone(random_model, awkward_batch):
    model = random_model("llama")
    decoder_layer.install(model)
    packed_forward(model, awkward_batch, 1.0, False)  # asks once what the model does behind its head
    rows = []
    for layer in model.base_model.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[1]))
    packed_forward(model, awkward_batch, 1.0, False)
    tokens, predicting = pack(awkward_batch).num_tokens, len(pack(awkward_batch).predictor)
    assert predicting < tokens
    assert rows == [tokens, tokens, predicting]


def test_with_gradient_checkpointing_it_is_the_same(random_model, awkward_batch, calls):
    wrapped, parameters = adapted(installed(random_model("llama", dtype=torch.float64)))
    model = wrapped.base_model.model
    expected = results(model, awkward_batch, parameters)
    set_checkpointing(model, True)
    model.train()
    calls.clear()
    torch.testing.assert_close(results(model, awkward_batch, parameters), expected, rtol=1e-12, atol=1e-12)
    assert calls == {"attention": 2 * LAYERS, "mlp": 2 * LAYERS}, "forward, and again in backward"


@pytest.fixture
def tiles(monkeypatch):
    """How many tokens each computation of a gated MLP had; a tile has 5, which divides no row here."""
    sizes, plain = [], decoder_layer._mlp
    monkeypatch.setattr(decoder_layer, "_mlp", lambda x, *args: sizes.append(x.shape[-2]) or plain(x, *args))
    monkeypatch.setattr(activations, "MLP_TILE", 5)
    return sizes


def cut(tokens):
    return [5] * (tokens // 5) + ([tokens % 5] if tokens % 5 else [])


@pytest.mark.parametrize("how", ["tiles", "offload"])
@pytest.mark.parametrize("kind", SERVED)
def test_mlps_in_tiles_are_the_same_and_each_tile_is_computed_twice(random_model, awkward_batch, tiles, kind, how):
    wrapped, parameters = adapted(installed(random_model(kind, dtype=torch.float64)))
    model = wrapped.base_model.model
    expected = results(model, awkward_batch, parameters)
    set_checkpointing(model, how)
    model.train()
    tiles.clear()
    torch.testing.assert_close(results(model, awkward_batch, parameters), expected, rtol=1e-12, atol=1e-12)
    packed = pack(awkward_batch)
    rows = [cut(packed.num_tokens)] * (LAYERS - 1) + [cut(len(packed.predictor))]
    assert tiles == [*itertools.chain(*rows), *itertools.chain(*reversed(rows))], "forward, and once more in backward"


def test_passes_without_gradient_have_tiles_too(random_model, awkward_batch, tiles):
    model = adapted(installed(random_model("llama", dtype=torch.float64)))[0].base_model.model
    with torch.no_grad():
        expected = packed_forward(model, awkward_batch, 1.0, False).logprobs
        set_checkpointing(model, "tiles")
        tiles.clear()
        torch.testing.assert_close(
            packed_forward(model, awkward_batch, 1.0, False).logprobs, expected, rtol=1e-12, atol=0
        )
    assert max(tiles) == 5


@pytest.mark.parametrize("install", [installed, lambda model: model], ids=["ours", "transformers"])
def test_offloaded_inputs_come_back_as_they_were_and_leave_nothing_behind(
    random_model, awkward_batch, monkeypatch, install
):
    class Noting(saved_tensors_hooks):
        def __init__(self, pin_memory):
            super().__init__(lambda x: kept.append(x.clone()) or kept[-1], lambda copy: copy)

    kept = []
    monkeypatch.setattr(activations, "save_on_cpu", Noting)
    wrapped, parameters = adapted(install(random_model("qwen2")))
    model = wrapped.base_model.model
    set_checkpointing(model, "tiles")
    model.train()
    expected = results(model, awkward_batch, parameters)
    set_checkpointing(model, "offload")
    for _ in range(2):
        found = results(model, awkward_batch, parameters)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    copies = [weakref.ref(copy) for copy in kept if copy.numel()]  # torch's checkpoint saves an empty one as well
    assert len(copies) == 2 * LAYERS, "the input of each layer, and nothing else"
    kept.clear()
    gc.collect()
    assert not any(copy() for copy in copies)


def test_checkpointing_that_is_turned_off_has_no_tiles(random_model, awkward_batch, tiles):
    model = adapted(installed(random_model("llama")))[0].base_model.model
    set_checkpointing(model, "tiles")
    set_checkpointing(model, False)
    packed_forward(model, awkward_batch, 1.0, False)
    assert max(tiles) == pack(awkward_batch).num_tokens


# -- attention ---------------------------------------------------------------------------------------------------------
KINDS = ["llama", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl", "mistral", "gemma", "granite", "mixtral", "qwen2_moe",
         "qwen3_moe"]  # fmt: skip
OF_EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe"]  # whose products torch has in float32 at most
WINDOWED = ["qwen2_window", "mistral_window"]


def with_attention(model):
    decoder_layer.install_attention(model, FAMILIES[model.config.model_type])
    return model


def test_every_family_that_gets_this_attention_is_compared_here(random_model):
    tested = {random_model(kind).config.model_type for kind in KINDS}
    assert tested == {name for name, family in FAMILIES.items() if family.attention}


@pytest.mark.parametrize("attention", ["eager", "sdpa", "ours"])
@pytest.mark.parametrize("kind", KINDS + WINDOWED)
def test_attentions_outputs_and_gradients_are_those_of_the_module(kind, attention, random_model, monkeypatch):
    calls, plain = [], elementwise.rotated
    monkeypatch.setattr(elementwise, "rotated", lambda *args: calls.append(1) or plain(*args))
    ids, found = torch.tensor([[5, 6, 7, 8, 9, 5, 3], [9, 9, 1, 2, 4, 0, 0]]), []
    mask = (ids != 0).long()
    for change in (lambda model: model, with_attention):
        model = change(random_model(kind, dtype=torch.float32 if kind in OF_EXPERTS else torch.float64))
        if attention != "ours":
            model.set_attn_implementation(attention)
        embeddings = model.get_input_embeddings()(ids).requires_grad_(True)
        logits = model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits[mask.bool()]
        found.append((logits, *torch.autograd.grad(logits.square().sum(), embeddings)))
    assert len(calls) == 3, "once in each layer of the one model"
    tolerance = 1e-5 if kind in OF_EXPERTS else 1e-11
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral_window"])
def test_with_a_cache_attention_decodes_the_same(kind, random_model):
    ids, found = torch.tensor([[5, 6, 7, 8, 9, 5]]), []
    for change in (lambda model: model, with_attention):
        model = change(random_model(kind, dtype=torch.float64))
        first = model(input_ids=ids, use_cache=True)
        name = "cache" if hasattr(first, "cache") else "past_key_values"  # renamed in transformers 5.24
        second = model(input_ids=torch.tensor([[3]]), **{name: first[name]})
        found.append((first.logits, second.logits))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


# -- both branches, with the adapters, biases and norms that they may have ---------------------------------------------
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
