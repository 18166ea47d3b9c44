"""Reads a run's config.yaml, and finds out whether it is complete, and whether a newer rlft wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rlft.config import command as verbs
from rlft.config.command import UnknownVerbError

CONFIG = "config.yaml"
ORIGIN = "origin"
WHOLE = "whole"
"""The last key of the origin, and so of the file: a file that was cut short at the end of a line lacks it."""
KEY = "format"
FORMAT = 1
"""Format of config.yaml, status.json, state.json and progress.json; raised when an older rlft would misread them."""

MAX_NESTED = 1000
"""The deepest nesting that is parsed with libyaml."""
_SECTION_START = re.compile(rb"^(?=[A-Za-z_])", re.MULTILINE)
_BEFORE_WORDS = re.compile(rb"^[ ?:-]+", re.MULTILINE)
"""The characters before a line's first word, each of which may begin a level of nesting."""


class NewerError(ValueError):
    """A file was written by a newer rlft; the message continues the file's name: `was written by ..`."""


def check_format(values: Any) -> None:
    """Raises NewerError for the values of a file whose format this rlft does not know."""
    number = values.get(KEY, FORMAT) if isinstance(values, Mapping) else FORMAT
    if type(number) is int and number > FORMAT:
        raise NewerError(f"was written by a newer rlft ({KEY} {number}, this one reads up to {FORMAT})")


def whole_config(folder: Path, *, shared: bool = False) -> dict[str, Any]:
    """The plain config of a run, `verb` and `origin` included, without the keys that mark the file as complete.

    Args:
        folder: the run's folder.
        shared: whether equal sections of several runs' configs may be the same objects, for callers that read many
            configs and change none.

    Raises:
        OSError: the file cannot be read.
        UnknownVerbError: the run is of a verb that does not exist, or no longer exists.
        NewerError: it was written by a newer rlft; the message says so.
        ValueError: it is damaged; the message says how.
    """
    content = (folder / CONFIG).read_bytes()
    try:
        config = by_section(content) if shared else None
        config = _load(content) if config is None else config
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError("it is no YAML") from None
    if not isinstance(config, dict):
        raise ValueError("it holds no keys")
    origin = config.get(ORIGIN)
    if not isinstance(origin, dict):
        raise ValueError(f"it is cut short, its {ORIGIN} is missing" if "verb" in config else "it has no verb")
    check_format(origin)
    if WHOLE not in origin or not content.endswith(b"\n"):
        raise ValueError(f"it is cut short, the end of its {ORIGIN} is missing")
    verb = str(config.get("verb"))
    try:
        verbs.named(verb)
    except UnknownVerbError as error:
        problem = f"{error.problem} (of the run in {folder})"
        raise UnknownVerbError(error.key, problem, got=verb, remedy=error.remedy) from None
    return {**config, ORIGIN: {key: value for key, value in origin.items() if key not in (KEY, WHOLE)}}


def by_section(content: bytes) -> dict[str, Any] | None:
    """The config, with each distinct section parsed once for all files; None if the file must be parsed as a whole."""
    config: dict[str, Any] = {}
    try:
        for section in filter(None, _SECTION_START.split(content)):
            name, value = _section_of(section)
            if name in config:
                return None
            config[name] = value
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return config or None


@lru_cache(maxsize=4096)
def _section_of(section: bytes) -> tuple[str, Any]:
    """The section's only key and its value."""
    keys = _load(section)
    if not isinstance(keys, dict) or len(keys) != 1:
        raise ValueError("it is not one section")
    [(name, value)] = keys.items()
    return name, value


def _load(content: bytes) -> Any:
    return yaml.load(content, Loader=_loader(content))


def _loader(content: bytes) -> Any:
    """The loader for this text: libyaml's takes 1 ms per config, Python's 9 ms, but libyaml crashes on deep nesting."""
    deepest = content.count(b"[") + content.count(b"{") + max(map(len, _BEFORE_WORDS.findall(content)), default=0)
    return yaml.CSafeLoader if yaml.__with_libyaml__ and deepest < MAX_NESTED else yaml.SafeLoader
