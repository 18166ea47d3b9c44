"""The last decoder layer on the positions that predict something: after its attention no other is read again.

In a packed row most of a prompt only lends its keys and values to what comes behind. In the last layer it is done once
these are made, so the gated MLP and the final norm get the positions alone from which a completion token is predicted.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def install(model: PreTrainedModel) -> None:
    """Replaces the forward of the last layer, if it is of the Llama family: two residual sums and nothing else."""
    layers = getattr(model.base_model, "layers", None)
    if not layers:
        return
    layer: Any = layers[-1]
    known = {name for name, _ in layer.named_children()} == set(PARTS)
    if (
        known
        and isinstance(getattr(layer.mlp, "down_proj", None), nn.Linear)
        and set(type(layer).forward.__code__.co_names) == set(PARTS)
    ):
        layer.forward = functools.partial(_forward, layer, layer.forward)


def is_installed(model: PreTrainedModel) -> bool:
    """Whether a packed row leaves the model as its predicting positions `[1, M, hidden]`."""
    layers = getattr(model.base_model, "layers", None)
    forward = layers[-1].forward if layers else None
    return isinstance(forward, functools.partial) and forward.func is _forward


def _forward(layer: Any, plain: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """`[1, M, hidden]` from `[1, N, hidden]` of a packed row; of anything else what the layer gives."""
    packed = kwargs.get("packed")
    if packed is None:
        return plain(hidden_states, **kwargs)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    predicting = (hidden_states + attended).index_select(1, packed.predictor)
    return predicting + layer.mlp(layer.post_attention_layernorm(predicting))
