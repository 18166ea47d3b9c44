"""Reads what a config names (base, tokenizer, prompts), and sizes of its model, of decoding and of files on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import nn

from rlft.config.model import KernelChoice, LoraSettings, ModelConfig, is_adapter, resolve_path
from rlft.config.schema import AUTO, ON_A_GPU, RunConfig, SamplingRoot, SftConfig, section_of
from rlft.config.trainer import CheckpointConfig
from rlft.data.prompts import PromptSet, scan
from rlft.generation.drafts import ROWS, Drafts
from rlft.generation.engine import Generator, rehearse
from rlft.generation.memory import Decoding, ModelSizes
from rlft.generation.stops import check_stops
from rlft.model.activations import NO_ADAPTER, AdapterLayers, layer_modules, layer_sizes
from rlft.model.backbone import check_weights, decoder_layers, ends_of, layer_weights, load_tokenizer, read_config
from rlft.model.forward import known_refusal
from rlft.model.kernels.selection import decide
from rlft.model.lora_config import adapted_words
from rlft.plan.demand import Demand, EngineWork
from rlft.plan.identity import fingerprints
from rlft.plan.memory_parts import FLOAT32, averages_bytes
from rlft.plan.model_rules import empty_model, fresh_shapes, why_not_on_a_gpu
from rlft.plan.roofline import Work
from rlft.plan.run_plan import LINE, Plan
from rlft.reward.workers.reward_spec import specs
from rlft.system.device import multiprocessors, resolve_device, resolve_dtype
from rlft.system.disk import room, size_text
from rlft.system.files import size_of
from rlft.tokens.text import RunTokenizer, TurnEnds
from rlft.trainer.optimizer import is_matrix
from rlft.types import NOTHING, Prompt, Shown, Split

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_base(settings: ModelConfig) -> tuple[PreTrainedConfig, dict[str, str]]:
    """(its config, its fingerprints); its weights are found and not read."""
    model, base = read_config(settings), fingerprints(settings)
    check_weights(settings)
    return model, base


def read_tokenizer(config: Any, model: PreTrainedConfig) -> tuple[RunTokenizer, TurnEnds]:
    """(its tokenizer, what ends a turn) of a root with `model` and `prompts`; the stops of a root that samples fit."""
    tokenizer = load_tokenizer(config.model, config.prompts.template_variables)
    ends = ends_of(config.model, config.prompts.style, tokenizer)
    if hasattr(config, "generation"):
        check_stops(config.generation, tokenizer, model.get_text_config().vocab_size, ends.ids)
    return tokenizer, ends


def scan_prompts(
    config: Any, prompts: Sequence[Prompt], tokenizer: RunTokenizer, split: Split, shown: Shown = NOTHING
) -> PromptSet:
    """The prompts of a split, within the limits of the root's `prompts`; `shown`: what they show of an environment."""
    limits = config.prompts
    return scan(prompts, tokenizer, limits.max_tokens, limits.over_limit, split, limits.style, shown)


CUDA_CONTEXT = 2**29  # an allowance for a CUDA context and the kernels of its libraries; not measured


