"""Rows that lie within an object: `data.*.paragraphs.*.qas` leads to the questions in a file of SQuAD.

A part of such a path is the name of a field, the number of an item of a list, or `*` for each item of a list or each
value of an object. What it leads to is a row, or a list of rows; `*` may be left out before the items of a list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlft.data.fields import MissingField, kind, only

EACH = "*"
KEY = "key"
"""The field of a row with its name, where an object holds the rows by name."""
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Names with which files, and lists in them, say that they are one split of a set."""


def rows_at(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where below `value`, fields) of each row to which the path leads, with the fields of what encloses it.

    A row's own field stands for an enclosing one of the same name. RowError: the path leads nowhere.

    >>> list(rows_at({"v": 2, "data": [{"title": "A", "qas": [{"q": "1?"}, {"q": "2?"}]}]}, "data.*.qas"))[1]
    ('.0.1', {'v': 2, 'title': 'A', 'q': '2?'})
    """
    return _walk(value, path.split("."), {}, "")


def _walk(
    value: Any, parts: Sequence[str], around: Mapping[str, Any], place: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, list | tuple):
        numbers: Sequence[int] = range(len(value))
        if parts and parts[0].isdecimal():
            numbers = [int(parts[0])] if int(parts[0]) in numbers else []
        parts = parts[1:] if parts and (parts[0] == EACH or parts[0].isdecimal()) else parts
        for i in numbers:
            yield from _walk(value[i], parts, around, f"{place}.{i}")
    elif not isinstance(value, Mapping):
        problem = f"there is {kind(value)} at {place.strip('.') or 'the top'}, not a row"
        raise MissingField(problem, key="rows", remedy="")
    elif not parts:
        yield place, {**around, **value}
    elif parts[0] == EACH and EACH not in value:
        held = {name: item for name, item in value.items() if item is None or isinstance(item, Mapping | list | tuple)}
        around = {**around, **{name: item for name, item in value.items() if name not in held}}
        for name, item in held.items():
            yield from _walk(item, parts[1:], {**around, KEY: name}, f"{place}.{name}")
    else:
        length = next((n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in value), None)
        if length is None:
            raise MissingField(f"there is no {parts[0]!r}, {only(value)}", key="rows", remedy="")
        name = ".".join(parts[:length])
        if value[name] is not None:  # null: no rows
            others = {other: item for other, item in value.items() if other != name}
            yield from _walk(value[name], parts[length:], {**around, **others}, place)


def paths_to_rows(value: Any, deepest: int = 8) -> Iterator[str]:
    """The paths below `value` that lead to rows, the nearest first; of each list only the first item is looked at."""
    waiting: deque[tuple[Any, tuple[str, ...]]] = deque([(value, ())])
    while waiting:
        inner, parts = waiting.popleft()
        if len(parts) >= deepest:
            continue
        if isinstance(inner, list | tuple):
            waiting.extend((item, (*parts, EACH)) for item in inner[:1])
        elif isinstance(inner, Mapping):
            named = _is_keyed(inner)
            items = {EACH: next(filter(_holds_rows, inner.values()))} if named else inner
            for name, item in items.items():
                if _holds_rows(item) and (named or isinstance(item, list | tuple)):
                    yield ".".join((*parts, name))
                waiting.append((item, (*parts, name)))


def _is_keyed(value: Mapping[str, Any]) -> bool:
    """Whether an object has rows, or lists of rows, by their names: they have fields in common."""
    held = [item for item in value.values() if isinstance(item, Mapping | list | tuple)]
    if not held or not all(map(_holds_rows, held)) or any(name in SPLITS for name in value):
        return False
    first, other = (set(item[0] if isinstance(item, list | tuple) else item) for item in (held[0], held[-1]))
    return len(held) > 1 and bool(first & other) and type(held[0]) is type(held[-1])


def _holds_rows(value: Any) -> bool:
    """Whether this is an object, or a list of them, and no chat."""
    if not isinstance(value, list | tuple):
        return isinstance(value, Mapping)
    return bool(value) and isinstance(value[0], Mapping) and not {"role", "from"} & value[0].keys()
