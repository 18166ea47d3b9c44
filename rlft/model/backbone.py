"""The frozen base model and its tokenizer: loaded once, never written to."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlft.model.activations import set_checkpointing
from rlft.model.config import DTYPES, ModelConfig
from rlft.model.kernels import selection
from rlft.model.kernels.selection import Kernels
from rlft.model.paths import check_local, resolve_path
from rlft.system.hub import hub_answers
from rlft.types import UserError


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise UserError(
            "model.device", "is not a device", got=device, remedy="use auto, cpu, cuda or cuda:<n>"
        ) from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "model.device",
            "there is no CUDA device here",
            got=device,
            remedy="use model.device=cpu, or auto to take what is there",
        )
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise UserError(
            "model.device", f"this machine has {torch.cuda.device_count()}", got=device, remedy="use a lower number"
        )
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on the CPU, where bfloat16 is slow on most machines."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise UserError("model.dtype", "is not a known dtype", got=dtype, remedy=f"use auto, {', '.join(DTYPES)}")
    return getattr(torch, dtype)


def source(config: ModelConfig) -> dict[str, Any]:
    """transformers' keyword arguments for loading config, tokenizer and weights.

    If the hub does not answer, only its cache on this machine is used, instead of half a minute of retries.
    """
    path = resolve_path(config.path)
    return {
        "pretrained_model_name_or_path": path,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": Path(path).is_dir() or not hub_answers(),
    }


def read_config(config: ModelConfig) -> Any:
    """The model's config.json as a transformers config, without weights. UserError if it cannot be read."""
    check_local(config.path)
    try:
        found = AutoConfig.from_pretrained(**source(config))
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            "model.path",
            f"the model cannot be read ({first_line[:200]})",
            got=config.path,
            remedy="connect to the network, or use local copies: model.path=<folder>, and for the data "
            "data.path=<folder or .jsonl>",
        ) from None
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(found.get_text_config(), name, None), int):
            problem = f"is no causal language model: its config.json, of type {found.model_type}, has no {name}"
            raise UserError("model.path", problem, got=config.path, remedy="use a decoder-only language model")
    return found


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(**source(config))
    except (OSError, ValueError) as error:
        raise UserError(
            "model.path",
            f"its tokenizer cannot be read ({str(error).strip().splitlines()[0][:200]})",
            got=config.path,
            remedy="the folder needs tokenizer files beside config.json",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """A loaded model.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
        device: where the model is.
        path: the config's model.path, as the user wrote it.
        kernels: what the model is computed with.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    path: str
    kernels: Kernels = field(default_factory=Kernels)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text as `Completion.text` shows it, without special tokens."""
        return self.tokenizer.batch_decode([list(token_ids)], skip_special_tokens=True)[0]

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text with its special tokens."""
        return self.tokenizer.batch_decode([list(token_ids)], skip_special_tokens=False)[0]


Adopt = Callable[[PreTrainedModel, torch.device], None]
"""Puts a model that was read into main memory on its device."""


@functools.lru_cache(maxsize=1)  # a sweep over models must not hold them all
def load_backbone(config: ModelConfig, adopt: Adopt | None = None) -> Backbone:
    """The base, which must not be written to: jobs of a sweep with the same base share it."""
    return read_backbone(config, adopt)


def read_backbone(config: ModelConfig, adopt: Adopt | None = None) -> Backbone:
    """Loads a base that nobody else uses.

    Args:
        config: the model's settings.
        adopt: called instead of `model.to(device)`, for instance to put the weights on an engine's storage.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    extra: dict[str, Any] = {}
    if config.quantization is not None:
        from transformers import BitsAndBytesConfig

        extra = {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_compute_dtype=dtype,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
            ),
            "device_map": {"": device},
        }
    model = AutoModelForCausalLM.from_pretrained(
        **source(config),
        dtype=dtype,
        attn_implementation=None if config.attn_implementation == "auto" else config.attn_implementation,
        **extra,
    )
    model.requires_grad_(False).eval()
    if config.quantization is None and adopt is not None:
        adopt(model, device)
    elif config.quantization is None:
        model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
    _silence_dropout(model)
    kernels = selection.install(model, config.kernels, own_attention=config.attn_implementation == "auto")
    if config.gradient_checkpointing is True:
        set_checkpointing(model, True)
    return Backbone(
        model=model,
        tokenizer=load_tokenizer(config),
        device=device,
        path=config.path,
        kernels=kernels,
    )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in their order; empty if they are not a single list of as many modules as the config says, or
    share weights."""
    number = cast(Any, model).config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    inside = {id(module) for layers in lists[:1] for module in layers.modules()}  # such as lists of experts
    if not lists or any(id(other) not in inside for other in lists):
        return []
    layers = list(lists[0])
    weights = [id(weight) for layer in layers for weight in layer_weights(layer)]
    return layers if len(set(weights)) == len(weights) else []


def layer_weights(layer: nn.Module) -> list[nn.Parameter]:
    """A decoder layer's parameters with two or more dimensions and the dtype of the first: no norms, no biases."""
    weights = [parameter for parameter in layer.parameters() if parameter.dim() > 1]
    return [weight for weight in weights if weight.dtype == weights[0].dtype]


def _silence_dropout(model: PreTrainedModel) -> None:
    """Turns off the base's own dropout, with which the policy's log-probs would differ from the sampled ones."""
    if hasattr(model.config, "attention_dropout"):
        model.config.attention_dropout = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):  # in some models it is a module
            module.attention_dropout = 0.0  # type: ignore[assignment]


def fingerprint(config: ModelConfig) -> str:
    """16 hex digits that identify the base: its config and, for a folder, the content of its weight files.

    Of each file the size and 64 evenly spread blocks of 64 KiB are read, instead of gigabytes: further training would
    change all of them.
    """
    fields = {
        k: v for k, v in read_config(config).to_dict().items() if k not in ("_name_or_path", "transformers_version")
    }
    described = json.dumps(fields, sort_keys=True, default=str)
    folder = Path(resolve_path(config.path))
    if folder.is_dir():
        described += "".join(f"{f.name}:{_content(f)}" for f in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _content(file: Path) -> str:
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as stream:
        for position in range(64):
            stream.seek(max(0, size - 2**16) * position // 63)
            digest.update(stream.read(2**16))
    return f"{size}:{digest.hexdigest()}"
