"""Decoder layers over a packed row: the log-probs and gradients of the modules called one by one, from fewer tensors
and, in the last layer, fewer rows; layers and modules that do more are left alone."""

import gc
import itertools
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
from in_one_test import each
from slow_cases import slow, slow_but
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rlft.config.model import KernelChoice
from rlft.model import activations
from rlft.model.activations import set_checkpointing
from rlft.model.forward import packed_forward
from rlft.model.kernels import decoder_layer, elementwise, selection
from rlft.model.kernels.decoder_layer import FAMILIES
from rlft.model.kernels.elementwise import Norm
from rlft.model.kernels.lora_linear import Layers, Operands
from rlft.model.kernels.split_attention import make_blocks
from rlft.model.packing import pack

LAYERS = 3
SERVED = ["llama", "llama_one_kv_head", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl", "mistral"]
"""Families whose branches are one function each."""
BOTH = {"attention": LAYERS, "mlp": LAYERS}


@pytest.fixture
def calls(monkeypatch):
    """How often each branch was one function."""
    counted = Counter()
    for name in ("attention", "mlp"):
        plain = getattr(decoder_layer, f"{name}_branch")
        count = lambda *a, name=name, plain=plain, **k: counted.update([name]) or plain(*a, **k)  # noqa: E731
        monkeypatch.setattr(decoder_layer, f"{name}_branch", count)
    return counted


def installed(model):
    """As `load_backbone` does it."""
    selection.install(model, KernelChoice.auto, own_attention=True)
    return model


@pytest.fixture
def policy(random_model, with_lora):
    """Builds a random model with our layers and an adapter that does something; gives it and the parameters."""

    def build(kind, dtype=torch.float64, install=installed, **settings):
        model = random_model(kind, dtype=dtype, **settings.pop("keys", {}))
        install(model)
        return model, with_lora(model, ours=True, **settings)

    return build


@pytest.fixture
def results(awkward_batch, weighted):
    """Log-probs and gradients of the packed forward, which tests/model/test_forward.py holds to rows run one by one."""

    def compute(model, parameters):
        logprobs = packed_forward(model, awkward_batch, 1.0, False).logprobs
        return logprobs.detach(), torch.autograd.grad(weighted(logprobs), parameters)

    return compute


@pytest.fixture
def check(policy, results, awkward_batch, calls):
    """Our layers against transformers' on all positions, with gradient and without; how often each was one function.

    Both with the norms that test_elementwise.py holds to their formula: transformers' are in float32 in any model.
    """

    def compare(kind, expected_calls, **settings):
        theirs = results(*policy(kind, install=elementwise.install, **settings))
        model, parameters = policy(kind, **settings)
        calls.clear()
        ours = results(model, parameters)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        assert calls == expected_calls
        calls.clear()
        with torch.no_grad():
            found = packed_forward(model, awkward_batch, 1.0, False).logprobs
        torch.testing.assert_close(found, ours[0], rtol=1e-12, atol=1e-12)
        assert calls == expected_calls

    return compare


TARGETS = (["q_proj", "v_proj"], ["k_proj", "down_proj"], ["gate_proj", "o_proj"])


@pytest.mark.parametrize(("kind", "targets"), [
    *((kind, "all-linear") for kind in SERVED),
    *(("qwen2", targets) for targets in TARGETS),
    *(slow(kind, targets) for kind in SERVED if kind != "qwen2" for targets in TARGETS),
])  # fmt: skip
def test_log_probs_and_gradients_are_those_of_the_modules_and_so_without_gradient(kind, targets, check):
    check(kind, BOTH, targets=targets)


def test_the_base_alone_takes_them_too(random_model, awkward_batch, calls):
    plain, ours = (random_model("qwen3", dtype=torch.float64) for _ in range(2))
    elementwise.install(plain)
    expected, found = (packed_forward(m, awkward_batch, 1.0, False).logprobs for m in (plain, installed(ours)))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert calls == BOTH


def test_a_second_backward_gives_the_same(policy, awkward_batch, weighted):
    """What one gradient writes over is nobody else's: neither kept for the next nor the gradient of something else."""
    model, parameters = policy("qwen3")
    loss = weighted(packed_forward(model, awkward_batch, 1.0, False).logprobs)
    first, second = (torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(second, first, rtol=0, atol=0)


# -- what is left alone ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "keys", "left"), [
    ("gemma", {}, {"attention": LAYERS}),  # its MLP's gate is a GELU
    ("llama", {"hidden_act": "gelu"}, {"attention": LAYERS}),
    ("smollm3", {}, {"mlp": LAYERS}),  # layers without rotary positions
])  # fmt: skip
def test_a_part_that_computes_something_else_is_its_own(kind, keys, left, check):
    check(kind, left, keys=keys)


