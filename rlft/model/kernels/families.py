"""The model types with which the kernels are tested, and how transformers' modules of each type are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TESTED = ("5.17", "5.24")
"""Releases of transformers, the first and the last, whose modules the kernels are tested against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What can be replaced in a model type, besides norms and gated MLPs, which are compared one by one.

    Attributes:
        attention: `self_attn` of every layer is Llama's: q, k, v and o projections, perhaps norms over each head, and
            rotary positions by halves.
        layer: every layer is x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)), and nothing
            else, with an MLP that returns one tensor.
        window_of_config: the attention's sliding window is `config.sliding_window`; otherwise it is the module's, if
            that has one.
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
"""{model type (`model_type` in config.json): its family}. Other types get no kernels."""
