"""Chains of elementwise steps as one pass over memory on a CUDA GPU, compiled by torch; on a CPU they run as written.

A norm in 16 bits takes six passes over its input when its steps run one by one, and a softmax over the vocabulary nine.
On a GPU, where products are fast and memory is the bottleneck, `torch.compile` makes one or two of them. The code is
the same, so that a CPU tests what a GPU compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled for all shapes at its first call with a first argument on a CUDA GPU.

    The function must not branch on the values of its tensors, and is called without gradient, inside an autograd
    function.
    """
    compiled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if not isinstance(first, Tensor) or not is_fused(first.device):
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function, dynamic=True))
        return compiled[0](*args, **kwargs)

    return chosen


def is_fused(device: torch.device) -> bool:
    """Whether fused functions are compiled on this device."""
    return device.type == "cuda" and obstacle(device) is None


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Why torch cannot compile for this GPU, found out by trying it once; None if it can."""
    try:
        with torch.no_grad():
            torch.compile(_probe, dynamic=True)(torch.ones(8, 8, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a missing compiler or Triton, a driver that is too old: torch has no common type
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"torch.compile failed: {type(error).__name__}: {first_line}"
    return None


def _probe(x: Tensor) -> Tensor:
    return x.mul(2).sub(x.amax(1, keepdim=True)).exp()
