"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Sequence

from rlft.system.check_rows import CheckRow, Status

STYLES = {Status.ok: "green", Status.slow: "yellow", Status.limit: "yellow", Status.wrong: "red", Status.skipped: "dim"}


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
