"""Loads the base for training, with gradient checkpointing if the machine's memory requires it."""

from __future__ import annotations

from typing import Any

import torch

from rlft.config.model import LoraSettings, ModelConfig, SnapshotConfig, teacher_settings
from rlft.config.trainer import ClusterConfig
from rlft.model.activations import NO_ADAPTER, AdapterLayers, activation_bytes, set_checkpointing
from rlft.model.backbone import Adopt, Backbone, load_backbone, read_backbone
from rlft.model.forward import Forward, choose
from rlft.model.lora_config import lora_config
from rlft.plan.adapters import empty_model, fresh_shapes
from rlft.system.memory import free_memory
from rlft.trainer.sharded_base import ShardedLayers

SHARE = 0.5
"""Activations may take this share of the memory that is free after loading the weights; else they are recomputed."""


def load_for_training(
    config: ModelConfig,
    lora: LoraSettings | None,
    token_budget: int,
    *,
    own: bool = False,
    adopt: Adopt | None = None,
    sharded: ShardedLayers | None = None,
) -> Backbone:
    """Loads the base.

    Args:
        config: the model's settings.
        lora: the shape of the trained adapter; None if the base itself is trained.
        token_budget: the most tokens in a forward with gradient.
        own: whether no other job of a sweep may share the base, because its weights will be trained.
        adopt: puts the base on its device (`rlft.model.backbone.read_backbone`).
        sharded: divides the base's layers among ranks; no other job can then share the base.
    """
    if sharded is not None:
        own, adopt = True, sharded.adopt
    if own:
        backbone = read_backbone(config, adopt)
    else:  # jobs share a base by the arguments that it was loaded with
        backbone = load_backbone(config) if adopt is None else load_backbone(config, adopt)
    if config.gradient_checkpointing == "auto":
        model, free = backbone.model, free_bytes(backbone.device)
        plain, itemsize = backbone.kernels.are_plain, model.dtype.itemsize
        layers = NO_ADAPTER
        quantized = config.quantization is not None
        if lora is not None and (plain or lora.dropout > 0 or lora.use_dora or quantized):
            empty = empty_model(config, model.config)
            shapes = fresh_shapes(empty, lora_config(lora, empty))
            layers = AdapterLayers.of(shapes, dropout=lora.dropout > 0, dora=lora.use_dora, quantized=quantized)
        device = backbone.device.type
        adapter_bytes = layers.bytes_of_a_token(itemsize, device, plain=plain)
        needed = needs_checkpointing(
            model.config, token_budget, itemsize, free, device=device, plain=plain, adapter=adapter_bytes
        )
        set_checkpointing(model, needed and model.supports_gradient_checkpointing)
    return backbone


def load_teacher(snapshot: SnapshotConfig, model: ModelConfig) -> Forward | None:
    """The forward of a teacher that is a separate model; None where the teacher is on the base or there is none."""
    settings = teacher_settings(snapshot, model)
    if settings is None:
        return None
    backbone = read_backbone(settings)
    return choose(backbone.model, backbone.kernels)


def layers_of_rank(cluster: ClusterConfig, rank: int) -> ShardedLayers | None:
    """This rank's share of the base's layers; None where every rank holds all of them."""
    return ShardedLayers(rank, cluster.ranks) if cluster.shard_base else None


def needs_checkpointing(
    config: Any, tokens: int, itemsize: int, free: int, *, device: str = "cpu", plain: bool = False, adapter: int = 0
) -> bool:
    """Whether activations would take more than SHARE of the free memory without gradient checkpointing.

    Args:
        config: the model's config.
        tokens: number of tokens in the forward.
        itemsize: bytes of one weight of the base.
        free: bytes of free memory.
        device: type of the device.
        plain: whether the kernels are plain.
        adapter: bytes that the adapter's layers keep per token.
    """
    activations = activation_bytes(config, tokens, itemsize, device=device, plain=plain, adapter=adapter)
    return activations > SHARE * free


def free_bytes(device: torch.device) -> int:
    """The bytes that this process can still allocate on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
