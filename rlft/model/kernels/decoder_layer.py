"""The forward of Llama-like decoder layers over a packed row: branches as one function each, and the last one narrowed.

In a packed row most tokens of a prompt only provide keys and values for later tokens. In the last layer nothing more is
needed of them, so its MLP and the final norm get only the positions from which a completion token is predicted.

This is for families with such layers (`families.py`). A branch is one function (`layer_branches`) where its parts are
known: norms, attention and MLP replaced by rlft's, and linear layers that are frozen or have one plain adapter. Its
modules are then not called, so that hooks on them do not run; otherwise they are called one by one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlft.model.kernels import layer_branches, llama_attention, norm_and_mlp
from rlft.model.kernels.lora_linear import operands_of
from rlft.model.packing import PackedRows


def install(model: PreTrainedModel) -> None:
    """Replaces the forward of every layer. Call it after `norm_and_mlp.install` and `llama_attention.install`."""
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, layer.forward, layer is layers[-1])


def narrows(model: PreTrainedModel) -> bool:
    """Whether the model returns only the predicting positions `[1, M, hidden]` of a packed row."""
    layers = getattr(model.base_model, "layers", None)
    forward = layers[-1].forward if layers else None
    return isinstance(forward, functools.partial) and forward.func is _forward


def _forward(layer: Any, plain: Any, is_last: bool, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """`[1, N, hidden]`, or `[1, M, hidden]` in the last layer, from `[1, N, hidden]` of a packed row; for other inputs
    what the layer itself gives."""
    packed = kwargs.get("packed")
    if packed is None:
        return plain(hidden_states, **kwargs)
    if not kwargs.pop("is_checkpointed", not _needs_checkpoint(layer)):
        # The whole module, as older releases do it: its hooks bring the weights of a divided base in the backward, too.
        inner = functools.partial(layer, is_checkpointed=True, **kwargs)
        return layer._gradient_checkpointing_func(inner, hidden_states)
    attended = None
    if llama_attention.is_installed(layer.self_attn):
        attended = _fused_attention(layer, hidden_states, packed, *kwargs["position_embeddings"])
    if attended is None:
        attended = hidden_states + layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
    return _mlp(layer, attended.index_select(1, packed.predictor) if is_last else attended)


def _needs_checkpoint(layer: Any) -> bool:
    """Whether this pass has to be checkpointed in the layer's forward, which is replaced.

    Since transformers 5.24 a class derived from GradientCheckpointingLayer does that in its `forward`, before that in
    `__call__`.
    """
    if "__call__" in vars(GradientCheckpointingLayer) or not isinstance(layer, GradientCheckpointingLayer):
        return False
    return layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()


def _fused_attention(layer: Any, x: Tensor, packed: PackedRows, cos: Tensor, sin: Tensor) -> Tensor | None:
    """The attention branch as one function; None if its parts do not allow that."""
    attention = layer.self_attn
    norm, *head_norms = (norm_and_mlp.norm_of(module) for module in (layer.input_layernorm, *_head_norms(attention)))
    if (
        norm is None
        or None in head_norms
        or not norm_and_mlp.serves(x)
        or (attention.training and attention.attention_dropout)
    ):
        return None
    operands = operands_of(x, (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj))
    spans = layer_branches.spans_of(packed, x, attention.head_dim)
    if operands is None or spans is None:
        return None
    query_norm, key_norm = head_norms or (None, None)
    heads = layer_branches.Heads(
        norm=norm,
        query_norm=query_norm,
        key_norm=key_norm,
        size=attention.head_dim,
        cos=cos,
        sin=sin,
        spans=spans,
        scale=attention.scaling,
    )
    return layer_branches.attention(x, heads, operands)


def _mlp(layer: Any, x: Tensor) -> Tensor:
    mlp, norm = layer.mlp, norm_and_mlp.norm_of(layer.post_attention_layernorm)
    operands = None
    if norm is not None and norm_and_mlp.serves(x) and norm_and_mlp.is_gated(mlp):
        operands = operands_of(x, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    if norm is None or operands is None:
        return x + mlp(layer.post_attention_layernorm(x))
    return layer_branches.mlp(x, norm, operands)


def _head_norms(attention: Any) -> list[nn.Module]:
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
