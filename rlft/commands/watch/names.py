"""What runs are called among others, by the settings in which they differ, and which are seeds of one experiment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.runs import run_folder
from rlft.runs.config_file import is_path_key
from rlft.runs.find import setting_name
from rlft.runs.run_folder import ORIGIN, flatten

MAX_KEYS_OF_NAME = 4

Config = Mapping[str, Any]


def settings_of(configs: Sequence[Config]) -> list[dict[str, str]]:
    """{key: its value as text} of each plain config, of the keys in which they differ and on which results depend."""
    flat = [flatten({key: value for key, value in config.items() if key != ORIGIN}) for config in configs]
    located = [
        {k: os.path.realpath(v) if is_path_key(k) and Path(str(v)).exists() else v for k, v in f.items()} for f in flat
    ]
    rows = [(key, v) for key, v in differing(located, "") if any(run_folder.decides_results(key, c) for c in configs)]
    return [{key: text_of(values[i]) for key, values in rows} for i in range(len(configs))]


def names_of(folders: Sequence[Path], configs: Sequence[Config]) -> list[tuple[str, str]]:
    """(name, name of its settings) of each run: the settings in which it differs from the others, and its seed.

    Runs with equal settings and seeds have their folders as well. If many settings differ, or none and no seed either,
    the name is the folder, and that of the settings is empty.
    """
    short = ["/".join(folder.parts[-2:]) for folder in folders]
    seeds, settings = [text_of(config.get("seed")) for config in configs], settings_of(configs)
    varied = [{"seed": seed} if len(set(seeds)) > 1 else {} for seed in seeds]
    names = [setting_name({**setting, **seed}) for setting, seed in zip(settings, varied, strict=True)]
    if len(settings[0]) > MAX_KEYS_OF_NAME or not any(names):
        return [(folder, "") for folder in short]
    own = [f"{name} ({folder})" if names.count(name) > 1 else name for name, folder in zip(names, short, strict=True)]
    return list(zip(own, map(setting_name, settings), strict=True))


def same_settings(configs: Sequence[Config]) -> list[list[int]]:
    """Groups of two or more runs, by index, with the same settings: seeds of one experiment."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, settings in enumerate(settings_of(configs)):
        groups.setdefault(tuple(settings.values()), []).append(index)
    return [indices for indices in groups.values() if len(indices) > 1]


def differing(configs: Sequence[Mapping[str, Any]], absent: str) -> list[tuple[str, list[Any]]]:
    """(key, its value in each config, or `absent`) of the keys whose values differ, the origin's keys last."""
    names = dict.fromkeys(name for config in configs for name in config if name != "resume")
    rows = [(name, [config.get(name, absent) for config in configs]) for name in names]
    rows = [(name, values) for name, values in rows if any(value != values[0] for value in values)]
    return sorted(rows, key=lambda row: row[0].startswith(f"{ORIGIN}."))


def text_of(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
