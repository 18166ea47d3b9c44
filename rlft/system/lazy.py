"""torch, imported when it is first used, so that an algorithm's keys can be checked without it."""

from __future__ import annotations

import functools
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


def no_grad(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function` without gradients, like the decorator `torch.no_grad()`."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
