"""`rlft translate`: another library's arguments as rlft's, with what has no counterpart and what differs in meaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlft.commands.tables import wrapped
from rlft.commands.translate.files import Given, read
from rlft.commands.translate.rules import Row, Translation, command_of, translate
from rlft.config.choices import as_typed, choice_remedy
from rlft.config.suggest import translated_peers
from rlft.system.terminal import command_line, for_a_shell, show
from rlft.types import UserError, require

LIBRARIES = "trl|verl|axolotl|openrlhf|unsloth"

WIDTH = 34  # columns of a table's first column; a longer cell has a line of its own


def command(arguments: list[str]) -> None:
    peer, words = (arguments[0] if arguments else ""), arguments[1:]
    remedy = f"write rlft translate {peer} <file or arguments>"
    require(words or peer not in translated_peers(), "translate", "there is nothing to translate", remedy=remedy)
    translation, given = translated(peer, words)
    show("\n".join(lines(translation, given)))


def translated(peer: str, words: Iterable[str]) -> tuple[Translation, Given]:
    """The translation of files and arguments, with what was read. Raises UserError: there is none in them."""
    remedy, got = choice_remedy(peer, translated_peers()), peer or "nothing"
    require(peer in translated_peers(), "translate", "needs the library's name first", got=got, remedy=remedy)
    given = read(list(words))
    if not given.arguments and not given.unread:
        problem, remedy = "there are no arguments in it", "name the file that has them, or write them as name=value"
        raise UserError("translate", problem, got=" ".join(words), remedy=remedy)
    command = command_of(peer, given.programs) or "train"
    how: dict[str, Any] = {"whole": given.is_whole, "programs": given.programs, "unread": given.unread}
    return translate(peer, given.arguments, command, **how), given


def lines(translation: Translation, given: Given) -> list[str]:
    """The text that is printed: the command, the table, and the lists of what is not the same."""
    mapped = [row for row in translation.rows if row.words]
    told = [command_line("rlft", translation.command, *translation.words.values()), ""]
    told += [f"{translation.title:<{WIDTH}} rlft {translation.command}"] if mapped else []
    for row in mapped:
        told += _two_columns(arguments_of(row), [for_a_shell(word) for word in row.words.values()])
    told += _listed("Differs in meaning", mapped)
    told += _listed("No counterpart here", [row for row in translation.rows if not row.words])
    if given.unread:
        told += ["", "Could not be read: add name=<value> for each that matters"]
        told += [line for name, text in given.unread.items() for line in wrapped(f"{name}: {text}", "  ", "    ")]
    return told


def arguments_of(row: Row) -> list[str]:
    """The arguments of the other library in a row, as they were given or are its defaults."""
    theirs = [f"{name}={_shown(value)}" for name, value in row.theirs.items()] or ["(not given)"]
    theirs[-1] += " (default)" * (row.is_default and bool(row.theirs))
    return theirs


def _two_columns(left: list[str], right: list[str]) -> list[str]:
    rows = []
    for index in range(max(len(left), len(right))):
        first, second = (cells[index] if index < len(cells) else "" for cells in (left, right))
        if len(first) > WIDTH:
            rows.append(first)
            first = ""
        if first or second:
            rows.append(f"{first:<{WIDTH}} {second}".rstrip())
    return rows


def _listed(title: str, rows: list[Row]) -> list[str]:
    """The notes of rows below a title; rows with one note share a line."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            names.setdefault(row.note, []).extend([*row.theirs] or [*row.words])
    notes = [line for note, of in names.items()
             for line in wrapped(for_a_shell(f"{', '.join(of)}: {note}" if of else note), "  ", "    ")]  # fmt: skip
    return ["", title, *notes] if notes else []


def _shown(value: object) -> str:
    return value if isinstance(value, str) else as_typed(value)
