"""From a config back to the words of its command line: the choices and keys in which it differs from the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rlft.config import catalog
from rlft.config.compose import FILES, compose
from rlft.config.keys import ABSENT, flatten, is_below
from rlft.config.suggest import SEVERAL
from rlft.system.terminal import override
from rlft.types import UserError

SETTLED = ("resume", "model.date", "model.revision", "cluster.lanes")
"""Keys whose values a run has settled itself, or that are not of its command line."""

Config = Mapping[str, Any]


def changed_keys(plain: Config, command: str) -> dict[str, tuple[Any, Any]]:
    """{key: (value, default)} of the keys in which a plain config differs from the chosen algorithm, data, ..

    Raises UserError: that cannot be composed here, as with a class of the user's own that is gone.
    """
    defaults, choices = choices_of(None, command), choices_of(plain, command)
    words = [f"{group}={choice}" for group, choice in choices.items() if choice not in ("", defaults[group])]
    found = _differences(plain, _composed((*words, *_files(plain)), command))
    return {key: (value, None if default is ABSENT else default) for key, (value, default) in found.items()}


def words_of(plain: Config, command: str) -> list[str] | None:
    """The fewest words after `rlft <command>` that compose this config; None if it has keys that no word gives.

    They begin with the recipe of its name if there is one.
    """
    recipe = [f"+recipe={plain['name']}"] if plain.get("name") in catalog.recipes(command) else []
    found = []
    for base in [[], recipe] if recipe else [[]]:
        try:
            settled = choices_of(_composed(tuple(base), command) if base else None, command)
            wanted = choices_of(plain, command)
            choices = [f"{group}={choice}" for group, choice in wanted.items() if choice != settled[group]]
            words = [*base, *choices, *_files(plain)]
            changed = _differences(plain, _composed(tuple(words), command)).items()
        except UserError:
            continue
        if all(wanted.values()) and not any(default is ABSENT for _, (_, default) in changed):
            found.append(list(dict.fromkeys([*words, *(_word(key, value) for key, (value, _) in changed)])))
    return min(found, key=len, default=None)


def choices_of(plain: Config | None, command: str) -> dict[str, str]:
    """{group: the choice} of a plain config; None: of the command's defaults list."""
    groups = [group for group in catalog.groups(command) if group != "recipe"]
    if plain is not None:
        return {group: _choice(group, plain.get(group), command) for group in groups}
    listed = yaml.safe_load(catalog.root_files(command)[-1].read_text(encoding="utf-8"))["defaults"]
    defaults = {name: value for one in listed if isinstance(one, dict) for name, value in one.items()}
    return {group: _choice_word(defaults[group]) for group in groups}


def _choice_word(value: Any) -> str:
    return "null" if value is None else f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def _choice(group: str, section: Any, command: str) -> str:
    """The choice whose YAML agrees with most keys of a section; "" if none has its class."""
    if section is None:
        return "null"
    if group in SEVERAL:
        known = catalog.choices(group, command)
        names = [name if name in known else str(one.get("_target_")) for name, one in section.items()]
        return _choice_word(names)
    flat = flatten(section)

    agreement, known = {}, catalog.files(group, command)
    for choice, content in ((choice, _content(file, group)) for choice, file in known.items()):
        if content.get("_target_") == flat.get("_target_"):
            agreement[choice] = sum(flat.get(key) == value for key, value in content.items())
    return max(agreement, key=lambda choice: agreement[choice], default="")


@lru_cache
def _content(file: Path, group: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for one in catalog.lineage(file, group):
        content |= flatten(yaml.safe_load(one.read_text(encoding="utf-8")) or {})
    return {key: value for key, value in content.items() if key != "defaults"}


@lru_cache
def _composed(words: tuple[str, ...], command: str) -> Config:
    try:
        return compose(words, None, command)
    except UserError:  # a recipe's own words, without the keys that it requires
        return compose(words, None, command, requires=False)


def _files(plain: Config) -> list[str]:
    """Words of the files that a command requires."""
    flat = flatten(plain)
    return [override(key, flat[key]) for key in FILES if flat.get(key)]


def _differences(plain: Config, base: Config) -> dict[str, tuple[Any, Any]]:
    """{key: (value, value in the base, or ABSENT)}; a section of the base that is null here is not absent."""
    flat, sections = flatten(plain), {name: "a section" for name, value in base.items() if isinstance(value, Mapping)}
    defaults = {**sections, **flatten(base)}
    keys = [key for key in flat if not is_below(key, SETTLED) and key not in ("command", *FILES)]
    return {key: (flat[key], defaults.get(key, ABSENT)) for key in keys if flat[key] != defaults.get(key, ABSENT)}


def _word(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool | int | float):
        return f"{key}={yaml.safe_dump(value).split()[0]}"
    if isinstance(value, str) and yaml.safe_load(value or "''") != value:
        return f"{key}='{value}'"
    return override(key, value)
