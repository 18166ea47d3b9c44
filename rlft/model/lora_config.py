"""PEFT's config of an adapter: of one that a run makes, and of a folder that a frozen role is read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from peft import LoraConfig
from transformers import PreTrainedModel

from rlft.config.model import LoraSettings
from rlft.model.adaptable import exclusion
from rlft.model.adapter_fields import OF_THE_FUNCTION, is_neutral
from rlft.model.adapter_folder import adapted_modules
from rlft.model.text_model import ModuleNames


def lora_config(settings: LoraSettings, model: PreTrainedModel) -> LoraConfig:
    """For adapters on this model, loaded or empty: a new config for each call, since PEFT writes into its configs."""
    targets = settings.target_modules if isinstance(settings.target_modules, str) else list(settings.target_modules)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT annotates int, and scales by any number
        lora_dropout=settings.dropout,
        target_modules=targets,
        exclude_modules=exclusion(model),
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        task_type="CAUSAL_LM",
    )


def folder_config(fields: Mapping[str, Any]) -> LoraConfig:
    """Of the adapter with these fields of adapter_config.json, after `rlft.model.adapter_fields.check_fields`.

    PEFT gets only what says how the tensors compute. It initialises an adapter before it reads the saved tensors, and
    so a folder's own initialisation could change the base.

    Raises:
        ValueError: the fields contradict each other.
    """
    used = {name: fields[name] for name in OF_THE_FUNCTION if not is_neutral(fields.get(name))}
    return LoraConfig(**used, task_type="CAUSAL_LM", inference_mode=True)


def named_inside(config: LoraConfig, names: ModuleNames, tensors: Iterable[str]) -> None:
    """Gives a folder's config the names of the trained model, where the folder's may be those of its own class.

    Args:
        config: of the adapter, which is changed.
        names: of the modules in both.
        tensors: names of the adapter's tensors in either; they say which modules it is on.
    """
    config.target_modules = adapted_modules(map(names.inside, tensors))
    config.exclude_modules = None
    config.rank_pattern = names.all_inside(config.rank_pattern or {})
    config.alpha_pattern = names.all_inside(config.alpha_pattern or {})
