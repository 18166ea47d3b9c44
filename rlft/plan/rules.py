"""Rules between the parts of a config, all checked before a weight is loaded.

Rules that read the config alone import no library, so that a config is checked before torch is imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.algorithm.objective import Objective
from rlft.config.instantiate import instantiate, locate
from rlft.config.model import ALL_LINEAR, DEVICES, DTYPES, HEAD, LoraSettings, ModelConfig, check_local
from rlft.config.schema import (
    ANYWHERE,
    AUTO,
    ON_A_GPU,
    EvalConfig,
    GenerationConfig,
    RunConfig,
    ScoringConfig,
    own_engines,
    section_of,
)
from rlft.generation.engine import Engine
from rlft.model.positions import limit_of
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.system.disk import DiskError, writing
from rlft.system.files import atomic_folder
from rlft.types import Prompt, UserError

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedConfig


BYTES_OF_16_BITS = 2


def check(config: RunConfig, algorithm: Objective, *, trains: bool = True) -> None:
    """Checks the rules that need no rewards, model config or data; rules for roles are in `rlft.plan.roles`.

    Args:
        config: the typed config.
        algorithm: its algorithm.
        trains: False if the policy is only evaluated, so that it may be sampled in any way.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    check_name(config.name)
    _sizes(config, algorithm)
    if trains:
        _weights(config, algorithm)
        _sampling(config, algorithm)
        _overlap(config, algorithm)
    check_evaluation(config.eval, config.generation)
    check_time_limits(config.reward, config.scoring)
    check_engine(config.generation, config.model)
    _resampling(config, algorithm)
    check_members(config)
    check_model(config.model)
    check_served(config.generation, config.lora)


def check_name(name: str) -> None:
    """Refuses a run's name that cannot be a folder's name."""
    if not name.strip() or name == ".." or Path(name).name != name:
        problem = "names a folder under runs/, and must be one plain word or several"
        raise UserError("name", problem, got=name or "nothing", remedy="leave out slashes, for instance name=first_try")


def check_data(section: Mapping[str, Any], key: str = "data") -> None:
    """Makes the component that a section describes, and calls its `check()`, if it has one, which reads no file.

    Raises:
        UserError: a key of the component is wrong, mainly that of a file which does not exist.
    """
    check = getattr(instantiate(section, key), "check", None)
    if callable(check):
        check()


def _sizes(config: RunConfig, algorithm: Objective) -> None:
    if config.group_size < algorithm.min_group_size:
        raise UserError(
            "group_size",
            f"this algorithm compares siblings and needs at least {algorithm.min_group_size}",
            got=config.group_size,
            remedy=f"set group_size={max(8, algorithm.min_group_size)}",
        )
    if config.minibatches > config.prompts_per_step:
        raise UserError(
            "minibatches",
            f"whole groups are dealt to them, and a step has only prompts_per_step={config.prompts_per_step} groups",
            got=config.minibatches,
            remedy=f"use at most {config.prompts_per_step}",
        )
    if config.prompts_per_step % config.minibatches:
        divisors = [d for d in range(1, config.prompts_per_step + 1) if config.prompts_per_step % d == 0]
        raise UserError(
            "minibatches",
            f"does not divide prompts_per_step={config.prompts_per_step}",
            got=config.minibatches,
            remedy=f"use one of {', '.join(map(str, divisors))}",
        )
    longest = config.prompts.max_tokens + config.generation.max_tokens
    if config.token_budget < longest:
        raise UserError(
            "token_budget",
            f"the longest row may have prompts.max_tokens + generation.max_tokens = {longest} tokens",
            got=config.token_budget,
            remedy=f"set token_budget={longest} or more, or shorten the rows",
        )
    if config.pretrain.path is not None and config.token_budget < config.pretrain.max_tokens:
        raise UserError(
            "token_budget",
            f"a pretraining text may have pretrain.max_tokens={config.pretrain.max_tokens} tokens",
            got=config.token_budget,
            remedy=f"set token_budget={config.pretrain.max_tokens} or more, or a lower pretrain.max_tokens",
        )


