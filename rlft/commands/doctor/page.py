"""The table of `rlft doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from rlft.commands.doctor.row import CheckRow, Status
from rlft.logger.console import open_terminal
from rlft.logger.text import visible

STYLES = {Status.ok: "green", Status.slow: "yellow", Status.wrong: "red", Status.skipped: "dim"}


def print_rows(rows: Sequence[CheckRow], terminal: Terminal | None = None) -> None:
    """Prints every row with its remedy below it, and then the number of rows with each status."""
    terminal = terminal or open_terminal()
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        text = Text(visible(row.value))
        if row.remedy:
            text.append(f"\n-> {visible(row.remedy)}", style="bold")
        table.add_row(Text(row.name), Text(str(row.status), style=STYLES[row.status]), text)
    terminal.print(table)
    counts = {status: sum(row.status is status for row in rows) for status in Status}
    counts_text = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    terminal.print()
    terminal.print(Text(counts_text, style=STYLES[Status.wrong if counts[Status.wrong] else Status.ok]))
