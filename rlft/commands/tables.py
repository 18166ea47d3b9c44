"""What several commands show alike: tables, paragraphs, the rows of them that a pattern chooses, and an HTML page."""

from __future__ import annotations

import base64
import hashlib
import html
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from rlft.config.choices import closest
from rlft.config.suggest import ASSETS
from rlft.system.terminal import CheckRow, Status, unbroken, with_spaces
from rlft.types import UserError, require

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
    from rlft.system.text import visible

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


def matching(
    words: Sequence[str],
    texts: Mapping[str, str],
    command: str,
    problem: str,
    meant: Callable[[str], str] = lambda wanted: "",
) -> list[str]:
    """The names of `texts`, {name: what is said of it}, that match the pattern in `words`, or whose text contains it.

    All without a pattern. Raises UserError: there are several, or `problem`, nothing matches; `meant` may then have
    another remedy than the most similar name, or "".
    """
    remedy = f"write rlft {command} <pattern>"
    require(len(words) < 2, command, "takes one pattern", got=" ".join(words), remedy=remedy)
    wanted, names = _plain("".join(words)), {_plain(name): name for name in texts}
    found = [n for plain, n in names.items() if fnmatch(plain, wanted) or wanted in _plain(f"{n}\n{texts[n]}")]
    if found or not words:
        return found
    close = names.get(closest(wanted, names) or "")
    remedy = meant(wanted) or (f"did you mean {close}?" if close else f"rlft {command} lists all")
    raise UserError(command, problem, got=words[0], remedy=remedy)


def _plain(text: str) -> str:
    return text.lower().replace("-", "_")


# -- an HTML page, which loads nothing and runs nothing else than its own styles and scripts ---------------------------
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {policy}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
{styles}
</head>
{body}
{data}{scripts}
</html>
"""


def html_page(
    title: str, body: str, styles: Sequence[str], scripts: Sequence[str], *, data: bytes = b"", policy: str = ""
) -> str:
    """The page of these files below assets/, which its content security policy allows by their hashes, and `policy`.

    `data` is for the scripts, in the element of that name as base64, which cannot hold markup.
    """
    style_texts, script_texts = ([*map(_asset, names)] for names in (styles, scripts))
    allowed = ["img-src data:", _allowed("script-src", script_texts), _allowed("style-src", style_texts), policy]
    return PAGE.format(
        policy="; ".join(filter(None, allowed)),
        title=html.escape(title),
        styles="\n".join(f"<style>{text}</style>" for text in style_texts),
        body=_asset(body),
        data=f'<script type="text/plain" id="data">{base64.b64encode(data).decode()}</script>\n' if data else "",
        scripts="\n".join(f"<script>{text}</script>" for text in script_texts),
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _allowed(kind: str, texts: Sequence[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join([kind, *(f"'sha256-{digest}'" for digest in hashes)])
