"""Counts the memory of a run, by part, from its config and the model's config alone: no weight is loaded.

A run's peak is what it always holds plus the largest of what its stages add. The tables at the end, `HELD` and
`OF_AN_UPDATE`, list the parts: name, formula, the key that lowers it, when it lives. Formulas follow from the shapes of
tensors; a constant that does not says where it was measured. tests/commands/test_plan.py compares whole runs with their
peak, tests/pretended_card updates of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from rlft.config.model import OFFLOAD, TILES
from rlft.config.trainer import OptimizerKind
from rlft.generation.memory import EngineMemory, MemoryPart, ModelSizes, When
from rlft.model.activations import (
    MLP_TILE,
    FlashRows,
    activation_bytes,
    checkpointed_bytes,
    layer_sizes,
    logit_rows,
    mlp_bytes,
)
from rlft.model.packing import micro_batches, num_packed_tokens, padded_micro_batches
from rlft.plan.demand import Demand
from rlft.system.device import BUCKET
from rlft.system.memory import LARGE_MICRO_BATCH
from rlft.types import Batch

FLOAT32, TOKEN_ID = 4, 8
MARGIN = 0.07
"""Share of a GPU's memory that a plan leaves to what torch's allocator does not count: CUDA graphs, workspaces of
libraries, and blocks that nothing fits into. An allowance."""
FIRST_USE = 40 * 2**20
"""Bytes that torch and its matrix library allocate on a CPU when they first compute. Fitted:
docs/benchmarks/performance.md, "Planned and measured memory"."""
CRITIC_HOLES = 0.45
"""Share of the activations of a critic's own pass that stay as freed but unusable blocks. Fitted to runs that left 0.32
to 0.47: the same section."""
OF_ADAMW = {OptimizerKind.adamw8bit: 2 * (1 + FLOAT32 / 256)}
"""Bytes of AdamW's two averages of a trained parameter where they are not float32: with a scale for each block of 256,
as bitsandbytes has it."""
TOP_K_LOGITS, TOP_K_FIELDS = 4, 4
"""In the backward through the log-probs of given tokens: copies of a chunk's logits in float32 (the logits, and the
gradients of their sum, of the tokens' own and of both), and float tensors `[B, T, K]` of a micro-batch. Counted by
tests/plan/test_memory_parts.py."""
KL_LOGITS, PADDED_KL_LOGITS = 5, 1
"""Copies of logits in float32 that are alive while a KL over the vocabulary is computed: of a chunk the logits, the
other policy's log-probs, probabilities, differences and their products; of all padded rows as many besides
`PADDED_LOGITS`. Counted by tests/plan/test_memory_parts.py and on the pretended card."""
PADDED_LOGITS = 5
"""Float32 copies of logits that are alive in autograd's backward, of all logits in padded rows, else of a chunk: the
logits, the gradients through the normaliser (two), through the tokens' own logits, and of both; of given tokens there
is one more. Counted on the pretended card."""
CAPPED_LOGITS = 2
"""Further tensors of the size of a chunk's logits where these are capped: their slopes, also times the shares."""
EXCHANGED = 3
"""Copies of queries, keys, values, attention and its gradient that are alive where ranks exchange them: what is sent,
what arrives, and the heads of all tokens."""
SENDERS_BUCKETS, BUCKETS_OF_AN_ENGINE = 2, 5
"""Copies of a bucket that are alive while weights are sent: its bytes and their pickle; and for each engine the message
there and here, the pickle and the bytes in it, and its tensors."""
BATCH_FIELDS = 8 + 3
"""Float tensors `[B, T]` of a batch: those that stages add to it, and as much as token ids and masks take."""


class Run:
    """A run whose parts are counted, with what several formulas share."""

    def __init__(self, model: ModelSizes, demand: Demand, process: int = 0) -> None:
        self.model, self.demand = model, demand
        self.process = process  # bytes of the process itself, without models and batches

    @property
    def on_cpu(self) -> bool:
        return self.demand.device == "cpu"

    @cached_property
    def engine(self) -> EngineMemory:
        return engine_memory(self.model, self.demand)

    @cached_property
    def micro_batch(self) -> tuple[int, int]:
        """(tokens that enter the network, tokens predicted) of the largest micro-batch, on all ranks."""
        return largest_micro_batch(self.demand, packed=self.model.packed)

    @cached_property
    def update(self) -> Update:
        return update_of(self)

    @property
    def engines_on_base(self) -> bool:
        """Whether the engine decodes on a base of the trainer's kind, with an adapter slot of its own."""
        return self.demand.engine is not None and self.demand.engine.on_trainers_base


