"""Gradient checkpointing: a layer keeps its input alone, and its activations are computed again in the backward.

Beyond that, gated MLPs can be computed some tokens at a time (`layer_branches.mlp`), and layers' inputs be kept in main
memory (`HostCopies`), for rows that would not fit otherwise. Each input is copied there while the next layers are
computed, and comes back while the layer above is in its backward: copies run on a stream of their own, to and from
pinned memory. The numbers are the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


# -- layers' inputs in main memory -------------------------------------------------------------------------------------
INPUTS_LEAVING = 2
"""Inputs whose memory is not free yet, since they are being copied while the next layers are computed."""
INPUTS_AT_ONCE = 2
"""Inputs on the device in a backward, in which most memory is in use: the present layer's, and the next one's."""


class HostCopy:
    """A tensor in main memory, and the one that was copied before it, which a backward needs next."""

    def __init__(self, numbers: Tensor, previous: HostCopy | None) -> None:
        self.numbers = numbers
        self.previous = None if previous is None else ref(previous)
        self.arriving: tuple[Tensor, Any] | None = None  # on the device, with the event after which it is complete


class HostCopies:
    """The copies of one model's passes, on a CUDA GPU by a second stream, else one after the other.

    device: where tensors come from and go back to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: ref[HostCopy] | None = None
        self._leaving: deque[tuple[Any, Tensor]] = deque()  # tensors whose memory the copy still reads

    def kept(self) -> AbstractContextManager[Any]:
        """Inside, what autograd saves of a forward is kept here."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, self._get)

    def _keep(self, tensor: Tensor) -> Tensor | HostCopy:
        if tensor.numel() == 0:  # torch's checkpoint saves an empty one as well
            return tensor
        on_gpu = self._stream is not None
        copy = HostCopy(
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu),
            None if self._last is None else self._last(),
        )
        self._last = ref(copy)
        self._copy(copy.numbers, tensor)
        if on_gpu:
            self._leaving.append((self._stream.record_event(), tensor))
            self._free(INPUTS_LEAVING)
        return copy

    def _get(self, copy: Tensor | HostCopy) -> Tensor:
        if isinstance(copy, Tensor):
            return copy
        self._free(0)
        self._fetch(copy)
        assert copy.arriving is not None, "it was begun"
        (tensor, event), copy.arriving = copy.arriving, None
        if event is not None:
            self._computing.wait_event(event)
            if copy.previous is not None and (previous := copy.previous()) is not None:
                self._fetch(previous)
        return tensor

    def _fetch(self, copy: HostCopy) -> None:
        """Begins to bring it to the device, unless that has begun."""
        if copy.arriving is None:
            tensor = torch.empty(copy.numbers.shape, dtype=copy.numbers.dtype, device=self._device)
            self._copy(tensor, copy.numbers)
            copy.arriving = tensor, None if self._stream is None else self._stream.record_event()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Begins a copy, once what is computed so far has written the source and no longer uses the target's memory."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(self._computing)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def _free(self, number: int) -> None:
        """Lets go of all tensors that leave but for so many of the newest: what is computed next may reuse their memory
        as soon as their copies are done."""
        while len(self._leaving) > number:
            event, _ = self._leaving.popleft()
            self._computing.wait_event(event)

    @property
    def _computing(self) -> Any:
        return torch.cuda.current_stream(self._device)
