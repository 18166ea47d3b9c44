"""The command line of a verb that only reads runs: folders, `<key>=<value>`, and for some verbs --json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlft.config.overrides import unquoted
from rlft.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """A parsed command line.

    Attributes:
        folders: the folders as they were typed, without a leading `run=`.
        values: {key: value} of the typed keys.
        as_json: whether --json was typed.
    """

    folders: tuple[str, ...]
    values: Mapping[str, str]
    as_json: bool


def read_words(
    verb: str, arguments: Sequence[str], known: Sequence[str] = (), *, has_json: bool = False
) -> RunArguments:
    """Parses the arguments of a verb that has the keys in `known`.

    An existing path is a folder, even with an equals sign: a sweep's may be named `lr=1e-05`.

    Raises:
        UserError: the verb does not have such an option or key.
    """
    options = [word for word in arguments if word.startswith("-") and not _exists(word)]
    if unknown_options := [word for word in options if not (has_json and word == "--json")]:
        remedy = "use --json or --help" if has_json else "use --help"
        raise UserError("command line", "there is no such option", got=unknown_options[0], remedy=remedy)
    words = [_without_run(word) for word in arguments if word not in options]
    assignments = [word for word in words if "=" in word and not _exists(word)]
    values = dict(word.split("=", 1) for word in assignments)
    if unknown := [word for word in values if word not in known]:
        remedy = f"use {', '.join(f'{word}=' for word in known)}" if known else "name folders only"
        raise UserError(unknown[0], f"is not a key of rlft {verb}", got=values[unknown[0]], remedy=remedy)
    folders = tuple(word for word in words if word not in assignments)
    return RunArguments(folders=folders, values=values, as_json=bool(options))


def _without_run(word: str) -> str:
    return unquoted(word.removeprefix("run=")) if word.startswith("run=") and not _exists(word) else word


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # too long for a name
        return False