def _weights(config: RunConfig, algorithm: Objective) -> None:
    rewards = config.reward
    if not rewards or not all(isinstance(keys, Mapping) and keys.get("weight") == 0 for keys in rewards.values()):
        return
    remedy = f"set for instance reward.{next(iter(rewards))}.weight=1"
    if not algorithm.needs_teacher:
        problem = "has no weight but 0: nothing would be learned"
        raise UserError("reward", problem, got=f"[{','.join(rewards)}]", remedy=remedy)
    if of_rewards := _reward_coef(config):
        problem = f"multiplies the advantages of rewards, and [{','.join(rewards)}] has no weight but 0"
        raise UserError("algorithm.reward_coef", problem, got=of_rewards, remedy=f"use 0, or {remedy}")


def _reward_coef(config: RunConfig) -> float:
    """What an algorithm with a teacher multiplies the advantages of the rewards with."""
    return config.algorithm.get("reward_coef", 0)


def _sampling(config: RunConfig, algorithm: Objective) -> None:
    generation = config.generation
    if generation.temperature == 0:
        raise UserError(
            "generation.temperature",
            "training needs completions that differ",
            got=0,
            remedy="use 1.0 (eval.temperature may be 0)",
        )
    if generation.min_p > 0:
        raise UserError(
            "generation.min_p",
            "leaves out tokens that the trainer's log-probs count, so that ratios and KL would be of another policy",
            got=generation.min_p,
            remedy="use 0 in training (rlft eval, rlft sample and rlft chat take it)",
        )
    distorting = "generation.top_p" if generation.top_p < 1 else "generation.top_k" if generation.top_k > 0 else None
    if distorting and algorithm.needs_teacher:
        raise UserError(
            distorting,
            "leaves out tokens that the teacher would judge, so that what is learned would be another divergence",
            got=getattr(generation, distorting.removeprefix("generation.")),
            remedy="use generation.top_p=1 generation.top_k=0",
        )
    compares_engine = algorithm.corrects_mismatch or config.snapshot.old == "sampled"
    if distorting and compares_engine:
        cause = "algorithm.mismatch" if algorithm.corrects_mismatch else "snapshot.old=sampled"
        raise UserError(
            distorting,
            f"{cause} compares the engine's log-probs with the trainer's, which only holds for undistorted sampling",
            got=getattr(generation, distorting.removeprefix("generation.")),
            remedy="use generation.top_p=1 generation.top_k=0, or algorithm.mismatch=off with snapshot.old=auto",
        )


def _overlap(config: RunConfig, algorithm: Objective) -> None:
    """Refuses overlap.lag where no importance weights correct for the older policy."""
    if not config.overlap.lag:
        return
    if not algorithm.corrects_mismatch:
        keys = config.algorithm
        level = "sequence" if keys.get("ratio") == "sequence" or keys.get("surrogate") == "gmpo" else "token"
        name = config.algorithm["_target_"].rpartition(".")[2]
        problem = "trains on what an earlier policy sampled, which needs importance weights (algorithm.mismatch)"
        raise UserError(
            "overlap.lag",
            problem,
            got=config.overlap.lag,
            remedy="set overlap.lag=0; Kimi has no such weights"
            if name == "Kimi"
            else f"set algorithm.mismatch={level}_truncate, or overlap.lag=0",
        )
    if config.snapshot.old == "sampled":
        raise UserError(
            "snapshot.old",
            "overlap.lag=1 corrects for the policy that sampled by log-probs of the one that is trained",
            got="sampled",
            remedy="use snapshot.old=auto or recompute, or overlap.lag=0",
        )


def check_lag_has_devices(config: RunConfig, device: str) -> None:
    """Refuses a lag where engine and trainer share a GPU, which gains nothing.

    Args:
        config: the typed config.
        device: the trainer's device, such as "cuda".
    """
    if config.overlap.lag and device != "cpu" and (not config.cluster.engines or config.cluster.placement == "pairs"):
        problem = "samples beside the update, and the engine shares the trainer's GPU, so that nothing would be gained"
        remedy = "give engines GPUs of their own (cluster.engines=1 cluster.placement=divided), or set overlap.lag=0"
        raise UserError("overlap.lag", problem, got=config.overlap.lag, remedy=remedy)


