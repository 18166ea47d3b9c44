"""CUDA graphs of the pretended card: what is done while one is captured is done again at each replay, in its memory.

As on a card, nothing is computed during the capture: what was overwritten is put back at its end, and what was made
holds nonsense until a replay. Numbers of the host stay what they were. Whatever waits for the card, comes from the host
or draws is refused. What is made lies in a pool that graphs may share, and that has room for what one of them needs at
a time.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

NONSENSE = 0x7F
"""Every byte of what no replay has computed yet: NaN in bfloat16 and float32, or a number of no token."""


class CUDAGraph:
    """In place of torch.cuda.CUDAGraph."""

    captured: ClassVar[CUDAGraph | None] = None
    """The one that is being captured."""
    number: ClassVar[int] = 0  # of pools so far
    of_pools: ClassVar[Counter[int]] = Counter()  # graphs that live, by pool
    bytes_of_pools: ClassVar[Counter[int]] = Counter()
    counts: ClassVar[Any] = None  # the card's

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # {storage: (its bytes, as they were)}
        self._made: dict[int, Tensor] = {}  # {storage: its bytes}
        self._users: Counter[int] = Counter()  # tensors on the card that live, by storage that was made
        self._live = self.peak = 0

    def capture_begin(self, pool: int) -> None:
        assert CUDAGraph.captured is None, "one at a time"
        CUDAGraph.captured, self.pool_id = self, pool
        CUDAGraph.of_pools[pool] += 1
        weakref.finalize(self, _left, pool)

    def capture_end(self) -> None:
        CUDAGraph.captured = None
        for stored, old in self._before.values():
            stored.copy_(old)
        for stored in self._made.values():
            stored.fill_(NONSENSE)
        self._before.clear()
        more = max(0, self.peak - self.bytes_of_pools[self.pool_id])
        CUDAGraph.bytes_of_pools[self.pool_id] += more
        self.counts.live += more

    def call(self, call: Callable[[], Any], given: Any, *, launches: bool) -> Any:
        """Computes what is captured, and notes it if it is more than a view or empty memory."""
        for x in tree_leaves(given):
            if isinstance(x, Tensor) and not self._knows(key := x.untyped_storage()._cdata):
                self._before[key] = (stored := _bytes(x)), stored.clone()
        out = call()
        leaves = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        for x in leaves:
            if not self._knows(key := x.untyped_storage()._cdata):
                self._made[key] = _bytes(x)
        if launches:
            self._calls.append((call, leaves))
        return out

    def _knows(self, key: int) -> bool:
        return key in self._made or key in self._before

    def holds(self, inner: Tensor, made: Tensor, size: int) -> bool:
        """Counts this tensor on the card; whether its memory is the pool's."""
        key = inner.untyped_storage()._cdata
        if key in self._before:
            return False
        self._live += size * (not self._users[key])
        self._users[key] += 1
        self.peak = max(self.peak, self._live)
        weakref.finalize(made, self._dropped, key, size)
        return True

    def _dropped(self, key: int, size: int) -> None:
        self._users[key] -= 1
        self._live -= size * (not self._users[key])

    def replay(self) -> None:
        self.counts.launch("graph")
        self.counts.replays = True
        for call, noted in self._calls:
            for old, new in zip(noted, (x for x in tree_leaves(call()) if isinstance(x, Tensor)), strict=True):
                if new.untyped_storage()._cdata != old.untyped_storage()._cdata:
                    old.copy_(new)
        self.counts.replays = False


def _left(pool: int) -> None:
    CUDAGraph.of_pools[pool] -= 1
    if not CUDAGraph.of_pools[pool]:
        CUDAGraph.counts.live -= CUDAGraph.bytes_of_pools.pop(pool, 0)


def _bytes(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


@contextmanager
def graph(into: CUDAGraph, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
    """In place of torch.cuda.graph."""
    into.capture_begin(pool)
    try:
        yield
    finally:
        into.capture_end()


def pool_handle() -> int:
    CUDAGraph.number += 1
    return CUDAGraph.number


def refuse(what: str) -> None:
    """What cudaStreamCaptureModeThreadLocal does not permit."""
    if CUDAGraph.captured is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def recorded(call: Callable[[], Any], given: Any, *, launches: bool = True) -> Any:
    held = CUDAGraph.captured
    return call() if held is None else held.call(call, given, launches=launches)
