"""The words by which a study was begun, kept in its folder: whoever goes on with it goes on with the same study."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlft.config.overrides import Arguments
from rlft.system.files import write_atomically
from rlft.system.terminal import resuming
from rlft.types import UserError
from rlft.verbs.study.config import key_of

WORDS = "sweep.yaml"
"""The file in a sweep's folder with the words that it was begun by."""
MAY_CHANGE = ("sweep.trials", "cluster", "hydra.sweep.dir")
"""Keys and sections that may differ when a study goes on: none of them changes a trial that was drawn."""


def is_study(folder: Path) -> bool:
    """Whether the folder is that of a sweep whose values Optuna chooses."""
    return (folder / WORDS).is_file()


def may_change(word: str) -> bool:
    """Whether an override may differ from the one that a study was begun by."""
    key = key_of(word)
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def saved_words(folder: Path) -> dict[str, Any]:
    """The verb, options and words (overrides) by which the study in this folder was begun.

    Raises:
        UserError: the file is damaged.
    """
    try:
        saved = yaml.safe_load((folder / WORDS).read_text(encoding="utf-8"))
        return {"verb": str(saved["verb"]), "options": list(saved["options"]), "words": list(saved["words"])}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        problem = f"{WORDS} in that folder cannot be read ({type(error).__name__})"
        raise UserError("resume", problem, got=folder, remedy="restore it from a copy, or begin another") from None


def keep_words(folder: Path, verb: str, parsed: Arguments) -> None:
    """Writes the words of a new study; those of one that goes on must be the same.

    Raises:
        UserError: they are of another sweep.
    """
    words = {"verb": verb, "options": list(parsed.options), "words": list(parsed.overrides)}
    if is_study(folder):
        _check_same(folder, saved_words(folder), words)
    write_atomically(folder / WORDS, yaml.safe_dump(words, sort_keys=False, allow_unicode=True))


def _check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    remedy = f"go on with that one by {resuming(folder)}, or name another hydra.sweep.dir"
    if before["verb"] != now["verb"]:
        raise UserError("hydra.sweep.dir", f"there is a sweep of rlft {before['verb']}", got=folder, remedy=remedy)
    old, new = ({key_of(w): w.partition("=")[2] for w in of["words"] if not may_change(w)} for of in (before, now))
    for key in (key for key in {**old, **new} if old.get(key) != new.get(key)):
        problem = f"differs from that of the sweep in {folder}, {old.get(key, 'left out')}"
        raise UserError(key, problem, got=new.get(key, "nothing"), remedy=remedy)
