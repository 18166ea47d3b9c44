"""Flattens a config to one full key per value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"trainer.lr": 1e-5, ..}.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