def check_evaluation(settings: EvalConfig, generation: GenerationConfig) -> None:
    """Checks how held-out prompts are sampled, and that eval.kl_base can be estimated from those samples."""
    temperature = settings.temperature
    if temperature is not None and temperature < 0:
        raise UserError(
            "eval.temperature", "must not be negative", got=temperature, remedy="use 0 for the most likely token"
        )
    samples_as_training = temperature in (None, generation.temperature)
    if settings.kl_base and settings.every and not samples_as_training:
        raise UserError(
            "eval.kl_base",
            f"is estimated from the policy's own samples, and eval.temperature={temperature:g} samples another one",
            got="true",
            remedy="set eval.temperature=null, or eval.kl_base=false",
        )
    is_truncated = generation.top_p < 1 or generation.top_k > 0 or generation.min_p > 0
    if settings.kl_base and settings.every and is_truncated:
        raise UserError(
            "eval.kl_base",
            "is estimated from the policy's own samples, and generation.top_p, top_k and min_p leave some of them out",
            got="true",
            remedy="use generation.top_p=1 generation.top_k=0 generation.min_p=0, or eval.kl_base=false",
        )


def check_engine(generation: GenerationConfig, model: ModelConfig) -> None:
    """Checks that the engine exists and that its keys fit together."""
    engine = ANYWHERE if generation.engine == AUTO else generation.engine
    section = section_of(engine)
    if section not in generation.engines:
        remedy = f"use auto, {', '.join(own_engines())}, or one of your own (docs/engines.md)"
        raise UserError("generation.engine", "is not an engine", got=engine, remedy=remedy)
    with _keys_of(engine):
        generation.named(engine).check(plain_kernels=model.kernels == "plain")


def check_members(config: RunConfig) -> None:
    """Checks the keys of `cluster` that are about engines in processes of their own, and about Ray."""
    cluster, engine = config.cluster, config.generation.engine
    if cluster.address is not None and cluster.kind == "local":
        remedy = "set cluster=ray, or leave it out"
        raise UserError("cluster.address", "is the address of a Ray cluster", got=cluster.address, remedy=remedy)
    if cluster.gpus_per_engine > 1 and not cluster.engines:
        problem = "applies to engines in processes of their own, and there are none"
        remedy = "set cluster.engines=1 or more, or leave it out"
        raise UserError("cluster.gpus_per_engine", problem, got=cluster.gpus_per_engine, remedy=remedy)
    if cluster.scoring and not config.scoring.workers:
        problem = "scoring.workers=0 scores in the run's own process"
        remedy = "set scoring.workers=1 or more, or leave it out"
        raise UserError("cluster.scoring", problem, got="true", remedy=remedy)
    if cluster.engines and engine != AUTO:
        check_apart(config, engine)


def check_apart(config: RunConfig, engine: str) -> None:
    """Checks that this engine can run in processes of its own, with `cluster.gpus_per_engine` GPUs each."""
    with _keys_of(engine):
        separate = config.generation.named(engine).standalone()
    separate.with_gpus(config.cluster.gpus_per_engine)


def _resampling(config: RunConfig, algorithm: Objective) -> None:
    if config.dynamic_sampling.max_rounds and algorithm.needs_teacher and not _reward_coef(config):
        raise UserError(
            "dynamic_sampling.max_rounds",
            "replaces groups of equal rewards, and a teacher teaches by their tokens all the same",
            got=config.dynamic_sampling.max_rounds,
            remedy="use 0",
        )
    if config.dynamic_sampling.max_rounds and config.group_size == 1:
        raise UserError(
            "dynamic_sampling.max_rounds",
            "replaces groups that are all right or all wrong, and with group_size=1 each of them is",
            got=config.dynamic_sampling.max_rounds,
            remedy="set group_size=8, or dynamic_sampling.max_rounds=0",
        )


def check_model(settings: ModelConfig) -> None:
    """Checks the model's keys by themselves: the folder exists, the device and the dtype are possible."""
    check_local(settings.path)
    if settings.device.partition(":")[0] not in DEVICES:
        remedy = "use auto, cpu, cuda or cuda:<n>"
        raise UserError("model.device", "is not a device", got=settings.device, remedy=remedy)
    if settings.dtype not in ("auto", *DTYPES):
        remedy = f"use auto, {', '.join(DTYPES)}"
        raise UserError("model.dtype", "is not a known dtype", got=settings.dtype, remedy=remedy)
    check_quantized_on(settings.quantization, settings.device)


