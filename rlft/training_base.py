"""The base as a training run loads it: with or without gradient checkpointing, as the machine's memory has it."""

from __future__ import annotations

from typing import Any

import torch

from rlft.memory import free_memory
from rlft.model.activations import activation_bytes, set_checkpointing
from rlft.model.backbone import Backbone, load_backbone, read_backbone
from rlft.model.config import ModelConfig

SHARE = 0.5
"""Of the memory that is free once the weights are loaded, what activations may take without checkpointing."""


def load_for_training(config: ModelConfig, token_budget: int, *, own: bool = False) -> Backbone:
    """The base, whose forwards with gradient are to have at most so many tokens.

    own: a base that no other job of a sweep shares, because its weights are to change.
    """
    backbone = read_backbone(config) if own else load_backbone(config)
    if config.gradient_checkpointing == "auto":
        model, free = backbone.model, free_bytes(backbone.device)
        needed = needs_checkpointing(model.config, token_budget, model.dtype.itemsize, free)
        set_checkpointing(model, needed and model.supports_gradient_checkpointing)
    return backbone


def needs_checkpointing(config: Any, tokens: int, itemsize: int, free: int) -> bool:
    """Whether a forward of so many tokens would keep more than its share of the free memory without checkpointing."""
    return activation_bytes(config, tokens, itemsize) > SHARE * free


def free_bytes(device: torch.device) -> int:
    """What this process could still take on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
