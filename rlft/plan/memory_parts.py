"""Counts the memory of a run, by part, from its config and the model's config alone: no weight is loaded.

Bytes are counted from the shapes of tensors; the process with its libraries cannot be counted and is measured. A run's
peak is what it always holds plus the larger of what sampling and an update add.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlft.batch import select
from rlft.config.model import OFFLOAD, TILES, Recompute
from rlft.config.trainer import OptimizerKind
from rlft.generation.engine import Engine
from rlft.generation.memory import Decoding, EngineMemory, Load, MemoryPart, ModelSizes, When
from rlft.generation.vllm import memory as vllm_memory
from rlft.model.activations import FlashRows, activation_bytes, checkpointed_bytes, layer_sizes, logit_rows, mlp_bytes
from rlft.model.checkpointing import MLP_TILE
from rlft.model.packing import micro_batches, num_packed_tokens, padded_micro_batches
from rlft.plan.tower import TowerDemand
from rlft.system.buckets import BUCKET
from rlft.system.device import MULTIPROCESSORS, type_of
from rlft.system.memory import LARGE_MICRO_BATCH
from rlft.types import Batch

TEACHER_SHARE = vllm_memory.TEACHER_SHARE_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherDemand:
    """Memory demand of a teacher.

    Attributes:
        model: the sizes of its model.
        row_tokens: number of tokens of the longest row that it may read.
        prompt_tokens: number of prompt tokens, the hint included, of the longest row that it reads.
        share: the share of a GPU's memory that vLLM gets for it; None where transformers computes it.
    """

    model: ModelSizes
    row_tokens: int
    prompt_tokens: int
    share: float | None

    def memory(self, device: str, device_memory: int, *, beside_vllm: bool) -> EngineMemory:
        """The parts of its memory, with their full keys; `beside_vllm`, where vLLM's libraries are counted, samples.

        device_memory: bytes of a GPU's memory; 0 if unknown.
        """
        if self.share is None:
            return EngineMemory(parts=(always("teacher", self.model.base_bytes, "snapshot.teacher"),))
        if device == "cpu":
            return vllm_memory.teacher_on_a_cpu(self.model, self.row_tokens, libraries=not beside_vllm)
        return vllm_memory.teacher_on_a_gpu(self.model, self.row_tokens, device_memory, self.share)

    def other_shares(self, device_memory: int, room: int) -> Iterator[TeacherDemand]:
        """The same teacher with a share in which vLLM starts, or with a smaller one that leaves room for the rest.

        room: bytes of the device's memory that the rest of the run leaves free.
        """
        if self.share is None or not device_memory:
            return
        least_bytes = vllm_memory.teacher_least_bytes(self.model, self.row_tokens, device_memory)
        least = vllm_memory.share_of(least_bytes, device_memory)
        fitting = int(100 * room / device_memory) / 100
        if self.share < least:
            yield replace(self, share=least)
        elif least <= fitting < self.share:
            yield replace(self, share=fitting)


FLOAT32, TOKEN_ID = 4, 8
OF_ADAMW = {OptimizerKind.adamw8bit: 2 * (1 + FLOAT32 / 256)}  # with a scale for each block of 256
"""Bytes of AdamW's two averages of a trained parameter, where they are not float32."""
MARGIN = 0.07
"""Share of a GPU's memory that a plan leaves to what torch does not count."""
OF_THE_PROCESS, OF_THE_MARGIN = "process and libraries", "graphs, workspaces, fragments"
"""Parts that torch's allocator does not count: on a GPU a CUDA context, and the margin for CUDA graphs, workspaces of
libraries, and blocks of the allocator that nothing fits into."""
ACTIVATIONS = "activations"
CRITIC_HOLES = 0.45
"""Share of the activations of a critic's own pass that stay as freed but unusable blocks (measured: 0.32 to 0.47)."""
FIRST_USE = 40 * 2**20
"""Bytes that torch and its matrix library allocate on a CPU when they first compute."""
TOP_K_LOGITS = 4
"""Copies of a chunk's logits in float32 that are alive in the backward through the log-probs of given tokens: the
logits, and the gradients of their sum, of the tokens' own and of both."""
TOP_K_FIELDS = 4
"""Float tensors `[B, T, K]` of a micro-batch that are alive beside them (measured)."""
EXCHANGED = 3
"""Copies of queries, keys, values, attention and its gradient that are alive where ranks exchange them: what is sent,
what arrives, and the heads of all tokens."""
SENDERS_BUCKETS, BUCKETS_OF_AN_ENGINE = 2, 5
"""Copies of a bucket that are alive while weights are sent: its bytes and their pickle; and for each engine the message
there and here, the pickle and the bytes in it, and its tensors."""
CAPPED_LOGITS = 2
"""Further tensors of the size of a chunk's logits where these are capped: their slopes, also times the shares."""
PADDED_LOGITS = 5
"""Float32 copies of logits that are alive in autograd's backward, of all logits in padded rows, else of a chunk: the
logits, the gradients through the normaliser (two), through the tokens' own logits, and of both; of given tokens there
is one more."""
BATCH_FIELDS = 8
"""Float tensors `[B, T]` that stages add to a batch; token ids and masks take as much memory as three more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Memory demand of a planned run of any command, on the trainer's device."""

    adapters: int  # number of adapters of the run's rank on the base, without the engine's own copy
    trainable: int  # number of trained parameters
    matrices: int  # how many of them are in matrices, which Muon moves
    optimizer: OptimizerKind
    prompt_tokens: int  # prompt length of the longest row, in tokens
    completion_tokens: int  # completion length of the longest row, in tokens
    group: int  # number of rows per prompt
    rows: int  # number of rows in a step
    update_rows: int  # number of rows in an optimizer batch
    token_budget: int  # the most tokens in a micro-batch
    recompute: Recompute  # what gradient checkpointing computes again
    device: str  # the kind of the trainer's device, one of `rlft.system.device.KINDS`
    per_step: str = "prompts_per_step"  # the key that says how many groups of rows these are
    whole_model: bool = False  # whether the model's own weights are trained
    copies: int = 0  # number of frozen copies of these weights, in other roles
    through_head: bool = True  # whether the LM head computes log-probs (values alone need none)
    entropy: bool = False  # whether the loss needs the entropy
    top_k: int = 0  # of how many of a teacher's most likely tokens distributions are compared
    choice: int = 0  # bytes of the numbers of a token's experts that a step keeps for a replay
    own_critic: bool = False  # whether the critic has an adapter, and so a forward and backward of its own
    frozen: int = 0  # number of parameters of adapters that keep the rank of their folder
    beside: int = 0  # bytes of learned rewards that have networks of their own
    teacher: TeacherDemand | None = None  # of a teacher that is a separate model; None if there is no such teacher
    engine: Engine | None = None  # the engine that samples completions; None if nothing is sampled
    section: str = ""  # the engine's section in `generation`
    decodings: tuple[Decoding, ...] = ()
    max_tokens: int = 0  # the most tokens in a completion
    max_sequence_tokens: int = 0  # the most tokens in a prompt with its completion
    device_memory: int = 0  # bytes of a GPU's memory; 0 if unknown
    multiprocessors: int = MULTIPROCESSORS  # their number on a GPU
    engines_apart: int = 0  # number of engines in other processes on this device, each with a base of its own
    ranks: int = 1  # number of ranks that share the forward and backward passes
    gradients: int = 1  # the most gradients that a rank holds at a time, those of its lanes
    held: float = 1.0  # the largest share of the optimizer's averages that a rank holds
    sharing: int = 1  # how many of them share the tokens of each pass
    sharded: bool | None = None  # whether the ranks divide the base's layers among them; None where they cannot
    tower: TowerDemand | None = None  # the demand of a vision tower; None if prompts have no images

    @property
    def trains(self) -> bool:
        return self.trainable > 0

    def with_groups(self, number: int) -> Demand:
        """The same with so many groups of rows in a step."""
        update_rows, decodings = self.update_rows * number * self.group // self.rows, self.decodings
        if decodings and self.per_step == "prompts_per_step":  # the first one is a step's, and the others stay
            decodings = (replace(decodings[0], num_prompts=number), *decodings[1:])
        return replace(self, rows=number * self.group, update_rows=update_rows, decodings=decodings)

    @property
    def load(self) -> Load:
        """The engine's work."""
        return Load(
            decodings=self.decodings,
            max_tokens=self.max_tokens,
            max_sequence_tokens=self.max_sequence_tokens,
            device=type_of(self.device),
            device_memory=self.device_memory,
            tower=0 if self.tower is None else self.tower.weights,
        )


