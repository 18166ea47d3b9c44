"""How fast a device multiplies matrices and copies memory, as measured now, beside whatever else it does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import device as Device, dtype as DType

MIN_REPEATS = 3
SIDE, NUM_BYTES, PROBED_S = 512, 2**25, 0.05
"""Sizes and seconds of the short probe: a call of either part takes some milliseconds."""


def seconds_of_calls(run: Callable[[], object], device: Device, total_s: float) -> list[float]:
    """The seconds that each call of `run` takes, repeated for `total_s` seconds; the first call is not counted."""
    seconds: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < total_s or len(seconds) < MIN_REPEATS:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def peak_rate(device: Device, dtype: DType, *, side: int = 4096, seconds: float = 2.0) -> float:
    """FLOP/s of a large square product: the fastest of those made within `seconds` seconds."""
    a = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / min(seconds_of_calls(lambda: a @ a, device, seconds))


def host_rates(dtype: DType) -> tuple[float, float]:
    """(FLOP/s of a square product, bytes per second of a copy) of this machine's CPU: medians of a tenth of a second.

    The product has few enough numbers that a slow processor is done as well; no random number of the process is drawn.
    """
    cpu = torch.device("cpu")
    a = torch.ones(SIDE, SIDE, dtype=dtype)
    source = torch.ones(NUM_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    product = statistics.median(seconds_of_calls(lambda: a @ a, cpu, PROBED_S))
    copy = statistics.median(seconds_of_calls(lambda: target.copy_(source), cpu, PROBED_S))
    return 2 * SIDE**3 / product, 2 * NUM_BYTES / copy
