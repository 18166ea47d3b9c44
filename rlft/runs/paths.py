"""Paths in a run's config that stay valid from any working directory, and when they have moved along with the run.

config.yaml keeps a path as it was typed, which may be relative to the working directory at that time. Its origin holds,
for every path that existed when the run started, the path relative to the run's folder. So the folder of a whole
pipeline can be moved or renamed, and a run can be used from any directory; fingerprints still show changed contents.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlft.config import command as verbs
from rlft.config.keys import keys_of

NAMES = ("path", "held_out_path")
"""Keys whose last part is one of these, and keys that may name a role of a run, may name a local file or folder."""
KEYWORDS = ("auto", "none", "base", "copy", "ema", "reward")
"""Values of these keys that are never a folder, whatever folders the working directory has."""


def path_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, path) of every key that may name a local file or folder and is not empty."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from path_keys(value, f"{key}.")
        elif isinstance(value, str) and value and value not in KEYWORDS and is_path_key(key):
            yield key, value


def is_path_key(key: str) -> bool:
    """Whether values of this key may name a local file or folder.

    >>> is_path_key("data.path"), is_path_key("trainer.lr")
    (True, False)
    """
    return key.rpartition(".")[2] in NAMES or key in _keys_of_roles()


@cache
def _keys_of_roles() -> set[str]:
    roots = (verbs.named(verb).root for verb in verbs.OWN)
    return {key for root in roots for key, known in keys_of(root).items() if known.roles}


def record(config: Mapping[str, Any], folder: Path) -> dict[str, dict[str, str]]:
    """{key: {value: the path in the config, relative: the path from the run's folder}} for every path that exists."""
    return {
        key: {"value": value, "relative": os.path.relpath(_absolute(value), folder.resolve())}
        for key, value in path_keys(config)
        if _absolute(value).exists()
    }


def located(config: Mapping[str, Any], recorded: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with every recorded path valid from the current working directory.

    Args:
        config: the run's plain config.
        recorded: what `record` returned when the config was written.
        folder: the run's current folder.
    """
    result = copy.deepcopy(dict(config))
    for key, value in path_keys(config):
        entry = recorded.get(key)
        if isinstance(entry, Mapping) and entry.get("value") == value:  # otherwise it was edited by hand
            _set(result, key, _located(value, folder, str(entry.get("relative"))))
    return result


def same_path(first: Any, second: Any) -> bool:
    """Whether both values are paths of the same existing file or folder."""
    if not may_have_moved(first, second):
        return False
    absolute = _absolute(first), _absolute(second)
    return absolute[0] == absolute[1] and absolute[0].exists()


def may_have_moved(first: Any, second: Any) -> bool:
    """Whether both values may be paths of the same thing, moved; its fingerprint tells whether they are."""
    return isinstance(first, str) and isinstance(second, str) and not {first, second} & set(KEYWORDS)


def _located(value: str, folder: Path, relative: str) -> str:
    """The typed path if it is still valid or nothing has moved with the run; else the path of what has moved."""
    relocated = (folder.resolve() / relative).resolve()
    if not relocated.exists() or relocated == _absolute(value):
        return value
    below = relocated.is_relative_to(Path.cwd().resolve())
    return os.path.relpath(relocated) if below else str(relocated)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _set(config: dict[str, Any], key: str, value: str) -> None:
    *sections, name = key.split(".")
    for section in sections:
        config = config[section]
    config[name] = value
