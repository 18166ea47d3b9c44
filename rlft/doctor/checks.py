"""The checks of `rlft doctor` in their order, with their time limits."""

from __future__ import annotations

from rlft.doctor.supervise import Check

ROOM = "rlft.doctor"
TRIAL = f"{ROOM}.trial:Trial"

CHECKS = (
    Check(name="versions", function=f"{ROOM}.versions:rows", limit_s=60),
    Check(name="machine", function=f"{ROOM}.machine:rows", limit_s=60),
    Check(name="hub", function=f"{ROOM}.machine:hub_rows", limit_s=20),
    Check(name="sandbox", function=f"{ROOM}.machine:sandbox_rows", limit_s=60),
    Check(name="model", function=f"{ROOM}.engine:model_rows", limit_s=120),
    Check(name="engine", function=f"{ROOM}.engine:engine_rows", limit_s=300),
    Check(name="step", function=f"{ROOM}.speed:step_rows", limit_s=180),
    Check(name="memory plan", function=f"{ROOM}.speed:memory_rows", limit_s=30),
    Check(name="log-prob gap", function=f"{ROOM}.engine:gap_rows", limit_s=60),
    Check(name="adapter swap", function=f"{ROOM}.engine:swap_rows", limit_s=60),
    # What the engine has taken of a GPU is given back for certain when its process ends.
    Check(name="kernels", function=f"{ROOM}.kernels:kernel_rows", limit_s=120, fresh=True),
)
"""The first one includes the start of a process, which imports torch; so does that of the kernels."""
