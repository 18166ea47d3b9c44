"""Tables and paragraphs that several commands print."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlft.system.check_rows import CheckRow, Status
from rlft.system.terminal import unbroken, with_spaces

if TYPE_CHECKING:
    from rich.text import Text

    from rlft.logger.tables import WordTable

STYLES = {Status.ok: "green", Status.slow: "yellow", Status.limit: "yellow", Status.wrong: "red", Status.skipped: "dim"}
WIDTH = 120  # columns of text that is printed into a pipe or a file


def wrapped(text: str, first: str, others: str) -> list[str]:
    """The text in lines of the terminal's width; `first` precedes the first line, `others` the rest."""
    width = max(shutil.get_terminal_size((WIDTH, 24)).columns, len(others) + 20)
    wrapper = textwrap.TextWrapper(width, first, others, break_on_hyphens=False, break_long_words=False)
    lines = [with_spaces(line) for line in wrapper.wrap(unbroken(text))]
    return lines or [first.rstrip()]


def rows_table(rows: Sequence[CheckRow]) -> WordTable:
    """Every row, with its remedy below it."""
    from rich.text import Text

    from rlft.logger.tables import Column, WordTable
    from rlft.logger.text import visible

    cells = []
    for row in rows:
        text = Text(visible(row.value))
        if row.remedy:
            text.append(f"\n-> {visible(row.remedy)}", style="bold")
        cells.append((row.name, Text(row.status, STYLES[row.status]), text))
    return WordTable((Column(), Column(), Column()), cells)


def counts_of(rows: Sequence[CheckRow]) -> Text:
    """How many rows have each status."""
    from rich.text import Text

    counts = {status: sum(row.status == status for row in rows) for status in STYLES}
    text = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return Text(text, STYLES[Status.wrong if counts[Status.wrong] else Status.ok])


def print_rows(rows: Sequence[CheckRow]) -> None:
    """Prints every row with its remedy below it, and how many rows have each status."""
    from rlft.logger.console import open_terminal

    terminal = open_terminal()
    terminal.print(rows_table(rows))
    terminal.print()
    terminal.print(counts_of(rows))