class Row(NamedTuple):
    """A part: its formula gives bytes, or None for a run that has no such part; its key is the one to lower."""

    name: str
    formula: Callable[[Run], int | None]
    key: str | Callable[[Demand], str | None] | None = None
    when: When = When.always

    def part(self, run: Run) -> MemoryPart | None:
        num_bytes = self.formula(run)
        key = self.key(run.demand) if callable(self.key) else self.key
        return None if num_bytes is None else MemoryPart(name=self.name, bytes=num_bytes, when=self.when, key=key)


def parts(model: ModelSizes, demand: Demand, process: int) -> list[MemoryPart]:
    """The parts of everything that the trainer's device holds; `process` is the bytes of the process itself."""
    run = Run(model, demand, process)

    def rows(table: tuple[Row, ...]) -> list[MemoryPart]:
        return [part for row in table if (part := row.part(run)) is not None]

    found = [*rows(HELD), *tower_parts(run), *teacher_memory(demand).parts, *run.engine.parts]
    return [*found, *rows(OF_AN_UPDATE)] if demand.trains else found


# -- what is held --------------------------------------------------------------------------------------------------
def base_bytes(run: Run) -> int:
    """The base's weights, or what a rank holds of them."""
    model, ranks = run.model, run.demand.ranks
    if not ranks.sharded:
        return model.base_bytes
    if not run.on_cpu:
        return model.divided_bytes(ranks.number)
    return model.divided_bytes(1) + sum(model.layers) * model.itemsize  # rank 0 keeps all layers in main memory


def adapter_bytes(run: Run) -> int:
    """Adapters in float32, the engine's own among them; fused layers read a copy in the base's dtype."""
    model, networks = run.model, run.demand.networks
    adapters = networks.adapters + (run.engines_on_base and not networks.whole_model)
    has_copy = model.itemsize < FLOAT32 and model.adapter.serves_fused(plain=model.plain)
    return (adapters * model.lora + networks.frozen) * (FLOAT32 + model.itemsize * has_copy)


def learned_bytes(run: Run) -> int:
    """Gradients in float32, and the optimizer's averages that a rank holds."""
    demand, ranks = run.demand, run.demand.ranks
    return ranks.gradients * FLOAT32 * demand.networks.trainable + int(ranks.held * averages_bytes(demand))


def roots_bytes(run: Run) -> int:
    """On a GPU the square roots of all second moments of what AdamW moves, at once; 8-bit AdamW makes none such."""
    demand = run.demand
    at_once = not run.on_cpu and demand.optimizer is not OptimizerKind.adamw8bit
    return int(demand.ranks.held * moved_by_adamw(demand)) * FLOAT32 * at_once


def exchange_bytes(run: Run) -> int | None:
    """The sum of a bucket of gradients, and the next lane's."""
    gradient = FLOAT32 * run.demand.networks.trainable
    return 2 * min(BUCKET, gradient) if run.demand.ranks.number > 1 else None


def dora_bytes(run: Run) -> int | None:
    return run.model.adapter.bytes_of_a_norm(run.model.itemsize) or None


def engines_bases_bytes(run: Run) -> int | None:
    """A base for each engine in a process of its own that computes as the trainer does; others count theirs."""
    apart = run.demand.work.apart
    return apart * run.model.base_bytes if apart and run.engines_on_base else None


def sent_bytes(run: Run) -> int | None:
    """The buckets of all weights that are on their way to engines in other processes."""
    apart = run.demand.work.apart
    if not (apart and run.demand.networks.whole_model and run.on_cpu):
        return None
    return (SENDERS_BUCKETS + BUCKETS_OF_AN_ENGINE * apart) * min(BUCKET, run.model.base_bytes)


def learned_key(demand: Demand) -> str | None:
    return "model.dtype" if demand.networks.whole_model else "lora.rank" if demand.trains else None


def moved_by_adamw(demand: Demand) -> int:
    """Number of trained parameters that AdamW moves: all, or with Muon what is in no matrix."""
    return demand.networks.trainable - demand.networks.matrices * (demand.optimizer is OptimizerKind.muon)