def of_all_weights(model: ModelSizes, *, heads: int = 0, copies: int = 0) -> dict[str, Any]:
    """The fields of a Demand where all weights are trained, and scalar heads with so many parameters."""
    return {"adapters": 0, "trainable": model.parameters + heads, "whole_model": True, "copies": copies}


def moved_by_adamw(demand: Demand) -> int:
    """Number of trained parameters that AdamW moves: all, or with Muon what is in no matrix."""
    return demand.trainable - (demand.matrices if demand.optimizer is OptimizerKind.muon else 0)


def averages_bytes(demand: Demand) -> int:
    """Bytes that the optimizer keeps: two averages of what AdamW moves, Muon's one of the rest."""
    by_adamw = moved_by_adamw(demand)
    return int(by_adamw * OF_ADAMW.get(demand.optimizer, 2 * FLOAT32)) + FLOAT32 * (demand.trainable - by_adamw)


def always(name: str, num_bytes: int, key: str | None = None) -> MemoryPart:
    """A part that is held from the start to the end of a run."""
    return MemoryPart(name=name, bytes=num_bytes, when=When.always, key=key)


def parts(model: ModelSizes, demand: Demand, process: int) -> list[MemoryPart]:
    """The parts of everything that the trainer's device holds; `process` is the bytes of the process itself."""
    engine = engine_memory(model, demand)
    has_copy = demand.engine is not None and demand.engine.on_trainers_base and not demand.whole_model
    adapters = demand.adapters + has_copy
    copy = model.itemsize if model.itemsize < FLOAT32 and model.adapter.serves_fused(plain=model.plain) else 0
    learned_by = "model.dtype" if demand.whole_model else "lora.rank" if demand.trains else None
    gradient = FLOAT32 * demand.trainable
    learned = demand.gradients * gradient + int(demand.held * averages_bytes(demand))
    roots_at_once = demand.device != "cpu" and demand.optimizer is not OptimizerKind.adamw8bit  # of second moments
    step = int(demand.held * moved_by_adamw(demand)) * FLOAT32 * roots_at_once
    counted = [
        always(OF_THE_PROCESS, process + FIRST_USE * (demand.device == "cpu")),
        always(OF_THE_MARGIN, int(MARGIN * demand.device_memory) if demand.device != "cpu" else 0),
        always("base", base_bytes(model, demand), "model.dtype"),
        always("adapters", (adapters * model.lora + demand.frozen) * (FLOAT32 + copy), learned_by),
        always("optimizer and gradients", learned, learned_by),
        MemoryPart(name="optimizer's step", bytes=step, when=When.stepping, key=learned_by),
    ]
    if demand.ranks > 1:  # the sum of a bucket, and the next lane's
        exchanged = 2 * min(BUCKET, gradient)
        counted.append(MemoryPart(name="exchange of gradients", bytes=exchanged, when=When.stepping))
    if norm := model.adapter.bytes_of_a_norm(model.itemsize):
        counted.append(always("weight norms of DoRA", norm, "lora.use_dora"))
    if demand.copies:
        counted.append(always("frozen copies", demand.copies * model.base_bytes, "snapshot.reference"))
    if demand.engines_apart and demand.engine is not None and demand.engine.on_trainers_base:
        counted.append(always("bases of the engines", demand.engines_apart * model.base_bytes, "cluster.engines"))
    if demand.engines_apart and demand.whole_model and demand.device == "cpu":
        sent = (SENDERS_BUCKETS + BUCKETS_OF_AN_ENGINE * demand.engines_apart) * min(BUCKET, model.base_bytes)
        counted.append(MemoryPart(name="weights on their way to engines", bytes=sent, when=When.publishing))
    if demand.beside:
        counted.append(always("learned rewards", demand.beside, "reward"))
    counted += tower_parts(model, demand)
    counted += teacher_memory(demand).parts
    if not demand.trains:
        return [*counted, *engine.parts]
    updating = updating_parts(model, demand)
    return [
        *counted,
        *engine.parts,
        *teachers_pass(demand),
        *updating,
        *holes(demand, left_by_sampling(model, demand, engine), updating),
    ]


