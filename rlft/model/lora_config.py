"""PEFT's config for the adapters that a run makes, from the `lora` section of the run's config."""

from __future__ import annotations

from peft import LoraConfig

from rlft.model.config import LoraSettings


def lora_config(settings: LoraSettings) -> LoraConfig:
    """A new config for each call, since PEFT writes into the configs that it gets."""
    targets = settings.target_modules if isinstance(settings.target_modules, str) else list(settings.target_modules)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT annotates int, and scales by any number
        lora_dropout=settings.dropout,
        target_modules=targets,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        task_type="CAUSAL_LM",
    )
