"""Decoding with each prompt's keys once, against the model's own forward over the whole rows."""

from __future__ import annotations

import pytest
import torch

from rlft.model.forward import choose
from rlft.model.kernels.flash_prefix_cache import open_prefix_cache
from rlft.model.kernels.prefix_cache import PrefixCache

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]


def whole_logits(model, row):
    with torch.no_grad():
        return model(input_ids=torch.tensor([row])).logits[0, -1]


@pytest.mark.parametrize("kind", ["llama", "llama_one_kv_head", "qwen3", "gemma"])
def test_logits_are_those_of_the_whole_row_at_every_step_and_after_rows_have_left(kind, random_model):
    model = random_model(kind).double()
    choose(model)
    cache = open_prefix_cache(choose(model), PROMPTS, 7)
    assert isinstance(cache, PrefixCache)
    rows = [list(p) for p in PROMPTS for _ in range(3)]
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logits = cache.prefill(3)
        for step in range(7):
            expected = torch.stack([whole_logits(model, row) for row in rows])
            torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
            if step in (2, 4):
                kept = torch.tensor([0, 2, 3, 8] if step == 2 else [1, 3])  # first no row of a prompt less, then two
                cache.keep(kept)
                rows = [rows[i] for i in kept.tolist()]
            tokens = torch.randint(1, 100, (len(rows),), generator=dice)
            rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
            logits = cache.step(tokens)


def test_a_prompts_keys_are_there_once_however_large_its_group(random_model):
    model = random_model("llama")
    choose(model)
    cache = PrefixCache(model, PROMPTS, 100)
    with torch.no_grad():
        cache.prefill(50)
    keys, values = cache._prompt[0]
    assert keys.shape[0] == values.shape[0] == len(PROMPTS)
