"""PEFT's config for the adapters that a run makes, from the `lora` section of the run's config."""

from __future__ import annotations

from peft import LoraConfig, PeftConfig
from torch import nn

from rlft.model.config import ALL_LINEAR, LoraSettings


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


READ_BY_MAMBA = ("out_proj", "dt_proj")
"""Linear layers of a Mamba mixer that are not called: in training its fused kernel multiplies with the weight of the
first (for which PEFT refuses it in some model types), and Mamba-1 with that of the second. So no adapter has an effect
there."""


def leave_out(lora: PeftConfig, model: nn.Module) -> None:
    """Excludes from all linear layers of this model those of Mamba's mixers that take no adapter."""
    if not isinstance(lora, LoraConfig) or lora.target_modules != ALL_LINEAR:
        return
    mixers = [name for name, module in model.named_modules() if _is_mamba(module)]
    if mixers:
        lora.exclude_modules = [f"{mixer}.{layer}" for mixer in mixers for layer in READ_BY_MAMBA]


def _is_mamba(module: nn.Module) -> bool:
    """Whether this is a Mamba or Mamba-2 mixer; other recurrent layers have decays, too, but no skip connection `D`."""
    return all(hasattr(module, name) for name in ("A_log", "D", "out_proj"))
