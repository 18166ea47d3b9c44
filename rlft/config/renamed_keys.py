"""Reads keys under their earlier names: `logger.jsonl.rollouts_every` and `rollouts_max` are now in `rollouts`.

Command lines, YAML files and the config.yaml of runs that have the earlier names keep their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from rlft.config.schema import ADDED_KEYS
from rlft.keys.instantiate import locate
from rlft.logger.jsonl import Jsonl
from rlft.types import UserError

SECTION = "rollouts"
NAMES = {"rollouts_every": "every", "rollouts_max": "keep"}
"""{earlier name in the section of the logger that writes the run's own files: name in `rollouts`}."""
TARGET = f"{Jsonl.__module__}.{Jsonl.__qualname__}"
DEFAULTS = {name: ADDED_KEYS[f"{SECTION}.{name}"] for name in NAMES.values()}


def renamed_overrides(overrides: Sequence[str], root: type) -> list[str]:
    """The command line with keys under their current names, without those that a verb of this root never read.

    >>> from rlft.config.schema import RunConfig, SftConfig
    >>> renamed_overrides(["seed=1", "logger.jsonl.rollouts_every=5,10"], RunConfig)
    ['seed=1', 'rollouts.every=5,10']
    >>> renamed_overrides(["seed=1", "logger.jsonl.rollouts_every=5"], SftConfig)
    ['seed=1']
    """
    result = []
    for override in overrides:
        key, equals, value = override.partition("=")
        section, _, last = key.lstrip("+").rpartition(".")
        name = NAMES.get(last)
        if name is None or section != "logger.jsonl" or not equals:
            result.append(override)
        elif has_rollouts(root):
            result.append(f"{SECTION}.{name}={value}")
    return result


def renamed(config: dict[str, Any], root: type) -> dict[str, Any]:
    """A composed config with these keys in `rollouts`; an earlier key counts where the current one has its default."""
    moved, loggers = _split_off(config.get("logger"))
    if not moved:
        return config
    result = {**config, "logger": loggers}
    section = config.get(SECTION)
    if has_rollouts(root) and isinstance(section, Mapping):
        result[SECTION] = {**section, **{k: v for k, v in moved.items() if section.get(k) == DEFAULTS[k]}}
    return result


def renamed_of_run(config: dict[str, Any], root: type) -> dict[str, Any]:
    """As `renamed`, for a run's config: without a logger of files, such a run wrote no rollouts."""
    loggers = config.get("logger")
    if SECTION in config or not has_rollouts(root) or not isinstance(loggers, Mapping):
        return renamed(config, root)
    moved, loggers = _split_off(loggers)
    sections = [section for section in loggers.values() if isinstance(section, Mapping)]
    # Sections of the class itself come first, because they are recognised without an import.
    sections.sort(key=lambda section: section.get("_target_") != TARGET)
    no_rollouts = {} if any(map(_writes_files, sections)) else {"every": 0}
    result: dict[str, Any] = {}
    for name, value in config.items():
        result[name] = loggers if name == "logger" else value
        if name == "logger":
            result[SECTION] = {**DEFAULTS, **moved, **no_rollouts}
    return result


def has_rollouts(root: type) -> bool:
    return any(field.name == SECTION for field in fields(root))


def _split_off(loggers: Any) -> tuple[dict[str, Any], Any]:
    """(values of the earlier keys under their current names, the loggers without these keys)."""
    if not isinstance(loggers, Mapping):
        return {}, loggers
    moved: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, section in loggers.items():
        rest[name] = section
        if isinstance(section, Mapping) and section.keys() & NAMES.keys() and _writes_files(section):
            moved = {NAMES[key]: value for key, value in section.items() if key in NAMES} | moved
            rest[name] = {key: value for key, value in section.items() if key not in NAMES}
    return moved, rest


def _writes_files(section: Any) -> bool:
    """Whether this is a section of the logger that writes the run's own files, or of one that builds on it."""
    if not isinstance(section, Mapping):
        return False
    target = section.get("_target_")
    if target == TARGET:
        return True
    with suppress(UserError):
        cls = locate(target, "logger")
        return isinstance(cls, type) and issubclass(cls, Jsonl)
    return False
