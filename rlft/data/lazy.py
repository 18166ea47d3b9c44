"""Sequences whose items are made each time they are accessed, so that data can be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar, overload

Item = TypeVar("Item")
Made = TypeVar("Made")


class Lazy(Sequence[Item], Generic[Item]):
    """A sequence that holds none of its items. Its slices are lazy, too.

    Subclasses define `__len__` and one of `at` and `between`: the latter where consecutive items are cheaper.
    """

    def at(self, index: int) -> Item:
        """The item at an index from 0 to the length - 1."""
        return next(self.between(index, index + 1))

    def between(self, start: int, stop: int) -> Iterator[Item]:
        """The items from `start` up to but not including `stop`, in order."""
        return map(self.at, range(start, stop))

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Lazy[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Lazy[Item]:
        selected = range(len(self))[index]
        return self.at(selected) if isinstance(selected, int) else Chosen(self, selected)

    def __iter__(self) -> Iterator[Item]:
        return self.between(0, len(self))


CHUNK = 1000  # indices that are read at a time


class Chosen(Lazy[Item]):
    """The items of a lazy sequence at these indices, which ascend or are a range."""

    def __init__(self, items: Lazy[Item], indices: Sequence[int]) -> None:
        self._items, self._indices = items, indices

    def __len__(self) -> int:
        return len(self._indices)

    def between(self, start: int, stop: int) -> Iterator[Item]:
        for begin in range(start, stop, CHUNK):
            chunk = self._indices[begin : min(stop, begin + CHUNK)]
            are_neighbours = chunk[-1] - chunk[0] == len(chunk) - 1
            yield from self._items.between(chunk[0], chunk[-1] + 1) if are_neighbours else map(self._items.at, chunk)


class Mapped(Lazy[Item], Generic[Made, Item]):
    """What a function makes of the items of another lazy sequence, one of each; it is given consecutive items."""

    def __init__(self, items: Lazy[Made], make: Callable[[Iterator[Made]], Iterator[Item]]) -> None:
        self.items, self._make = items, make

    def __len__(self) -> int:
        return len(self.items)

    def between(self, start: int, stop: int) -> Iterator[Item]:
        return self._make(self.items.between(start, stop))


class Chained(Lazy[Item]):
    """The items of several sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def between(self, start: int, stop: int) -> Iterator[Item]:
        part_start = 0
        for part in self._parts:
            yield from part[max(0, start - part_start) : max(0, stop - part_start)]
            part_start += len(part)


def mapped(items: Sequence[Made], make: Callable[[Made], Item]) -> Sequence[Item]:
    """The result of the function for each item: a list, or a lazy sequence if the items are lazy."""
    return Mapped(items, partial(map, make)) if isinstance(items, Lazy) else [make(item) for item in items]


def joined(first: Sequence[Item], second: Sequence[Item]) -> Sequence[Item]:
    """The items of both sequences: a list, or a lazy sequence if one of them is lazy."""
    if isinstance(first, Lazy) or isinstance(second, Lazy):
        return Chained([first, second])
    return [*first, *second]
