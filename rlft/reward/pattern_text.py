"""A text that a regular expression finds an answer in: what a completion has to look like for `answer_in: pattern`."""

from __future__ import annotations

import re
import re._constants as op  # pyright: ignore[reportMissingImports]
import re._parser as parser  # pyright: ignore[reportMissingImports]
from collections.abc import Iterable, Iterator
from typing import Any

CATEGORIES = {"CATEGORY_DIGIT": r"\d", "CATEGORY_SPACE": r"\s", "CATEGORY_WORD": r"\w", "CATEGORY_NOT_DIGIT": r"\D",
              "CATEGORY_NOT_SPACE": r"\S", "CATEGORY_NOT_WORD": r"\W"}  # fmt: skip
SAMPLES = ("a", " ", "0", "A", "-", "é")
"""Characters for the parts of a pattern that allow many."""


def written_for(pattern: str, answer: str) -> str | None:
    r"""The shortest text for the pattern, with the answer in place of its first group; None for one that finds nothing.

    The answer may still not be what the pattern finds: it may cut it, or not match it.

    >>> written_for(r"(?i)answer:\s*(-?\d+)", "18"), written_for(r"#### (\d+)", "1,080")
    ('answer:18', '#### 1,080')
    >>> written_for(r"(?P<x>a)(?!a)(?P=x)", "a") is None
    True
    """
    try:
        parts = parser.parse(pattern)
        found = re.search(pattern, "".join(_shortest(parts, None)))
        return None if found is None else "".join(_shortest(parts, answer))
    except (_Unknown, re.error, RecursionError):
        return None


class _Unknown(Exception):
    """A part of a pattern for which no text is made."""


def _shortest(parts: Iterable[tuple[Any, Any]], answer: str | None) -> Iterator[str]:
    """The shortest texts of these parts of a pattern; group 1 becomes the answer, or its own shortest text if None."""
    for kind, value in parts:
        if kind is op.LITERAL:
            yield chr(value)
        elif kind in (op.ANY, op.NOT_LITERAL):
            yield next(c for c in SAMPLES if ord(c) != value)
        elif kind is op.IN:
            yield _member(value)
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            least, _, repeated = value
            has_answer = any(part[0] is op.SUBPATTERN and part[1][0] == 1 for part in repeated)
            yield "".join(_shortest(repeated, answer)) * max(least, int(has_answer))
        elif kind is op.SUBPATTERN:
            yield answer if value[0] == 1 and answer is not None else "".join(_shortest(value[3], answer))
        elif kind is op.ATOMIC_GROUP:
            yield from _shortest(value, answer)
        elif kind is op.BRANCH:
            yield from _shortest(_with_the_answer(value[1]), answer)
        elif kind is op.ASSERT and value[0] < 0:  # what has to stand before
            yield from _shortest(value[1], answer)
        elif kind not in (op.AT, op.ASSERT, op.ASSERT_NOT):
            raise _Unknown


def _with_the_answer(branches: list[Any]) -> Any:
    """The branch with the first group, or else the first branch."""
    return next((b for b in branches if any(p[0] is op.SUBPATTERN and p[1][0] == 1 for p in b)), branches[0])


def _member(members: list[tuple[Any, Any]]) -> str:
    """A character of a set such as [a-z] or [^0-9]."""
    excludes = members[0][0] is op.NEGATE
    named = [
        chr(value if kind is op.LITERAL else value[0]) for kind, value in members if kind in (op.LITERAL, op.RANGE)
    ]
    for character in SAMPLES if excludes else (*named, *SAMPLES):
        if any(_is_in(character, kind, value) for kind, value in members) is not excludes:
            return character
    raise _Unknown


def _is_in(character: str, kind: Any, value: Any) -> bool:
    if kind is op.RANGE:
        return value[0] <= ord(character) <= value[1]
    if kind is op.CATEGORY:
        return re.fullmatch(CATEGORIES[str(value)], character) is not None
    return kind is op.LITERAL and ord(character) == value
