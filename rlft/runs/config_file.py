"""Reads a run's config.yaml: whether it is complete, whether a newer rlft wrote it, and where its paths are now.

config.yaml keeps a path as it was typed, which may be relative to the working directory at that time. Its origin holds,
for every path that existed when the run started, the path relative to the run's folder. So the folder of a whole
pipeline can be moved or renamed, and a run can be used from any directory; fingerprints still show changed contents.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlft.config import command as commands
from rlft.config.command import UnknownCommandError
from rlft.config.instantiate import split_target
from rlft.config.keys import KEYWORDS, flatten, is_path_key, with_values

CONFIG = "config.yaml"
ORIGIN = "origin"
WHOLE = "whole"
"""The last key of the origin, and so of the file: a file that was cut short at the end of a line lacks it."""
KEY = "format"
FORMAT = 1  # of config.yaml, status.json, state.json and progress.json; raised when an older rlft would misread them
MAX_NESTED = 1000  # the deepest nesting that is parsed with libyaml
_BEFORE_WORDS = re.compile(rb"^[ ?:-]+", re.MULTILINE)
"""The characters before a line's first word, each of which may begin a level of nesting."""


class NewerError(ValueError):
    """A file was written by a newer rlft; the message continues the file's name: `was written by ..`."""


def check_format(values: Any) -> None:
    """Raises NewerError for the values of a file whose format this rlft does not know."""
    number = values.get(KEY, FORMAT) if isinstance(values, Mapping) else FORMAT
    if type(number) is int and number > FORMAT:
        raise NewerError(f"was written by a newer rlft ({KEY} {number}, this one reads up to {FORMAT})")


def whole_config(folder: Path) -> dict[str, Any]:
    """The plain config of a run, `command` and `origin` included, without the keys that mark the file as complete.

    Raises:
        OSError: the file cannot be read.
        UnknownCommandError: the run is of a command that does not exist, or no longer exists.
        NewerError: it was written by a newer rlft; the message says so.
        ValueError: it is damaged; the message says how.
    """
    content = (folder / CONFIG).read_bytes()
    try:
        config = _load(content)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError("it is no YAML") from None
    if not isinstance(config, dict):
        raise ValueError("it holds no keys")
    origin = config.get(ORIGIN)
    if not isinstance(origin, dict):
        raise ValueError(f"it is cut short, its {ORIGIN} is missing" if "command" in config else "it has no command")
    check_format(origin)
    if WHOLE not in origin or not content.endswith(b"\n"):
        raise ValueError(f"it is cut short, the end of its {ORIGIN} is missing")
    command = str(config.get("command"))
    try:
        commands.named(command)
    except UnknownCommandError as error:
        problem = f"{error.problem} (of the run in {folder})"
        raise UnknownCommandError(error.key, problem, got=command, remedy=error.remedy) from None
    return {**config, ORIGIN: {key: value for key, value in origin.items() if key not in (KEY, WHOLE)}}


def _load(content: bytes) -> Any:
    # libyaml takes 1 ms per config, Python 9 ms, but libyaml crashes on deep nesting.
    deepest = content.count(b"[") + content.count(b"{") + max(map(len, _BEFORE_WORDS.findall(content)), default=0)
    fast = yaml.__with_libyaml__ and deepest < MAX_NESTED
    return yaml.load(content, Loader=yaml.CSafeLoader if fast else yaml.SafeLoader)


def path_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, path) of every key that may name a local file or folder and is not empty; of a class, that of its file."""
    for key, value in flatten(config).items():
        if isinstance(value, str) and value and value not in KEYWORDS and is_path_key(key):
            yield key, value
    for key, file in files_of_code(config).items():
        yield key, str(file)


def files_of_code(config: Mapping[str, Any]) -> dict[str, Path]:
    """{key: file} of the classes and functions that are named in files of the user's own."""
    targets = {key: split_target(value) for key, value in flatten(config).items() if key.endswith("_target_")}
    return {key: Path(file) for key, (file, separator, _) in targets.items() if separator == ":"}


def recorded_paths(config: Mapping[str, Any], folder: Path) -> dict[str, dict[str, str]]:
    """{key: {value: the path in the config, relative: the path from the run's folder}} for every path that exists."""
    return {
        key: {"value": value, "relative": os.path.relpath(_absolute(value), folder.resolve())}
        for key, value in path_keys(config)
        if _absolute(value).exists()
    }


def with_located_paths(config: Mapping[str, Any], recorded: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with every path that `recorded_paths` has recorded valid from the current working directory."""
    values, located = flatten(config), dict[str, str]()
    for key, path in path_keys(config):
        entry = recorded.get(key)
        if isinstance(entry, Mapping) and entry.get("value") == path:  # otherwise it was edited by hand
            located[key] = values[key].replace(path, _located(path, folder, str(entry.get("relative"))), 1)
    return with_values(config, located)


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
