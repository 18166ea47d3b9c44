"""The forwards of Llama-like attention modules and decoder layers, and the model types that have them.

Any other model computes packed rows, too, if its attention does (`attention`); here is what is faster still.

In a packed row most tokens of a prompt only provide keys and values for later tokens. In the last layer nothing more is
needed of them, so its MLP and the final norm get only the positions from which a completion token is predicted.

A branch of a layer is one function (`layer_branches`) where its parts are known: norms, attention and MLP replaced by
rlft's, and linear layers that are frozen or have one plain adapter. Its modules are then not called, so that hooks on
them do not run; otherwise they are called one by one. Attention is Llama's in families that differ only in names, and
in Qwen3, which has norms over each head in addition.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import eager_attention_forward

from rlft.model.checkpointing import tile_of
from rlft.model.kernels import elementwise, layer_branches
from rlft.model.kernels.layer_attention import window_of
from rlft.model.kernels.lora_linear import layers_of
from rlft.model.kernels.prefix_cache import FlashPrefixCache
from rlft.model.kernels.row_attention import spans_of
from rlft.model.packing import PackedRows

TESTED = ("5.17", "5.24")
"""Releases of transformers, the first and the last, whose modules the kernels are tested against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What can be replaced in a model type besides attention, norms and gated MLPs, which are known by what they do."""

    # `self_attn` of every layer is Llama's: q, k, v and o projections, perhaps norms over each head, and rotary
    # positions by halves.
    attention: bool = False
    # Every layer is x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)), and nothing else,
    # with an MLP that returns one tensor.
    layer: bool = False
    # The attention's sliding window is `config.sliding_window`; otherwise it is the module's, if that has one.
    window_of_config: bool = False


FAMILIES: Mapping[str, Family] = {
    "gemma": Family(attention=True, layer=True),
    "granite": Family(attention=True),
    "llama": Family(attention=True, layer=True),
    "mistral": Family(attention=True, layer=True, window_of_config=True),
    "mixtral": Family(attention=True, window_of_config=True),
    "qwen2": Family(attention=True, layer=True),
    "qwen2_5_vl_text": Family(attention=True, layer=True),
    "qwen2_moe": Family(attention=True),
    "qwen3": Family(attention=True, layer=True),
    "qwen3_moe": Family(attention=True),
    "qwen3_vl_text": Family(attention=True, layer=True),
    "smollm3": Family(layer=True),
}
"""{model type (`model_type` in config.json): its family}."""


# -- attention ---------------------------------------------------------------------------------------------------------
def install_attention(model: PreTrainedModel, family: Family) -> None:
    """Replaces the forward of every layer's attention."""
    layers: Any = model.base_model.layers
    for layer in layers:
        attention = layer.self_attn
        holder = attention.config if family.window_of_config else attention
        attention.forward = functools.partial(_attention_forward, attention, getattr(holder, "sliding_window", None))


def _attention_forward(
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
    query, key = elementwise.rotated(query, key, *position_embeddings)
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


# -- layers ------------------------------------------------------------------------------------------------------------
def install(model: PreTrainedModel) -> None:
    """Replaces the forward of every layer. Call it after `elementwise.install` and `install_attention`."""
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, layer.forward, layer is layers[-1])


def narrows(model: PreTrainedModel) -> bool:
    """Whether the model returns only the predicting positions `[1, M, hidden]` of a packed row."""
    layers = getattr(model.base_model, "layers", None)
    return bool(layers) and elementwise.is_replaced(layers[-1], _forward)


def _forward(layer: Any, plain: Any, is_last: bool, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """`[1, N, hidden]`, or `[1, M, hidden]` in the last layer, from `[1, N, hidden]` of a packed row, or of the next
    tokens in decoding on a GPU; for other inputs what the layer itself gives."""
    packed, cache = kwargs.get("packed"), kwargs.get("prefix_cache")
    if isinstance(cache, FlashPrefixCache) and cache.is_decoding:
        packed = cache
    elif not isinstance(packed, PackedRows):
        return plain(hidden_states, **kwargs)
    if not kwargs.pop("is_checkpointed", not _needs_checkpoint(layer)):
        # The whole module, as older releases do it: its hooks bring the weights of a divided base in the backward, too.
        inner = functools.partial(layer, is_checkpointed=True, **kwargs)
        return layer._gradient_checkpointing_func(inner, hidden_states)
    attended = None
    if elementwise.is_replaced(layer.self_attn, _attention_forward):
        window = window_of(kwargs.get("attention_mask"))
        attended = _fused_attention(layer, hidden_states, packed, window, *kwargs["position_embeddings"])
    if attended is None:
        attended = hidden_states + layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
    if isinstance(packed, FlashPrefixCache):
        return _mlp(layer, attended, decodes=True)
    return _mlp(layer, packed.predicting(attended) if is_last else attended)


def _needs_checkpoint(layer: Any) -> bool:
    """Whether this pass has to be checkpointed in the layer's forward, which is replaced.

    Since transformers 5.24 a class derived from GradientCheckpointingLayer does that in its `forward`, before that in
    `__call__`.
    """
    if "__call__" in vars(GradientCheckpointingLayer) or not isinstance(layer, GradientCheckpointingLayer):
        return False
    return layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()


def _fused_attention(
    layer: Any, x: Tensor, packed: PackedRows | FlashPrefixCache, window: int | None, cos: Tensor, sin: Tensor
) -> Tensor | None:
    """The attention branch as one function; None if its parts do not allow that."""
    attention = layer.self_attn
    norms_of_heads = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    norm, *head_norms = (elementwise.norm_of(module) for module in (layer.input_layernorm, *norms_of_heads))
    if norm is None or None in head_norms or not elementwise.serves(x):
        return None
    layers = layers_of(x, (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj))
    if layers is None or (layers.in_4_bits and isinstance(packed, FlashPrefixCache)):
        return None  # bitsandbytes multiplies a few tokens with the 4-bit numbers themselves
    query_norm, key_norm = head_norms or (None, None)
    heads = layer_branches.Heads(
        norm=norm, query_norm=query_norm, key_norm=key_norm, size=attention.head_dim, cos=cos, sin=sin
    )
    if isinstance(packed, FlashPrefixCache):
        return layer_branches.decoded_attention(x, heads, packed, window, attention.scaling, layers.operands)
    spans = spans_of(packed, x, attention.head_dim, window)
    return layer_branches.attention(x, heads, spans, attention.scaling, layers)


def _mlp(layer: Any, x: Tensor, *, decodes: bool = False) -> Tensor:
    mlp, norm = layer.mlp, elementwise.norm_of(layer.post_attention_layernorm)
    layers = None
    if norm is not None and elementwise.serves(x) and elementwise.is_gated(mlp):
        layers = layers_of(x, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    if norm is None or layers is None or (layers.in_4_bits and decodes):
        return x + mlp(layer.post_attention_layernorm(x))
    if decodes:
        return layer_branches.decoded_mlp(x, norm, layers.operands)
    return layer_branches.mlp(x, norm, layers, tile_of(layer))
