"""What a machine computes with, in words: the same numbers in, the same bits out only where these words agree."""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import TYPE_CHECKING

from rlft.system.lazy import torch
from rlft.system.memory import CPUINFO

if TYPE_CHECKING:
    from torch import device as Device


def processor() -> str:
    """The processor's name and architecture."""
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return f"{value.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def machine(device: Device) -> dict[str, str]:
    """{what: its name} of processor, device and threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"processor": processor(), "device": name, "threads": str(torch.get_num_threads())}
