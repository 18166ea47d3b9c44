"""torch, imported when it is first used: what an algorithm's keys say is checked without it."""

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
        """Its attributes are torch's; each is looked up in torch once."""

        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)
            return value

    torch = _Torch()


def no_grad(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function without gradients, as `torch.no_grad()` decorates one."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
