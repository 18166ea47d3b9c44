"""The checks of `rlft doctor` in their order, with their time limits."""

from __future__ import annotations

from rlft.commands.doctor.supervise import Check

PACKAGE = "rlft.commands.doctor"
TRIAL = f"{PACKAGE}.trial:Trial"

CHECKS = (
    Check(name="versions", function=f"{PACKAGE}.versions:rows", limit_s=60),
    Check(name="machine", function=f"{PACKAGE}.machine:rows", limit_s=60),
    Check(name="hub", function=f"{PACKAGE}.machine:hub_rows", limit_s=20),
    Check(name="sandbox", function=f"{PACKAGE}.machine:sandbox_rows", limit_s=60),
    Check(name="model", function=f"{PACKAGE}.engine:model_rows", limit_s=120),
    Check(name="engine", function=f"{PACKAGE}.engine:engine_rows", limit_s=300),
    Check(name="step", function=f"{PACKAGE}.speed:step_rows", limit_s=180),
    Check(name="memory plan", function=f"{PACKAGE}.speed:memory_rows", limit_s=30),
    Check(name="log-prob gap", function=f"{PACKAGE}.engine:gap_rows", limit_s=60),
    Check(name="adapter swap", function=f"{PACKAGE}.engine:swap_rows", limit_s=60),
    # The engine's GPU memory is certain to be free only once its process has ended.
    Check(name="kernels", function=f"{PACKAGE}.kernels:kernel_rows", limit_s=120, fresh=True),
)
"""The time limits of `versions` and `kernels` include the start of a process, which imports torch."""
