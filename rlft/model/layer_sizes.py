"""The sizes of each decoder layer, from a model's config alone, whichever of its layers are unlike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Numbers of elements for a token.

    Attributes:
        queries: of all heads' queries, and of their outputs.
        keys: of all heads' keys, and of their values; 0 in a model without attention.
        mlp: of the MLP's gate.
    """

    queries: int
    keys: int
    mlp: int


def layer_sizes(config: Any) -> list[LayerSizes]:
    """The sizes of the decoder layers of a model with this transformers config, in their order.

    A config has a number, a list with one for each layer (Gemma 3n's MLPs), or a config for each layer (Gemma 4's
    heads). A model without attention counts two hidden states for what replaces queries.
    """
    text = config.get_text_config()
    number = text.num_hidden_layers
    of_layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * number
    return [_of_layer(of_layers[i], i, number) for i in range(number)]


def _of_layer(layer: Any, i: int, number: int) -> LayerSizes:
    def size(name: str) -> int:
        value = getattr(layer, name, None)
        if isinstance(value, Sequence):
            value = value[i] if len(value) == number else max(value)
        return value or 0

    heads, hidden = size("num_attention_heads"), layer.hidden_size
    head = size("head_dim") or (hidden // heads if heads else 0)
    key_heads = size("num_key_value_heads") or heads
    return LayerSizes(
        queries=head * heads or 2 * hidden, keys=head * key_heads, mlp=size("intermediate_size") or 4 * hidden
    )
