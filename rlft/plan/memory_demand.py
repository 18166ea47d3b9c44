"""Reads from a run's config the sizes from which memory_parts.py counts memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from torch import nn
from transformers import PreTrainedModel

from rlft.config.model import KernelChoice, LoraSettings, ModelConfig, is_adapter
from rlft.config.schema import AUTO, ON_A_GPU, SamplingRoot, section_of
from rlft.generation.engine import Engine
from rlft.generation.memory import Decoding, ModelSizes
from rlft.model.activations import NO_ADAPTER, AdapterLayers
from rlft.model.adaptable import adapted_words
from rlft.model.backbone import (
    decoder_layers,
    layer_weights,
    read_config,
    resolve_device,
    resolve_dtype,
    resolve_path,
)
from rlft.model.forward import known_refusal
from rlft.model.kernels.selection import decide
from rlft.plan.adapters import empty_model, fresh_shapes
from rlft.plan.memory_parts import Demand, model_sizes
from rlft.plan.rules import why_not_on_a_gpu
from rlft.plan.run_plan import Plan

CUDA_CONTEXT = 2**29
"""An allowance for a CUDA context and the kernels of its libraries; not measured."""


def sizes_of(settings: ModelConfig, lora: LoraSettings | None) -> ModelSizes:
    """The sizes of this config's base, and of one adapter on it unless `lora` is None."""
    from rlft.model.lora_config import lora_config

    config = read_config(settings)
    empty = empty_model(settings, config)
    parameters, device = sum(p.numel() for p in empty.parameters()), resolve_device(settings.device)
    kernels = decide(settings.kernels, empty.config.model_type)
    packed = (
        kernels.choice is KernelChoice.auto and settings.attn_implementation == "auto" and known_refusal(empty) is None
    )
    linear = linear_weights(empty)
    layers = tuple(sum(p.numel() for p in layer_weights(layer)) for layer in decoder_layers(empty))
    shapes: Mapping[str, tuple[int, ...]] = {}
    adapter, layer_kinds = NO_ADAPTER, ("", "")
    if lora is not None:
        shapes = fresh_shapes(empty, lora_config(lora, empty))
        layer_kinds = adapted_words(empty)
        adapter = AdapterLayers.of(
            shapes, dropout=lora.dropout > 0, dora=lora.use_dora, quantized=settings.quantization is not None
        )
    return model_sizes(
        config,
        parameters,
        shapes,
        adapter=adapter,
        itemsize=resolve_dtype(settings.dtype, device).itemsize,
        quantized=linear if settings.quantization is not None else 0,
        packed=packed,
        kernels=kernels,
        linear=linear,
        layers=layers,
        layer_kinds=layer_kinds,
    )


def linear_weights(model: PreTrainedModel) -> int:
    """Number of weights in linear layers without the output head, which transformers does not quantise."""
    head = model.get_output_embeddings()
    linear = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return sum(module.weight.numel() for module in linear)


def on_a_gpu(demand: Demand, plan: Plan, device_memory: int, *, absent: bool) -> Demand:
    """The demand on a GPU with `device_memory` bytes; if it is in another machine, `auto` may choose another engine."""
    demand = replace(demand, device="cuda", device_memory=device_memory)
    if demand.engine is None or not absent or plan.config.generation.engine != AUTO:
        return demand
    generation, lora = plan.config.generation, plan.config.lora
    if why_not_on_a_gpu(generation, lora, whole=lora is None, is_absent=True) is not None:
        return demand
    engine = generation.named(ON_A_GPU)
    return replace(demand, engine=engine.standalone() if demand.engines_apart else engine, section=ON_A_GPU)


class SamplingDemand(TypedDict, total=False):
    """The fields of a Demand that describe the engine's work."""

    engine: Engine
    section: str
    decodings: tuple[Decoding, ...]
    max_tokens: int
    max_sequence_tokens: int
    engines_apart: int


def sampling_of(run: SamplingRoot, engine: str | None, decodings: Sequence[Decoding]) -> SamplingDemand:
    """The fields of SamplingDemand for a run; empty if nothing is sampled."""
    if engine is None:
        return {}
    return {
        "engine": run.generation.named(engine),
        "section": section_of(engine),
        "decodings": tuple(decodings),
        "max_tokens": run.generation.max_tokens,
        "max_sequence_tokens": run.prompts.max_tokens + run.generation.max_tokens,
    }


def classifier_bytes(path: str | None) -> int:
    """Bytes of a learned reward's own network; 0 for an adapter on the base."""
    if path is None or is_adapter(path):
        return 0
    return sum(file.stat().st_size for file in Path(resolve_path(path)).glob("*.safetensors"))
