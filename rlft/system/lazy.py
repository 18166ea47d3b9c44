"""What is put off at the start: the import of torch, without which keys are checked, and the collection of garbage."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """Stands for torch: its attributes are torch's, and each is looked up in torch only once."""

        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)
            return value

    torch = _Torch()


USUAL_OBJECTS, SELDOM_OBJECTS = gc.get_threshold()[0], 100_000  # that are made from one collection to the next


def collect_garbage(*, seldom: bool) -> None:
    """Sets how often Python looks for garbage: seldom while modules and configs are read, of which nearly all stays.

    Else a tenth of the time to a command's first line is spent on it.
    """
    gc.set_threshold(SELDOM_OBJECTS if seldom else USUAL_OBJECTS)


def no_grad(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function` without gradients, like the decorator `torch.no_grad()`."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
