"""Tensors of a base that its class has no place for, as for predicting several tokens at once: an export keeps them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rlft.model.backbone import source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlft.config.model import ModelConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UNUSED = "model-unused.safetensors"
"""The file that is written for them."""


def file_of_base(config: ModelConfig, name: str) -> Path | None:
    """The path of the base's file of this name; None if it has none."""
    from transformers.utils.hub import cached_file

    base = source(config)
    file = cached_file(
        base["pretrained_model_name_or_path"],
        name,
        revision=base["revision"],
        local_files_only=base["local_files_only"],
        _raise_exceptions_for_missing_entries=False,
    )
    return None if file is None else Path(file)


def add_unused(model: PreTrainedModel, config: ModelConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Adds to the written weights those tensors of the base that its class says it leaves out, bit for bit.

    Args:
        model: the model that was written.
        config: the model settings of the base.
        folder: the folder that `save_pretrained` has written.
        say: prints a line if other tensors of the base are not in the folder.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    written = tensors_of(folder / INDEX, folder / WEIGHTS)
    base = tensors_of(file_of_base(config, INDEX), file_of_base(config, WEIGHTS))
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    missing = sorted(base.keys() - written.keys())
    unused = [name for name in missing if any(re.search(pattern, name) for pattern in patterns)]
    known = model.state_dict().keys()  # a tied head is written once, under another name
    others = [name for name in missing if name not in unused and name not in known]
    if len(others) > len(written.keys() - base.keys()):  # else they may just have new names
        say(f"left out, as the class of the export does not read it: {others[0]} (of {len(others)} such)")
    if not unused:
        return
    tensors = {}
    for name in unused:
        with safe_open(str(file_of_base(config, base[name])), framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    save_file(tensors, folder / UNUSED, metadata={"format": "pt"})
    places = {**written, **dict.fromkeys(unused, UNUSED)}
    size = sum((folder / name).stat().st_size for name in set(places.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def tensors_of(index: Path | None, weights: Path | None) -> dict[str, str]:
    """{tensor: its file's name} of a model with an index or with one file; empty if it has neither."""
    from safetensors import safe_open

    if index is not None and index.is_file():
        return json.loads(index.read_text())["weight_map"]
    if weights is None or not weights.is_file():
        return {}
    with safe_open(str(weights), framework="pt") as file:
        return dict.fromkeys(file.keys(), weights.name)
