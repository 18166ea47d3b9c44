"""Causal language models of text models for which transformers has a class only inside one with a vision tower.

Each is its text model with an output head, as all others are in transformers. They are made when one is needed: their
modules take a while to import.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, Qwen2ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

INSIDE = {"qwen2_5_vl_text": "Qwen2_5_VL", "qwen3_vl_text": "Qwen3VL"}
"""{type of the text model: how transformers' names of its classes begin}."""


def causal_class(text: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of causal language models with this config; None if there is none."""
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        return found
    return _with_head(text.model_type) if text.model_type in INSIDE else None


@cache
def _with_head(kind: str) -> type[PreTrainedModel]:
    name, folder = INSIDE[kind], kind.removesuffix("_text")
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    text_model, pretrained = getattr(module, f"{name}TextModel"), getattr(module, f"{name}PreTrainedModel")

    class CausalTextModel(pretrained, GenerationMixin):
        config_class = text_model.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  # as in transformers
        forward = Qwen2ForCausalLM.forward

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = text_model(config)
            self.vocab_size = config.vocab_size
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    CausalTextModel.__name__ = f"{name}ForCausalLM"
    return CausalTextModel
