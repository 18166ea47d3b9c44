"""What a path of a config names: a model (folder, hub id, or one that ships with rlft), or an adapter."""

from __future__ import annotations

from pathlib import Path

import rlft
from rlft.types import UserError

EMBEDDED = "embedded:"


def resolve_path(path: str) -> str:
    """A folder or hub id that transformers understands: `embedded:<name>` is a model that ships with rlft."""
    if not path.startswith(EMBEDDED):
        return str(Path(path).expanduser()) if looks_local(path) else path
    folder = Path(rlft.__file__).parent / "assets" / path.removeprefix(EMBEDDED)
    if not (folder / "config.json").is_file():
        known = ", ".join(EMBEDDED + f.parent.name for f in sorted(folder.parent.glob("*/config.json")))
        raise UserError(
            "model.path", "there is no such embedded model", got=path, remedy=f"use {known}, a folder or a hub id"
        )
    return str(folder)


def looks_local(path: str) -> bool:
    """Whether the path is an existing folder, or looks like one, and not a hub id."""
    return path.startswith(("/", ".", "~")) or Path(path).exists()


def check_local(path: str) -> None:
    """Checks that a local path is a model's folder; a hub id is not looked up.

    Raises:
        UserError: model.path is empty, names no embedded model, or a folder without config.json.
    """
    if not path:
        remedy = "give a model folder, a hub id or embedded:tiny-arithmetic"
        raise UserError("model.path", "is empty", got="nothing", remedy=remedy)
    folder = Path(resolve_path(path))
    if looks_local(path) and not (folder / "config.json").is_file():
        problem = "there is no config.json in that folder" if folder.exists() else "there is no such folder"
        raise UserError("model.path", problem, got=path, remedy="point it at a Hugging Face model folder")


def is_adapter(path: str | None) -> bool:
    """Whether a learned reward is an adapter on the base (None: a new one) and not a network of its own."""
    return path is None or (Path(path).expanduser() / "adapter_config.json").is_file()
