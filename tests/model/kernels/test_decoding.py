"""Which cache a model is decoded with: by its attention, its dtype and where it is."""

from __future__ import annotations

import pytest
import torch

from rlft.model.forward import choose
from rlft.model.kernels import flash_attention
from rlft.model.kernels.flash_prefix_cache import FlashPrefixCache, open_prefix_cache
from rlft.model.kernels.prefix_cache import PrefixCache

PROMPTS = [[5, 6], [7]]


@pytest.mark.parametrize("kind", ["mistral_window", "gemma2", "falcon"])
def test_models_with_another_attention_have_none(kind, random_model):
    assert open_prefix_cache(choose(random_model(kind)), PROMPTS, 4) is None


def test_a_gpu_has_its_own_where_it_takes_the_heads(random_model, monkeypatch):
    forward = choose(random_model("llama"))
    assert type(open_prefix_cache(forward, PROMPTS, 4)) is PrefixCache
    asked = []

    def takes(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
        asked.append((dtype, head_size, device.type))
        return True

    monkeypatch.setattr(flash_attention, "takes", takes)
    assert type(open_prefix_cache(forward, PROMPTS, 4)) is FlashPrefixCache
    assert asked == [(torch.float32, 8, "cpu")]


def test_a_gpu_that_does_not_take_the_heads_has_none(random_model, monkeypatch):
    forward = choose(random_model("llama"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(type(forward.model), "device", torch.device("cuda"))  # where its float32 goes through a mask
    assert open_prefix_cache(forward, PROMPTS, 4) is None
