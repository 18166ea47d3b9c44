"""What this machine's processor can multiply in."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

INSTRUCTIONS: Mapping[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
"""{dtype: names, in Linux's list, of instructions that multiply in it, of x86 and ARM processors}."""

CPUINFO = Path("/proc/cpuinfo")


def multiplies_in(dtype: str) -> bool:
    """Whether the processor has instructions for products in this dtype; True where the system does not tell.

    Args:
        dtype: such as "bfloat16".
    """
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
