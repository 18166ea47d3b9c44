"""Sequences whose items are made each time they are accessed, so that data can be larger than memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, overload

Item = TypeVar("Item")
Made = TypeVar("Made")

CHUNK = 1000  # indices that are read at a time


class Lazy(Sequence[Item], Generic[Item]):
    """A sequence that holds none of its items. Its slices are lazy, too."""

    @abstractmethod
    def between(self, start: int, stop: int) -> Iterator[Item]:
        """The items from `start` up to but not including `stop`, in order."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Lazy[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Lazy[Item]:
        selected = range(len(self))[index]
        return next(self.between(selected, selected + 1)) if isinstance(selected, int) else chosen(self, selected)

    def __iter__(self) -> Iterator[Item]:
        return self.between(0, len(self))


class Derived(Lazy[Item]):
    """A lazy sequence of this length, whose items a function gives as `between` does."""

    def __init__(self, length: int, between: Callable[[int, int], Iterator[Item]]) -> None:
        self._length, self._between = length, between

    def __len__(self) -> int:
        return self._length

    def between(self, start: int, stop: int) -> Iterator[Item]:
        return self._between(start, stop)


def chosen(items: Lazy[Item], indices: Sequence[int]) -> Lazy[Item]:
    """The items at these indices, which ascend or are a range."""

    def between(start: int, stop: int) -> Iterator[Item]:
        for begin in range(start, stop, CHUNK):
            chunk = indices[begin : min(stop, begin + CHUNK)]
            are_neighbours = chunk[-1] - chunk[0] == len(chunk) - 1
            yield from items.between(chunk[0], chunk[-1] + 1) if are_neighbours else (items[i] for i in chunk)

    return Derived(len(indices), between)


def mapped(items: Sequence[Made], make: Callable[[Made], Item]) -> Sequence[Item]:
    """The result of the function for each item: a list, or a lazy sequence if the items are lazy."""
    if isinstance(items, Lazy):
        return Derived(len(items), lambda start, stop: map(make, items.between(start, stop)))
    return [make(item) for item in items]


def joined(first: Sequence[Item], second: Sequence[Item]) -> Sequence[Item]:
    """The items of both sequences: a list, or a lazy sequence if one of them is lazy."""
    if not isinstance(first, Lazy) and not isinstance(second, Lazy):
        return [*first, *second]

    def between(start: int, stop: int) -> Iterator[Item]:
        yield from first[start:stop]
        yield from second[max(0, start - len(first)) : max(0, stop - len(first))]

    return Derived(len(first) + len(second), between)
