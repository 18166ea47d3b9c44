"""The words of a verb that only reads runs: places, `<word>=<value>`, and --json where it has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlft.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """places: folders as they were written, without a `run=` before them. given: `{word: value}`."""

    places: tuple[str, ...]
    given: Mapping[str, str]
    as_json: bool


def read_words(verb: str, arguments: Sequence[str], known: Sequence[str] = (), *, has_json: bool = False) -> Words:
    """Sorts the arguments of a verb; known: the words that it takes a value of.

    Something that is there is a place, whatever its name: folders of sweeps are called `lr=1e-05`.

    Raises:
        UserError: an option or a word that the verb has not.
    """
    options = [word for word in arguments if word.startswith("-") and not _is_there(word)]
    if others := [word for word in options if not (has_json and word == "--json")]:
        remedy = "use --json or --help" if has_json else "use --help"
        raise UserError("command line", "there is no such option", got=others[0], remedy=remedy)
    words = [word.removeprefix("run=") for word in arguments if word not in options]
    valued = [word for word in words if "=" in word and not _is_there(word)]
    given = dict(word.split("=", 1) for word in valued)
    if unknown := [word for word in given if word not in known]:
        remedy = f"use {', '.join(f'{word}=' for word in known)}" if known else "name folders only"
        raise UserError(unknown[0], f"is no word of rlft {verb}", got=given[unknown[0]], remedy=remedy)
    places = tuple(word for word in words if word not in valued)
    return Words(places=places, given=given, as_json=bool(options))


def _is_there(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # too long for a name
        return False