def check_machine(settings: ModelConfig, *, runs_here: bool = True) -> None:
    """Checks that this machine has the model's device and libraries; imports torch and transformers, reads no file.

    Args:
        settings: the model's settings.
        runs_here: False if the run is only planned, so that the libraries for 4-bit weights may be missing.
    """
    from transformers import AttentionInterface

    from rlft.model.backbone import resolve_device, resolve_dtype

    device = resolve_device(settings.device)
    resolve_dtype(settings.dtype, device)
    if settings.attn_implementation not in ("auto", "eager", *AttentionInterface().valid_keys()):
        raise UserError(
            "model.attn_implementation",
            "is not known to transformers",
            got=settings.attn_implementation,
            remedy="use auto, sdpa or eager",
        )
    if runs_here:
        check_flash_attention(settings.attn_implementation)
        check_quantization(settings)


FLASH_ATTENTION = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn", "flash-attn-4"),
}
"""{value of model.attn_implementation: (the module that it needs, the package that installs this module)}."""


def check_flash_attention(implementation: str) -> None:
    """Requires the package of this attention, or `kernels`, through which transformers downloads its kernel."""
    module, package = FLASH_ATTENTION.get(implementation, ("", ""))
    if module and not any(importlib.util.find_spec(name) for name in (module, "kernels")):
        problem = f"{package} is not installed"
        raise UserError("model.attn_implementation", problem, got=implementation, remedy="use auto or sdpa")


def check_quantization(settings: ModelConfig) -> None:
    """Checks that this machine can load 4-bit weights, if they are configured."""
    check_quantized_device(settings)
    if settings.quantization is not None and not has_bitsandbytes():
        raise UserError(
            "model.quantization",
            "bitsandbytes is not installed",
            got=settings.quantization,
            remedy="pip install 'rlft[quantization]'",
        )


def check_quantized_device(settings: ModelConfig) -> None:
    """Checks that the model's device supports 4-bit weights, if they are configured."""
    from rlft.model.backbone import resolve_device

    check_quantized_on(settings.quantization, resolve_device(settings.device).type)


def check_quantized_on(quantization: str | None, device: str) -> None:
    """Checks that a device of this type supports quantised weights."""
    if quantization is not None and device.partition(":")[0] not in ("cuda", "auto"):
        raise UserError(
            "model.quantization",
            "4-bit weights need a CUDA device",
            got=quantization,
            remedy="set model.quantization=null",
        )


def check_served(generation: GenerationConfig, lora: LoraSettings) -> None:
    """Checks that the named engine serves adapters of this rank and kind."""
    check_pattern(lora)
    if generation.engine == AUTO:
        return
    engine = generation.named(generation.engine)
    if problem := too_large_a_rank(engine, lora):
        remedy = "lower it, or choose generation=transformers"
        raise UserError("lora.rank", problem, got=lora.rank, remedy=remedy)
    if lora.use_dora and not engine.serves_dora:
        remedy = "use generation=transformers, or lora.use_rslora=true instead"
        raise UserError("lora.use_dora", no_dora(engine), got="true", remedy=remedy)

    if lora.adapts_head and not engine.serves_head:
        remedy = "leave it out, or use generation=transformers"
        raise UserError("lora.target_modules", no_head(engine), got=HEAD, remedy=remedy)


def check_pattern(lora: LoraSettings) -> None:
    """Refuses a lora.target_modules that is no regular expression; a list is none."""
    if isinstance(lora.target_modules, str):
        try:
            re.compile(lora.target_modules)
        except re.error as error:
            problem, remedy = f"is not a regular expression ({error})", "use all-linear, or a list of layers' names"
            raise UserError("lora.target_modules", problem, got=lora.target_modules, remedy=remedy) from None


def too_large_a_rank(engine: Engine, lora: LoraSettings) -> str | None:
    """Why the engine cannot serve adapters of this rank; None if it can."""
    limit = engine.largest_rank
    return f"{engine.title} takes adapters up to rank {limit}" if limit is not None and lora.rank > limit else None


def no_dora(engine: Engine) -> str:
    """Why the engine cannot serve a DoRA adapter."""
    return f"{engine.title} serves no DoRA adapters"


def no_head(engine: Engine) -> str:
    """Why the engine cannot serve an adapter of the output layer."""
    return f"{engine.title} serves no adapters of {HEAD}"


