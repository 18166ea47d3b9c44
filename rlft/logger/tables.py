"""Tables for a terminal or a pipe of any width, in which no word is cut, so that keys can be read and copied whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.console import Console, ConsoleOptions
from rich.text import Text

from rlft.system.terminal import unbroken, with_spaces
from rlft.system.text import visible

GAP, INDENT = "  ", " " * 4
NARROW = 16  # cells of the terminal that a column of long words has at least


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str = ""
    style: str = ""
    right: bool = False  # its cells are numbers: they are aligned to the right and stay on one line
    folds: bool = False  # its words may be cut, as those of completions
    # Its cells of the terminal, so that tables below each other are aligned; a longer word moves what follows it.
    # 0: as its cells need.
    width: int = 0


class WordTable:
    """Rows of cells in the width that there is; a rich renderable.

    A cell with a word that is longer than its column is printed below its row, with the cells that follow it. A command
    is such a word: it is never broken, and copied as one line.
    """

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
        self.columns = columns
        self.rows = [
            [
                _of_words(cell if isinstance(cell, Text) else Text(visible(str(cell)), c.style), c)
                for c, cell in zip(columns, row, strict=True)
            ]
            for row in rows
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self._all_lines(console, options):
            line.plain, line.no_wrap, line.overflow = with_spaces(line.plain), True, "ignore"
            yield line

    def _all_lines(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        titles = [Text(visible(column.title), "bold") for column in self.columns]
        widths = self._widths(titles, options.max_width)
        if any(titles):
            yield from self._lines(console, titles[: len(widths)], widths)
        for row in self.rows:
            own_widths = self._moved(row, widths, options.max_width)
            long = (n for n, cell in enumerate(row) if n and not self._holds(n, cell, own_widths))
            apart = next(long, len(row))
            yield from self._lines(console, row[:apart], own_widths)
            named = zip(self.columns[apart:], row[apart:], strict=True)
            below = Text(GAP).join(Text(f"{c.title} " * c.right) + cell for c, cell in named if cell)
            width = max(options.max_width - len(INDENT), _longest_word(below))
            for line in below.wrap(console, width) if below else ():
                yield Text(INDENT) + line

    def _holds(self, number: int, cell: Text, widths: Sequence[int]) -> bool:
        if not cell or number >= len(widths):
            return not cell
        return self.columns[number].folds or _longest_word(cell) <= widths[number]

    def _widths(self, titles: Sequence[Text], room: int) -> list[int]:
        """The widths of the first columns, as many as have room in a row together."""
        widths, least = [], []
        for number, (column, title) in enumerate(zip(self.columns, titles, strict=True)):
            cells = [row[number] for row in self.rows]
            lines = [line.cell_len for cell in (title, *cells) for line in cell.split()]
            words = [_longest_word(title), *(cell.cell_len if column.right else _longest_word(cell) for cell in cells)]
            widths.append(column.width or max(lines, default=0))
            least.append(column.width or max(words) if column.right or not number else min(max(words), NARROW))
        while len(least) > 1 and sum(least) + len(GAP) * (len(least) - 1) > room:
            least.pop()
        widths = widths[: len(least)]
        while sum(widths) + len(GAP) * (len(widths) - 1) > room and widths != least:
            widths[max(range(len(widths)), key=lambda n: (widths[n] > least[n], widths[n]))] -= 1
        return widths

    def _moved(self, row: Sequence[Text], widths: Sequence[int], room: int) -> Sequence[int]:
        """The widths for this row, whose long words move its last cell to the right, or below if it had no room."""
        if len(widths) == 1:
            return widths
        moved = [
            max(width, _longest_word(cell)) if column.width else width
            for column, cell, width in zip(self.columns, row, widths, strict=False)
        ]
        moved[-1] -= max(0, sum(moved) + len(GAP) * (len(moved) - 1) - room)
        return moved if moved[-1] >= min(widths[-1], NARROW) else [*moved[:-1], 0]

    def _lines(self, console: Console, row: Sequence[Text], widths: Sequence[int]) -> Iterator[Text]:
        """The lines of cells that stand next to each other."""
        wrapped = [cell.wrap(console, max(1, width)) for cell, width in zip(row, widths, strict=False)]
        for parts in zip_longest(*wrapped, fillvalue=Text()):
            line = Text()
            for part, width, column in zip(parts, widths, self.columns, strict=False):
                free = " " * (width - part.cell_len)
                line += Text(free * column.right) + part + Text(free * (not column.right) + GAP)
            line.rstrip()
            yield line


def _of_words(cell: Text, column: Column) -> Text:
    if not column.folds:
        cell.plain = unbroken(cell.plain)
    return cell


def _longest_word(text: Text) -> int:
    return max((len(word) for word in text.plain.split()), default=0)
