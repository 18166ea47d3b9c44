"""Reads a run's config.yaml, and finds out whether it is complete, and whether another version of rlft wrote it."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

import rlft
from rlft.config import command as verbs
from rlft.config.command import UnknownVerbError
from rlft.config.instantiate import locate
from rlft.config.schema import ADDED_KEYS
from rlft.system.versions import KEY, NewerError, is_newer, problem_of_format

CONFIG = "config.yaml"
ORIGIN = "origin"
WHOLE = "whole"
"""The last key of the origin, and so of the file: a file that was cut short at the end of a line lacks it. Older
versions wrote neither this key nor a format."""

MAX_NESTED = 1000
"""The deepest nesting that is parsed with libyaml."""
_SECTION_START = re.compile(rb"^(?=[A-Za-z_])", re.MULTILINE)
_BEFORE_WORDS = re.compile(rb"^[ ?:-]+", re.MULTILINE)
"""The characters before a line's first word, each of which may begin a level of nesting."""


def whole_config(folder: Path, *, shared: bool = False) -> dict[str, Any]:
    """The plain config of a run, `verb` and `origin` included, without the keys that mark the file as complete.

    A file of an older version, which has no origin, is complete if it has every key that its verb needs.

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
    has_origin = isinstance(origin, dict)
    if newer := problem_of_format(config) or problem_of_format(origin):
        raise NewerError(newer)
    verb = str(config.get("verb", "train"))
    try:
        root = verbs.named(verb).root
    except UnknownVerbError as error:
        if not has_origin:
            raise ValueError(f"it is cut short, its {ORIGIN} is missing") from None
        problem = f"{error.problem} (of the run in {folder})"
        raise UnknownVerbError(error.key, problem, got=verb, remedy=error.remedy) from None
    missing = None if has_origin and "verb" in config else next(missing_keys(root, config), None)
    if missing is not None or not content.endswith(b"\n"):
        raise ValueError(
            "it has no verb" if "verb" not in config else f"it is cut short, its {missing or ORIGIN} is missing"
        )
    if has_origin and KEY in origin and WHOLE not in origin:
        raise ValueError(f"it is cut short, the end of its {ORIGIN} is missing")
    origin_values = {key: value for key, value in origin.items() if key not in (KEY, WHOLE)} if has_origin else {}
    config = {**config, "verb": verb, ORIGIN: origin_values}
    if is_newer(version := config[ORIGIN].get("rlft")):
        unknown = next(unknown_keys(root, {k: v for k, v in config.items() if k != ORIGIN}), None)
        if unknown is not None:
            problem = f"was written by rlft {version}, which has keys that this one ({rlft.__version__}) does not know"
            raise NewerError(f"{problem} ({unknown})")
    return config


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


@dataclass(frozen=True, slots=True)
class Key:
    """What config.yaml may hold at a key.

    Attributes:
        section: the dataclass of the section at this key; None where the key holds a value.
        is_required: whether a file without the key is cut short.
        may_be_null: whether null is a value; if not, the file was cut short after the name of a section.
    """

    section: Any
    is_required: bool
    may_be_null: bool


def keys_of(cls: Any) -> dict[str, Key]:
    """{key: what it may hold} of a section's dataclass, with engines' sections instead of the field that they fill."""
    read_from: Mapping[str, Mapping[str, str]] = getattr(cls, "READ_FROM", {})
    hints = typing.get_type_hints(cls)
    keys = {}
    for field in dataclasses.fields(cls):
        if field.name in read_from:
            for name, target in read_from[field.name].items():
                keys[name] = Key(locate(target, name), is_required=True, may_be_null=False)
        else:
            kinds = (hints[field.name], *typing.get_args(hints[field.name]))
            section = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
            is_required = field.default is field.default_factory is dataclasses.MISSING
            keys[field.name] = Key(section, is_required, may_be_null=section is None or type(None) in kinds)
    return keys


def missing_keys(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The required keys that this section, or one below it, lacks, except those that later versions added."""
    for name, key in keys_of(cls).items():
        path = f"{prefix}{name}"
        if name not in values:
            if key.is_required and path not in {"verb", *ADDED_KEYS}:
                yield path
        elif key.section is not None and isinstance(values[name], Mapping):
            yield from missing_keys(key.section, values[name], f"{path}.")
        elif values[name] is None and not key.may_be_null:
            yield path


def unknown_keys(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of these values that the section, or one below it, does not know."""
    known = keys_of(cls)
    for name, value in values.items():
        is_mapping = isinstance(value, Mapping)
        if name not in known:
            is_outside_engine = hasattr(cls, "READ_FROM") and is_mapping and "_target_" in value
            if not is_outside_engine:
                yield f"{prefix}{name}"
        elif known[name].section is not None and is_mapping:
            yield from unknown_keys(known[name].section, value, f"{prefix}{name}.")
