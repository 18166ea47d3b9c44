"""The forward of Llama's attention module, with rotary positions in one pass (`rotary.py`).

This is for the families whose attention is Llama's (`families.py`): those that differ only in names, and Qwen3's, which
has norms over each head in addition.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.llama.modeling_llama import eager_attention_forward

from rlft.model.kernels import rotary
from rlft.model.kernels.families import Family


def install(model: PreTrainedModel, family: Family) -> None:
    """Replaces the forward of every layer's attention."""
    layers: Any = model.base_model.layers
    for layer in layers:
        attention = layer.self_attn
        holder = attention.config if family.window_of_config else attention
        attention.forward = functools.partial(_forward, attention, getattr(holder, "sliding_window", None))


def is_installed(attention: Any) -> bool:
    """Whether this module's forward is the one of this file."""
    forward = vars(attention).get("forward")
    return isinstance(forward, functools.partial) and forward.func is _forward


def _forward(
    attention: Any,
    window: int | None,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(`[B, N, hidden]`, attention weights if the attention function gives any) from hidden states `[B, N, hidden]`.

    The cache of earlier keys and values comes as `cache` since transformers 5.24, before that as `past_key_values`.
    """
    cache = past_key_values if cache is None else cache
    shape = hidden_states.shape[:-1]
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (layer(hidden_states).view(*shape, -1, attention.head_dim) for layer in layers)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    query, key = rotary.apply(query, key, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    implementation = attention.config._attn_implementation
    attend = AttentionInterface().get_interface(implementation, eager_attention_forward)
    out, weights = attend(
        attention,
        query,
        key,
        value,
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        sliding_window=window,
        **kwargs,
    )
    return attention.o_proj(out.reshape(*shape, -1).contiguous()), weights
