"""How much memory a run takes, by part, from its config and the model's config alone: no weight is loaded.

Everything is counted in bytes from the shapes that the code makes; what cannot be counted, the process with its
libraries, is measured. A run's peak is what is always there and the larger of what sampling and an update add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from rlft.collate import select
from rlft.generation.transformers import AT_ONCE
from rlft.memory import LARGE_MICRO_BATCH
from rlft.model.activations import activation_bytes, checkpointed_bytes
from rlft.model.head import LOGIT_CHUNK
from rlft.model.packing import micro_batches, num_packed_tokens, padded_micro_batches
from rlft.types import Batch

FLOAT32 = 4
LEARNED_COPIES = 3
"""Of a parameter that learns, beside itself: its gradient and AdamW's two averages."""

ACTIVATIONS = "activations"
ENGINE = "vLLM, its base and KV cache"

CRITIC_HOLES = 0.45
"""Of the activations, what a critic's own pass leaves beside the policy's: 0.32 to 0.47 where it was measured."""

FIRST_USE = 40 * 2**20
"""What torch and its matrix library take on a CPU when they first compute."""

BATCH_FIELDS = 8
"""Float tensors `[B, T]` that stages add to a batch; token ids and masks are as much as three more."""


class When(StrEnum):
    """Parts of `sampling` and `updating` are not there at the same time."""

    always = "always"
    sampling = "sampling"
    updating = "updating"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes on one device. key: what to lower for less of it, None where nothing helps."""

    name: str
    bytes: int
    when: When
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What is known of a base from its config.json.

    parameters: of the base. itemsize: bytes of a weight and of an activation. lora: parameters of one adapter.
    adapted: weights of the linear layers that it lies on. key_size: elements of one token's keys and values in all
    layers. config: transformers' config of the text model. packed: whether prompts are shared and nothing is padded.
    """

    parameters: int
    base_bytes: int
    itemsize: int
    lora: int
    adapted: int
    key_size: int
    config: Any
    packed: bool

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size

    @property
    def hidden(self) -> int:
        return self.config.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A batch of completions that is decoded on the trainer's own base.

    rows: completions at a time, of `prompts` prompts. weights: merged, merged_bfloat16 or apart.
    """

    rows: int
    prompts: int
    prompt_tokens: int
    completion_tokens: int
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks for on the trainer's device.

    adapters: on the base, the engine's own copy included. trainable: parameters that learn. prompt_tokens,
    completion_tokens: of the longest row. rows: of a step, `group` to a prompt. update_rows: of an optimizer batch.
    through_head: whether log-probs are asked of it (values alone are not). own_critic: whether the critic has an
    adapter, and so a forward and backward, of its own. sampled: what is decoded here, in turn. engine: bytes
    that vLLM takes of the same device; engine_sleeps: whether it gives them back during updates. beside: bytes of other
    networks.
    """

    adapters: int
    trainable: int
    prompt_tokens: int
    completion_tokens: int
    group: int
    rows: int
    update_rows: int
    token_budget: int
    recompute: bool
    device: str
    whole_model: bool = False
    through_head: bool = True
    entropy: bool = False
    own_critic: bool = False
    sampled: tuple[Sampled, ...] = ()
    engine: int = 0
    engine_sleeps: bool = False
    beside: int = 0


def model_sizes(
    config: Any,
    parameters: int,
    adapter: Mapping[str, tuple[int, ...]],
    *,
    itemsize: int,
    quantized: int,
    packed: bool,
) -> ModelSizes:
    """Counts of a base. config: transformers'. adapter: the shapes of an adapter's tensors, by PEFT's names.

    quantized: how many of the parameters are held in 4 bits.
    """
    text = config.get_text_config()
    outputs = {name: shape[0] for name, shape in adapter.items() if ".lora_B" in name}
    inputs = {name.replace(".lora_A", ".lora_B"): shape[1] for name, shape in adapter.items() if ".lora_A" in name}
    adapted = sum(inputs[name] * outputs[name] for name in outputs)
    # bitsandbytes: half a byte a weight, and a scale for 64 of them that is a byte itself (double quantisation).
    base = int(quantized * 0.516) + (parameters - quantized) * itemsize
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return ModelSizes(
        parameters=parameters,
        base_bytes=base,
        itemsize=itemsize,
        lora=sum(math.prod(shape) for shape in adapter.values()),
        adapted=adapted,
        key_size=2 * key_heads * head * text.num_hidden_layers,
        config=text,
        packed=packed,
    )


