"""From a config back to the words of its command line: the choices and keys in which it differs from the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rlft.config import catalog
from rlft.config.compose import MISSING, compose
from rlft.config.keys import ABSENT, flatten, is_below
from rlft.config.suggest import SEVERAL
from rlft.system.terminal import override, quoted
from rlft.types import UserError

SETTLED = ("command", "resume", "model.date", "model.revision", "cluster.lanes")
"""Keys whose values a run has settled itself, or that are not of its command line."""

Config = Mapping[str, Any]


def changed_keys(plain: Config, command: str) -> dict[str, tuple[Any, Any]]:
    """{key: (value, default)} of the keys in which a plain config differs from the chosen algorithm, data, ..

    Raises UserError: that cannot be composed here, as with a class of the user's own that is gone.
    """
    changed = _apart(plain, command, [])[1]
    return {key: (value, None if default is ABSENT else default) for key, (value, default) in changed.items()}


def words_of(plain: Config, command: str) -> list[str] | None:
    """The fewest words after `rlft <command>` that compose this config; None if it has keys that no word gives.

    They begin with the recipe of its name if there is one.
    """
    found = []
    for base in [[f"+recipe={plain['name']}"] if plain.get("name") in catalog.recipes(command) else [], []]:
        with suppress(UserError):
            words, changed = _apart(plain, command, base)
            if all(choices_of(plain, command).values()) and all(old is not ABSENT for _, old in changed.values()):
                found.append([*words, *(_word(key, value) for key, (value, _) in changed.items())])
    return min(found, key=len, default=None)


def choices_of(plain: Config, command: str) -> dict[str, str]:
    """{group: the choice in it, or "" for a class of the user's own}."""
    return {group: _choice(group, plain.get(group), command) for group in catalog.chosen(command)}


def _choice(group: str, section: Any, command: str) -> str:
    """The choice whose YAML agrees with most keys of a section; "" if none has its class."""
    known = catalog.files(group, command)
    if group in SEVERAL:
        several = (section or {}).items()
        return f"[{','.join(name if name in known else str(one.get('_target_')) for name, one in several)}]"
    if section is None:
        return "null"
    flat, agreement = flatten(section), dict[str, int]()
    for choice, file in known.items():
        content = _content(file, group)
        if content.get("_target_") == flat.get("_target_"):
            agreement[choice] = sum(flat.get(key) == value for key, value in content.items())
    return max(agreement, key=agreement.__getitem__, default="")


@lru_cache
def _content(file: Path, group: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for one in catalog.lineage(file, group):
        content |= flatten(yaml.safe_load(one.read_text(encoding="utf-8")) or {})
    return {key: value for key, value in content.items() if key != "defaults"}


@lru_cache
def _composed(words: tuple[str, ...], command: str) -> Config:
    return compose(words, None, command, requires=False)


def _apart(plain: Config, command: str, base: Sequence[str]) -> tuple[list[str], dict[str, tuple[Any, Any]]]:
    """(`base`, choices, and keys that these require; {key: (value, value by these words, or ABSENT)} of the others)."""
    flat, wanted, required = flatten(plain), choices_of(plain, command), []
    for group, choice in wanted.items():
        content = _content(file, group) if (file := catalog.files(group, command).get(choice)) else {}
        keys = [f"{group}.{key}" for key, value in content.items() if value == MISSING]
        required += [_word(key, flat[key]) for key in keys if key in flat]
    begun = choices_of(_composed((*base, *required), command), command) if base else catalog.chosen(command)
    choices = [f"{group}={choice}" for group, choice in wanted.items() if choice not in ("", begun[group])]
    words = [*base, *choices, *required]
    composed = _composed(tuple(words), command)
    # A section of these that is null in the config is not absent.
    defaults = {key: "a section" if isinstance(value, Mapping) else value for key, value in composed.items()}
    defaults |= flatten(composed)
    pairs = {key: (value, defaults.get(key, ABSENT)) for key, value in flat.items() if not is_below(key, SETTLED)}
    # An empty section, as the trackers of a run from before the console was a section, says as little as none.
    return words, {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and pair != ({}, ABSENT)}


def _word(key: str, value: Any) -> str:
    if isinstance(value, str) and not _is_plain(value):
        return f"{key}={quoted(value)}"
    return override(key, value)


def _is_plain(text: str) -> bool:
    """Whether OmegaConf, to which 1e3 is a number as well, reads the text as itself."""
    try:
        float(text)
    except ValueError:
        with suppress(yaml.YAMLError):
            return yaml.safe_load(text or "''") == text
    return False
