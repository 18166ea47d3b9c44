"""PEFT's config for the adapters that a run makes, from the `lora` section of the run's config."""

from __future__ import annotations

from peft import LoraConfig
from transformers import PreTrainedModel

from rlft.model.adaptable import exclusion
from rlft.model.config import LoraSettings


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