@each("kind", ["granite", "gemma2_full", "gpt_oss", "gpt2", "falcon"])
def test_layers_that_do_more_are_left_as_they_are(kind, random_model):
    assert not decoder_layer.narrows(installed(random_model(kind)))


@pytest.mark.parametrize(("settings", "left"), [
    ({"lora_dropout": 0.5, "targets": ["q_proj"]}, {"mlp": LAYERS}),
    ({"use_dora": True, "targets": ["up_proj"]}, {"attention": LAYERS}),
    ({"lora_bias": True, "targets": ["q_proj"]}, {"mlp": LAYERS}),
])  # fmt: skip
def test_adapters_that_do_more_have_their_branch_called_by_modules(settings, left, policy, awkward_batch, calls):
    model, _ = policy("qwen2", torch.float32, **settings)
    packed_forward(model.train(), awkward_batch, 1.0, False)
    assert calls == left


@pytest.mark.parametrize(("name", "left"), [
    ("input_layernorm", {"attention": LAYERS - 1, "mlp": LAYERS}),
    ("self_attn.q_norm", {"attention": LAYERS - 1, "mlp": LAYERS}),
    ("post_attention_layernorm", {"attention": LAYERS, "mlp": LAYERS - 1}),
    ("mlp.up_proj", {"attention": LAYERS, "mlp": LAYERS - 1}),
])  # fmt: skip
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


@pytest.fixture
def tiles(monkeypatch):
    """How many tokens each computation of a gated MLP had; a tile has 5, which divides no row here."""
    sizes, plain = [], decoder_layer._mlp
    monkeypatch.setattr(decoder_layer, "_mlp", lambda x, *args: sizes.append(x.shape[-2]) or plain(x, *args))
    monkeypatch.setattr(activations, "MLP_TILE", 5)
    return sizes


