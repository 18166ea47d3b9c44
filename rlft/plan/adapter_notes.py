"""Notes about adapter folders that are taken, and yet may not be what they are taken for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.config.model import EMBEDDED, ModelConfig, resolve_path
from rlft.model.adapter_folder import check_adapter_folder, does_nothing, has_head, read_record
from rlft.model.identity import OF_SAMPLES, PARTS, name_of, template_in
from rlft.plan.adapters import Use, changed_base


def notes_of_adapters(used: Sequence[Use], settings: ModelConfig, base: Mapping[str, str]) -> list[str]:
    """A sentence for each thing that is odd about these folders. base: the fingerprints of the run's base."""
    return [f"{use.key}: {note}" for use in used if use.has_adapter for note in _notes(use, settings, base)]


def _notes(use: Use, settings: ModelConfig, base: Mapping[str, str]) -> Iterator[str]:
    record, fields = read_record(use.path, use.key), check_adapter_folder(use.path, use.key)
    changed = changed_base(use, base)
    if changed.parts and changed.parts.keys() <= set(OF_SAMPLES):
        yield f"the base of its run had other {changed.both}"
    elif template_in(Path(use.path).expanduser()) not in (None, base.get(name_of("base", "template"))):
        yield f"the {PARTS['template']} in its folder is not that of model.path, which the run uses"
    named = fields.get("base_model_name_or_path")
    if named and not record.get("base_fingerprint") and not _same_name(named, settings.path):
        yield f"its adapter_config.json names the base {named}, and model.path is {settings.path}"
    if not fields.get("use_dora") and not has_head(use.path) and does_nothing(use.path, use.key):
        yield "all of its lora_B are 0, so that it changes nothing of the base"


def _same_name(named: Any, path: str) -> bool:
    """Whether both may name one model: by the last part, as in Qwen/Qwen3-0.6B and models/Qwen3-0.6B."""
    first, second = Path(str(named).removeprefix(EMBEDDED)), Path(resolve_path(path))
    return first.name.lower() == second.name.lower() or (first.exists() and first.resolve() == second.resolve())
