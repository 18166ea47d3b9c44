"""What a machine computes with, in words, and what its processor multiplies in.

The same numbers in give the same bits out only where these words agree.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import device as Device

INSTRUCTIONS: Mapping[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
"""{dtype: names, in Linux's list, of instructions that multiply in it, of x86 and ARM processors}."""

CPUINFO = Path("/proc/cpuinfo")


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


def multiplies_in(dtype: str) -> bool:
    """Whether the processor has instructions for products in a dtype such as bfloat16; True where it is not known."""
    known = _known_instructions(CPUINFO)
    return dtype not in INSTRUCTIONS or not known or bool(known & INSTRUCTIONS[dtype])


@functools.cache
def _known_instructions(cpuinfo: Path) -> frozenset[str]:
    """The instructions that Linux lists for the first processor; none on other systems."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").split())
