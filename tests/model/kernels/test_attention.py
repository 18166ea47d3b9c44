"""Attention over a packed row against its definition, and what each layer says of its own."""

from dataclasses import replace
from itertools import product

import flash_stand_in
import pytest
import torch
from attention_families import OTHERS, QUICK, random_model
from dense_attention import masked
from in_one_test import each
from slow_cases import slow
from torch import nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    blockwise_overlay,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from rlft.config.model import KernelChoice
from rlft.model.forward import choose, open_prefix_cache
from rlft.model.kernels import flash_attention, selection, split_attention
from rlft.model.kernels.attention import (
    NAME,
    NotPackableError,
    _row_attention,
    attention_of_layers,
    packed_attention,
    packed_mask,
)
from rlft.model.kernels.split_attention import Scoring
from rlft.model.packing import pack

CPU = torch.device("cpu")
ROWS = [
    *((0, [5, 6, 7, 8, 3, 4, 5, 2], row) for row in ([20, 21], list(range(22, 32)), [])),
    (1, [9, 10], list(range(26, 31))), (2, [14], [31]), (3, [11, 12, 13], []),
]  # fmt: skip


def compared(packed, window, cap, with_sinks, key_heads, sizes=(8, 8)):
    """Attention and its gradients, to 1e-9 of their definition."""
    dice = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=dice, dtype=torch.float64).requires_grad_()

    heads = ((4, sizes[0]), (key_heads, sizes[0]), (key_heads, sizes[1]))
    query, key, value = tensors = [random(1, number, packed.num_tokens, size) for number, size in heads]
    sinks = random(4) if with_sinks else None
    inputs = [x for x in (*tensors, sinks) if x is not None]
    layer = {"scaling": 0.3, "softcap": cap, "s_aux": sinks, "packed": packed}
    mask = AttentionMaskInterface()[NAME](attention_mask=packed_mask(packed.num_tokens, CPU), local_size=window)
    ours, weights = packed_attention(nn.Module(), query, key, value, mask, **layer)
    assert weights is None
    theirs = masked(*(x[0].transpose(0, 1) for x in tensors), packed, 0.3, window, cap, sinks)[None]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    factor = torch.randn(ours.shape, generator=dice, dtype=torch.float64)
    gradients = [torch.autograd.grad((x * factor).sum(), inputs) for x in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


WINDOWS = (None, 1, 2, 3, 5, 8, 9, 12, 100)


@each(("window", "cap", "sinks"), product(WINDOWS, (None, 0.7), (False, True)))
def test_attention_in_blocks_is_that_of_the_mask_it_never_makes(window, cap, sinks, make_batch):
    for prompts_first, key_heads in ((False, 1), (True, 2)):
        compared(pack(make_batch(ROWS), prompts_first=prompts_first), window, cap, sinks, key_heads)
    for sizes in ((8, 6), (6, 8)):  # heads of values may have another size than those of keys
        compared(pack(make_batch(ROWS)), window, cap, sinks, 2, sizes)


@each(("window", "sinks"), product((None, 3, 9), (False, True)))
def test_attention_by_plain_products_is_the_same_also_without_a_cap(window, sinks, make_batch, monkeypatch):
    """As GPUs compute what flash attention does not take, in parts of 40 scores."""
    monkeypatch.setattr(split_attention, "_has_kernel", lambda *_: False)
    monkeypatch.setattr(split_attention, "AT_ONCE", 40)
    compared(pack(make_batch(ROWS)), window, None, sinks, 2)


def test_large_keys_overflow_no_score_in_float16(make_batch, monkeypatch):
    """q k is 128 * 40 * 40 = 204,800, above the largest number of float16, 65,504; scaled, 18,102.

    The equal weights, two sums and the merge of two parts are rounded to eleven bits: four times 2^-11."""
    monkeypatch.setattr(split_attention, "_has_kernel", lambda *_: False)
    packed = pack(make_batch(ROWS))
    large = torch.full((1, 2, packed.num_tokens, 128), 40.0, dtype=torch.float16)
    value = torch.ones_like(large)
    for softcap in (None, 50.0):
        row = packed_attention(nn.Module(), large, large, value, None, packed=packed, softcap=softcap)[0]
        plain = _row_attention(large, large, value, None, Scoring(None, softcap), None)
        torch.testing.assert_close(row, torch.ones_like(row), rtol=2**-9, atol=0)
        torch.testing.assert_close(plain, torch.ones_like(plain), rtol=2**-9, atol=0)


@each(("window", "cap", "tile", "at_once"), product((None, 3, 6), (None, 0.7), (2, 256), (40, 2**23)))
def test_rows_with_branches_and_the_sizes_of_blocks_change_nothing(window, cap, tile, at_once, tree_batch, monkeypatch):
    monkeypatch.setattr(split_attention, "TILE", tile)
    monkeypatch.setattr(split_attention, "AT_ONCE", at_once)
    monkeypatch.setattr(split_attention, "SMALL_BLOCK", tile)
    compared(pack(tree_batch[0]), window, cap, True, 2)


@each(("window", "sinks"), product(WINDOWS, (False, True)))
def test_flash_attention_has_windows_and_sinks(window, sinks, make_batch, stand_in, monkeypatch):
    """Caps, and completions in another order, are computed in blocks beside it."""
    monkeypatch.setattr(flash_attention, "takes", lambda *_, caps=False, **__: not caps)
    packed = pack(make_batch(ROWS), prompts_first=True)
    for cap, row in ((None, packed), (0.7, packed), (None, replace(packed, owner=tuple(reversed(packed.owner))))):
        flash_stand_in.CALLS.clear()
        compared(row, window, cap, sinks, 2)
        in_flash = cap is None and row is packed
        assert (["forward"] * 2 + ["backward"] * 2 if in_flash else []) == flash_stand_in.CALLS


def test_a_window_costs_as_many_scores_as_it_has_keys():
    """A row of 4,000 tokens with a window of 100: no token is a query of more than 200 keys."""
    blocks = split_attention.make_blocks([(0, 4000)], (), (), CPU, window=100)
    assert sum(rows * queries * keys for rows, queries, keys in (block.shape for block in blocks)) <= 4000 * 200


def test_a_window_that_no_row_exceeds_is_none(make_batch):
    packed = pack(make_batch(ROWS), prompts_first=True)
    assert packed.blocks(18) is packed.blocks() is not packed.blocks(17)
    assert packed.lengths(18) is packed.lengths() is not packed.lengths(17)


@each("kind", ["gemma2", "gpt_oss", "mistral_window"])
def test_padded_rows_and_decoding_with_transformers_cache_are_those_of_eager_attention(kind, random_model):
    found = []
    for attention in ("eager", NAME):
        model = random_model(kind)
        model.set_attn_implementation(attention)
        ids = torch.tensor([[5, 6, 7, 8, 9, 3, 2], [0, 0, 0, 4, 9, 8, 7]])
        mask = (ids != 0).long()
        first = model(input_ids=ids, attention_mask=mask, use_cache=True)
        cache = {name: first[name] for name in ("cache", "past_key_values") if name in first}  # renamed in 5.24
        longer = torch.nn.functional.pad(mask, (0, 1), value=1)
        second = model(input_ids=torch.tensor([[3], [4]]), attention_mask=longer, **cache)
        found.append((first.logits[mask.bool()], second.logits))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_without_packed_rows_it_is_plain_sdpa_bit_for_bit(random_model):
    model, ids = random_model("llama"), torch.tensor([[3, 4, 5, 6, 7]])
    assert model.config._attn_implementation == NAME
    mine = model(input_ids=ids).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(mine, model(input_ids=ids).logits)


# -- what a layer says -------------------------------------------------------------------------------------------------
def test_a_models_layers_say_how_they_attend(random_model):
    models = {kind: random_model(kind) for kind in ("llama", "gemma2", "mistral")}
    models["mistral"].config.sliding_window = 4  # its mask is made by the config
    for kind, expected in (
        ("llama", [(8, None, False)] * 3),
        ("gemma2", [(16, 4, True), (16, None, True), (16, 4, True)]),
        ("mistral", [(8, 4, False)] * 3),
    ):
        assert [(a.head_size, a.window, a.cap) for a in attention_of_layers(models[kind])] == expected


SEEN = "in which a token sees those before it, and which are not those of packed rows"


def test_what_a_packed_row_cannot_do_is_found_before(random_model):
    for kind, words in (
        *((kind.lower(), f"{kind}ForCausalLM has layers {SEEN}") for kind in ("Falcon", "Mamba2", "Lfm2")),
        ("doge", "DogeAttention has a mask of its own"),
    ):
        with pytest.raises(NotPackableError, match=f"^{words}$"):
            attention_of_layers(random_model(kind))


class Attention(nn.Module):
    """A layer that asks for something of its attention."""

    def __init__(self, asks):
        super().__init__()
        self.asks, self.is_causal = asks, True

    def forward(self, x, attention_mask, packed):
        heads = x[:, None]
        asks = {"attention_mask": attention_mask} | self.asks
        return packed_attention(self, heads, heads, heads, packed=packed, **asks)[0][:, :, 0]


class Model(nn.Module):
    """As much of a PreTrainedModel as is asked."""

    device, dtype = CPU, torch.float32
    base_model = property(lambda self: self)

    def __init__(self, asks, rule):
        super().__init__()
        self.embedding, self.layer, self.rule = nn.Embedding(5, 4), Attention(asks), rule

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, position_ids, attention_mask, use_cache, packed, seq_idx):
        x = self.embedding(input_ids)
        mask = AttentionMaskInterface()[NAME](attention_mask=attention_mask, local_size=4, mask_function=self.rule)
        output = nn.Identity()
        output.last_hidden_state = x + self.layer(x, mask, packed)
        return output


