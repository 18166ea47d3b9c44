from __future__ import annotations

import pytest
import torch
from torch import nn

from rlft.model.kernels.attention import NAME, install, obstacle, packed_attention
from rlft.model.packing import pack


def dense(query, key, value, scaling, batch):
    """The same attention with an N x N mask, from its definition."""
    owners, prompts, positions = [], [], []
    unit = -1
    for group in batch.group_ids.unique(sorted=False).sort().values.tolist():
        rows = (batch.group_ids == group).nonzero()[:, 0].tolist()
        unit += 1
        length = int((batch.attention_mask[rows[0]] & ~batch.loss_mask[rows[0]]).sum())
        for member, row in [(-1, rows[0]), *enumerate(rows)]:
            size = length if member < 0 else int(batch.loss_mask[row].sum())
            owners += [(unit, member)] * size
            prompts += [member < 0] * size
            positions += list(range(size)) if member < 0 else list(range(length, length + size))
    n = len(owners)
    mask = torch.tensor(
        [
            [
                owners[j][0] == owners[i][0] and positions[j] <= positions[i] and (prompts[j] or owners[j] == owners[i])
                for j in range(n)
            ]
            for i in range(n)
        ]
    )
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_attention_is_that_of_the_mask_it_never_makes(kv_heads, make_batch):
    batch = make_batch(
        [
            (0, [5, 6, 7, 8], [20, 21]),
            (0, [5, 6, 7, 8], [22, 23, 24]),
            (0, [5, 6, 7, 8], []),
            (1, [9, 10], [26, 27, 28, 29, 30]),
        ]
    )
    packed = pack(batch)
    generator = torch.Generator().manual_seed(0)

    def random(heads, size):
        return torch.randn(1, heads, packed.num_tokens, size, generator=generator, dtype=torch.float64)

    query, key, value = random(4, 8), random(kv_heads, 8), random(kv_heads, 6)  # value heads may have their own size
    query.requires_grad_()
    out, weights = packed_attention(nn.Module(), query, key, value, None, scaling=0.3, packed=packed)
    expected = dense(query, key, value, 0.3, batch)
    assert weights is None
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    (mine,) = torch.autograd.grad(out.square().sum(), query)
    (its,) = torch.autograd.grad(expected.square().sum(), query)
    torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "mistral_window", "granite"])
def test_a_model_whose_attention_is_plain_gets_the_packed_one(kind, random_model):
    model = random_model(kind)
    model.set_attn_implementation("sdpa")
    install(model)
    assert obstacle(model) is None
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_a_model_that_needs_more_gets_eager_attention_which_leaves_nothing_out(kind, random_model):
    model = random_model(kind)
    assert obstacle(model) is not None
    assert model.config._attn_implementation == "eager"


def test_a_model_with_an_attention_of_its_own_keeps_it(random_model):
    model = random_model("falcon")
    assert model.config._attn_implementation != NAME
