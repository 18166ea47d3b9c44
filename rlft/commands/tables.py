"""Tables and paragraphs that several commands print."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from rlft.system.check_rows import CheckRow, Status

STYLES = {Status.ok: "green", Status.slow: "yellow", Status.limit: "yellow", Status.wrong: "red", Status.skipped: "dim"}
WIDTH = 120  # columns of text that is printed into a pipe or a file


def wrapped(text: str, first: str, others: str) -> list[str]:
    """The text in lines of the terminal's width; `first` precedes the first line, `others` the rest."""
    width = max(shutil.get_terminal_size((WIDTH, 24)).columns, len(others) + 20)
    lines = textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
    return lines or [first.rstrip()]


def print_rows(rows: Sequence[CheckRow]) -> None:
    """Prints every row with its remedy below it, and how many rows have each status."""
    from rich.table import Table
    from rich.text import Text

    from rlft.logger.console import open_terminal
    from rlft.logger.text import visible

    terminal, table = open_terminal(), Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        text = Text(visible(row.value))
        if row.remedy:
            text.append(f"\n-> {visible(row.remedy)}", style="bold")
        table.add_row(Text(row.name), Text(str(row.status), style=STYLES[row.status]), text)
    terminal.print(table)
    counts = {status: sum(row.status == status for row in rows) for status in STYLES}
    counts_text = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    terminal.print()
    terminal.print(Text(counts_text, style=STYLES[Status.wrong if counts[Status.wrong] else Status.ok]))