WINDOW = sliding_window_causal_mask_function(4)
OTHER = "Attention sees neither all tokens before one nor those in a sliding window"


@each(("asks", "rule", "words"), [
    ({}, WINDOW, None),
    ({"attention_mask": None}, WINDOW, None),
    ({"attention_mask": None, "is_causal": False}, WINDOW, "Attention sees the tokens behind"),
    ({"position_bias": torch.zeros(1)}, WINDOW, "Attention gives its attention position_bias"),
    ({"indices": torch.zeros(1)}, WINDOW, "Attention gives its attention indices"),
    ({"attention_mask": torch.zeros(1, 1, 3, 3)}, WINDOW, "Attention has a mask of its own"),
    *(({}, rule, OTHER) for rule in (
        sliding_window_causal_mask_function(5), sliding_window_bidirectional_mask_function(4),
        bidirectional_mask_function, chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64, device="meta")),
        or_masks(WINDOW, blockwise_overlay(torch.zeros(1, 3, dtype=torch.int64))),
    )),
])  # fmt: skip
def test_a_layer_that_asks_for_more_is_named(asks, rule, words):
    if words is None:
        assert len(attention_of_layers(Model(asks, rule))) == 1
        return
    with pytest.raises(NotPackableError, match=words):
        attention_of_layers(Model(asks, rule))