def cut(tokens):
    return [5] * (tokens // 5) + ([tokens % 5] if tokens % 5 else [])


@pytest.mark.parametrize("kind", slow_but("qwen2", SERVED))
def test_recomputed_layers_give_the_same_and_each_tile_of_their_mlps_is_computed_twice(
    kind, policy, results, awkward_batch, calls, tiles
):
    model, parameters = policy(kind)
    expected, packed = results(model, parameters), pack(awkward_batch)
    rows = [cut(packed.num_tokens)] * (LAYERS - 1) + [cut(len(packed.predictor))]
    for how in (True, "tiles", "offload"):
        set_checkpointing(model, how)
        model.train()
        calls.clear()
        tiles.clear()
        torch.testing.assert_close(results(model, parameters), expected, rtol=1e-12, atol=1e-12)
        if how is True:
            assert calls == {"attention": 2 * LAYERS, "mlp": 2 * LAYERS}, "forward, and again in backward"
        else:
            assert tiles == [*itertools.chain(*rows), *itertools.chain(*reversed(rows))]
    set_checkpointing(model, "tiles")
    model.eval()
    tiles.clear()
    with torch.no_grad():  # passes without gradient have tiles, too
        logprobs = packed_forward(model, awkward_batch, 1.0, False).logprobs
    torch.testing.assert_close(logprobs, expected[0], rtol=1e-12, atol=0)
    assert max(tiles) == 5
    set_checkpointing(model, False)
    packed_forward(model, awkward_batch, 1.0, False)
    assert max(tiles) == packed.num_tokens, "what is turned off has no tiles"


@pytest.mark.parametrize("install", [installed, lambda model: None], ids=["ours", "transformers"])
def test_offloaded_inputs_come_back_as_they_were_and_leave_nothing_behind(policy, results, monkeypatch, install):
    class Noting(saved_tensors_hooks):
        def __init__(self, pin_memory):
            super().__init__(lambda x: kept.append(x.clone()) or kept[-1], lambda copy: copy)

    kept = []
    monkeypatch.setattr(activations, "save_on_cpu", Noting)
    model, parameters = policy("qwen2", torch.float32, install=install)
    set_checkpointing(model, "tiles")
    model.train()
    expected = results(model, parameters)
    set_checkpointing(model, "offload")
    for _ in range(2):
        torch.testing.assert_close(results(model, parameters), expected, rtol=0, atol=0)
    copies = [weakref.ref(copy) for copy in kept if copy.numel()]  # torch's checkpoint saves an empty one as well
    assert len(copies) == 2 * LAYERS, "the input of each layer, and nothing else"
    kept.clear()
    gc.collect()
    assert not any(copy() for copy in copies)


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


@pytest.mark.parametrize(("kind", "attention"), [
    *((kind, "ours") for kind in KINDS + WINDOWED),
    *(("qwen3", attention) for attention in ("eager", "sdpa")),
    *(slow(*case) for case in itertools.product(KINDS + WINDOWED, ("eager", "sdpa")) if case[0] != "qwen3"),
])  # fmt: skip
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
QUERIES, KEYS = (HEADS * SIZE, HIDDEN), (KEY_HEADS * SIZE, HIDDEN)
SHAPES = {"attention": [QUERIES, KEYS, KEYS, QUERIES[::-1]], "mlp": [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]}
"""{branch: (out, in) of each of its layers}."""


def made(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def frozen(size):
    return nn.Parameter(made(size), requires_grad=False)


def layers_of(branch, adapted):
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


def gradients_of(y, x, layers):
    weights = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return torch.autograd.grad((weights * y).sum(), [x, *layers.learned])


def branch_of(name, head_norms=False):
    """The attention or the MLP of a layer, whose norms and positions are the same in each call."""
    norm = Norm(frozen(HIDDEN), 1e-5)
    if name == "mlp":
        return lambda x, layers: decoder_layer.mlp_branch(x, norm, layers)
    angles = made(1, TOKENS, SIZE // 2).repeat(1, 1, 2)
    of_heads = (Norm(frozen(SIZE), 1e-5), Norm(frozen(SIZE), 1e-6, adds_one=True)) if head_norms else (None, None)
    heads = elementwise.Heads(norm, *of_heads, SIZE, angles.cos(), angles.sin())
    return lambda x, layers: decoder_layer.attention_branch(x, heads, SPANS, SCALE, layers)


CASES = [
    *(("mlp", adapted, False) for adapted in ("111", "100", "010", "001")),
    *(("attention", adapted, norms) for adapted in ("1111", "1000", "0110", "0001") for norms in (False, True)),
]


@each(("branch", "adapted", "head_norms"), CASES)
def test_sums_that_are_lent_and_passes_without_gradient_give_the_same(branch, adapted, head_norms):
    torch.manual_seed(0)
    x, compute = made(1, TOKENS, HIDDEN).requires_grad_(), branch_of(branch, head_norms)
    plain, lent = layers_of(branch, adapted)
    expected, found = compute(x, plain), compute(x, lent)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    gradients = gradients_of(found, x, lent), gradients_of(expected, x, plain)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(compute(x, plain), expected, rtol=1e-11, atol=1e-11)


def test_the_gradient_that_comes_in_is_left_as_it_is():
    x = made(1, 5, HIDDEN).requires_grad_()
    y = decoder_layer.mlp_branch(x, Norm(made(HIDDEN), 1e-6), layers_of("mlp", "111")[0])
    grad = torch.randn_like(y)
    before = grad.clone()
    y.backward(grad)
    assert torch.equal(grad, before)


def test_an_input_without_gradient_gets_none():
    """The first layer's, which comes from a frozen embedding."""
    torch.manual_seed(0)
    x, layers = made(1, 5, HIDDEN), layers_of("mlp", "111")[0]
    decoder_layer.mlp_branch(x, Norm(made(HIDDEN), 1e-6), layers).sum().backward()
    assert x.grad is None
    assert all(down.grad.abs().sum() > 0 for down in layers.learned[::2])


@pytest.mark.slow
@pytest.mark.parametrize(("branch", "head_norms"), [("mlp", False), ("attention", False), ("attention", True)])
def test_branches_are_compiled_for_all_numbers_of_tokens_and_compute_the_same(branch, head_norms, monkeypatch):
    """As for a GPU, each as one graph, whose operations then run one by one; in float64, since a compiled branch leaves
    its low-rank products to the next sum, which rounds elsewhere."""
    torch.manual_seed(0)
    compute, (layers, _) = branch_of(branch, head_norms), layers_of(branch, "1111")
    inputs = [made(1, n, HIDDEN).requires_grad_() for n in ((TOKENS, 5, 11) if branch == "mlp" else (TOKENS,))]

    def results():
        outputs = [(x, compute(x, layers)) for x in inputs]
        return [(y.detach(), *gradients_of(y, x, layers)) for x, y in outputs]

    expected = results()
    compile_whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_whole(function))
    monkeypatch.setattr(elementwise, "is_fused", lambda device: True)
    with torch._dynamo.config.patch(error_on_recompile=branch == "mlp"):
        torch.testing.assert_close(results(), expected, rtol=1e-10, atol=1e-10)
