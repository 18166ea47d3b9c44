"""Runs as values of keys for adapters and models: `lora.path=runs/sft/<time>` means its newest checkpoint's policy.

So the stages of a pipeline name each other by their run folders. A run's config records the folder that the name meant
when the run started: a resume uses the same adapter, even if the other run has continued.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.config import command as verbs
from rlft.config.keys import keys_of
from rlft.runs import checkpoint
from rlft.runs.find import LATEST, one_run
from rlft.runs.paths import KEYWORDS
from rlft.runs.run_folder import CONFIG, checkpoints
from rlft.system.terminal import say
from rlft.types import UserError


def resolved(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every run or checkpoint that a key names replaced by the folder of the role in it.

    Raises:
        UserError: a named run has no checkpoint, or its checkpoint has no such role.
    """
    changed = copy.deepcopy(dict(plain))
    for key, roles in adapter_references(changed):
        *sections, name = key.split(".")
        section = changed
        for part in sections:
            section = section[part]
        section[name] = folder_of(section[name], roles, key)
    return changed


def adapter_references(plain: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """(key, acceptable roles in order of preference) for every key that may name a run and is not empty."""
    root = verbs.named(plain.get("verb", "train")).root
    adapters: list[tuple[str, Sequence[str]]] = [(key, of.roles) for key, of in keys_of(root).items() if of.roles]
    adapters += [(f"reward.{name}.path", ("reward", f"reward_{name}")) for name in plain.get("reward", {})]
    for key, roles in adapters:
        value: Any = plain
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and value:
            yield key, roles


def _may_name_a_run(folder: Path) -> bool:
    """Whether this is `latest`, or a folder that is neither an adapter nor a model, so that runs may be below it."""
    if str(folder) in KEYWORDS:
        return False
    if not folder.is_dir():
        return folder.parts[:1] == (LATEST,)
    return not any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def folder_of(path: str, roles: Sequence[str], key: str) -> str:
    """The folder of the first of these roles in a checkpoint or in a run's newest undamaged one; else the path."""
    folder = Path(path).expanduser()
    if _may_name_a_run(folder):
        folder = one_run(str(folder), key, say)
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        newest = checkpoint.newest_whole(checkpoints(folder), say)
        if newest is None:
            raise UserError(
                key, "that run has no checkpoint", got=path, remedy="let it reach one first, or name an adapter folder"
            )
        folder = newest
    elif not (folder / checkpoint.STATE).is_file() or not (folder / checkpoint.MANIFEST).is_file():
        return path
    for role in roles:
        if (folder / role).is_dir():
            return str(folder / role)
    folders = ", ".join(sorted(f.name for f in folder.iterdir() if f.is_dir())) or "none"
    problem = f"that checkpoint has no {' or '.join(roles)}, only {folders}"
    raise UserError(key, problem, got=folder, remedy="name the run of another kind, or the folder itself")
