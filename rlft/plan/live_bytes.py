"""Counts the bytes that operations make, while they are alive, without computing what costs time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class LiveBytes(TorchDispatchMode):
    """Inside, `now` and `peak` are the bytes alive of storages that operations make; those of arguments do not count.

    Args:
        hollow: whether parameters, and what is made of them, stand for any numbers: results are memory of their shape,
            and nothing is computed. Other arguments keep their numbers, since shapes may depend on them: towers leave
            out parts of an image that are padding.
    """

    def __init__(self, *, hollow: bool = False) -> None:
        super().__init__()
        self._hollow = hollow
        self._sizes: dict[int, int] = {}
        self._without_numbers: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = _tensors((args, kwargs))
        for tensor in arguments:
            self._note(tensor, 0, self._hollow and isinstance(tensor, torch.nn.Parameter))
        is_hollow = any(x.untyped_storage()._cdata in self._without_numbers for x in arguments)
        made = _shaped(func, args, kwargs or {}) if is_hollow else func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._note(tensor, tensor.untyped_storage().nbytes(), is_hollow)
        return made

    def _note(self, tensor: Tensor, size: int, is_hollow: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)
        if is_hollow and tensor.is_floating_point():
            self._without_numbers.add(storage._cdata)

    def _gone(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)
        self._without_numbers.discard(storage)


def _shaped(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A result of the operation's shape; the operation's own where that is a view, or its shape depends on numbers."""
    if any(returned.alias_info for returned in func._schema.returns):
        return func(*args, **kwargs)
    try:
        shapes = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs))
        made = func(*shapes[0], **shapes[1])
    except RuntimeError:  # the shape depends on numbers, or torch has no rule for it
        return func(*args, **kwargs)
    return tree_map_only(Tensor, _without_numbers, made)


def _without_numbers(shape: Tensor) -> Tensor:
    """Memory of a shape; indices and conditions, on which later shapes may depend, are zeros."""
    memory = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
    return memory if shape.is_floating_point() else memory.zero_()


def _tensors(things: Any) -> list[Tensor]:
    return [x for x in tree_leaves(things) if isinstance(x, Tensor)]
