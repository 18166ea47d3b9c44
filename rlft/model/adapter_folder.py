"""Adapter folders on disk: PEFT's two files, a scalar head where there is one, and a record of what they belong to.

    adapter_config.json, adapter_model.safetensors   PEFT's own
    head.safetensors                                 weight [1, H], bias [1]: of a critic or a reward
    rlft.json                                        {"role", "base_fingerprint", ..}: written by rlft, absent elsewhere

Nothing pickled is ever loaded. Only `load_adapter` and `load_head` read weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rlft.model.adapter_fields import check_fields
from rlft.types import UserError

if TYPE_CHECKING:
    from torch import Tensor  # not at run time: a bad folder is refused before torch is imported

CONFIG, WEIGHTS, HEAD, RECORD = "adapter_config.json", "adapter_model.safetensors", "head.safetensors", "rlft.json"

POLICY, OLD, REFERENCE, TEACHER, SAMPLER = "policy", "old", "reference", "teacher", "sampler"
"""Names of roles, as rlft.json records them; critics and rewards have their own."""

WORDS = {WEIGHTS: "the adapter", HEAD: "the scalar head"}

Shapes = dict[str, tuple[int, ...]]
"""{tensor's name: its shape}."""


def load_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    from safetensors import torch

    return torch.load_file(file)


def load_adapter(path: str | Path, key: str) -> dict[str, Tensor]:
    """The tensors of the adapter, under PEFT's names."""
    with _readable(WEIGHTS, path, key) as file:
        return load_file(file)


def load_head(path: str | Path, key: str) -> dict[str, Tensor]:
    """The tensors of the scalar head."""
    with _readable(HEAD, path, key) as file:
        return load_file(file)


def adapter_shapes(path: str | Path, key: str) -> Shapes:
    """The shapes of the adapter's tensors, from the file's header."""
    return _shapes(WEIGHTS, path, key)


def adapted_modules(tensors: Iterable[str]) -> set[str]:
    """The base's modules that an adapter with tensors of these names is on.

    >>> adapted_modules(["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"])
    {'model.layers.0.mlp.up_proj'}
    """
    return {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}


def num_parameters(path: str | Path, key: str) -> int:
    """Of the adapter, from the file's header."""
    return sum(math.prod(shape) for shape in adapter_shapes(path, key).values())


def head_shapes(path: str | Path, key: str) -> Shapes:
    """The shapes of the scalar head's tensors, from the file's header."""
    return _shapes(HEAD, path, key)


def check_adapter_folder(path: str | Path, key: str) -> dict[str, Any]:
    """The fields of adapter_config.json. Refuses a folder that lacks one of PEFT's files, or is not plain LoRA."""
    for name in (CONFIG, WEIGHTS):
        if not (Path(path).expanduser() / name).is_file():
            raise UserError(
                key, f"there is no {name} in that folder", got=path, remedy="point it at a PEFT adapter folder"
            )
    fields = _read_json(CONFIG, path, key)
    check_fields(fields, path, key)
    return fields


def has_head(path: str | Path) -> bool:
    """Whether the folder has a scalar head, so that it is a critic's or a reward's."""
    return (Path(path).expanduser() / HEAD).is_file()


def check_head(path: str | Path, key: str) -> None:
    """Refuses a folder without head.safetensors, which cannot be a critic's or a reward's."""
    if not has_head(path):
        problem = f"there is no {HEAD} in that folder"
        raise UserError(key, problem, got=path, remedy="point it at the folder of a reward or a critic")


def content_fingerprint(path: str | Path) -> str:
    """sha256 (hex) of the files that define an adapter: its config, its weights and its head."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS, HEAD):
        file = Path(path).expanduser() / name
        if file.is_file():
            digest.update(f"{name}:{file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def read_record(path: str | Path, key: str) -> dict[str, Any]:
    """The fields of rlft.json; {} if rlft did not make the folder."""
    return _read_json(RECORD, path, key) if (Path(path).expanduser() / RECORD).is_file() else {}


def _shapes(name: str, path: str | Path, key: str) -> Shapes:
    with _readable(name, path, key) as file, safe_open(file, framework="pt") as tensors:
        return {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118  # not iterable


def _read_json(name: str, path: str | Path, key: str) -> dict[str, Any]:
    with _readable(name, path, key) as file:
        fields = json.loads(file.read_text())
        if not isinstance(fields, dict):
            raise ValueError("not a mapping")
        return fields


@contextmanager
def _readable(name: str, path: str | Path, key: str) -> Iterator[Path]:
    """The file of that name in the folder; an error inside the block, while it is read, becomes a UserError."""
    try:
        yield Path(path).expanduser() / name
    except (OSError, SafetensorError, ValueError) as error:
        problem = f"{WORDS.get(name, name)} cannot be read ({str(error).splitlines()[0]})"
        raise UserError(key, problem, got=path, remedy="point it at a folder that is whole") from None