def averages_bytes(demand: Demand) -> int:
    """Bytes that the optimizer keeps: two averages of what AdamW moves, Muon's one of the rest."""
    by_adamw = moved_by_adamw(demand)
    by_muon = demand.networks.trainable - by_adamw
    return int(by_adamw * OF_ADAMW.get(demand.optimizer, 2 * FLOAT32)) + FLOAT32 * by_muon


# -- engine, teacher and tower count themselves --------------------------------------------------------------------
def engine_memory(model: ModelSizes, demand: Demand) -> EngineMemory:
    """The memory of the engine, or of all engines, on the trainer's device; its parts have their full keys."""
    if demand.engine is None:
        return EngineMemory()
    one_engine, engines = demand.engine.memory(model, demand.load), max(1, demand.work.apart)
    all_engines = (
        replace(part, bytes=engines * part.bytes, key=part.key and f"generation.{demand.work.section}.{part.key}")
        for part in one_engine.parts
    )
    return replace(one_engine, parts=tuple(all_engines))


def teacher_memory(demand: Demand) -> EngineMemory:
    """The memory of a teacher that is a separate model."""
    teacher = demand.teacher
    return EngineMemory() if teacher is None else teacher.engine.teacher_memory(teacher.model, demand.teacher_load)


def memory_shortfall(model: ModelSizes, demand: Demand) -> int:
    """Bytes that the policy's and the teacher's engines need beyond their shares of the device; 0 if these suffice."""
    return engine_memory(model, demand).lacks + teacher_memory(demand).lacks


