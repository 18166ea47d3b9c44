"""Softmax attention of any kind in packed rows and in decoding: tiny random models against their own eager rows."""

from __future__ import annotations

import pytest
import torch
from attention_families import OTHERS, QUICK, random_model
from slow_cases import slow

from rlft.config.model import KernelChoice
from rlft.model.forward import choose, open_prefix_cache
from rlft.model.kernels import selection

PROMPTS = [[3, 17, 5, 99, 42, 8, 23], [11, 4, 9]]
COMPLETIONS = [[[9, 30, 31, 2, 55, 7], [70, 71, 72, 73, 74, 75]], [[61, 80, 81, 82, 83, 84], [12, 13, 14, 15, 16, 17]]]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [*QUICK.items(), *(slow(kind, fields) for kind, fields in OTHERS.items())],
    ids=[*QUICK, *OTHERS],
)
def test_packed_rows_and_decoding_are_the_models_own_eager_rows(kind, fields, make_batch, plain) -> None:
    model = random_model(kind, fields)
    batch = make_batch(
        [(u, prompt, own) for u, prompt in enumerate(PROMPTS) for own in [*COMPLETIONS[u], COMPLETIONS[u][0][:1]]]
    )
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
        assert cache is not None
        logits = [cache.prefill(2), *(cache.step(tokens) for tokens in rows.t()[:-1])]
    decoded = torch.stack(logits, 1).log_softmax(-1).gather(-1, rows[..., None])[..., 0]
    sampled = expected[[0, 1, 3, 4]]
    torch.testing.assert_close(decoded, sampled[sampled != 0].view_as(decoded), rtol=0, atol=1e-4)
