"""Folders of tiny models with random weights, with the embedded model's tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma3Config,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    Qwen3_5Config,
)

import rlft
from rlft.config.model import ModelConfig
from rlft.model.roles import Roles

TOKENIZER = Path(rlft.__file__).parent / "assets" / "tiny-arithmetic"


def text_sizes(**more: Any) -> dict[str, Any]:
    """Fields of a text model with that tokenizer; vLLM on a CPU has kernels for heads of 32 numbers."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }  # fmt: skip
    return {**sizes, **ends, **more}


def saved(config: Any, folder: Path, kind: Any = AutoModelForCausalLM) -> Path:
    """The folder of a model of this config, with the tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


def classifier_folder(folder: Path) -> Path:
    """A reward model of its own: a sequence classifier with one label."""
    return saved(AutoConfig.from_pretrained(TOKENIZER, num_labels=1), folder, AutoModelForSequenceClassification)


def settings(folder: Path) -> ModelConfig:
    """The model section of this folder, in float32 on the CPU."""
    fields: dict[str, Any] = {
        "revision": None, "dtype": "float32", "device": "cpu", "attn_implementation": "auto",
        "gradient_checkpointing": False, "quantization": None, "trust_remote_code": False,
    }  # fmt: skip
    return ModelConfig(path=str(folder), **fields)


def with_noise(roles: Roles) -> Roles:
    """The roles, whose adapters are random numbers."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in roles.named_parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)  # passes may hold on to its place
    return roles


def llama(folder: Path) -> Path:
    """A Llama whose output head has weights of its own."""
    return saved(LlamaConfig(**text_sizes()), folder)


def with_vision(folder: Path, kind: str) -> Path:
    """A model of this type whose text model is inside, beside a tower for images, saved from its own class."""
    text = text_sizes()
    tower: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    tied = {"tie_word_embeddings": False}
    config: Any
    if kind == "qwen3_5":
        linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
        linear |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        kinds = {"layer_types": ["linear_attention", "full_attention"]}
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"num_position_embeddings": 16, "patch_size": 4}
        config = Qwen3_5Config(text_config={**text, **linear, **kinds, **tied}, vision_config=vision, **tied)
    elif kind == "gemma3":
        text |= {"sliding_window": 64}
        config = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_index=5)
    else:
        made, of_text, of_tower = {
            "mistral3": (Mistral3Config, "mistral", {"model_type": "pixtral", "head_dim": 16}),
            "llava": (LlavaConfig, "llama", {"model_type": "clip_vision_model"}),
        }[kind]
        text |= {**tied, "model_type": of_text}
        config = made(text_config=text, vision_config=tower | of_tower, image_token_index=5, **tied)
    return saved(config, folder, AutoModelForImageTextToText)


def of_half_its_layers(folder: Path) -> Path:
    """The embedded model with two of its four layers, which takes half of the time."""
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    AutoModelForCausalLM.from_pretrained(TOKENIZER, **layers).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder
