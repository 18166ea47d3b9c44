"""What a planned run asks of memory: from each verb's plan to the sizes that `rlft.footprint` counts with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rlft.auto import AUTO
from rlft.check_adapters import empty_model, fresh_shapes
from rlft.decodings import Decoding, of_evaluation, of_training
from rlft.footprint import Demand, ModelSizes, Sampled, model_sizes
from rlft.model.adapter_folder import is_adapter
from rlft.model.backbone import read_config, resolve_device, resolve_dtype, resolve_path
from rlft.model.config import CriticKind, LoraSettings, ModelConfig, Old
from rlft.model.forward import known_refusal
from rlft.plan import Plan
from rlft.reward.spec import specs
from rlft.rm import RmPlan
from rlft.roots import SamplingRoot
from rlft.sft import SftPlan

TRANSFORMERS = "transformers"
CUDA_CONTEXT = 2**29
"""An allowance for a CUDA context and the kernels of its libraries; not measured."""


def sizes_of(settings: ModelConfig, lora: LoraSettings | None) -> ModelSizes:
    """The base of this config, and one adapter on it (lora None: none)."""
    from rlft.model.lora_config import lora_config

    config = read_config(settings)
    empty = empty_model(settings, config)
    parameters, device = sum(p.numel() for p in empty.parameters()), resolve_device(settings.device)
    packed = settings.attn_implementation == "auto" and known_refusal(empty) is None
    quantized = quantized_weights(empty) if settings.quantization is not None else 0
    shapes: Mapping[str, tuple[int, ...]] = {}
    if lora is not None:
        shapes = fresh_shapes(empty, lora_config(lora))
    return model_sizes(
        config,
        parameters,
        shapes,
        itemsize=resolve_dtype(settings.dtype, device).itemsize,
        quantized=quantized,
        packed=packed,
    )


def quantized_weights(model: PreTrainedModel) -> int:
    """Weights of the linear layers but the output head, which transformers leaves as it is (and embeddings too)."""
    head = model.get_output_embeddings()
    linear = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return sum(module.weight.numel() for module in linear)


def demand_of(plan: Plan | SftPlan | RmPlan, model: ModelSizes, recompute: bool) -> Demand:
    """Of a run of whichever verb; recompute: with gradient checkpointing."""
    if isinstance(plan, Plan):
        return _of_train(plan, model, recompute)
    if isinstance(plan, SftPlan):
        return _of_sft(plan, model, recompute)
    return _of_rm(plan, model, recompute)


def _of_train(plan: Plan, model: ModelSizes, recompute: bool) -> Demand:
    """`rlft train`: the policy with old, reference, critic and rewards as adapters beside it."""
    run = plan.config
    critic, snapshot = run.critic.kind, run.snapshot
    adapters = 1 + (snapshot.reference not in ("none", "base")) + (snapshot.old is Old.copy)
    adapters += (critic is CriticKind.adapter) + (plan.engine == TRANSFORMERS)
    rewards = [spec for spec in specs(run.reward).values() if spec.runs_in_trainer]
    networks = [_classifier_bytes(spec.kwargs.get("path")) for spec in rewards]
    adapters += networks.count(0)
    learning = 1 + (critic is CriticKind.adapter) + (run.reward_model.refresh_every > 0)
    return Demand(
        adapters=adapters,
        trainable=learning * model.lora + (critic is not CriticKind.none) * model.hidden,
        prompt_tokens=plan.train_prompts.lengths.longest,
        completion_tokens=run.generation.max_tokens,
        group=run.group_size,
        rows=run.completions_per_step,
        update_rows=run.completions_per_step // run.minibatches,
        token_budget=run.token_budget,
        entropy=plan.algorithm.needs_entropy,
        recompute=recompute,
        own_critic=critic is CriticKind.adapter,
        sampled=_sampled(run, plan.engine, of_training(plan.train_prompts, plan.held_out, run)),
        beside=sum(networks),
        device=resolve_device(run.model.device).type,
    )


def _of_sft(plan: SftPlan, model: ModelSizes, recompute: bool) -> Demand:
    """`rlft sft`: an adapter, or all weights of the model."""
    run, whole = plan.config, plan.config.lora is None
    prompt, completion = _longest_text(plan.train.texts)
    sampled = _sampled(run, plan.engine, of_evaluation(plan.held_out, run.eval))
    return Demand(
        adapters=0 if whole else 1 + bool(sampled),
        trainable=model.parameters if whole else model.lora,
        whole_model=whole,
        prompt_tokens=prompt,
        completion_tokens=completion,
        group=1,
        rows=run.examples_per_step,
        update_rows=run.examples_per_step,
        token_budget=run.token_budget,
        recompute=recompute,
        sampled=sampled,
        device=resolve_device(run.model.device).type,
    )


def _of_rm(plan: RmPlan, model: ModelSizes, recompute: bool) -> Demand:
    """`rlft rm`: an adapter and a scalar head; no LM head, no sampling."""
    run = plan.config
    group = max(len(ranking.scores) for ranking in plan.train.rankings)
    return Demand(
        adapters=2,  # a policy alone is made, and the reward beside it
        trainable=model.lora + model.hidden,
        prompt_tokens=run.prompts.max_tokens,
        completion_tokens=run.max_completion_tokens,
        group=group,
        rows=run.rankings_per_step * group,
        update_rows=run.rankings_per_step * group,
        token_budget=run.token_budget,
        through_head=False,
        recompute=recompute,
        device=resolve_device(run.model.device).type,
    )


def with_vllm(demand: Demand, plan: Plan | SftPlan | RmPlan, device_memory: int, *, absent: bool) -> Demand:
    """With vLLM's share of a GPU of that many bytes in place of decoding on the base, if it samples.

    absent: the GPU is not here, where `auto` will be vLLM.
    """
    if isinstance(plan, RmPlan) or (isinstance(plan, SftPlan) and plan.held_out is None):
        return demand
    will_be = absent and plan.config.generation.engine == AUTO and not _is_dora(plan.config.lora)
    if plan.engine != "vllm" and not will_be:
        return demand
    settings = plan.config.generation.vllm
    return replace(
        demand,
        adapters=demand.adapters - bool(demand.sampled),
        sampled=(),
        engine=int(settings.gpu_memory_utilization * device_memory),
        engine_sleeps=settings.sleep,
    )


def _is_dora(lora: LoraSettings | None) -> bool:
    """Whether `auto` is transformers everywhere, since vLLM serves no such adapters."""
    return lora is not None and lora.use_dora


def _sampled(run: SamplingRoot, engine: str, found: Iterable[Decoding]) -> tuple[Sampled, ...]:
    """What the engine decodes at a time on the trainer's base; nothing where the engine is elsewhere."""
    if engine != TRANSFORMERS:
        return ()
    settings = run.generation.transformers

    def at_once(decoding: Decoding) -> Sampled:
        prompts = min(decoding.num_prompts, max(1, settings.batch_size // decoding.samples))
        return Sampled(
            rows=prompts * decoding.samples,
            prompts=prompts,
            prompt_tokens=len(decoding.longest),
            completion_tokens=run.generation.max_tokens,
            weights=settings.weights,
        )

    return tuple(map(at_once, found))


def _longest_text(texts: Any) -> tuple[int, int]:
    """(prompt, completion) tokens of the longest demonstration."""
    longest = max(texts, key=lambda text: len(text.ids))
    return longest.num_given, len(longest.ids) - longest.num_given


def _classifier_bytes(path: str | None) -> int:
    """The weights of a network of its own that a learned reward stands for; 0 for an adapter on the base."""
    if path is None or is_adapter(path):
        return 0
    return sum(file.stat().st_size for file in Path(resolve_path(path)).glob("*.safetensors"))
