"""How much of the trainer's device vLLM takes, counted from shapes. On a GPU none of it has been measured yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlft.generation.memory import TEACHER_SHARE, EngineMemory, Load, MemoryPart, ModelSizes, When

CPU_BLOCK_SIZE = 32
"""Tokens of a prefix-cache block on a CPU. The default is 128: shorter prompts would never be shared by their group."""

CPU_CACHE_BYTES = 4 * 2**30  # the KV cache on a CPU is as large as `max_num_seqs` full sequences need, but at most this

CPU_LIBRARIES = 300 * 2**20
"""Bytes of vLLM's libraries and what it compiles on a CPU, besides base and cache: 240 to 400 MiB were measured."""

LEAST_SHARE = 0.1  # the smallest share of a GPU's memory in which vLLM can do something
MOST_SHARE = 0.95  # the largest share of a GPU's memory for vLLM, besides the CUDA context

BATCHED_TOKENS, LARGE_BATCHED_TOKENS, LARGE_DEVICE = 8192, 16384, 70 * 2**30
"""Tokens of one forward pass on a GPU, and on one with more memory, unless max_num_batched_tokens says otherwise."""

GRAPHS = 2**29  # an allowance for CUDA graphs, which stay while the KV cache is released; not measured

TEACHER_SEQS, TEACHER_BATCHED_TOKENS = 32, 1024
"""Number of rows that a teacher reads together, and of their tokens in one forward pass on a GPU.

These are few tokens, since for each of them vLLM makes log-probs of the whole vocabulary, outside its share of memory.
"""

COPY_BLOCK, COPY_BLOCK_OF_A_CPU = 2**26, 2**20
"""Number of a policy's elements that are added up at a time where vLLM holds a copy of it (`copied_weights`)."""

FLOAT32 = 4


def taken(least: int, share: float, device_memory: int) -> tuple[int, int]:
    """(bytes of this share of the device, or the least that is needed where that is more; how many the share lacks).

    Nothing lacks where the device's memory is not known (0).
    """
    share_bytes = int(share * device_memory)
    lacks = max(0, least - share_bytes) if device_memory else 0
    return share_bytes + lacks, lacks


def least_bytes(model: ModelSizes, load: Load, options: Mapping[str, Any], max_num_seqs: int) -> int:
    """Bytes below which vLLM does not start: its weights, a forward pass, and the keys and values of one sequence."""
    default = LARGE_BATCHED_TOKENS if load.device_memory >= LARGE_DEVICE else BATCHED_TOKENS
    tokens = max(int(options.get("max_num_batched_tokens") or default), max_num_seqs)
    forward = tokens * model.layer_width * model.itemsize + 2 * max_num_seqs * model.vocabulary * FLOAT32
    weights = base_bytes(model, options) + load.tower
    return weights + forward + model.key_size * model.itemsize * load.max_sequence_tokens


def teacher_on_a_cpu(model: ModelSizes, row_tokens: int, *, libraries: bool) -> EngineMemory:
    """A teacher's weights and KV cache; with `libraries` also vLLM's, if no engine of the policy counts them."""
    cache = cpu_cache_bytes(model.key_size * model.itemsize, row_tokens + 1, TEACHER_SEQS)
    size = model.base_bytes + cache + libraries * CPU_LIBRARIES
    return EngineMemory(
        parts=(MemoryPart(name="teacher in vLLM", bytes=size, when=When.always, key="snapshot.teacher"),)
    )


def teacher_on_a_gpu(model: ModelSizes, row_tokens: int, device_memory: int, share: float) -> EngineMemory:
    """A teacher's share of a GPU's memory, or the least that it needs where that is more, and its log-probs next to it.

    device_memory: bytes of the device's memory; 0 where they are not known.
    share: share of the device's memory (snapshot.teacher_gpu_memory_utilization).
    """
    size, lacks = taken(teacher_least_bytes(model, row_tokens, device_memory), share, device_memory)
    tokens = min(TEACHER_BATCHED_TOKENS, row_tokens)
    # The logits of a forward pass's tokens, their log-probs, and room to sort these.
    vocabulary = tokens * model.vocabulary * (model.itemsize + 2 * FLOAT32)
    parts = (
        MemoryPart(name="teacher in vLLM", bytes=size, when=When.always, key=TEACHER_SHARE),
        MemoryPart(name="teacher's log-probs", bytes=vocabulary, when=When.updating, key="snapshot.teacher"),
    )
    return EngineMemory(parts=parts, lacks=lacks)


def teacher_least_bytes(model: ModelSizes, row_tokens: int, device_memory: int) -> int:
    """Bytes below which vLLM does not start with this teacher."""
    load = Load(
        decodings=(), max_tokens=1, max_sequence_tokens=row_tokens + 1, device="cuda", device_memory=device_memory
    )
    return least_bytes(model, load, {"max_num_batched_tokens": TEACHER_BATCHED_TOKENS}, TEACHER_SEQS)


def base_bytes(model: ModelSizes, options: Mapping[str, Any]) -> int:
    """Bytes of vLLM's weights: the trainer's, or with 8 bits in linear layers where `quantization` is fp8."""
    if options.get("quantization") == "fp8":
        return model.linear + (model.parameters - model.linear) * model.itemsize
    return model.base_bytes


def least_share(model: ModelSizes, load: Load, options: Mapping[str, Any], max_num_seqs: int) -> float:
    """The smallest share of the device's memory in which vLLM starts, rounded up to a hundredth."""
    return max(LEAST_SHARE, share_of(least_bytes(model, load, options, max_num_seqs), load.device_memory))


def share_of(size: int, device_memory: int) -> float:
    """These bytes as a share of the device's memory, rounded up to a hundredth."""
    return math.ceil(100 * size / device_memory) / 100


def cpu_cache_bytes(token: int, max_sequence_tokens: int, max_num_seqs: int) -> int:
    """Bytes of the KV cache for `max_num_seqs` full sequences, capped; vLLM writes to all of it, so it is real memory.

    One token's keys and values have `token` bytes.
    """
    sequence = token * (max_sequence_tokens + CPU_BLOCK_SIZE)  # the last block is rarely full
    return max(sequence, min(CPU_CACHE_BYTES, sequence * max_num_seqs))


def cpu_cache_of(options: Mapping[str, Any]) -> int:
    """Bytes of the KV cache of a CPU engine with these arguments of vLLM's; reads the model's config."""
    from transformers import AutoConfig

    loading = {"trust_remote_code": options["trust_remote_code"], "revision": options["revision"]}
    config = AutoConfig.from_pretrained(options["model"], **loading).get_text_config()
    # Layers may differ, such as Gemma 4's; vLLM gives each of them blocks of the widest one's size.
    layers = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]
    element = 2 if options["dtype"] in ("bfloat16", "float16", "half") else 4
    token = 2 * config.num_hidden_layers * max(map(_key_elements, layers)) * element  # keys and values
    return cpu_cache_bytes(token, options["max_model_len"], options["max_num_seqs"])


def _key_elements(layer: Any) -> int:
    """Elements of a token's keys in a layer with this config."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
