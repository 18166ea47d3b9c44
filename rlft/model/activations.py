"""What a forward with gradient keeps for its backward, and whether to recompute it instead (gradient checkpointing)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


def set_checkpointing(model: PreTrainedModel, on: bool) -> None:
    """Turns gradient checkpointing on or off. It acts in training mode only."""
    if on:
        _method(model, "enable")({"use_reentrant": False})
        model.disable_input_require_grads()  # only re-entrant checkpointing needs the hook that sets this
    elif model.supports_gradient_checkpointing:
        _method(model, "disable")()


def _method(model: PreTrainedModel, verb: str) -> Callable[..., None]:
    """transformers 5.23 renamed gradient checkpointing to activation checkpointing; the first argument is the same."""
    return getattr(model, f"activation_checkpointing_{verb}", None) or getattr(model, f"gradient_checkpointing_{verb}")


def is_checkpointing(model: PreTrainedModel) -> bool:
    """Whether any layer recomputes its activations."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@contextmanager
def peft_reads_the_old_name() -> Iterator[None]:
    """Inside, PEFT may wrap a model without a FutureWarning.

    The line is `if getattr(model, "is_gradient_checkpointing", True)` in PeftModel.__init__ (peft/peft_model.py, PEFT
    0.21); transformers 5.23 deprecates the name, a property of PreTrainedModel that no attribute of a model can hide.
    Only this message of that module is left out; every other warning stays.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message="`is_gradient_checkpointing` is deprecated",
            category=FutureWarning,
            module=r"transformers\.modeling_utils$",
        )
        yield


def activation_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Kept by rlft's packed forward of so many tokens through all layers; itemsize: bytes of an activation.

    A layer keeps the inputs and outputs of its two norms, queries, keys, values and attention output, and of its gated
    MLP gate, up and their product. Low-rank products and normalisers are left out (a few per cent), and so are logits,
    which are alive for a chunk of tokens only. The last layer is counted as any other, though its MLP keeps fewer.
    """
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    attention = 2 * head * text.num_attention_heads + 2 * head * key_heads
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    a_token = text.num_hidden_layers * (4 * text.hidden_size + attention + 3 * intermediate)
    return tokens * a_token * itemsize


def checkpointed_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """The same with gradient checkpointing: every layer's input, and one layer's activations at a time."""
    text = config.get_text_config()
    one_layer = activation_bytes(config, tokens, itemsize) // text.num_hidden_layers
    return tokens * text.hidden_size * text.num_hidden_layers * itemsize + one_layer