def sizes_of(settings: ModelConfig, lora: LoraSettings | None) -> ModelSizes:
    """The sizes of this config's base, and of one adapter on it unless `lora` is None."""
    from rlft.model.lora_config import lora_config

    config = read_config(settings)
    empty = empty_model(settings, config)
    parameters, device = sum(p.numel() for p in empty.parameters()), resolve_device(settings.device)
    kernels = decide(settings.kernels, empty.config.model_type)
    padded = known_refusal(empty) or ""
    if settings.attn_implementation != "auto":
        padded = padded or f"model.attn_implementation is {settings.attn_implementation}"
    if kernels.choice is KernelChoice.plain:
        padded = f"kernels are plain ({kernels.reason})"
    head = empty.get_output_embeddings()  # which transformers does not quantise
    linear = sum(m.weight.numel() for m in empty.modules() if isinstance(m, nn.Linear) and m is not head)
    quantized = 0 if settings.quantization is None else linear
    itemsize = resolve_dtype(settings.dtype, device).itemsize
    of_layers = layer_sizes(config)
    decoder = decoder_layers(empty)
    layers, modules = tuple(sum(p.numel() for p in layer_weights(x)) for x in decoder), layer_modules(decoder)
    shapes: Mapping[str, tuple[int, ...]] = {}
    adapter, layer_kinds = NO_ADAPTER, ("", "", 0)
    if lora is not None:  # from here on its adapter is on the empty base
        shapes = fresh_shapes(empty, lora_config(lora, empty))
        layer_kinds = adapted_words(empty)
        adapter = AdapterLayers.of(shapes, dropout=lora.dropout > 0, dora=lora.use_dora)
    outputs = {name: shape[0] for name, shape in shapes.items() if ".lora_B" in name}
    inputs = {name.replace(".lora_A", ".lora_B"): shape[1] for name, shape in shapes.items() if ".lora_A" in name}
    adapted = [inputs[name] * outputs[name] for name in outputs]
    trained = shapes if lora is not None else {name: tuple(p.shape) for name, p in empty.named_parameters()}
    return ModelSizes(
        parameters=parameters,
        # bitsandbytes takes half a byte per weight and one byte per 64 weights for their scale (double quantisation).
        base_bytes=int(quantized * 0.516) + (parameters - quantized) * itemsize,
        itemsize=itemsize,
        lora=sum(math.prod(shape) for shape in shapes.values()),
        adapted=sum(adapted),
        largest_adapted=max(adapted, default=0),
        adapter=adapter,
        key_size=2 * sum(layer.keys for layer in of_layers),
        config=config.get_text_config(),
        padded=padded,
        kernels=kernels,
        modules=modules,
        linear=linear,
        layers=layers,
        layer_kinds=layer_kinds,
        widest_mlp=max(layer.mlp for layer in of_layers),
        matrices=sum(math.prod(shape) for name, shape in trained.items() if is_matrix(name, shape)),
        trained=() if lora is not None else tuple(map(math.prod, trained.values())),
    )


def on_a_gpu(demand: Demand, plan: Plan, device_memory: int, *, absent: bool, where: str = "cuda") -> Demand:
    """The demand on a GPU with `device_memory` bytes; on one in another machine (`where`, such as "cuda:1")
    `auto` may choose another engine."""
    device = None if absent else resolve_device(plan.config.model.device)
    where = where if device is None else str(device)
    kind, index = "cuda" if demand.device == "cpu" else demand.device, int(where.partition(":")[2] or 0)
    demand = replace(demand, device=kind, index=index, device_memory=device_memory)
    if device is not None and device.type == "cuda":
        demand = replace(demand, multiprocessors=multiprocessors(device))
    if demand.engine is None or not absent or plan.config.generation.engine != AUTO:
        return demand
    generation, lora, apart = plan.config.generation, plan.lora_settings, demand.work.apart > 0
    why_not = why_not_on_a_gpu(
        generation, lora, plan.config.model, whole=lora is None, apart=apart, is_absent=True, device=where
    )
    if why_not is not None:
        return demand
    engine = generation.named(ON_A_GPU)
    work = replace(demand.work, section=ON_A_GPU)
    return replace(demand, engine=engine.standalone() if apart else engine, work=work)


def sampling_of(run: SamplingRoot, name: str | None, decodings: Sequence[Decoding], apart: int = 0) -> dict[str, Any]:
    """The fields of a Demand about the engine of this name, or so many in other processes; empty if nothing samples."""
    if name is None:
        return {}
    engine = run.generation.named(name)
    here = isinstance(run, RunConfig) and not apart  # other commands use none
    drafts = (Drafts.of(run.generation, name, device, 1, in_process=here) for device in ROWS)
    work = EngineWork(
        section=section_of(name),
        decodings=tuple(decodings),
        max_tokens=run.generation.max_tokens,
        max_sequence_tokens=run.prompts.max_tokens + run.generation.max_tokens,
        draft_rows=max(0 if each is None else each.rows for each in drafts),
        apart=apart,
    )
    return {"engine": engine.standalone() if apart else engine, "work": work}


def learned_rewards(run: SamplingRoot) -> tuple[int, int]:
    """(number of learned rewards that are adapters on the base, bytes of the networks of the others)."""
    paths = [spec.kwargs.get("path") for spec in specs(run.reward).values() if spec.runs_in_trainer]
    networks = [Path(resolve_path(path)) for path in paths if path is not None and not is_adapter(path)]
    num_bytes = sum(file.stat().st_size for network in networks for file in network.glob("*.safetensors"))
    return len(paths) - len(networks), num_bytes


