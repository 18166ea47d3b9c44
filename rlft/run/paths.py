"""Paths in a run's config that are found again when the run has moved with them, or from another working directory.

config.yaml keeps a path as it was typed, which may be relative to the working directory of that day. Its origin holds,
for every path that was there when the run began, where it lies as seen from the run's own folder. So the folder of a
whole pipeline can be moved or renamed, and a run be used from any directory; what changed inside is still found out by
fingerprints.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KEYS = ("snapshot.reference", "critic.init", "adapter")
NAMES = ("path", "held_out_path")
"""Such keys, and all keys with such a last part, may name a local file or folder."""
KEYWORDS = ("none", "base", "copy", "ema", "reward")
"""Values of such keys that are no folder, whatever folders the working directory has."""


def path_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, path) of every key that may name a local file or folder and does name something."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from path_keys(value, f"{key}.")
        elif isinstance(value, str) and value and value not in KEYWORDS and (name in NAMES or key in KEYS):
            yield key, value


def record(config: Mapping[str, Any], folder: Path) -> dict[str, dict[str, str]]:
    """{key: {value: as the config has it, relative: to the run's folder}} of every path that is there."""
    return {
        key: {"value": value, "relative": os.path.relpath(_absolute(value), folder.resolve())}
        for key, value in path_keys(config)
        if _absolute(value).exists()
    }


def located(config: Mapping[str, Any], recorded: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with every recorded path as it is found from here and now.

    Args:
        config: the run's plain config.
        recorded: what `record` gave when it was written.
        folder: where the run is now.
    """
    result = copy.deepcopy(dict(config))
    for key, value in path_keys(config):
        entry = recorded.get(key)
        if isinstance(entry, Mapping) and entry.get("value") == value:  # else it was changed by hand since
            _set(result, key, _located(value, folder, str(entry.get("relative"))))
    return result


def same_path(first: Any, second: Any) -> bool:
    """Whether both values are paths of one file or folder."""
    if not (isinstance(first, str) and isinstance(second, str)) or {first, second} & set(KEYWORDS):
        return False
    there = _absolute(first), _absolute(second)
    return there[0] == there[1] and there[0].exists()


def _located(value: str, folder: Path, relative: str) -> str:
    """The path as it was typed if it still leads there; else as seen from the working directory."""
    beside_the_run = (folder.resolve() / relative).resolve()
    if not beside_the_run.exists() or beside_the_run == _absolute(value):
        return value
    below = beside_the_run.is_relative_to(Path.cwd().resolve())
    return os.path.relpath(beside_the_run) if below else str(beside_the_run)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _set(config: dict[str, Any], key: str, value: str) -> None:
    *sections, name = key.split(".")
    for section in sections:
        config = config[section]
    config[name] = value