def tower_parts(run: Run) -> list[MemoryPart]:
    """The parts of a vision tower, and of images."""
    demand, rows, work = run.demand, run.demand.rows, run.demand.work
    if demand.tower is None:
        return []
    trained, sampled, towers = 0, 0, 1
    if demand.trains:
        trained = math.ceil(run.micro_batch[1] / (rows.completion_tokens * rows.group))
    if demand.engine is not None and run.engines_on_base:  # vLLM counts its own
        at_once = [min(each.num_prompts, max(1, demand.engine.at_once // each.samples)) for each in work.decodings]
        sampled, towers = max(1, work.apart) * max(at_once, default=0), 1 + work.apart
    return demand.tower.parts(
        demand.device,
        prompts_per_step=rows.number // rows.group,
        trained_at_once=trained,
        sampled_at_once=sampled,
        towers=towers,
    )


# -- a forward and backward of the largest micro-batch -------------------------------------------------------------
class Update(NamedTuple):
    """Bytes of a micro-batch's forward and backward: what layers keep, their gradients, and the LM head's."""

    kept: int
    gradients: int
    head: int


def update_of(run: Run) -> Update:
    """A GPU's allocator gives what the LM head has freed to the layers' backward: only the larger of both counts."""
    model, demand = run.model, run.demand
    tokens, predicted = (math.ceil(number / demand.ranks.sharing) for number in run.micro_batch)
    how = layers_kept(model, demand, predicted)
    kept, of_a_layer = activation_bytes(model.config, tokens, model.itemsize, **how), 0
    if demand.recompute:
        is_offloaded = demand.recompute == OFFLOAD and not run.on_cpu
        kept, of_a_layer = checkpointed_bytes(model.config, tokens, model.itemsize, offloaded=is_offloaded, **how)
    gradients = max(layer_gradients(model, demand, tokens), attention_gradients(run, how))
    if model.quantized:  # a branch's weights in the dtype that it computes with: those of its gated MLP
        gradients += 3 * model.mlp_width * model.hidden * model.itemsize
    head = head_bytes(model, demand, tokens, predicted)
    terms = (1 + demand.loss.entropy) * demand.loss.through_head
    outputs = terms * predicted * model.hidden * model.itemsize
    if run.on_cpu:
        return Update(kept + of_a_layer, gradients, head + outputs)
    gradients -= tokens * model.hidden * model.itemsize  # of a layer's output, which that of its input overwrites
    head += 4 * outputs  # the hidden states, their gradients, and the two terms of these
    if head > of_a_layer + gradients:
        return Update(kept, 0, head)
    return Update(kept + of_a_layer, gradients, 0)


def layer_gradients(model: ModelSizes, demand: Demand, tokens: int) -> int:
    """Bytes that a layer's backward makes besides what is kept, in its gated MLP or, if that has tiles, elsewhere."""
    sizes = layer_sizes(model.config)
    if (tile := tile_of(model, demand)) is None or tile >= tokens:
        # Where the product of gate and up was kept, its backward has freed it before their gradients are made.
        has_states = any(size.state for size in sizes)  # the gate of such layers is not an MLP's
        kept = model.modules.gate == "silu" and not (model.plain or has_states or has_fused_layers(model, demand))
        of_mlp = tokens * (model.layer_width - kept * model.mlp_width)
    else:
        of_mlp = tile * 3 * model.mlp_width + tokens * 3 * model.hidden
    shared = sizes if demand.ranks.sharing > 1 else []
    exchanged = max((EXCHANGED * (3 * size.queries + 2 * size.keys) for size in shared), default=0)
    return max(of_mlp, tokens * exchanged) * model.itemsize


def attention_gradients(run: Run, how: Mapping[str, Any]) -> int:
    """Bytes that a backward of flash attention makes in a layer, less what its MLP's has freed; 0 with another one."""
    model, demand, (tokens, predicted) = run.model, run.demand, run.micro_batch
    caps = getattr(model.config, "attn_logit_softcapping", None)
    if demand.device != "cuda" or model.itemsize != 2 or not model.packed or caps:
        return 0
    completions, sharing = predicted // demand.rows.completion_tokens, demand.ranks.sharing
    prompts = math.ceil(completions / demand.rows.group)
    row = FlashRows(tokens=tokens, predicted=predicted, prompts=prompts, completions=completions)
    freed = mlp_bytes(model.config, math.ceil(tokens / sharing), model.itemsize, **how)
    made = (
        size.flash_gradients(model.hidden, row, sharing, demand.multiprocessors) - of_mlp
        for size, of_mlp in zip(layer_sizes(model.config), freed, strict=True)
    )
    return max(0, *made)


def layers_kept(model: ModelSizes, demand: Demand, predicted: int | None = None) -> dict[str, Any]:
    """What `activation_bytes` asks besides the number of tokens."""
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
    serves = model.adapter.serves_fused(plain=model.plain)
    return model.kernels.fused_layers and not demand.networks.whole_model and serves


def head_bytes(model: ModelSizes, demand: Demand, tokens: int, predicted: int) -> int:
    """Bytes that are alive while log-probs are computed, besides the hidden states' gradients; 0 if none are."""
    loss, rows = demand.loss, demand.rows
    if not loss.through_head:
        return 0
    if not model.packed:
        copies = PADDED_LOGITS + (loss.top_k > 0) + PADDED_KL_LOGITS * loss.exact_kl
        return copies * tokens * model.vocabulary * FLOAT32
    head = logit_rows(model.vocabulary, demand.device, predicted) * model.vocabulary * bytes_of_a_logit(model, demand)
    if loss.top_k:
        completions = predicted * demand.ranks.sharing // rows.completion_tokens
        head += completions * rows.tokens * loss.top_k * FLOAT32 * TOP_K_FIELDS
    return head + loss.exact_kl * predicted * model.hidden * model.itemsize  # the other policy's hidden states


def bytes_of_a_logit(model: ModelSizes, demand: Demand) -> int:
    """Bytes that are alive of each logit of a packed row's chunk."""
    entropy, size = demand.loss.entropy, model.itemsize
    wide = FLOAT32 * (1 + entropy)
    if demand.device != "cuda":
        found = wide + size * (1 + entropy) * (size == 2)
    else:  # compiled: probs overwrite the logits; for an entropy they and their logarithm are float32, with a copy
        found = wide if size == FLOAT32 else 12 if entropy else 2
    if getattr(model.config, "final_logit_softcapping", None):
        found += CAPPED_LOGITS * size
    if demand.networks.whole_model:  # autograd computes them, again in the backward
        found = max(found, PADDED_LOGITS * FLOAT32)
    if demand.loss.top_k:  # this pass and the other one, one after the other
        found = max(found, FLOAT32 * (TOP_K_LOGITS + (size == 2)))
    if demand.loss.exact_kl:  # of this pass as well
        found = max(found, FLOAT32 * KL_LOGITS)
    return found


# -- around an update ----------------------------------------------------------------------------------------------
def teacher_pass_bytes(run: Run) -> int | None:
    """The largest pass, without gradient, through a teacher that no engine computes."""
    teacher, demand = run.demand.teacher, run.demand
    if teacher is None or teacher.engine.teaches:
        return None
    model, rows = teacher.model, replace(demand.rows, prompt_tokens=teacher.prompt_tokens)
    tokens, predicted = largest_micro_batch(replace(demand, rows=rows), packed=model.packed)
    if model.packed:  # logits in float32 and their log-softmax, a chunk at a time
        head = logit_rows(model.vocabulary, demand.device, predicted) * model.vocabulary * 2 * FLOAT32
    else:
        head = tokens * model.vocabulary * (model.itemsize + 2 * FLOAT32)
    return tokens * model.layer_width * model.itemsize + head


def batch_bytes(run: Run) -> int:
    """The tensors of a step's batch."""
    rows, loss = run.demand.rows, run.demand.loss
    of_a_token = FLOAT32 * BATCH_FIELDS + loss.top_k * (TOKEN_ID + FLOAT32) + loss.expert_bytes
    return rows.number * rows.tokens * of_a_token


def hole_bytes(run: Run) -> int | None:
    """The freed blocks that the C library keeps on a CPU for later steps (`rlft.system.memory`): of sampling, and of a
    critic's own pass, which the policy's cannot reuse."""
    if not run.on_cpu or run.demand.token_budget > LARGE_MICRO_BATCH:
        return None
    of_a_critic = int(CRITIC_HOLES * run.update.kept) if run.demand.networks.own_critic else 0
    return left_by_sampling(run) + of_a_critic


def left_by_sampling(run: Run) -> int:
    """Bytes of sampling's freed blocks that an update cannot reuse: all if its own blocks are larger, else none.

    Measured: with the embedded model, whose update takes 130 MB, 33 to 132 MB of keys and values added nothing to the
    peak where one layer's took 4 MB or more; with 17M parameters all of them did (4 MB a layer, the update's 11 MB).
    """
    freed, model = run.engine.freed_block, run.model
    if not freed or run.micro_batch[0] * model.mlp_width * model.itemsize <= freed:
        return 0
    return sum(part.bytes for part in run.engine.parts if part.when is When.sampling)


# -- the table -----------------------------------------------------------------------------------------------------
OF_THE_PROCESS, OF_THE_MARGIN = "process and libraries", "graphs, workspaces, fragments"
"""Parts that torch's allocator does not count."""

HELD = (
    # Measured where it is planned: on a GPU a CUDA context.
    Row(OF_THE_PROCESS, lambda run: run.process + FIRST_USE * run.on_cpu),
    Row(OF_THE_MARGIN, lambda run: 0 if run.on_cpu else int(MARGIN * run.demand.device_memory)),  # an allowance
    Row("base", base_bytes, "model.dtype"),
    Row("adapters", adapter_bytes, learned_key),
    Row("optimizer and gradients", learned_bytes, learned_key),
    Row("optimizer's step", roots_bytes, learned_key, When.stepping),
    Row("exchange of gradients", exchange_bytes, None, When.stepping),
    Row("weight norms of DoRA", dora_bytes, "lora.use_dora"),
    Row("frozen copies", lambda run: run.demand.networks.copies * run.model.base_bytes or None, "snapshot.reference"),
    Row("bases of the engines", engines_bases_bytes, "cluster.engines"),
    Row("weights on their way to engines", sent_bytes, None, When.publishing),
    Row("learned rewards", lambda run: run.demand.networks.rewards or None, "reward"),
)
"""The parts of every run, but for those that an engine, a teacher and a vision tower count themselves."""

OF_AN_UPDATE = (
    Row("teacher's pass", teacher_pass_bytes, "token_budget", When.annotating),
    Row("activations", lambda run: run.update.kept, "token_budget", When.updating),
    Row("gradients of activations", lambda run: run.update.gradients, "token_budget", When.updating),
    Row("LM head", lambda run: run.update.head, "token_budget", When.updating),
    Row("batch", batch_bytes, lambda demand: demand.rows.key),
    Row("freed blocks that stay", hole_bytes, "token_budget", When.updating),  # fitted
)
"""The parts of a run that trains."""


# -- the largest micro-batch ---------------------------------------------------------------------------------------
def largest_micro_batch(demand: Demand, *, packed: bool) -> tuple[int, int]:
    """(tokens that enter the network, tokens predicted) of the largest micro-batch when all rows are the longest.

    The trainer's own code splits a batch of zeros.
    """
    rows, completion = demand.rows, demand.rows.completion_tokens
    batch = longest_rows(rows.prompt_tokens, completion, rows.group, rows.in_update, demand.token_budget)
    split = micro_batches if packed else padded_micro_batches
    largest = (0, 0)
    for part in split(batch, torch.arange(len(batch.rewards)), demand.token_budget):
        micro = batch.select(part)
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