def warnings(config: RunConfig, algorithm: Objective) -> tuple[str, ...]:
    """Warnings about valid settings that are usually mistakes, which the run prints at its start."""
    texts = [*algorithm.warnings]
    if (
        config.algorithm.get("kl_to") == "old"
        and config.algorithm.get("kl_coef", 0) > 0
        and config.updates_per_step == 1
    ):
        problem = "with one update per step the policy is still the old one, so the KL is 0"
        texts.append(f"algorithm.kl_to: {problem}, got old; use several epochs or minibatches")
    if config.algorithm.get("reward_aggregation") == "normalize_then_sum" and config.environment is None:
        weighted = [name for name, keys in config.reward.items() if keys.get("weight") != 0]
        if len(weighted) < 2:
            problem = "normalises several rewards one by one, and there is one that counts"
            texts.append(
                f"algorithm.reward_aggregation: {problem}, got reward=[{','.join(weighted)}]; use algorithm=grpo"
            )
    if config.dynamic_sampling.max_rounds and algorithm.needs_teacher:
        problem = "also replaces groups of equal rewards, by whose tokens a teacher teaches"
        texts.append(f"dynamic_sampling.max_rounds: {problem}, got {config.dynamic_sampling.max_rounds}; use 0")
    generation = config.generation
    truncating = [("top_p", generation.top_p)] if generation.top_p < 1 else []
    truncating += [("top_k", generation.top_k)] if generation.top_k > 0 else []
    for key, value in truncating:
        problem = "leaves out unlikely tokens that the trained policy could have sampled, so its gradient is biased"
        texts.append(f"generation.{key}: {problem}, got {value:g}; use generation.top_p=1 generation.top_k=0")
    return tuple(texts)


def warnings_of_sizes(config: RunConfig, num_train: int | None, num_held_out: int | None) -> tuple[str, ...]:
    """Warnings about a run that needs more prompts than exist; a number is None if no such prompts are sampled."""
    texts = []
    if num_train is not None and config.prompts_per_step > num_train:
        problem = f"there are only {num_train} train prompts, so that each step has some of them more than once"
        texts.append(
            f"prompts_per_step: {problem}, got {config.prompts_per_step}; use at most {num_train}, or more data"
        )
    if num_held_out is not None and config.eval.num_prompts > num_held_out:
        problem = f"there are only {num_held_out} held-out prompts, and an evaluation samples each of them once"
        texts.append(f"eval.num_prompts: {problem}, got {config.eval.num_prompts}; use at most {num_held_out}")
    return tuple(texts)


def check_context(config: RunConfig, model: PreTrainedConfig) -> None:
    """Checks that the longest row and text are within the model's limit, according to its config.json."""
    check_row(config.prompts.max_tokens, config.generation.max_tokens, "generation.max_tokens", model)
    limit = limit_of(model)
    if limit is not None and config.pretrain.path is not None and config.pretrain.max_tokens > limit.tokens:
        raise UserError(
            "pretrain.max_tokens",
            f"exceeds the model's {limit.words}",
            got=config.pretrain.max_tokens,
            remedy=f"use at most {limit.tokens}",
        )


def check_row(prompt_tokens: int, completion_tokens: int, key: str, model: PreTrainedConfig) -> None:
    """Checks that a prompt and a completion of these lengths are within the model's limit for a row.

    `key` is the key of the completion's length.
    """
    limit = limit_of(model)
    if limit is None or prompt_tokens + completion_tokens <= limit.tokens:
        return
    if prompt_tokens >= limit.tokens:  # no completion fits, however short
        half = limit.tokens // 2
        raise UserError(
            "prompts.max_tokens",
            f"leaves no room for a completion in the model's {limit.words}",
            got=prompt_tokens,
            remedy=f"lower it, for instance to {half}, and {key} to {limit.tokens - half}",
        )
    raise UserError(
        key,
        f"with prompts.max_tokens={prompt_tokens} it exceeds the model's {limit.words}",
        got=completion_tokens,
        remedy=f"use at most {limit.tokens - prompt_tokens}, or lower prompts.max_tokens",
    )


def check_budget(token_budget: int, longest: int, of_what: str) -> None:
    """Checks that the longest possible row of a supervised run fits the token budget."""
    if token_budget < longest:
        problem = f"the longest row may have {longest} tokens ({of_what})"
        raise UserError("token_budget", problem, got=token_budget, remedy=f"set token_budget={longest} or more")


