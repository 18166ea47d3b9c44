"""What a forward with gradient keeps for its backward, and what weights take: bytes, from the model's config alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def activation_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Kept by rlft's packed forward of so many tokens through all layers; itemsize: bytes of an activation.

    A layer keeps the inputs and outputs of its two norms, queries, keys, values and attention output, and of its gated
    MLP gate, up and their product. Low-rank products and normalisers are left out (a few per cent), and so are logits,
    which are alive for a chunk of tokens only.
    """
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    attention = 2 * head * text.num_attention_heads + 2 * head * key_heads
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    a_token = text.num_hidden_layers * (4 * text.hidden_size + attention + 3 * intermediate)
    return tokens * a_token * itemsize


def weight_bytes(config: Any, bits: int) -> int:
    """Of all the model's weights, counted on the meta device; bits: of one weight."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters()) * bits // 8