PROMPTS = [[3, 17, 5, 99, 42, 8, 23], [11, 4, 9]]
COMPLETIONS = [[[9, 30, 31, 2, 55, 7], [70, 71, 72, 73, 74, 75]], [[61, 80, 81, 82, 83, 84], [12, 13, 14, 15, 16, 17]]]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [*QUICK.items(), *(slow(kind, fields) for kind, fields in OTHERS.items())],
    ids=[*QUICK, *OTHERS],
)
def test_packed_rows_and_decoding_are_the_models_own_eager_rows(kind, fields, make_batch, plain):
    model = random_model(kind, fields)
    several = [[*rows, rows[0][:1]] for rows in COMPLETIONS]
    batch = make_batch([(u, prompt, own) for u, prompt in enumerate(PROMPTS) for own in several[u]])
    weights = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(1))
    embedding = model.get_input_embeddings().weight.requires_grad_()
    expected, _ = plain(model, batch)
    [slope] = torch.autograd.grad((weights * expected).sum(), embedding)

    kernels = selection.install(model, KernelChoice.auto, own_attention=True)
    forward = choose(model, kernels)
    assert forward.packed, forward.reason
    found = forward(batch, 1.0).logprobs
    [own_slope] = torch.autograd.grad((weights * found).sum(), embedding)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(own_slope / slope.abs().max(), slope / slope.abs().max(), rtol=0, atol=1e-3)

    rows = torch.tensor([own for group in COMPLETIONS for own in group])
    with torch.no_grad():
        cache = open_prefix_cache(forward, PROMPTS, rows.shape[1])
        logits = [cache.prefill(2), *(cache.step(tokens) for tokens in rows.t()[:-1])]
    decoded = torch.stack(logits, 1).log_softmax(-1).gather(-1, rows[..., None])[..., 0]
    sampled = expected[[0, 1, 3, 4]]
    torch.testing.assert_close(decoded, sampled[sampled != 0].view_as(decoded), rtol=0, atol=1e-4)
