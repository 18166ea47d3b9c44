"""Runs named where an adapter or a model is wanted: `lora.path=runs/sft/<time>` is its newest checkpoint's policy.

So the stages of a pipeline name each other by their run folders. What the name stood for when a run began is written
into its config: a resume goes on with the same adapter, even if the run it came from has gone on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.roots import Verb
from rlft.run.naming import LATEST, one_run
from rlft.run.paths import KEYWORDS
from rlft.runfolder import CONFIG, checkpoints
from rlft.trainer import checkpoint
from rlft.types import UserError
from rlft.work import say

POLICY_KEYS = ("snapshot.reference", "adapter")


def resolved(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every run or checkpoint folder in such a key replaced by the folder of the role it stands for.

    Raises:
        UserError: a run without a checkpoint, or without that role.
    """
    changed = copy.deepcopy(dict(plain))
    for key, roles in wanted(changed):
        *sections, name = key.split(".")
        section = changed
        for part in sections:
            section = section[part]
        section[name] = folder_of(section[name], roles, key)
    return changed


def wanted(plain: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """(key, roles that would serve, the first one first) of every key that may name a run and does name something."""
    found: list[tuple[str, Sequence[str]]] = [(key, ("policy",)) for key in POLICY_KEYS]
    found.append(("lora.path", ("reward", "policy") if plain.get("verb") == Verb.rm else ("policy",)))
    found += [("critic.init", ("critic", "reward")), ("model.path", ("model",))]
    found += [(f"reward.{name}.path", ("reward", f"reward_{name}")) for name in plain.get("reward", {})]
    for key, roles in found:
        value: Any = plain
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and value:
            yield key, roles


def _may_name_a_run(folder: Path) -> bool:
    """`latest`, or a folder that is neither an adapter nor a model: runs may lie below it."""
    if str(folder) in KEYWORDS:
        return False
    if not folder.is_dir():
        return folder.parts[:1] == (LATEST,)
    return not any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def folder_of(path: str, roles: Sequence[str], key: str) -> str:
    """The folder of the first of these roles in a run's newest whole checkpoint, or in a checkpoint; else the path."""
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
    there = ", ".join(sorted(f.name for f in folder.iterdir() if f.is_dir())) or "none"
    problem = f"that checkpoint has no {' or '.join(roles)}, only {there}"
    raise UserError(key, problem, got=folder, remedy="name the run of another kind, or the folder itself")
