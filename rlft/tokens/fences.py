"""The blocks of fenced code in a text, by CommonMark's rules, for all that reads code in what models write.

Some rules are wider than CommonMark's, because models write so: a fence may be indented by any number of spaces, in a
list or not; a fence that names a language opens a block, even inside of another whose fence is no longer, and behind
text on its line; what follows a closing fence on its line, such as `</answer>`, may be anything but a language; and a
fence is no longer than all the later ones. Lines lose no more white space than all of them have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

_LINE = re.compile(r"([^\r\n]*)(?:\r\n|\r|\n|\Z)")
_CONTAINERS = re.compile(r"(?:[ \t]*(?:>|(?:[-*+]|[0-9]{1,9}[.)])(?=[ \t])))*[ \t]*")
"""What may stand before an opening fence on its line: quotes, items of lists, white space."""
_FENCE = re.compile(r"(`{3,}(?=[^`]*\Z)|~{3,})[ \t]*\{?\.?([A-Za-z0-9]*)")
_RUN = re.compile(r"`{3,}|~{3,}")
_QUOTE = re.compile(r"[ \t]*> ?")
_TAB = 4
_LOOSE = 3  # the most columns by which a closing fence may be indented more than the opening one


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: the language that its fence names, in lower case, or ""; the text in it; where it ends.

    One that no fence closes goes on to the end of the text.
    """

    language: str
    text: str
    end: int
    is_closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fence:
    """A fence: the quotes before it, its column behind them, its characters, and the language behind it."""

    quotes: int
    column: int
    run: str
    language: str


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a text, in order. Linear in the length of the text."""
    lines = [line for line in _LINE.finditer(text) if line[0]]
    marked = [number for number, line in enumerate(lines) if "```" in line[1] or "~~~" in line[1]]
    inside = cache(lambda number, quotes: _inside(lines[number][1], quotes))
    longest = [max(map(len, _RUN.findall(lines[number][1]))) for number in marked]
    longest_later = [*accumulate(reversed([*longest[1:], 0]), max)][::-1]
    at = 0
    while at < len(marked):
        first = marked[at]
        at += 1
        if (opened := _opening(lines[first][1])) is None:
            continue
        opened = replace(opened, run=opened.run[: max(3, longest_later[at - 1])])
        later = ((index, inside(marked[index], opened.quotes)) for index in range(at, len(marked)))
        index, is_closed = _end_of(later, opened)
        at = len(marked) if index is None else index + is_closed
        if index is not None and not is_closed:  # another block begins there
            continue
        end = len(lines) if index is None else marked[index]
        within = [_without_quotes(line[1], opened.quotes) for line in lines[first + 1 : end]]
        column = min([opened.column, *(_column(line) for line in within if line.strip(" \t"))])
        yield Block(
            language=opened.language.lower(),
            text="".join(f"{_from_column(line, column)}\n" for line in within),
            end=len(text) if index is None else lines[end].end(),
            is_closed=is_closed,
        )


def unfenced(text: str) -> str:
    """The text of the fenced block that is all of a text; a text that is none as it is."""
    block = next(blocks(text.strip()), None) if text.lstrip().startswith(("```", "~~~")) else None
    return text if block is None or block.end < len(text.strip()) else block.text


def _end_of(later: Iterable[tuple[int, _Fence | None]], opened: _Fence) -> tuple[int | None, bool]:
    """(which of the later fences ends the block that a fence has opened, or None; whether it is its closing fence).

    A fence that is indented more than the opening one closes the block only if no other does: it may be a line of the
    program's.
    """
    loose = None
    for index, fence in later:
        if fence is None or not fence.run.startswith(opened.run) or fence.column > opened.column + _LOOSE:
            continue
        if fence.column > opened.column:
            loose = index if loose is None and not fence.language else loose
        elif not fence.language or loose is None:
            return index, not fence.language
        else:
            break
    return loose, loose is not None


def _inside(line: str, quotes: int) -> _Fence | None:
    """The fence on a line of a block; None if it has none."""
    line = _without_quotes(line, quotes)
    return _fence(line.lstrip(" \t"), quotes, _column(line))


def _opening(line: str) -> _Fence | None:
    """The fence on a line outside of all blocks, behind quotes and items of lists; None if it has none."""
    before = next(_CONTAINERS.finditer(line))[0]  # it matches the empty text, too
    quotes = before.count(">")
    text, _, language = line.rpartition("```")
    text = text.rstrip("`")
    is_behind_text = "```" not in text and language.strip().isalnum() and len(text.rstrip()) > len(before)
    rest = line[len(text if is_behind_text else before) :]
    return _fence(rest, quotes, len(_without_quotes(before, quotes).expandtabs(_TAB)))


def _fence(rest: str, quotes: int, column: int) -> _Fence | None:
    match = _FENCE.match(rest)
    return match and _Fence(quotes=quotes, column=column, run=match[1], language=match[2])


def _column(line: str) -> int:
    """At which column the text of a line begins."""
    return len(line[: len(line) - len(line.lstrip(" \t"))].expandtabs(_TAB))


def _from_column(line: str, column: int) -> str:
    """A line without so many columns of white space, or as many as it begins with."""
    rest = line.lstrip(" \t")
    width = 0
    for index, character in enumerate(line[: len(line) - len(rest)]):
        if width >= column:
            return " " * (width - column) + line[index:]
        width += _TAB - width % _TAB if character == "\t" else 1
    return " " * (width - column) + rest


def _without_quotes(line: str, number: int) -> str:
    """The line without so many quotes' signs before it, or as many as it has."""
    while number and (match := _QUOTE.match(line)):
        number, line = number - 1, line[match.end() :]
    return line