def parts(model: ModelSizes, demand: Demand, process: int) -> list[Part]:
    """Everything that the trainer's device holds. process: bytes of what runs on it besides."""
    found = [
        Part(name="process and libraries", bytes=process + FIRST_USE * (demand.device == "cpu"), when=When.always),
        Part(name="base", bytes=model.base_bytes, when=When.always, key="model.dtype"),
        Part(name="adapters", bytes=demand.adapters * model.lora * FLOAT32, when=When.always, key="lora.rank"),
        Part(
            name="optimizer and gradients",
            bytes=LEARNED_COPIES * demand.trainable * FLOAT32,
            when=When.always,
            key="model.dtype" if demand.whole_model else "lora.rank",
        ),
    ]
    if demand.engine:
        when = When.sampling if demand.engine_sleeps else When.always
        found.append(Part(name=ENGINE, bytes=demand.engine, when=when, key="generation.vllm.gpu_memory_utilization"))
    if demand.beside:
        found.append(Part(name="learned rewards", bytes=demand.beside, when=When.always, key="reward"))
    largest = largest_sampled(model, demand.sampled)
    sampling = [] if largest is None else sampling_parts(model, largest)
    updating = updating_parts(model, demand)
    left = 0 if largest is None else left_by_sampling(model, demand, largest, sampling)
    return [*found, *sampling, *updating, *holes(demand, left, updating)]


def largest_sampled(model: ModelSizes, sampled: Sequence[Sampled]) -> Sampled | None:
    """The one that takes most while it is decoded; None where nothing is."""
    return max(sampled, default=None, key=lambda one: sum(part.bytes for part in sampling_parts(model, one)))


def sampling_parts(model: ModelSizes, sampled: Sampled) -> list[Part]:
    """The decoder's: sums of base and adapter, keys and values, logits."""
    size = {"merged": model.itemsize if model.itemsize > 2 else 0, "merged_bfloat16": 2, "apart": 0}[sampled.weights]
    tokens = sampled.prompts * sampled.prompt_tokens + sampled.rows * sampled.completion_tokens
    prefill = sampled.prompts * sampled.prompt_tokens * layer_width(model) * model.itemsize
    logits = sampled.rows * model.vocabulary * FLOAT32 * 3 + AT_ONCE * 8
    return [
        Part(
            name="base and policy added up",
            bytes=model.adapted * size,
            when=When.always,
            key="generation.transformers.weights",
        ),
        Part(
            name="keys and values",
            bytes=tokens * model.key_size * model.itemsize,
            when=When.sampling,
            key="generation.transformers.batch_size",
        ),
        Part(name="decoding", bytes=max(prefill, logits), when=When.sampling, key="generation.transformers.batch_size"),
    ]


def updating_parts(model: ModelSizes, demand: Demand) -> list[Part]:
    """A forward and backward of the largest micro-batch, and the batch it is of."""
    tokens, predicted = largest_micro_batch(demand, packed=model.packed)
    kept = (checkpointed_bytes if demand.recompute else activation_bytes)(model.config, tokens, model.itemsize)
    head = 0
    if demand.through_head and not model.packed:
        head = 3 * tokens * model.vocabulary * FLOAT32  # all logits, their log-softmax and its gradient
    elif demand.through_head:
        chunk = LOGIT_CHUNK["cpu" if demand.device == "cpu" else "cuda"]
        copies = (2 if demand.entropy else 1) + (model.itemsize == 2)
        slopes = predicted * model.hidden * model.itemsize * (2 if demand.entropy else 1)
        head = min(chunk, predicted * model.vocabulary) * FLOAT32 * copies + slopes
    width = demand.prompt_tokens + demand.completion_tokens
    return [
        Part(name=ACTIVATIONS, bytes=kept, when=When.updating, key="token_budget"),
        Part(
            name="gradients of activations",
            bytes=tokens * layer_width(model) * model.itemsize,
            when=When.updating,
            key="token_budget",
        ),
        Part(name="LM head", bytes=head, when=When.updating, key="token_budget"),
        Part(
            name="batch",
            bytes=demand.rows * width * FLOAT32 * (BATCH_FIELDS + 3),
            when=When.always,
            key="prompts_per_step",
        ),
    ]


