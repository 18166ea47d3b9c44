"""Attention in blocks, forward and backward, against attention through a mask of every token by every token."""

from __future__ import annotations

import pytest
import torch

from rlft.model.kernels.attention_blocks import make_blocks
from rlft.model.kernels.split_attention import flash, merge, serves, split_attention

ROW = ([(0, 5), (14, 3)], [(5, 4), (9, 5), (17, 1), (18, 6)], [0, 0, 1, 1])
NUM_TOKENS = 24


def masked(query, key, value, scale):
    prompts, completions, owner = ROW
    mask = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    for start, length in (*prompts, *completions):
        mask[start : start + length, start : start + length] = torch.ones(length, length).tril().bool()
    for (start, length), unit in zip(completions, owner, strict=True):
        first, size = prompts[unit]
        mask[start : start + length, first : first + size] = True
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_the_mask(key_heads):
    generator = torch.Generator().manual_seed(0)
    shapes = [(NUM_TOKENS, heads, 8) for heads in (4, key_heads, key_heads)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    weight = torch.randn(NUM_TOKENS, 4, 8, generator=generator, dtype=torch.float64)
    blocks = make_blocks(*ROW, torch.device("cpu"))
    assert any(block.queries.slots is not None for block in blocks), "some queries are padded"
    assert any(block.key_bias is not None for block in blocks), "and some keys"
    ours, theirs = split_attention(*tensors, blocks, 0.3), masked(*tensors, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    mine = torch.autograd.grad((ours * weight).sum(), tensors)
    its = torch.autograd.grad((theirs * weight).sum(), tensors)
    torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


def test_two_parts_make_the_whole():
    query, key, value = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (4, 9, 9))
    one, other = (flash(query, key[:, :, part], value[:, :, part], None, 0.5) for part in (slice(0, 2), slice(2, 9)))
    whole, whole_lse = flash(query, key, value, None, 0.5)
    merged, lse = merge(one[0], one[1][..., None], other[0], other[1][..., None])
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[..., 0], whole_lse, rtol=1e-12, atol=1e-12)


def test_heads_of_unlike_sizes_are_left_to_others():
    assert serves(torch.zeros(1, 4), torch.zeros(1, 4))
    assert not serves(torch.zeros(1, 4), torch.zeros(1, 6))
