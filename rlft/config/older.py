"""Reads the config of a run that was recorded before a key existed: the key has the value of what rlft did then.

That value stands at the key, `Annotated[int, Key(before=5)]`, in a typed section or in the class that a section's
`_target_` names. Nothing else has to know that the key is new. A class whose keys then meant something else has the
static method `of_older(keys)`, which returns them as they are written now.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from rlft.config.keys import ABSENT, fields_of, keys_of
from rlft.config.schema import ANYWHERE, engine_classes

OPEN = ("data", "reward", "logger", "algorithm", "demonstrations", "preferences", "loss", "environment")
"""Sections whose classes are named by `_target_`, in the section itself or in sections of it."""
NOT_TRACKERS = {"console": "rlft.logger.console.Console", "jsonl": "rlft.logger.jsonl.Jsonl"}
"""{earlier choice in the group logger: its class} of what is no tracker."""


def completed(recorded: Mapping[str, Any], root: type) -> dict[str, Any]:
    """The recorded config of a command with this root, with the values of the keys that it lacks.

    A key without such a value stays absent, and is refused when the config is typed. A section is added if all of its
    keys have one.
    """
    config = _completed(_with_console(recorded, root), root)
    config |= {name: _with_components(config[name]) for name in OPEN if name in config}
    if isinstance(generation := config.get("generation"), Mapping):
        generation = _with_adapted_layers(generation, recorded["generation"])
        own = {name: (generation.get(name, {}), of) for name, of in engine_classes({}).items()}
        engines = {name: _section(getattr(of, "of_older", dict)(keys), of) for name, (keys, of) in own.items()}
        config["generation"] = {**generation, **{name: keys for name, keys in engines.items() if keys is not ABSENT}}
    return config


def _with_console(recorded: Mapping[str, Any], root: type) -> Mapping[str, Any]:
    """The recorded config with trackers alone as loggers: the terminal was one, too, and so were the run's files."""
    if "console" in recorded or "console" not in keys_of(root):
        return recorded
    loggers = recorded.get("logger") or {}
    shown = [keys for keys in loggers.values() if keys["_target_"] == NOT_TRACKERS["console"]]
    console = {name: value for keys in shown for name, value in keys.items() if name != "_target_"} or None
    trackers = {name: keys for name, keys in loggers.items() if keys["_target_"] not in NOT_TRACKERS.values()}
    return {**recorded, "logger": trackers, "console": console}


def _with_adapted_layers(generation: Mapping[str, Any], recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section as it is written now: before there were drafts, `merged_bfloat16` left the LM head and layers without
    an adapter as they are, and nothing corrected its roundings."""
    keys = generation.get(ANYWHERE, {})
    if "drafts" in recorded or keys.get("weights") != "merged_bfloat16":
        return generation
    return {**generation, ANYWHERE: {**keys, "weights": "adapted_bfloat16"}}


def _completed(recorded: Mapping[str, Any], cls: type) -> dict[str, Any]:
    values = dict(recorded)
    for field in fields_of(cls):
        value = values.get(field.name, field.key.before)
        if field.section is not None and isinstance(inner := values.get(field.name, {}), Mapping):
            section_now = _section(inner, field.section)
            value = value if section_now is ABSENT else section_now
        if value is not ABSENT:
            values[field.name] = value
    return values


def _section(recorded: Mapping[str, Any], cls: type) -> Any:
    """The completed section; ABSENT if the config has none of its keys, and they cannot all be completed."""
    values = _completed(recorded, cls)
    return values if recorded or len(values) == len(dataclasses.fields(cls)) > 0 else ABSENT


def _with_components(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_components(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    inner = {name: _with_components(below) for name, below in value.items()}
    cls = _own_class(value.get("_target_"))
    return inner if cls is None else _completed(getattr(cls, "of_older", dict)(inner), cls)


def _own_class(target: Any) -> type | None:
    """The dataclass of rlft that the target names; what is outside the tree is not imported to read a config."""
    if not isinstance(target, str) or not target.startswith("rlft."):
        return None
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except ImportError:  # a class that is gone is refused when the run is used
        return None
    return cls if isinstance(cls, type) and dataclasses.is_dataclass(cls) else None