def left_by_sampling(model: ModelSizes, demand: Demand, sampled: Sampled, sampling: Sequence[Part]) -> int:
    """Bytes of sampling's freed blocks that an update cannot use: all where its own are larger, else none.

    Measured: with the embedded model, whose update takes 130 MB, 33 to 132 MB of keys and values added nothing to the
    peak where a layer's were 4 MB and more; with 17M parameters all of them did (4 MB a layer, the update's 11).
    """
    layers = model.config.num_hidden_layers
    room = sampled.rows * sampled.completion_tokens * model.key_size * model.itemsize // (2 * layers)
    tokens, _ = largest_micro_batch(demand, packed=model.packed)
    if tokens * mlp_width(model) * model.itemsize <= room:
        return 0
    return sum(part.bytes for part in sampling if part.when is When.sampling)


def holes(demand: Demand, left: int, updating: Sequence[Part]) -> list[Part]:
    """What the C library keeps of freed blocks on a CPU, where steps are to use them again (`rlft.memory`).

    left: what of sampling's an update cannot use; of a critic's own pass, the policy's cannot use all.
    """
    if demand.device != "cpu" or demand.token_budget > LARGE_MICRO_BATCH:
        return []
    if demand.own_critic:
        left += int(CRITIC_HOLES * sum(part.bytes for part in updating if part.name == ACTIVATIONS))
    return [Part(name="freed blocks that stay", bytes=left, when=When.updating, key="token_budget")]


def layer_width(model: ModelSizes) -> int:
    """Elements a token that are alive at once inside one layer: its gated MLP's, and the hidden states around it."""
    return 3 * mlp_width(model) + 3 * model.hidden


def mlp_width(model: ModelSizes) -> int:
    return getattr(model.config, "intermediate_size", None) or 4 * model.hidden


def largest_micro_batch(demand: Demand, *, packed: bool) -> tuple[int, int]:
    """(tokens that enter the network, tokens predicted) of the largest micro-batch of rows that are all the longest.

    By the trainer's own splitting of a batch of zeros.
    """
    prompt, completion, group = demand.prompt_tokens, demand.completion_tokens, demand.group
    batch = longest_rows(prompt, completion, group, demand.update_rows, demand.token_budget)
    split = micro_batches if packed else padded_micro_batches
    largest = (0, 0)
    for part in split(batch, torch.arange(len(batch.rewards)), demand.token_budget):
        micro = select(batch, part)
        tokens = num_packed_tokens(micro) if packed else micro.attention_mask.numel()
        largest = max(largest, (tokens, len(part) * completion))
    return largest


def longest_rows(prompt: int, completion: int, group: int, rows: int, token_budget: int) -> Batch:
    """Zeros in the shape of an optimizer batch's longest rows: as many of `rows` as make its largest micro-batch."""
    rows = min(rows, group * (token_budget // (prompt + group * completion) + 1))
    mask = torch.ones(rows, prompt + completion, dtype=torch.bool)
    loss_mask = mask.clone()
    loss_mask[:, :prompt] = False
    zeros = torch.zeros(rows, prompt + completion)
    return Batch(
        token_ids=zeros.long(),
        attention_mask=mask,
        loss_mask=loss_mask,
        sampled_logprobs=zeros,
        rewards=zeros[:, 0],
        group_ids=torch.arange(rows) // group,
    )


def peak(found: Sequence[Part]) -> int:
    """The most that is there at a time."""
    by_time = {when: sum(part.bytes for part in found if part.when is when) for when in When}
    return by_time[When.always] + max(by_time[When.sampling], by_time[When.updating])
