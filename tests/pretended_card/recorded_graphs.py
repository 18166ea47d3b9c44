"""CUDA graphs and streams of the pretended card.

What is done while a graph is captured is done again at each replay, in its memory. As on a card, nothing is computed
during the capture: what was overwritten is put back at its end, and what was made holds nonsense until a replay.
Numbers of the host stay what they were. Whatever waits for the card, comes from the host or draws is refused. What is
made lies in a pool that graphs may share, and that has room for what one of them needs at a time.

Streams: nothing is computed out of order. What a stream reads or overwrites has to be written by itself, or by another
one for which it has waited since then, or for which the host has. Anything else is a race, which is counted while
`Stream.watched`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

Pool = tuple[int, int]
NONSENSE = 0x7F
"""Every byte of what no replay has computed yet: a huge number, or one of no token."""


class Stream:
    """In place of torch.cuda.Stream and torch.cuda.Event: an event knows what its stream knew when it was recorded."""

    watched: ClassVar[bool] = False
    races: ClassVar[Counter[str]] = Counter()
    all: ClassVar[weakref.WeakSet[Stream]] = weakref.WeakSet()
    current: ClassVar[Stream]
    writers: ClassVar[dict[int, tuple[Stream, int]]] = {}  # {storage: (the last that wrote to it, its number then)}

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = 0  # of writes
        self.known: dict[Stream, int] = {}  # up to which of their writes it has waited for others
        Stream.all.add(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or Stream()
        event.known = {**self.known, self: self.number}
        return event

    def record(self, stream: Any = None) -> None:
        (stream or Stream.current).record_event(self)

    def wait_event(self, event: Stream) -> None:
        self.known = {s: max(self.known.get(s, 0), event.known.get(s, 0)) for s in (*self.known, *event.known)}

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait(self, stream: Any = None) -> None:
        (stream or Stream.current).wait_event(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextmanager
def entered(stream: Stream | None) -> Iterator[None]:
    """In place of torch.cuda.stream."""
    before, Stream.current = Stream.current, stream or Stream.current
    try:
        yield
    finally:
        Stream.current = before


def host_waits() -> None:
    """What is launched from here on comes after all that the current stream was asked for."""
    if Stream.watched:
        event = Stream.current.record_event()
        for stream in Stream.all:
            stream.wait_event(event)


def touched(what: str, tensors: Iterable[Tensor], written: Iterable[Tensor]) -> None:
    """Counts a race if one of these was written by a stream for which the current one has not waited."""
    stream = Stream.current
    for x in tensors:
        writer, number = Stream.writers.get(x.untyped_storage()._cdata, (stream, 0))
        if writer is not stream and stream.known.get(writer, 0) < number:
            Stream.races[what] += 1
    stream.number += 1
    for x in written:
        Stream.writers[x.untyped_storage()._cdata] = stream, stream.number


class CUDAGraph:
    """In place of torch.cuda.CUDAGraph."""

    captured: ClassVar[CUDAGraph | None] = None
    """The one that is being captured."""
    release: ClassVar[str] = "2.12"
    """Of torch, whose allocator it is: after a capture that failed that of 2.12 believes that it goes on, that of 2.13
    counts a user of the pool for good, and that of 2.14 does neither."""
    number: ClassVar[int] = 0  # of pools so far
    underway: ClassVar[set[Pool]] = set()  # those to which captures go
    users: ClassVar[Counter[Pool]] = Counter()
    of_pools: ClassVar[dict[Pool, weakref.WeakSet[CUDAGraph]]] = {}
    bytes_of_pools: ClassVar[Counter[Pool]] = Counter()
    counts: ClassVar[Any] = None  # the card's

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # {storage: (its bytes, as they were)}
        self._made: dict[int, Tensor] = {}  # {storage: its bytes}
        self._users: Counter[int] = Counter()  # tensors on the card that live, by storage that was made
        self._live = self.peak = 0
        self.is_invalid = False  # whether it was asked for what cannot be captured
        self.read: list[Tensor] = []  # the bytes of all that a replay finds
        self.written: list[Tensor] = []  # and of what it changes of it

    def capture_begin(self, pool: Pool) -> None:
        assert CUDAGraph.captured is None, "one at a time"
        CUDAGraph.captured, self.pool_id = self, pool
        CUDAGraph.underway.add(pool)
        CUDAGraph.users[pool] += 1
        CUDAGraph.of_pools.setdefault(pool, weakref.WeakSet()).add(self)
        self._goes = weakref.finalize(self, _left, pool, self._made)

    def capture_end(self) -> None:
        CUDAGraph.captured = None
        for stored, old in self._before.values():
            self.read.append(stored)
            if not stored.equal(old):
                self.written.append(stored)
                stored.copy_(old)
        for stored in self._made.values():
            stored.fill_(NONSENSE)
        self._before.clear()
        more = max(0, self.peak - self.bytes_of_pools[self.pool_id])
        CUDAGraph.bytes_of_pools[self.pool_id] += more
        self.counts.live += more
        if self.is_invalid and self.release != "2.14":
            self._goes.detach()
        if not (self.is_invalid and self.release == "2.12"):
            CUDAGraph.underway.discard(self.pool_id)
        if self.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")

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
        weakref.finalize(made, _dropped, weakref.ref(self), key, size)
        return True

    def replay(self) -> None:
        self.counts.launch("graph")
        touched("graph", self.read, self.written)
        self.counts.replays = True
        with _disable_current_modes():  # what is computed again is counted no more
            for other in self.of_pools[self.pool_id] - {self}:  # whose memory is the same
                for stored in other._made.values():
                    stored.fill_(NONSENSE)
            for call, noted in self._calls:
                for old, new in zip(noted, (x for x in tree_leaves(call()) if isinstance(x, Tensor)), strict=True):
                    if new.untyped_storage()._cdata != old.untyped_storage()._cdata:
                        old.copy_(new)
        self.counts.replays = False


def _dropped(of: weakref.ref[CUDAGraph], key: int, size: int) -> None:
    if (graph := of()) is not None:
        graph._users[key] -= 1
        graph._live -= size * (not graph._users[key])


def _left(pool: Pool, made: dict[int, Tensor]) -> None:
    """The graph is gone: whoever still reads its memory finds nonsense."""
    for stored in made.values():
        stored.fill_(NONSENSE)
    _cuda_releasePool(0, pool)


def _cuda_releasePool(device: int, pool: Pool) -> None:
    assert CUDAGraph.users[pool] > 0, "nobody is counted as its user"
    CUDAGraph.users[pool] -= 1
    if not CUDAGraph.users[pool]:
        CUDAGraph.counts.live -= CUDAGraph.bytes_of_pools.pop(pool, 0)


def _cuda_endAllocateToPool(device: int, pool: Pool) -> None:
    if pool not in CUDAGraph.underway:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    CUDAGraph.underway.remove(pool)


def empty_cache() -> None:
    assert not CUDAGraph.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"


def memory_snapshot() -> list[dict[str, Any]]:
    pools = [pool for pool, size in CUDAGraph.bytes_of_pools.items() if size]
    return [{"device": 0, "segment_pool_id": pool, "active_size": 0} for pool in pools]


def _bytes(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


class graph:
    """In place of torch.cuda.graph, which leaves its stream only if the capture ends well."""

    def __init__(self, into: CUDAGraph, pool: Pool, stream: Any, capture_error_mode: str) -> None:
        self.into, self.pool, self.entered = into, pool, entered(stream)

    def __enter__(self) -> None:
        empty_cache()
        self.entered.__enter__()
        self.into.capture_begin(self.pool)

    def __exit__(self, *error: Any) -> None:
        self.into.capture_end()
        self.entered.__exit__(None, None, None)


def pool_handle() -> Pool:
    CUDAGraph.number += 1
    return 0, CUDAGraph.number


def refuse(what: str) -> None:
    """What cudaStreamCaptureModeThreadLocal does not permit."""
    if CUDAGraph.captured is not None:
        CUDAGraph.captured.is_invalid = True
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def recorded(call: Callable[[], Any], given: Any, what: str, *, launches: bool = True) -> Any:
    """What the call computes from what is given; a graph that is captured notes it."""
    if CUDAGraph.captured is not None:
        return CUDAGraph.captured.call(call, given, launches=launches)
    if not Stream.watched:
        return call()
    before = [(x, x._version) for x in tree_leaves(given) if isinstance(x, Tensor)]
    out = call()
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor)] if launches else []
    touched(what, [x for x, _ in before], [*made, *(x for x, version in before if x._version != version)])
    return out
