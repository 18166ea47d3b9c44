"""Streams of the pretended card: which of them has waited for what. Nothing is computed out of order.

What a stream reads or overwrites has to be written by itself, or by another one for which it has waited since then, or
for which the host has. Anything else is a race, which is counted while `Stream.watched`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor


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
