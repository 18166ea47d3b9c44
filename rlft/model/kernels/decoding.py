"""Chooses the prefix cache with which a model is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlft.model.kernels import flash_attention
from rlft.model.kernels.flash_prefix_cache import FlashPrefixCache
from rlft.model.kernels.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from rlft.model.forward import Forward


def open_prefix_cache(forward: Forward, prompts: Sequence[Sequence[int]], max_tokens: int) -> PrefixCache | None:
    """A cache for decoding these prompts; None if the model's attention is not rlft's, or its heads are such that flash
    attention does not take them on a CUDA GPU."""
    if not forward.packed:
        return None
    model = forward.model
    if flash_attention.takes(model.dtype, flash_attention.head_size(model), model.device):
        return FlashPrefixCache(model, prompts, max_tokens)
    return PrefixCache(model, prompts, max_tokens) if model.device.type == "cpu" else None