def check_enough(key: str, configured: int, needed: int, available: int, of_what: str) -> None:
    """Checks that there are enough examples for one update.

    Args:
        key: the config key that sets how many an update needs.
        configured: the value of that key.
        needed: how many examples an update needs.
        available: how many examples there are.
        of_what: what the examples are called in the refusal.
    """
    if available < needed:
        problem = f"there are only {available} {of_what} to train on"
        raise UserError(
            key, problem, got=configured, remedy=f"use at most {available}" if available else "name other data"
        )


def check_targets(lora: LoraSettings, settings: ModelConfig, model: PreTrainedConfig) -> None:
    """Checks that lora.target_modules names linear layers that can learn, with weights of their own; loads no weights.

    An adapter on a weight that another module shares could not be exported as a model, and engines do not serve it.
    """
    targets = lora.target_modules
    if targets == ALL_LINEAR:
        return
    check_pattern(lora)
    import torch

    from rlft.model.adaptable import left_out, linear_layers
    from rlft.plan.adapters import empty_model

    empty = empty_model(settings, model)
    modules, without = dict(empty.named_modules()), left_out(empty)
    layers = {*linear_layers(empty), *(name for name, module in modules.items() if isinstance(module, torch.nn.Linear))}
    names = sorted({name.rpartition(".")[2] for name in linear_layers(empty).keys() - without.keys()})
    remedy = f"use all-linear, or a list of {', '.join(names)}"
    of_weight: dict[int | None, list[str]] = defaultdict(list)
    for name, module in modules.items():
        if _weight(module) is not None:
            of_weight[_weight(module)].append(name)
    for target in [targets] if isinstance(targets, str) else targets:
        named = [name for name in modules if _is_target(name, target, targets)]
        if not layers.intersection(named):
            problem = "the model has no linear layer of that name"
            raise UserError("lora.target_modules", problem, got=target, remedy=remedy)
        if without.keys() >= layers.intersection(named):
            why = next(without[name] for name in named if name in without)
            problem = f"names no layer that an adapter can learn on: {why}"
            raise UserError("lora.target_modules", problem, got=target, remedy=remedy)
        for name in named:
            if name not in layers:
                problem = f"{name or 'the model'} would be adapted, too, which is no linear layer"
                raise UserError("lora.target_modules", problem, got=target, remedy=remedy)
            sharing = [other for other in of_weight.get(_weight(modules[name]), []) if other != name]
            if sharing:
                problem = f"the weights of {name} are those of {sharing[0]}, so that its adapter could not be exported"
                raise UserError("lora.target_modules", problem, got=target, remedy=remedy)


def _is_target(name: str, target: str, targets: str | Sequence[str]) -> bool:
    """As in PEFT, a text is a regular expression over whole names, and a list holds ends of names."""
    return bool(re.fullmatch(target, name)) if isinstance(targets, str) else f".{name}".endswith(f".{target}")


def _weight(module: Module) -> int | None:
    """Identifies a module's weight, also on the meta device, where every address is 0; None if it has none."""
    weight = getattr(module, "weight", None)
    return None if weight is None else id(weight)


def check_adapted(
    engine: Engine, lora: LoraSettings, settings: ModelConfig, model: PreTrainedConfig, folder: str | None = None
) -> None:
    """Checks that the engine can load an adapter of these settings.

    folder: the adapter's, where the key `adapter` names one.
    """
    from rlft.plan.adapters import modules_to_adapt

    problem = engine.unserved(lambda: sorted(modules_to_adapt(lora, settings, model)))
    if problem is not None:
        if folder is not None:
            raise UserError("adapter", problem, got=folder, remedy="use generation=transformers")
        remedy = "name other layers, such as [q_proj,v_proj], or use generation=transformers"
        raise UserError("lora.target_modules", problem, got=lora.target_modules, remedy=remedy)


def check_time_limits(rewards: Mapping[str, Any], scoring: ScoringConfig) -> None:
    """Refuses a reward whose group_timeout is longer than the scorer's time limit."""
    for name, keys in rewards.items():
        group_timeout = keys.get("group_timeout") if isinstance(keys, Mapping) else None
        if isinstance(group_timeout, int | float) and group_timeout > scoring.timeout:
            problem = f"exceeds scoring.timeout={scoring.timeout:g}, which cuts the reward off"
            remedy = f"leave it out and set scoring.timeout={group_timeout:g}"
            raise UserError(f"reward.{name}.group_timeout", problem, got=f"{group_timeout:g}", remedy=remedy)


