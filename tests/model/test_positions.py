"""Rows whose numbers would depend on the rows beside them are refused by name; shorter ones are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from rlft.model import forward
from rlft.model.forward import _probe, choose, packed_forward, padded_forward
from rlft.model.positions import SHORT, limit_of, probed_beginnings, windows_of
from rlft.types import UserError

LIMIT = 16
FACTORS = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [3.0, 4.0, 5.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT}
FACTORS_OF_128 = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
# Phi-4-mini's shape: three quarters of each head are rotated, 6 of 8 numbers, so 3 factors.
PHI4_MINI = {
    "original_max_position_embeddings": LIMIT,
    "rope_parameters": LONGROPE | FACTORS | {"partial_rotary_factor": 0.75},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0}
OF_A_BATCH = [
    ("phi3", PHI4_MINI),
    ("llama", {"rope_parameters": LONGROPE | {name: [*factors, 2.0] for name, factors in FACTORS.items()}}),
    ("llama", {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC | {"factor": 4.0}}),
    ("qwen2", {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC | {"factor": 2.0}}),
]


def rows_of(make_batch, completions):
    """Rows of one group with a prompt of 6 tokens and completions of these lengths, and one short row of another."""
    prompt, other = [3, 17, 5, 99, 42, 8], [11, 4]
    rows = [(5, prompt, [9 + 7 * i + j for j in range(length)]) for i, length in enumerate(completions)]
    return make_batch([*rows, (2, other, [70, 71, 72])])


def test_rows_up_to_the_limit_are_exact_and_longer_ones_are_refused_by_name(random_model, plain, make_batch):
    for kind, keys in OF_A_BATCH:
        model = random_model(kind, **keys)
        forward = choose(model)
        assert forward.packed, forward.reason
        batch = rows_of(make_batch, (LIMIT - 6, 1, 4))
        expected, _ = plain(model, batch)
        padded = padded_forward(model, batch, 1.0, False)
        for outputs in (forward(batch, 1.0), padded):
            torch.testing.assert_close(outputs.logprobs, expected, rtol=1e-5, atol=1e-5)
        longer = rows_of(make_batch, (LIMIT - 5, 1, 4))
        alone, _ = plain(model, longer)
        # The refusal is needed: beside a longer row the short ones have other log-probs than alone.
        assert (padded_forward(model, longer, 1.0, False).logprobs - alone)[1:].abs().max() > 1e-3
        words = f"model.path: a row exceeds the model's context of {LIMIT} tokens, .* RoPE makes a row depend on its"
        with pytest.raises(UserError, match=words):
            forward(longer, 1.0)
        with pytest.raises(UserError, match=words):
            forward.most_likely(longer, 2, 90)


def test_a_row_with_branches_is_as_long_as_its_longest_path(random_model, tree_batch):
    trees, paths, _ = tree_batch
    longest, all_tokens = int(paths.attention_mask.sum(1).max()), int(trees.attention_mask.sum(1).max())
    assert longest <= LIMIT < all_tokens
    choose(random_model("phi3", **PHI4_MINI))(trees, 1.0)


def test_the_limit_is_the_smallest_length_that_the_config_names():
    nested = {
        "full_attention": LONGROPE | {"short_factor": [1.0] * 128, "long_factor": [2.0] * 128},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    for name, keys, expected in (
        ("phi3", {"max_position_embeddings": 64, "original_max_position_embeddings": 64}, (64, "context of 64 tokens")),
        ("llama", {"rope_parameters": linear}, (128, "context of 128 tokens")),
        ("llama", {"rope_parameters": yarn}, (128, "context of 128 tokens")),
        ("gemma3_text", {"rope_parameters": nested}, (LIMIT, "longrope RoPE")),
        ("gemma3", {"text_config": {"rope_parameters": nested}}, (LIMIT, "longrope RoPE")),
        ("llama4_text", {"floor_scale": 32, "attn_temperature_tuning": True}, (31, "a floor_scale of 32")),
        ("llama4_text", {"floor_scale": 32, "attn_temperature_tuning": False}, (128, "context of 128 tokens")),
        ("gpt2", {"max_position_embeddings": 50}, (50, "context of 50 tokens")),
    ):
        limit = limit_of(AutoConfig.for_model(name, **{"max_position_embeddings": 128} | keys))
        assert limit is not None
        assert limit.tokens == expected[0]
        assert expected[1] in limit.words
    assert limit_of(AutoConfig.for_model("mamba2")) is None


def test_the_probe_has_rows_on_both_sides_of_every_window_that_a_row_may_reach(random_model):
    for kind, keys, expected in (
        ("mistral_window", {"sliding_window": 24}, [24]),
        ("mistral_window", {"sliding_window": 400, "max_position_embeddings": 1024}, [400]),
        ("mistral_window", {"sliding_window": 126}, []),  # rows of 129 tokens do not fit the context
        ("mistral_window", {"sliding_window": 4000, "max_position_embeddings": 8192}, []),
        ("llama", {}, []),
    ):
        model = random_model(kind, **keys)
        batch, first = _probe(model)
        lengths, context = batch.attention_mask.sum(1).tolist(), model.config.max_position_embeddings
        assert lengths[:4] == [9, 7, 9, 4]
        assert sorted(lengths[4:-2]) == sorted(n for window in expected for n in (window - 1, window + 3))
        assert first.tolist() == [0] * (len(lengths) - 2) + [context - SHORT] * 2
        assert lengths[-2] == SHORT
        assert windows_of(model.config) in ([], [keys.get("sliding_window")])
        choose(model)


def test_the_probe_has_rows_on_both_sides_of_the_contexts_that_rope_extends_and_at_the_end():
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    for kind, keys, expected in (
        ("llama", {"rope_parameters": yarn}, [60, 119]),
        ("llama", {"rope_parameters": yarn | {"original_max_position_embeddings": 126}}, [119]),
        ("llama", {"rope_parameters": LONGROPE | FACTORS_OF_128}, [LIMIT - SHORT]),  # no row exceeds its first limit
        ("gpt2", {}, [119]),
        ("llama", {"max_position_embeddings": SHORT}, []),
    ):
        config = AutoConfig.for_model(kind, **{"max_position_embeddings": 128} | keys)
        assert probed_beginnings(config) == expected, kind


def test_a_packed_forward_that_is_wrong_at_the_end_of_the_context_is_not_used(random_model, monkeypatch):
    model = random_model("llama")
    assert choose(model).packed

    def wrong(model, batch, *args, layout, **keys):
        return packed_forward(
            model, batch, *args, layout=replace(layout, position_ids=layout.position_ids.clamp(max=122)), **keys
        )

    monkeypatch.setattr(forward, "packed_forward", wrong)
    found = choose(model)
    assert not found.packed
    assert "packed and padded log-probs differ" in found.reason
