"""The model's own weights as the policy, all of them trained: supervised fine-tuning without an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from rlft.batch import score_sequences
from rlft.model.backbone import Backbone, set_training_mode
from rlft.model.forward import Forward, choose
from rlft.model.kernels.prefix_cache import PrefixCache, open_prefix_cache
from rlft.types import Adapter

MODEL = "model"
"""The role, and its folder in a checkpoint: a complete Hugging Face model."""


class WholeModel:
    """The part of `Roles` that supervised fine-tuning needs, for a backbone whose weights change.

    Nobody else may use that backbone. An engine on it samples from the current weights: publishing copies nothing.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.model = backbone, backbone.model
        self.model.requires_grad_(True)
        self.forward: Forward = choose(self.model, backbone.kernels)

    def named_parameters(self, role: str = MODEL) -> list[tuple[str, Parameter]]:
        """Every weight in a fixed order, tied ones only once."""
        return list(self.model.named_parameters())

    @contextmanager
    def training(self, *, dropout: bool = True) -> Iterator[None]:
        """Inside, gradient checkpointing is on if it is configured; the model's own dropout is always off."""
        set_training_mode(self.model, dropout=dropout)
        try:
            yield
        finally:
            self.model.eval()

    def check_gradients(self) -> None:
        missing = [name for name, p in self.named_parameters() if p.grad is None]
        assert not missing, f"no gradient reached {len(missing)} weights, e.g. {missing[0]}"

    def write(self, folder: Path) -> None:
        """Writes a model folder that transformers and vLLM can load: weights, config, tokenizer."""
        self.model.save_pretrained(folder)
        self.backbone.tokenizer.save_pretrained(folder)

    def restore(self, folder: Path) -> None:
        """Loads the weights that `write` has saved."""
        weights = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
        report = self.model.load_state_dict(weights, strict=False)
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        mismatched = [*(name for name in report.missing_keys if name not in tied), *report.unexpected_keys]
        assert not mismatched, f"these weights are another model's: {mismatched[:3]}"

    # -- what an engine on the trainer's own model needs ------------------------------------------------------------
    def publish(self, version: int) -> Adapter:
        return Adapter(version=version, weights={}, config={})

    def load_sampler(self, adapter: Adapter, *, weights: str = "apart") -> None:
        """Does nothing: the engine's model is the trainer's."""

    def sampler_tensors(self) -> tuple[dict[str, Tensor], list[str]]:
        return {}, []

    def prefix_cache(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> PrefixCache | None:
        """A cache for decoding these prompts with the current weights; None if the model cannot use one."""
        return open_prefix_cache(self.forward, prompts, max_tokens)

    @contextmanager
    def using(self, role: str | None) -> Iterator[Any]:
        yield self.model

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first: the freshness check."""
        with torch.no_grad():
            return score_sequences(self.model, sequences, self.backbone.device)
