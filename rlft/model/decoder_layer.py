"""The forward of Llama-like decoder layers over a packed row: branches as one function each, and the last one narrowed.

In a packed row most of a prompt only lends its keys and values to what comes behind. In the last layer it is done once
these are made, so its MLP and the final norm get the positions alone from which a completion token is predicted.

A branch is one function (`branches`) where its parts are known: norms, rotary positions and MLP replaced by ours, and
linear layers that are frozen or have one plain adapter. Its modules are then not called, so that hooks on them see
nothing; otherwise they are called one by one.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlft.model import branches, fused, rotary
from rlft.model.lora_linear import operands_of
from rlft.model.packing import PackedRows

PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
"""What a layer calls if it is two residual sums and nothing else."""

ATTENTION = {
    "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb", "attention_dropout", "config",
    "contiguous", "eager_attention_forward", "get_interface", "head_dim", "k_proj", "layer_idx", "o_proj", "q_proj",
    "reshape", "scaling", "shape", "training", "transpose", "update", "v_proj", "view",
}  # fmt: skip
"""The names in the forward of an attention of this family ..."""

BESIDES = {"sliding_window", "getattr", "q_norm", "k_norm"}
"""... and those that may come with them: windows are never packed, and the heads' norms are ours too."""


def install(model: PreTrainedModel) -> None:
    """Replaces the forward of every layer of the family. To be called after `fused.install` and `rotary.install`."""
    layers = getattr(model.base_model, "layers", None) or []
    for layer in layers:
        known = {name for name, _ in layer.named_children()} == PARTS
        code = getattr(type(layer).forward, "__code__", None)
        if known and code is not None and set(code.co_names) == PARTS and _leaves_one_tensor(layer.mlp):
            layer.forward = functools.partial(
                _forward, layer, layer.forward, layer is layers[-1], _knows(layer.self_attn)
            )


def narrows(model: PreTrainedModel) -> bool:
    """Whether a packed row leaves the model as its predicting positions `[1, M, hidden]`."""
    layers = getattr(model.base_model, "layers", None)
    forward = layers[-1].forward if layers else None
    return isinstance(forward, functools.partial) and forward.func is _forward


def _leaves_one_tensor(mlp: Any) -> bool:
    """Experts may leave more than their output."""
    return isinstance(getattr(mlp, "down_proj", None), nn.Linear)


def _forward(
    layer: Any, plain: Any, is_last: bool, knows_attention: bool, hidden_states: Tensor, **kwargs: Any
) -> Tensor:
    """`[1, N, hidden]`, of the last layer `[1, M, hidden]`, from `[1, N, hidden]` of a packed row; of anything else
    what the layer gives."""
    packed = kwargs.get("packed")
    if packed is None:
        return plain(hidden_states, **kwargs)
    attended = _in_one(layer, hidden_states, packed, *kwargs["position_embeddings"]) if knows_attention else None
    if attended is None:
        attended = hidden_states + layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
    return _mlp(layer, attended.index_select(1, packed.predictor) if is_last else attended)


def _in_one(layer: Any, x: Tensor, packed: PackedRows, cos: Tensor, sin: Tensor) -> Tensor | None:
    """The attention's branch as one function; None if it cannot be."""
    attention = layer.self_attn
    norm, *head_norms = (fused.norm_of(module) for module in (layer.input_layernorm, *_head_norms(attention)))
    if (
        norm is None
        or None in head_norms
        or x.device.type != "cpu"
        or not fused.is_wide(x)
        or (attention.training and attention.attention_dropout)
    ):
        return None
    operands = operands_of(x, (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj))
    if operands is None:
        return None
    query_norm, key_norm = head_norms or (None, None)
    heads = branches.Heads(
        norm=norm,
        query_norm=query_norm,
        key_norm=key_norm,
        size=attention.head_dim,
        cos=cos,
        sin=sin,
        blocks=packed.blocks,
        scale=attention.scaling,
    )
    return branches.attention(x, heads, operands)


def _mlp(layer: Any, x: Tensor) -> Tensor:
    mlp, norm = layer.mlp, fused.norm_of(layer.post_attention_layernorm)
    operands = None
    if norm is not None and fused.is_wide(x) and fused.is_gated(mlp):
        operands = operands_of(x, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    if norm is None or operands is None:
        return x + mlp(layer.post_attention_layernorm(x))
    return branches.mlp(x, norm, operands)


def _knows(attention: Any) -> bool:
    """Whether its forward is that of `branches.attention`."""
    names = set(type(attention).forward.__code__.co_names)
    return ATTENTION <= names <= ATTENTION | BESIDES and rotary.is_installed(attention)


def _head_norms(attention: Any) -> list[nn.Module]:
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
