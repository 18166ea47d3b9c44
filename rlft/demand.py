"""What a planned run asks of memory: from each verb's plan to the sizes that `rlft.footprint` counts with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlft.check_adapters import empty_model, fresh_shapes
from rlft.footprint import Demand, ModelSizes, Sampled, model_sizes
from rlft.model.attention import obstacle
from rlft.model.backbone import read_config, resolve_device, resolve_dtype, resolve_path
from rlft.model.config import CriticKind, LoraSettings, ModelConfig, Old
from rlft.model.reward_model import is_adapter
from rlft.plan import Plan
from rlft.reward.spec import specs
from rlft.rm import RmPlan
from rlft.roots import SamplingRoot
from rlft.sft import SftPlan

TRANSFORMERS = "transformers"


def sizes_of(settings: ModelConfig, lora: LoraSettings | None) -> ModelSizes:
    """The base of this config, and one adapter on it (lora None: none)."""
    from peft import LoraConfig

    config = read_config(settings)
    empty = empty_model(settings, config)
    parameters, device = sum(p.numel() for p in empty.parameters()), resolve_device(settings.device)
    sliding = getattr(config.get_text_config(), "layer_types", None) or ()
    packed = (
        obstacle(empty) is None and settings.attn_implementation == "auto" and not any("sliding" in s for s in sliding)
    )
    shapes: Mapping[str, tuple[int, ...]] = {}
    if lora is not None:
        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        shapes = fresh_shapes(empty, LoraConfig(r=lora.rank, target_modules=targets, task_type="CAUSAL_LM"))
    return model_sizes(
        config,
        parameters,
        shapes,
        itemsize=resolve_dtype(settings.dtype, device).itemsize,
        quantized=settings.quantization is not None,
        packed=packed,
    )


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
        whole_model=False,
        prompt_tokens=plan.train_prompts.lengths.longest,
        completion_tokens=run.generation.max_tokens,
        group=run.group_size,
        rows=run.completions_per_step,
        update_rows=run.completions_per_step // run.minibatches,
        token_budget=run.token_budget,
        through_head=True,
        entropy=plan.algorithm.needs_entropy,
        recompute=recompute,
        own_critic=critic is CriticKind.adapter,
        sampled=_sampled(run, plan.engine, run.prompts_per_step, run.group_size, plan.train_prompts.lengths.longest),
        beside=sum(networks),
        device=resolve_device(run.model.device).type,
    )


def _of_sft(plan: SftPlan, model: ModelSizes, recompute: bool) -> Demand:
    """`rlft sft`: an adapter, or all weights of the model."""
    run, whole = plan.config, plan.config.lora is None
    prompt, completion = _longest_text(plan.train.texts)
    sampled = None
    if plan.held_out is not None:
        samples = run.eval.num_samples
        sampled = _sampled(run, plan.engine, run.eval.num_prompts, samples, plan.held_out.lengths.longest)
    return Demand(
        adapters=0 if whole else 1 + (sampled is not None),
        trainable=model.parameters if whole else model.lora,
        whole_model=whole,
        prompt_tokens=prompt,
        completion_tokens=completion,
        group=1,
        rows=run.examples_per_step,
        update_rows=run.examples_per_step,
        token_budget=run.token_budget,
        through_head=True,
        entropy=False,
        recompute=recompute,
        own_critic=False,
        sampled=sampled,
        beside=0,
        device=resolve_device(run.model.device).type,
    )


def _of_rm(plan: RmPlan, model: ModelSizes, recompute: bool) -> Demand:
    """`rlft rm`: an adapter and a scalar head; no LM head, no sampling."""
    run = plan.config
    group = max(len(ranking.scores) for ranking in plan.train.rankings)
    return Demand(
        adapters=2,  # a policy alone is made, and the reward beside it
        trainable=model.lora + model.hidden,
        whole_model=False,
        prompt_tokens=run.prompts.max_tokens,
        completion_tokens=run.max_completion_tokens,
        group=group,
        rows=run.rankings_per_step * group,
        update_rows=run.rankings_per_step * group,
        token_budget=run.token_budget,
        through_head=False,
        entropy=False,
        recompute=recompute,
        own_critic=False,
        sampled=None,
        beside=0,
        device=resolve_device(run.model.device).type,
    )


def _sampled(run: SamplingRoot, engine: str, prompts: int, group: int, prompt_tokens: int) -> Sampled | None:
    """What the engine decodes at a time on the trainer's base; None where the engine is elsewhere."""
    if engine != TRANSFORMERS:
        return None
    at_once = min(prompts, max(1, run.generation.transformers.batch_size // group))
    return Sampled(
        rows=at_once * group,
        prompts=at_once,
        prompt_tokens=prompt_tokens,
        completion_tokens=run.generation.max_tokens,
        weights=run.generation.transformers.weights,
    )


def _longest_text(texts: Any) -> tuple[int, int]:
    """(prompt, completion) tokens of the longest demonstration."""
    longest = max(texts, key=lambda text: len(text.ids))
    return longest.num_given, len(longest.ids) - longest.num_given


def _classifier_bytes(path: str | None) -> int:
    """The weights of a network of its own that a learned reward stands for; 0 for an adapter on the base."""
    if path is None or is_adapter(path):
        return 0
    return sum(file.stat().st_size for file in Path(resolve_path(path)).glob("*.safetensors"))
