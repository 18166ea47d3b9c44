"""Lazy sequences are read as lists are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from in_one_test import each

from rlft.data.records import Lazy, chosen, joined, mapped


class Squares(Lazy[int]):
    def __len__(self) -> int:
        return 12

    def between(self, start: int, stop: int) -> Iterator[int]:
        return (index * index for index in range(start, stop))


SQUARES = [i * i for i in range(12)]
SEQUENCES: dict[str, tuple[Sequence[Any], list[Any]]] = {
    "items": (Squares(), SQUARES),
    "mapped": (mapped(Squares(), str), [str(i) for i in SQUARES]),
    "chosen": (chosen(Squares(), [0, 1, 5, 6, 11]), [0, 1, 25, 36, 121]),
    "none chosen": (chosen(Squares(), []), []),
    "joined": (joined(Squares(), [7, 8]), [*SQUARES, 7, 8]),
    "joined the other way": (joined((7, 8), Squares()), [7, 8, *SQUARES]),
}


@each(("lazy", "held"), SEQUENCES.values(), ids=list(SEQUENCES))
def test_a_lazy_sequence_is_read_as_a_list_is(lazy: Sequence[Any], held: list[Any]) -> None:
    assert isinstance(lazy, Lazy)
    assert (len(lazy), list(lazy)) == (len(held), held)
    assert [lazy[i] for i in range(-len(held), len(held))] == [*held, *held]
    for i, j, k in itertools.product((None, 0, 2, -3, 99), (None, 0, 4, -1, 99), (None, 1, 2, -1)):
        part = lazy[i:j:k]
        assert isinstance(part, Lazy), "a slice holds nothing either"
        assert list(part) == held[i:j:k]
        assert list(part[1:3]) == held[i:j:k][1:3]
    for index in (len(held), -len(held) - 1):
        with pytest.raises(IndexError):
            lazy[index]


def test_chosen_items_that_are_neighbours_are_read_together() -> None:
    class Counted(Squares):
        asked: ClassVar[list[tuple[int, int]]] = []

        def between(self, start: int, stop: int) -> Iterator[int]:
            self.asked.append((start, stop))
            return super().between(start, stop)

    assert list(chosen(Counted(), [3, 4, 5])) == [9, 16, 25]
    assert Counted.asked == [(3, 6)]


def test_lists_stay_lists() -> None:
    assert mapped([1, 2], str) == ["1", "2"]
    assert joined([1], (2,)) == [1, 2]