def check_stops_and_rewards(generation: GenerationConfig, rewards: Mapping[str, RewardSpec]) -> None:
    """Refuses a stop string that is cut off the text although a reward looks for it, such as a closing tag."""
    sampling = generation.sampling
    if sampling.include_stop_str_in_output:
        return
    for name, spec in rewards.items():
        for closing in (f"</{tag}>" for tag in _tags(spec.kwargs)):
            for stop in (stop for stop in sampling.stop if stop in closing or closing in stop):
                problem = f"is cut off the text, in which reward.{name} looks for {closing}"
                remedy = "set generation.include_stop_str_in_output=true, or use another stop string"
                raise UserError("generation.stop", problem, got=stop, remedy=remedy)


def _tags(kwargs: Mapping[str, Any]) -> Sequence[str]:
    """The names of the tags that a reward with these keys looks for."""
    tags = kwargs.get("tags") if kwargs.get("pattern") is None else None
    if isinstance(tags, Sequence) and not isinstance(tags, str):
        return tags
    location = kwargs.get("answer_in", kwargs.get("program_in"))
    return [kwargs["tag"]] if location == "tag" and isinstance(kwargs.get("tag"), str) else []


def check_metadata(rewards: Mapping[str, RewardSpec], prompt: Prompt) -> None:
    """Checks that the prompt's metadata have the fields that a reward reads (`needs_metadata`, `metadata_keys`)."""
    for name, spec in rewards.items():
        needed = getattr(locate(spec.target, f"reward.{name}._target_"), "needs_metadata", None)
        if needed is not None and needed not in prompt.metadata:
            raise UserError(
                f"reward.{name}",
                f"scores prompts of data={needed} only",
                got=f"prompt {prompt.id}",
                remedy=f"use data={needed}, or another reward",
            )
        for column in (column for column in spec.columns if column not in prompt.metadata):
            raise UserError(
                f"reward.{name}",
                f"{spec.target} takes {column}, and the data keep no such field with their prompts, "
                f"only {list(prompt.metadata) or 'none'}",
                remedy=f"set data.metadata_fields=[{column}], or give it a value in the reward's YAML",
            )
        for key in getattr(locate(spec.target, f"reward.{name}._target_"), "metadata_keys", ()):
            field = spec.kwargs.get(key)
            if field is not None and field not in prompt.metadata:
                raise UserError(
                    f"reward.{name}.{key}",
                    f"the data keep no such field with their prompts, only {list(prompt.metadata) or 'none'}",
                    got=field,
                    remedy=f"set data.metadata_fields=[{field}]",
                )


def check_fresh_prompts(config: RunConfig, num_prompts: int) -> None:
    """Checks that dynamic sampling has train prompts besides those of the step."""
    if config.dynamic_sampling.max_rounds and num_prompts <= config.prompts_per_step:
        raise UserError(
            "dynamic_sampling.max_rounds",
            f"samples fresh prompts, and all {num_prompts} train prompts are in each step",
            got=config.dynamic_sampling.max_rounds,
            remedy="use a lower prompts_per_step or more data, or dynamic_sampling.max_rounds=0",
        )


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed; does not import it."""
    return importlib.util.find_spec("bitsandbytes") is not None


def choose_engine(
    generation: GenerationConfig,
    model: ModelConfig,
    lora: LoraSettings | None = None,
    *,
    runs_here: bool = True,
    whole: bool = False,
) -> tuple[str, str]:
    """(engine, reason), with `auto` resolved: vLLM if it is installed and there is a GPU, else transformers.

    Args:
        generation: the `generation` section of the config.
        model: the settings of the trainer's base; the engine's keys are checked against them if `runs_here`.
        lora: the shape of the adapters that the engine will load; None if it loads none.
        runs_here: False if the run is only planned, which needs no engine.
        whole: whether a whole model is trained.
    """
    name, reason = _chosen(generation, lora, runs_here=runs_here, whole=whole)
    if runs_here:
        from rlft.model.backbone import resolve_device, resolve_dtype

        device = resolve_device(model.device)
        itemsize = resolve_dtype(model.dtype, device).itemsize
        check_engine_on(generation, name, str(device), itemsize=itemsize, quantized=model.quantization is not None)
    return name, reason


def resolve_mismatch(config: RunConfig, algorithm: Objective, engine: str, *, itemsize: int) -> Objective:
    """The algorithm with `algorithm.mismatch: auto` resolved for this engine.

    It is off where sampling is distorted, which a correction cannot undo, and with `snapshot.old: sampled`, which takes
    the engine's log-probs for the trainer's.

    Args:
        config: the typed config.
        algorithm: its algorithm.
        engine: the name of the engine that samples.
        itemsize: bytes of a weight of the trainer's base.
    """
    generation, chosen = config.generation, config.generation.named(engine)
    differs = chosen.rounds_apart and (itemsize <= BYTES_OF_16_BITS or chosen.rounds)
    undistorted = generation.top_p == 1 and generation.top_k == 0 and config.snapshot.old != "sampled"
    return algorithm.with_mismatch_of(rounds_apart=differs and undistorted)


def check_engine_on(generation: GenerationConfig, engine: str, device: str, *, itemsize: int, quantized: bool) -> None:
    """Checks the engine's keys against the trainer's device and base.

    Args:
        generation: the `generation` section of the config.
        engine: the name of the engine.
        device: the trainer's device, such as "cuda:1".
        itemsize: bytes of one weight of the trainer's base.
        quantized: whether the trainer's base is quantised.
    """
    with _keys_of(engine):
        generation.named(engine).check_device(device=device, itemsize=itemsize, quantized=quantized)


@contextmanager
def _keys_of(engine: str) -> Iterator[None]:
    """Prefixes the keys of UserErrors raised inside with the engine's section."""
    try:
        yield
    except UserError as error:
        key = f"generation.{section_of(engine)}.{error.key}"
        raise UserError(key, error.problem, got=error.got, remedy=error.remedy) from None