def of_training(prompts: PromptSet, held_out: PromptSet | None, run: RunConfig) -> list[Decoding]:
    """The decodings of a step's groups and, if there is one, of an evaluation."""
    shape = {"num_prompts": run.prompts_per_step, "samples": run.group_size}
    step = Decoding(**shape, longest=prompts.longest().token_ids, sampling=run.sampling)
    decodings = [step, *of_evaluation(held_out, run, run.sampling.drafts)]
    if run.environment:
        decodings += [of_a_later_round(decoding, run.generation.max_tokens) for decoding in decodings]
    return decodings


def of_a_later_round(first: Decoding, max_tokens: int) -> Decoding:
    """The decoding of a later turn, when half of `max_tokens` is sampled; each conversation is a prompt of its own."""
    sampled = tuple(first.longest[i % len(first.longest)] for i in range(max_tokens // 2))
    prompts = first.num_prompts * first.samples
    return replace(first, num_prompts=prompts, samples=1, longest=(*first.longest, *sampled))


def of_evaluation(held_out: PromptSet | None, run: RunConfig | SftConfig, drafts: Any = None) -> list[Decoding]:
    """The decoding of an evaluation; none if nothing is held out."""
    if held_out is None:
        return []
    settings, sampling = run.eval, run.eval.drawn(replace(run.generation.sampling, drafts=drafts))
    number = len(held_out.prompts[: settings.num_prompts])
    longest = held_out.longest(settings.num_prompts).token_ids
    return [Decoding(num_prompts=number, samples=settings.num_samples, longest=longest, sampling=sampling)]


def rows_of(lengths: Sequence[int], samples: int, run: SamplingRoot, number: float | None = None) -> Work:
    """`samples` completions of full length for each of `number` prompts (None: all) of the mean of these lengths."""
    return Work(
        prompts=len(lengths) if number is None else number,
        group=samples,
        prompt=fmean(lengths),
        completion=run.generation.max_tokens,
        budget=run.token_budget,
    )


def rehearse_decoding(
    generator: Generator, decodings: Sequence[Decoding], max_tokens: int, draft_rows: int = 0
) -> None:
    """Has the engine allocate as much memory as the longest rows of each decoding need: of an evaluation, and of later
    turns, before those of a step, which often need less."""
    for decoding in reversed(decodings):
        prompts = [decoding.longest] * decoding.num_prompts
        further = {"draft_rows": draft_rows, "sampling": decoding.sampling}
        rehearse(generator, prompts, decoding.samples, max_tokens, **further)


CHECKPOINT = 64 * 2**10  # bytes of a checkpoint besides its tensors: their names, state.json, MANIFEST
TEXT = 4  # bytes of a token's text, an upper bound of the average
TOKEN_ID, LOGPROB = 8, 24  # bytes of a token id, of a log-prob: digits and a comma
LOWERED_BY = {
    "checkpoints": "lower checkpoint.keep",
    "rollouts": "set rollouts.keep or a larger rollouts.every",
    "metrics": "raise eval.every",
    "samples": "lower num_prompts or n",
}
"""{part: how to make it smaller}, for the parts whose size depends on a key."""


def checkpoint_bytes(settings: CheckpointConfig, num_steps: int, demand: Demand, beside: int = 0) -> int:
    """The most bytes that the checkpoints of a run take at a time.

    beside: number of parameters of adapters that change without being trained, such as a moving reference.
    """
    bytes_of_one = FLOAT32 * (demand.networks.trainable + beside) + averages_bytes(demand) + CHECKPOINT
    number = 1 + (num_steps - 1) // settings.every if settings.every else 1
    return bytes_of_one * min(settings.keep + 1, number)  # the next one is complete before the oldest is deleted


def completion_bytes(config: SamplingRoot) -> int:
    """Bytes of the line with a completion of full length and its prompt."""
    return LINE + TEXT * config.generation.max_tokens + TEXT * config.prompts.max_tokens


def note_of_disk(parts: Mapping[str, int], folder: Path) -> str | None:
    """A warning if the run may write more than is free on the disk of its folder; None if the space suffices.

    Files already in the folder, for instance after an interruption, do not count.
    """
    needed = sum(parts.values()) - (size_of(folder) if folder.is_dir() else 0)
    free, _ = room(folder)
    if free is None or needed <= free:
        return None
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)
    remedies = [LOWERED_BY[name] for name, size in parts.items() if size and name in LOWERED_BY]
    problem = f"the run may write up to {size_text(needed)} ({listed}), and {size_text(free)} are free on the disk"
    return f"{problem} of {folder}: {', '.join(['free some', *remedies])}, or choose another folder (hydra.run.dir)"
