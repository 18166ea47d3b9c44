"""The code sandbox's system-call filter for this machine, made with libseccomp (scripts/write_seccomp_filters.py)."""

from __future__ import annotations

import functools
import platform
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "assets" / "seccomp"
NAMES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")


@functools.cache
def system_call_filter() -> bytes | None:
    """The BPF program for the kernel, 8 bytes for each instruction; None if there is none (`missing` says why)."""
    return None if missing() else (FOLDER / f"{NAMES[platform.machine().lower()]}.bpf").read_bytes()


def missing() -> str | None:
    """Why system calls cannot be filtered here; None if they can."""
    machine = platform.machine().lower()
    if machine not in NAMES:
        return f"there is no system-call filter for {machine}, only for x86_64 and aarch64"
    if sys.maxsize < 2**32:
        return "there is no system-call filter for 32-bit Pythons"
    if not ACTIONS.is_file():
        return "this kernel filters no system calls"
    return None