def tower_parts(model: ModelSizes, demand: Demand) -> list[MemoryPart]:
    """The parts of a vision tower, and of images."""
    if demand.tower is None:
        return []
    trained = 0
    if demand.trains:
        _, predicted = largest_micro_batch(demand, packed=model.packed)
        trained = math.ceil(predicted / (demand.completion_tokens * demand.group))
    per_step, engine, sampled, towers = demand.rows // demand.group, demand.engine, 0, 1
    if engine is not None and engine.on_trainers_base:  # vLLM counts its own
        at_once = [min(each.num_prompts, max(1, engine.at_once // each.samples)) for each in demand.decodings]
        sampled, towers = max(1, demand.engines_apart) * max(at_once, default=0), 1 + demand.engines_apart
    return demand.tower.parts(
        demand.device,
        prompts_per_step=per_step,
        trained_at_once=trained,
        sampled_at_once=sampled,
        towers=towers,
    )


def base_bytes(model: ModelSizes, demand: Demand) -> int:
    """Bytes of the weights of the base that the trainer's device holds."""
    if not demand.sharded:
        return model.base_bytes
    if demand.device != "cpu":
        return model.divided_bytes(demand.ranks)
    return model.divided_bytes(1) + sum(model.layers) * model.itemsize  # rank 0 keeps all layers in main memory


def engine_memory(model: ModelSizes, demand: Demand) -> EngineMemory:
    """The memory of the engine, or of all engines, on the trainer's device; its parts have their full keys."""
    if demand.engine is None:
        return EngineMemory()
    one_engine, engines = demand.engine.memory(model, demand.load), max(1, demand.engines_apart)
    all_engines = (
        replace(part, bytes=engines * part.bytes, key=part.key and f"generation.{demand.section}.{part.key}")
        for part in one_engine.parts
    )
    return replace(one_engine, parts=tuple(all_engines))


def teacher_memory(demand: Demand) -> EngineMemory:
    """The memory of a teacher that is a separate model."""
    if demand.teacher is None:
        return EngineMemory()
    beside_vllm = demand.section == "vllm"
    return demand.teacher.memory(demand.device, demand.device_memory, beside_vllm=beside_vllm)


def teachers_pass(demand: Demand) -> list[MemoryPart]:
    """The part for the largest pass, without gradient, through a teacher that transformers computes."""
    teacher = demand.teacher
    if teacher is None or teacher.share is not None:
        return []
    model = teacher.model
    tokens, predicted = largest_micro_batch(replace(demand, prompt_tokens=teacher.prompt_tokens), packed=model.packed)
    if model.packed:  # logits in float32 and their log-softmax, a chunk at a time
        head = logit_rows(model.vocabulary, demand.device, predicted) * model.vocabulary * 2 * FLOAT32
    else:
        head = tokens * model.vocabulary * (model.itemsize + 2 * FLOAT32)
    pass_bytes = tokens * model.layer_width * model.itemsize + head
    return [MemoryPart(name="teacher's pass", bytes=pass_bytes, when=When.annotating, key="token_budget")]


def memory_shortfall(model: ModelSizes, demand: Demand) -> int:
    """Bytes that the policy's and the teacher's engines need beyond their shares of the device; 0 if these suffice."""
    return engine_memory(model, demand).lacks + teacher_memory(demand).lacks


def updating_parts(model: ModelSizes, demand: Demand) -> list[MemoryPart]:
    """The parts of a forward and backward of the largest micro-batch, and of its batch.

    A GPU's allocator gives what the LM head has freed to the layers' backward: only the larger of both counts there.
    """
    of_rows = largest_micro_batch(demand, packed=model.packed)
    tokens, predicted = (math.ceil(number / demand.sharing) for number in of_rows)
    how = layers_kept(model, demand, predicted)
    gradients = max(layer_gradients(model, demand, tokens), attention_gradients(model, demand, *of_rows, how))
    head = head_bytes(model, demand, tokens, predicted)
    if model.quantized:  # a branch's weights in the dtype that it computes with: those of its gated MLP
        gradients += 3 * model.mlp_width * model.hidden * model.itemsize
    outputs = predicted * model.hidden * model.itemsize * (2 if demand.entropy else 1) if demand.through_head else 0
    kept, of_a_layer = activation_bytes(model.config, tokens, model.itemsize, **how), 0
    if demand.recompute:
        is_offloaded = demand.recompute == OFFLOAD and demand.device != "cpu"
        kept, of_a_layer = checkpointed_bytes(model.config, tokens, model.itemsize, offloaded=is_offloaded, **how)
    if demand.device == "cpu":
        kept, head = kept + of_a_layer, head + outputs
    else:
        gradients -= tokens * model.hidden * model.itemsize  # of a layer's output, which that of its input overwrites
        head += 4 * outputs  # the hidden states, their gradients, and the two terms of these
        if head > of_a_layer + gradients:
            gradients = 0
        else:
            kept, head = kept + of_a_layer, 0
    width = demand.prompt_tokens + demand.completion_tokens
    of_top_k = demand.top_k * (TOKEN_ID + FLOAT32)
    return [
        MemoryPart(name=ACTIVATIONS, bytes=kept, when=When.updating, key="token_budget"),
        MemoryPart(name="gradients of activations", bytes=gradients, when=When.updating, key="token_budget"),
        MemoryPart(name="LM head", bytes=head, when=When.updating, key="token_budget"),
        always(
            "batch",
            demand.rows * width * (FLOAT32 * (BATCH_FIELDS + 3) + of_top_k + demand.choice),
            demand.per_step,
        ),
    ]


def layer_gradients(model: ModelSizes, demand: Demand, tokens: int) -> int:
    """Bytes that a layer's backward makes beside what is kept, in its gated MLP or, if that has tiles, elsewhere."""
    sizes = layer_sizes(model.config)
    if (tile := tile_of(model, demand)) is None or tile >= tokens:
        # Where the product of gate and up was kept, its backward has freed it before their gradients are made.
        has_states = any(size.state for size in sizes)  # the gate of such layers is not an MLP's
        kept = model.modules.gate == "silu" and not (model.plain or has_states or has_fused_layers(model, demand))
        of_mlp = tokens * (model.layer_width - kept * model.mlp_width)
    else:
        of_mlp = tile * 3 * model.mlp_width + tokens * 3 * model.hidden
    shared = sizes if demand.sharing > 1 else []
    exchanged = max((EXCHANGED * (3 * size.queries + 2 * size.keys) for size in shared), default=0)
    return max(of_mlp, tokens * exchanged) * model.itemsize


def attention_gradients(model: ModelSizes, demand: Demand, tokens: int, predicted: int, how: Mapping[str, Any]) -> int:
    """Bytes that the backward of a layer's attention makes, less what its MLP's has freed; 0 where it is not flash's.

    Args:
        tokens: of a micro-batch on all ranks; `predicted`: those of its completions.
        how: how layers are kept (`layers_kept`).
    """
    caps = getattr(model.config, "attn_logit_softcapping", None)
    if demand.device != "cuda" or model.itemsize != 2 or not model.packed or caps:
        return 0
    completions = predicted // demand.completion_tokens
    prompts = math.ceil(completions / demand.group)
    row = FlashRows(tokens=tokens, predicted=predicted, prompts=prompts, completions=completions)
    freed = mlp_bytes(model.config, math.ceil(tokens / demand.sharing), model.itemsize, **how)
    made = (
        size.flash_gradients(model.hidden, row, demand.sharing, demand.multiprocessors) - of_mlp
        for size, of_mlp in zip(layer_sizes(model.config), freed, strict=True)
    )
    return max(0, *made)


def layers_kept(model: ModelSizes, demand: Demand, predicted: int | None = None) -> dict[str, Any]:
    """What `activation_bytes` asks beside the number of tokens."""
    narrows = model.packed and model.kernels.fused_layers and demand.device != "cpu"
    return {
        "device": demand.device,
        "plain": model.plain,
        "is_fused": has_fused_layers(model, demand),
        "adapter": model.adapter.bytes_of_a_token(model.itemsize, demand.device, plain=model.plain),
        "predicted": predicted if narrows else None,
        "tile": tile_of(model, demand),
        "modules": model.modules,
    }


def tile_of(model: ModelSizes, demand: Demand) -> int | None:
    """How many tokens of a gated MLP are computed at a time; None: all together."""
    return MLP_TILE if has_fused_layers(model, demand) and demand.recompute in (TILES, OFFLOAD) else None


def has_fused_layers(model: ModelSizes, demand: Demand) -> bool:
    """Whether one function computes a whole branch of a layer, adapter included."""
    return model.kernels.fused_layers and not demand.whole_model and model.adapter.serves_fused(plain=model.plain)


def head_bytes(model: ModelSizes, demand: Demand, tokens: int, predicted: int) -> int:
    """Bytes that are alive while log-probs are computed, besides the hidden states' gradients; 0 if none are."""
    if not demand.through_head:
        return 0
    if not model.packed:
        return (PADDED_LOGITS + (demand.top_k > 0)) * tokens * model.vocabulary * FLOAT32
    wide = FLOAT32 * (2 if demand.entropy else 1)
    if demand.device != "cuda":
        of_a_logit = wide + model.itemsize * (2 if demand.entropy else 1) * (model.itemsize == 2)
    else:  # compiled: probs overwrite the logits; for an entropy they and their logarithm are float32, with a copy
        of_a_logit = wide if model.itemsize == FLOAT32 else 12 if demand.entropy else 2
    if getattr(model.config, "final_logit_softcapping", None):
        of_a_logit += CAPPED_LOGITS * model.itemsize
    if demand.whole_model:  # autograd computes them, again in the backward
        of_a_logit = max(of_a_logit, PADDED_LOGITS * FLOAT32)
    if demand.top_k:  # this pass and the other one, one after the other
        of_a_logit = max(of_a_logit, FLOAT32 * (TOP_K_LOGITS + (model.itemsize == 2)))
    head = logit_rows(model.vocabulary, demand.device, predicted) * model.vocabulary * of_a_logit
    if demand.top_k:
        width = demand.prompt_tokens + demand.completion_tokens
        head += predicted * demand.sharing // demand.completion_tokens * width * demand.top_k * FLOAT32 * TOP_K_FIELDS
    return head


def left_by_sampling(model: ModelSizes, demand: Demand, engine: EngineMemory) -> int:
    """Bytes of sampling's freed blocks that an update cannot reuse: all if its own blocks are larger, else none.

    Measured: with the embedded model, whose update takes 130 MB, 33 to 132 MB of keys and values added nothing to the
    peak where one layer's took 4 MB or more; with 17M parameters all of them did (4 MB a layer, the update's 11 MB).
    """
    if not engine.freed_block:
        return 0
    tokens, _ = largest_micro_batch(demand, packed=model.packed)
    if tokens * model.mlp_width * model.itemsize <= engine.freed_block:
        return 0
    return sum(part.bytes for part in engine.parts if part.when is When.sampling)


def holes(demand: Demand, left: int, updating: Sequence[MemoryPart]) -> list[MemoryPart]:
    """The freed blocks that the C library keeps on a CPU for later steps (`rlft.system.memory`).

    left: bytes of sampling's blocks that an update cannot reuse, as the policy's pass those of a critic's own pass.
    """
    if demand.device != "cpu" or demand.token_budget > LARGE_MICRO_BATCH:
        return []
    if demand.own_critic:
        left += int(CRITIC_HOLES * sum(part.bytes for part in updating if part.name == ACTIVATIONS))
    return [MemoryPart(name="freed blocks that stay", bytes=left, when=When.updating, key="token_budget")]


def largest_micro_batch(demand: Demand, *, packed: bool) -> tuple[int, int]:
    """(tokens that enter the network, tokens predicted) of the largest micro-batch when all rows are the longest.

    The trainer's own code splits a batch of zeros.
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
    """A batch of zeros with the longest rows, at most `rows` and as many as its largest micro-batch needs."""
    # With more of one group's rows than a micro-batch can have, one is full.
    rows = min(rows, group * (token_budget // (prompt + group * completion) + 1), token_budget // completion + 2)
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
