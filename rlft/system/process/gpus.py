"""The CUDA GPUs of this machine, which a run's own process and its other processes have."""

from __future__ import annotations

import os

import torch


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return [str(gpu) for gpu in range(torch.cuda.device_count())]


def all_gpus(own: torch.device) -> list[str]:
    """All of them, that of the run's own process first: as `Placement` counts them."""
    gpus, index = visible_gpus(), own.index or 0
    return [gpus[index], *gpus[:index], *gpus[index + 1 :]]
