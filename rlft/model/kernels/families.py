"""The model types that the kernels are tested with, and what transformers' modules of each are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TESTED = ("5.17", "5.23")
"""Releases of transformers, the first and the last, whose modules the kernels are tested against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What there is to replace, besides norms and gated MLPs, which are compared one by one.

    Args:
        attention: `self_attn` of every layer is Llama's: q, k, v and o projections, perhaps norms over each head, and
            rotary positions by halves.
        layer: every layer is x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)), and nothing
            else, with an MLP that leaves one tensor.
        window_of_config: the attention's sliding window is `config.sliding_window`; else it is the module's, if that
            has one.
    """

    attention: bool = False
    layer: bool = False
    window_of_config: bool = False


FAMILIES: Mapping[str, Family] = {
    "gemma": Family(attention=True, layer=True),
    "gpt2": Family(),
    "granite": Family(attention=True),
    "llama": Family(attention=True, layer=True),
    "mistral": Family(attention=True, layer=True, window_of_config=True),
    "mixtral": Family(attention=True, window_of_config=True),
    "olmo2": Family(),
    "phi3": Family(),
    "qwen2": Family(attention=True, layer=True),
    "qwen2_moe": Family(attention=True),
    "qwen3": Family(attention=True, layer=True),
    "qwen3_moe": Family(attention=True),
    "smollm3": Family(layer=True),
    "starcoder2": Family(),
}
"""By model type (`model_type` in config.json). Another one gets no kernels."""