def _chosen(
    generation: GenerationConfig, lora: LoraSettings | None, *, runs_here: bool, whole: bool
) -> tuple[str, str]:
    name = generation.engine
    if name != AUTO:
        missing = generation.named(name).missing() if runs_here else None
        if missing is not None:
            raise UserError("generation.engine", missing.problem, got=name, remedy=missing.remedy)
        return name, "as asked"
    import torch

    if not torch.cuda.is_available():
        return ANYWHERE, "no GPU here"
    reason = why_not_on_a_gpu(generation, lora, whole=whole)
    return (ON_A_GPU, "installed, with a GPU") if reason is None else (ANYWHERE, reason)


def why_not_on_a_gpu(
    generation: GenerationConfig, lora: LoraSettings | None, *, whole: bool = False, is_absent: bool = False
) -> str | None:
    """Why `auto` does not choose the engine for GPUs on a GPU; None if it does.

    With `is_absent`, the GPU is in another machine, on which that engine is assumed to be installed.
    """
    engine = generation.named(ON_A_GPU)
    if whole and not engine.serves_whole_models:
        return f"{engine.title} serves adapters only"
    if lora is not None and lora.use_dora and not engine.serves_dora:
        return no_dora(engine)
    if lora is not None and lora.adapts_head and not engine.serves_head:
        return no_head(engine)
    if lora is not None and (problem := too_large_a_rank(engine, lora)):
        return problem
    missing = None if is_absent else engine.missing()
    return None if missing is None else missing.problem


WRITTEN = (
    "config.yaml",
    "status.json",
    "metrics.jsonl",
    "eval.jsonl",
    "alarms.jsonl",
    "progress.json",
    "samples.jsonl",
)
"""Files that runs write."""


def check_writable(folder: Path, key: str = "hydra.run.dir") -> None:
    """Refuses a run folder that cannot be created, written to, flushed or renamed in.

    It also refuses a file with the name of a folder that runs write, and the reverse.
    """
    for name in (name for name in WRITTEN if (folder / name).is_dir()):
        raise UserError(key, f"its {name} is a folder instead of a file", got=folder, remedy="remove that folder")
    for name in (name for name in ("checkpoints", "rollouts") if (folder / name).is_file()):
        raise UserError(key, f"its {name} is a file instead of a folder", got=folder, remedy="remove that file")
    probe = folder / ".rlft_write_probe"
    try:
        # A kill here leaves the probe, which the next check replaces.
        with atomic_folder(probe, folder / ".rlft_write_probe.writing", replaces=True) as written, writing(written):
            (written / "file").touch()
    except DiskError as error:
        if not error.is_of_the_name:
            raise
        problem = f"cannot be written ({os.strerror(error.code)})"
        raise UserError(key, problem, got=folder, remedy="choose another folder") from None
    finally:
        shutil.rmtree(probe, ignore_errors=True)
