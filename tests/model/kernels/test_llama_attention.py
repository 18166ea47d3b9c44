"""Llama's attention with our rotary positions: what each module of transformers gives with its own forward."""

from __future__ import annotations

import pytest
import torch

from rlft.model.kernels import llama_attention, rotary
from rlft.model.kernels.families import FAMILIES

KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma", "granite", "mixtral", "qwen2_moe", "qwen3_moe"]
OF_EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe"]  # whose products torch has in float32 at most
WINDOWED = ["qwen2_window", "mistral_window"]


def installed(model):
    llama_attention.install(model, FAMILIES[model.config.model_type])
    return model


def test_every_family_that_gets_it_is_compared_here(random_model):
    tested = {random_model(kind).config.model_type for kind in KINDS}
    assert tested == {name for name, family in FAMILIES.items() if family.attention}


@pytest.mark.parametrize("attention", ["eager", "sdpa", "ours"])
@pytest.mark.parametrize("kind", KINDS + WINDOWED)
def test_outputs_and_gradients_are_those_of_the_module(kind, attention, random_model, monkeypatch):
    calls, plain = [], rotary.apply
    monkeypatch.setattr(rotary, "apply", lambda *args: calls.append(1) or plain(*args))
    ids, found = torch.tensor([[5, 6, 7, 8, 9, 5, 3], [9, 9, 1, 2, 4, 0, 0]]), []
    mask = (ids != 0).long()
    for change in (lambda model: model, installed):
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
def test_with_a_cache_it_decodes_the_same(kind, random_model):
    ids, found = torch.tensor([[5, 6, 7, 8, 9, 5]]), []
    for change in (lambda model: model, installed):
        model = change(random_model(kind, dtype=torch.float64))
        first = model(input_ids=ids, use_cache=True)
        name = "cache" if hasattr(first, "cache") else "past_key_values"  # renamed in transformers 5.24
        second = model(input_ids=torch.tensor([[3]]), **{name: first[name]})
        found.append((first.logits, second.logits))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
