"""The functions of recurrent layers: of flash-linear-attention, causal-conv1d and mamba-ssm, or in torch.

transformers takes the functions of such a package wherever it is installed, also for tensors on a CPU, where they
crash, and on GPUs on which the package refuses gradients. There its own functions in torch take their place.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers.integrations import hub_kernels

from rlft.model.kernels.shared_states import SharedStates, is_over_tokens

DELTA_RULE = "chunk_gated_delta_rule"  # whose gradients flash-linear-attention may refuse

Function = Callable[..., Any]


def install(model: nn.Module) -> None:
    """Makes the functions that the model's layers call choose by the device of their tensors; nothing is done twice."""
    for functions, name, function in _functions(model):
        is_one = inspect.isfunction(function) and hasattr(function, "__wrapped__")
        if is_one and inspect.getfile(function.__code__) == hub_kernels.__file__:
            functions[name] = _Choice(name, function, why_no_gradients() if name.endswith(DELTA_RULE) else None)


def obstacle(model: nn.Module) -> str | None:
    """Why layers of the model are computed in torch on a GPU, although a package for them is installed."""
    chosen = (function.obstacle for _, _, function in _functions(model) if isinstance(function, _Choice))
    return next(filter(None, chosen), None)


def why_no_gradients() -> str | None:
    """Why flash-linear-attention has no gradients of gated delta rules on this GPU; None if it has, or is not in use.

    Triton 3.4 to 3.7.0 computes wrong ones on Hopper GPUs (issue 640 of flash-linear-attention).
    """
    utils = sys.modules.get("fla.utils")  # transformers has imported it if it can be
    if utils is None or importlib.util.find_spec("tilelang") is not None:
        return None
    is_fixed = getattr(utils, "TRITON_ABOVE_3_7_1", False)
    if is_fixed or not (getattr(utils, "IS_NVIDIA_HOPPER", False) and getattr(utils, "TRITON_ABOVE_3_4_0", False)):
        return None
    fix = "triton>=3.7.1 and flash-linear-attention>=0.6 fix it"
    return f"flash-linear-attention has no right gradients on Hopper GPUs with this Triton ({fix})"


class _Choice:
    """A package's function, or for tensors on a CPU, or where there is an obstacle, the one in torch."""

    def __init__(self, name: str, function: Function, obstacle: str | None) -> None:
        functools.update_wrapper(self, function)
        self.name = name
        self.function, self.in_torch, self.obstacle = function, inspect.unwrap(function), obstacle

    def __call__(self, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = self.in_torch if self.obstacle is not None or first.is_cpu else self.function
        states = _shared.get()
        if states is not None and is_over_tokens(self.name):
            return states.call(self.name, chosen, first, *args, **kwargs)
        return chosen(first, *args, **kwargs)


_shared: ContextVar[SharedStates | None] = ContextVar("states of rows that ranks share", default=None)


@contextmanager
def shared(states: SharedStates) -> Iterator[None]:
    """Inside, functions over tokens are computed together with the other ranks."""
    before = _shared.set(states)
    try:
        yield
    finally:
        _shared.reset(before)


def _functions(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(the names of a module of Python, one of them, what it names) where the classes of the model's modules are."""
    for module in {type(module).__module__ for module in model.modules()}:
        names = vars(sys.modules[module])
        yield from ((names, name, names[name]) for name in list(names))
