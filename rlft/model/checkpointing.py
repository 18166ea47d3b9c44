"""Gradient checkpointing: a layer keeps its input alone, and its activations are computed again in the backward.

Beyond that, gated MLPs can be computed some tokens at a time (`layer_branches.mlp`), and layers' inputs be kept in main
memory (`offload`), for rows that would not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlft.model.offload import HostCopies

MLP_TILE = 4096
"""Tokens of a gated MLP that are computed at a time: few enough that its activations are small next to those of a long
row, and enough that its products fill a GPU."""


_is_recomputing: ContextVar[bool] = ContextVar("_is_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether a layer with tiles is being computed again, for its activations alone: nothing reads its output."""
    return _is_recomputing.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledCheckpoint:
    """Checkpoints a layer whose gated MLP is computed in tiles; it is called as torch's `checkpoint`."""

    copies: HostCopies | None  # keeps the layers' inputs; None: they stay on the device
    draws_again: bool  # whether the recomputation has to be told which random numbers the forward had

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.copies is None else self.copies.kept():
            return checkpoint(function, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """(context of a forward, of its recomputation)."""
        forward, again = drawing_again() if self.draws_again else (nullcontext(), nullcontext())
        return forward, _recomputation(again)


@contextmanager
def _recomputation(again: AbstractContextManager[None]) -> Iterator[None]:
    token = _is_recomputing.set(True)
    try:
        with again:
            yield
    finally:
        _is_recomputing.reset(token)


def tile_of(layer: nn.Module) -> int | None:
    """How many tokens of this layer's gated MLP are computed at a time; None: all together."""
    return MLP_TILE if isinstance(getattr(layer, "_gradient_checkpointing_func", None), TiledCheckpoint) else None


def drawing_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """(context of a forward, of its recomputation), which draws the same numbers on an Apple GPU. torch's own code
    (`had_device_in_fwd` in torch/utils/checkpoint.py) passes over devices whose module has no `_initialized`."""
    state = torch.mps.get_rng_state()

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices=["mps"], device_type="mps"):
            torch.mps.set_rng_state(state)
            yield

    return nullcontext(), again()
