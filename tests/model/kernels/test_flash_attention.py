"""The attention of CUDA GPUs, run on a CPU through stand-ins for its operators, against attention through a mask."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from dense_attention import masked
from in_one_test import each

from rlft.model.kernels import attention, flash_attention
from rlft.model.kernels.attention import RowAttention, attention_of_layers, on_this_device
from rlft.model.kernels.flash_attention import backward_scratch, obstacle, row_lengths
from rlft.model.kernels.split_attention import Scoring, make_blocks
from rlft.model.packing import pack

ROWS = [
    (0, [5, 6, 7, 8], [20, 21]), (0, [5, 6, 7, 8], [22, 23, 24]), (0, [5, 6, 7, 8], []),
    (1, [9, 10], [26, 27, 28, 29, 30]), (2, [11, 12, 13], []), (3, [14], [31]), (3, [14], [32, 33]),
]  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture
def packed(make_batch):
    return pack(make_batch(ROWS), prompts_first=True)


def tensors_of(packed, key_heads, dtype):
    dice = torch.Generator().manual_seed(0)
    shapes = [(packed.num_tokens, heads, 8) for heads in (4, key_heads, key_heads)]
    return [torch.randn(s, generator=dice, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def test_in_16_bits_it_is_off_by_roundings_alone(packed, stand_in):
    # A result is rounded once by each of two calls and once merged, each by at most half of 2^-7 (bfloat16 keeps 8
    # bits); the gradient of a prompt's key is rounded by two calls and once added up. Of numbers up to `largest`.
    tensors = tensors_of(packed, 2, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    ours, theirs = RowAttention.apply(*tensors, None, packed.lengths(), Scoring(0.3)), masked(*exact, packed, 0.3)
    mine = torch.autograd.grad(ours.sum(), tensors)
    its = torch.autograd.grad(theirs.sum(), exact)
    for one, other in zip((ours, *mine), (theirs, *its), strict=True):
        assert (one.double() - other).abs().max() <= 3 * 2**-8 * max(1, other.abs().max())


def test_completions_of_one_token_may_stand_beside_empty_ones_where_heads_share_keys(make_batch, stand_in):
    # With a longest run of 1 torch takes it that every run has one query, and a prompt without completions has none.
    rows = [(0, [5, 6, 7], [20]), (1, [8], []), (2, [9, 10], [21])], [(0, [5], []), (1, [6], [])], [(0, [5], [20])]
    for batch in rows:
        packed = pack(make_batch(batch), prompts_first=True)
        for key_heads in (1, 2, 4):
            tensors = tensors_of(packed, key_heads, torch.float64)
            ours = RowAttention.apply(*tensors, None, packed.lengths(), Scoring(0.3))
            theirs = masked(*tensors, packed, 0.3)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            gradients = [torch.autograd.grad(x.square().sum(), tensors) for x in (ours, theirs)]
            torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@each("window", [None, 1, 2, 3])
def test_images_that_are_read_both_ways_are_as_in_blocks(window, packed, stand_in):
    spans = (packed.prompts, packed.completions, packed.owner)
    images = [(packed.prompts[0][0], 4), (packed.prompts[2][0] + 1, 2)]  # of a group, of a prompt alone
    tensors = tensors_of(packed, 2, torch.float64)
    lengths = row_lengths(*spans, CPU, window, images)
    assert lengths is not None
    found = [
        RowAttention.apply(*tensors, None, spans, Scoring(0.3))
        for spans in (lengths, make_blocks(*spans, CPU, window=window, images=images))
    ]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    weight = torch.randn(packed.num_tokens, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weight).sum(), tensors) for out in found]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_what_a_backward_holds_is_what_torchs_source_says():
    """`mha_varlen_bwd` of heads of 128, of which pairs share a key, on a card of 132 multiprocessors."""
    of = partial(backward_scratch, heads=12, key_heads=2, head_size=128, multiprocessors=132)
    # 132 / 12 = 11 float32 copies of the queries, the sums of a normaliser, and 12 heads' gradients of keys and values.
    assert of(1000, 50, 1) == 11 * 1128 * 12 * 128 * 4 + 1128 * 12 * 4 + 2 * 50 * 12 * 128 * 2
    assert of(1000, 50, 2) == 6 * 1256 * 12 * 128 * 4 + 1256 * 12 * 4 + 2 * 50 * 12 * 128 * 2  # 132 / 24 = 5.5
    assert of(1000, 50, 40) == 6120 * 12 * 128 * 4 + 6120 * 12 * 4 + 2 * 50 * 12 * 128 * 2
    # Heads of 40 and 136 are widened to 64 and 192; no key is shared.
    alone = partial(backward_scratch, 100, 50, 4, heads=3, key_heads=3, multiprocessors=12)
    assert [alone(head_size=size) for size in (40, 136)] == [612 * 3 * (size + 1) * 4 for size in (64, 192)]


def test_rows_that_it_cannot_take_have_no_lengths(make_batch, packed):
    assert packed.lengths() is not None
    assert pack(make_batch(ROWS)).lengths() is None, "completions stand between the prompts"
    assert row_lengths([(0, 2), (2, 0)], [(2, 3), (5, 1)], [0, 1], CPU) is None, "a prompt is empty"
    assert row_lengths([(0, 2), (2, 1)], [(3, 3), (6, 1)], [1, 0], CPU) is None, "completions in another order"


@each(("dtype", "size", "gpu", "reason"), [
    (torch.bfloat16, 64, (8, 0), None),
    (torch.float16, 256, (9, 0), None),
    (torch.float32, 64, (9, 0), "flash attention computes in 16 bits, not in float32"),
    (torch.bfloat16, 264, (9, 0), "flash attention takes heads of 8, 16 .. up to 256 numbers, not of 264"),
    (torch.bfloat16, 60, (9, 0), "flash attention takes heads of 8, 16 .. up to 256 numbers, not of 60"),
    (torch.bfloat16, 64, (7, 5), "flash attention needs compute capability 8.0, which Some GPU lacks"),
    (torch.bfloat16, 200, (8, 6), "flash attention has no gradient for heads of 200 numbers on Some GPU"),
    (torch.float16, 224, (12, 0), "flash attention has no gradient for heads of 224 numbers on Some GPU"),
    (torch.bfloat16, 192, (8, 9), None), (torch.bfloat16, 256, (8, 9), None), (torch.bfloat16, 224, (9, 0), None),
])  # fmt: skip
def test_what_it_cannot_take_has_a_reason(dtype, size, gpu, reason, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: gpu)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Some GPU")
    assert obstacle(dtype, size, torch.device("cuda")) == reason


@each(("dtype", "words"), [
    (torch.bfloat16, "attention by variable-length flash calls, fused steps"),
    (torch.float32,
     "attention by plain products, since flash attention computes in 16 bits, not in float32, fused steps"),
])  # fmt: skip
def test_a_run_says_which_attention_it_has_on_a_gpu_and_nothing_of_a_cpu(dtype, words, backbone, monkeypatch):
    assert obstacle(torch.bfloat16, 64, CPU) == "flash attention was tried on NVIDIA's GPUs only, not on a CPU"
    assert on_this_device(backbone.model) == ""
    asked = attention_of_layers(backbone.model)
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
        patch.setattr("rlft.model.kernels.elementwise.obstacle", lambda device: None)
        patch.setattr(attention, "attention_of_layers", lambda model: asked)
        assert on_this_device(SimpleNamespace(device=torch.device("cuda"), dtype=dtype)) == words


def test_the_backward_adds_up_in_a_fixed_order_and_leaves_torchs_setting(packed, stand_in, monkeypatch):
    """With warn_only torch would compute it with atomic sums (measured on an H100: half of all gradients differed)."""
    order, plain = [], flash_attention._BACKWARD
    modes = torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled

    def recorded(*args, **keys):
        order.append(tuple(mode() for mode in modes))
        return plain(*args, **keys)

    monkeypatch.setattr(flash_attention, "_BACKWARD", recorded)
    tensors = [torch.randn(packed.num_tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    RowAttention.apply(*tensors, None, packed.lengths(), Scoring(0.3)).sum().backward()
    assert order == [(True, False)] * 2
    assert not torch.are_deterministic_algorithms_enabled()
