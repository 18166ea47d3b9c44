"""Rules between the sections of a config, which import no library and read no file.

Like every check of this room, they raise a UserError with the key, what is wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.algorithm.objective import Objective
from rlft.config.instantiate import instantiate
from rlft.config.schema import AUTO, EvalConfig, GenerationConfig, RunConfig, section_of
from rlft.config.trainer import ClusterConfig
from rlft.generation.pool import units_of
from rlft.plan.learner_rules import check_learner
from rlft.plan.model_rules import check_apart, check_engine, check_model
from rlft.plan.scoring_rules import check_time_limits
from rlft.system.device import kind_of
from rlft.types import UserError, are, counted, require

if TYPE_CHECKING:
    import torch


def check_run(config: RunConfig, algorithm: Objective, *, trains: bool = True) -> None:
    """Checks the rules that need no rewards, model config or data; rules for roles are in `rlft.plan.roles`.

    trains: False if the policy is only evaluated, so that it may be sampled in any way.
    """
    check_name(config.name)
    _sizes(config, algorithm)
    if trains:
        _weights(config, algorithm)
        _sampling(config, algorithm)
        _overlap(config, algorithm)
        _curriculum(config)
    check_evaluation(config.eval, config.generation)
    check_time_limits(config.reward, config.scoring)
    check_engine(config.generation, config.model)
    _resampling(config, algorithm)
    check_members(config)
    check_model(config.model)
    check_learner(config)


def check_name(name: str) -> None:
    """Refuses a run's name that cannot be a folder's name."""
    if not name.strip() or name == ".." or Path(name).name != name:
        problem = "names a folder under runs/, and must be one plain word or several"
        raise UserError("name", problem, got=name or "nothing", remedy="leave out slashes, for instance name=first_try")


def check_data(section: Mapping[str, Any], key: str = "data") -> None:
    """Makes the component that a section describes, and calls its `check()`, if it has one, which reads no file."""
    check = getattr(instantiate(section, key), "check", None)
    if callable(check):
        check()


def _sizes(config: RunConfig, algorithm: Objective) -> None:
    problem = f"this algorithm compares siblings and needs at least {algorithm.min_group_size}"
    remedy = f"set group_size={max(8, algorithm.min_group_size)}"
    require(config.group_size >= algorithm.min_group_size, "group_size", problem, got=config.group_size, remedy=remedy)
    batches, groups = config.minibatches, config.prompts_per_step
    problem = f"whole groups are dealt to them, and a step has only prompts_per_step={counted(groups, 'group')}"
    require(batches <= groups, "minibatches", problem, got=batches, remedy=f"use at most {groups}")
    if groups % batches:
        problem, remedy = f"does not divide prompts_per_step={groups}", f"use one of {divisors_of(groups)}"
        raise UserError("minibatches", problem, got=batches, remedy=remedy)
    longest = config.prompts.max_tokens + config.generation.max_tokens
    problem = f"the longest row may have prompts.max_tokens + generation.max_tokens = {counted(longest, 'token')}"
    remedy = f"set token_budget={longest} or more, or shorten the rows"
    require(config.token_budget >= longest, "token_budget", problem, got=config.token_budget, remedy=remedy)
    if config.pretrain.path is not None and config.token_budget < config.pretrain.max_tokens:
        problem = f"a pretraining text may have pretrain.max_tokens={counted(config.pretrain.max_tokens, 'token')}"
        remedy = f"set token_budget={config.pretrain.max_tokens} or more, or a lower pretrain.max_tokens"
        raise UserError("token_budget", problem, got=config.token_budget, remedy=remedy)


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
        remedy = "use 1.0 (eval.temperature may be 0)"
        raise UserError("generation.temperature", "training needs completions that differ", got=0, remedy=remedy)
    problem = "leaves out tokens that the trainer's log-probs count, so that ratios and KL would be of another policy"
    remedy = "use 0 in training (rlft eval, rlft sample and rlft chat take it)"
    require(generation.min_p <= 0, "generation.min_p", problem, got=generation.min_p, remedy=remedy)
    distorting = "generation.top_p" if generation.top_p < 1 else "generation.top_k" if generation.top_k > 0 else None
    if distorting is None:
        return
    got = getattr(generation, distorting.removeprefix("generation."))
    remedy = "use generation.top_p=1 generation.top_k=0"
    problem = "leaves out tokens that the teacher would judge, so that what is learned would be another divergence"
    require(not algorithm.needs_teacher, distorting, problem, got=got, remedy=remedy)
    if algorithm.corrects_mismatch or config.snapshot.old == "sampled":
        cause = "algorithm.mismatch" if algorithm.corrects_mismatch else "snapshot.old=sampled"
        problem = "compares the engine's log-probs with the trainer's, which only holds for undistorted sampling"
        remedy += ", or algorithm.mismatch=off with snapshot.old=auto"
        raise UserError(distorting, f"{cause} {problem}", got=got, remedy=remedy)


def _overlap(config: RunConfig, algorithm: Objective) -> None:
    """Refuses overlap.lag where no importance weights correct for the older policy."""
    if not config.overlap.lag:
        return
    if not algorithm.corrects_mismatch:
        keys = config.algorithm
        level = "sequence" if keys.get("ratio") == "sequence" or keys.get("surrogate") == "gmpo" else "token"
        name = config.algorithm["_target_"].rpartition(".")[2]
        problem = "trains on what an earlier policy sampled, which needs importance weights (algorithm.mismatch)"
        remedy = f"set algorithm.mismatch={level}_truncate, or overlap.lag=0"
        if name == "Kimi":
            remedy = "set overlap.lag=0; Kimi has no such weights"
        raise UserError("overlap.lag", problem, got=config.overlap.lag, remedy=remedy)
    problem = "overlap.lag=1 corrects for the policy that sampled by log-probs of the one that is trained"
    remedy = "use snapshot.old=auto or recompute, or overlap.lag=0"
    require(config.snapshot.old != "sampled", "snapshot.old", problem, got="sampled", remedy=remedy)


def check_lag_has_devices(config: RunConfig, device: str) -> None:
    """Refuses a lag where engine and trainer share a GPU (`device` is the trainer's), which gains nothing."""
    if config.overlap.lag and device != "cpu" and (not config.cluster.engines or config.cluster.placement == "pairs"):
        problem = "samples beside the update, and the engine shares the trainer's GPU, so that nothing would be gained"
        remedy = "give engines GPUs of their own (cluster.engines=1 cluster.placement=divided), or set overlap.lag=0"
        raise UserError("overlap.lag", problem, got=config.overlap.lag, remedy=remedy)


def check_cluster_has_devices(cluster: ClusterConfig, device: torch.device) -> None:
    """Refuses engines and ranks in other processes on devices whose processes cannot exchange tensors."""
    kind = kind_of(device)
    for key, number, alone in (("cluster.ranks", cluster.ranks, 1), ("cluster.engines", cluster.engines, 0)):
        problem = f"other processes need CPUs or CUDA devices, and model.device is {kind.title}"
        require(kind.collective or number <= alone, key, problem, got=number, remedy=f"set {key}={alone}")


def check_evaluation(settings: EvalConfig, generation: GenerationConfig) -> None:
    """Checks how held-out prompts are sampled, and that eval.kl_base can be estimated from those samples."""
    temperature = settings.temperature
    if temperature is not None and temperature < 0:
        remedy = "use 0 for the most likely token"
        raise UserError("eval.temperature", "must not be negative", got=temperature, remedy=remedy)
    if not settings.kl_base or not settings.every:
        return
    own_samples = "is estimated from the policy's own samples, and"
    if temperature not in (None, generation.temperature):
        problem = f"{own_samples} eval.temperature={temperature:g} samples another one"
        remedy = "set eval.temperature=null, or eval.kl_base=false"
        raise UserError("eval.kl_base", problem, got="true", remedy=remedy)
    is_truncated = generation.top_p < 1 or generation.top_k > 0 or generation.min_p > 0
    problem = f"{own_samples} generation.top_p, top_k and min_p leave some of them out"
    remedy = "use generation.top_p=1 generation.top_k=0 generation.min_p=0, or eval.kl_base=false"
    require(not is_truncated, "eval.kl_base", problem, got="true", remedy=remedy)


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


def _resampling(config: RunConfig, algorithm: Objective) -> None:
    rounds, key = config.dynamic_sampling.max_rounds, "dynamic_sampling.max_rounds"
    if rounds:
        problem = "replaces groups of equal rewards, and a teacher teaches by their tokens all the same"
        require(not algorithm.needs_teacher or _reward_coef(config), key, problem, got=rounds, remedy="use 0")
        problem = "replaces groups that are all right or all wrong, and with group_size=1 each of them is"
        remedy = "set group_size=8, or dynamic_sampling.max_rounds=0"
        require(config.group_size != 1, key, problem, got=rounds, remedy=remedy)


def _curriculum(config: RunConfig) -> None:
    settings = config.curriculum
    if settings is None:
        return
    above, below = settings.above, settings.below
    for key, value in (("above", above), ("below", below), ("replay", settings.replay or None)):
        problem, remedy = "is read where pass rates are known", "set curriculum.running=true or curriculum.path"
        require(settings.is_on or value is None, f"curriculum.{key}", problem, got=value, remedy=remedy)
    problem = f"is not below curriculum.below={below}, so that every prompt would be left out"
    is_open = above is None or below is None or above < below
    require(is_open, "curriculum.above", problem, got=above, remedy="use a lower one")
    key, got = ("curriculum.path", settings.path) if settings.path else ("curriculum.running", "true")
    problem = "counts completions that are right by the first reward, and there is none"
    has_reward = bool(config.reward) or (config.environment is not None and settings.path is None)
    require(not settings.is_on or has_reward, key, problem, got=got, remedy="set reward=[exact_match]")


def warnings_of_config(config: RunConfig, algorithm: Objective) -> tuple[str, ...]:
    """Warnings about valid settings that are usually mistakes, which the run prints at its start."""
    texts, keys, generation = [*algorithm.warnings], config.algorithm, config.generation
    if keys.get("kl_to") == "old" and keys.get("kl_coef", 0) > 0 and config.updates_per_step == 1:
        problem = "with one update per step the policy is still the old one, so the KL is 0"
        texts.append(f"algorithm.kl_to: {problem}, got old; use several epochs or minibatches")
    if config.snapshot.routing == "old" and config.updates_per_step == 1:
        problem = "with one update per step the policy is still the old one and chooses the same experts"
        texts.append(f"snapshot.routing: {problem}, got old; use free or engine, or several epochs or minibatches")
    if keys.get("reward_aggregation") == "normalize_then_sum" and config.environment is None:
        weighted = [name for name, section in config.reward.items() if section.get("weight") != 0]
        if len(weighted) < 2:
            problem = "normalises several rewards one by one, and there is one that counts"
            problem += f", got reward=[{','.join(weighted)}]"
            texts.append(f"algorithm.reward_aggregation: {problem}; use algorithm=grpo")
    if config.dynamic_sampling.max_rounds and algorithm.needs_teacher:
        problem = "also replaces groups of equal rewards, by whose tokens a teacher teaches"
        texts.append(f"dynamic_sampling.max_rounds: {problem}, got {config.dynamic_sampling.max_rounds}; use 0")
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
        problem = f"there {are(num_train)} only {counted(num_train, 'train prompt')}"
        problem += ", so that each step has some of them more than once"
        problem += f", got {config.prompts_per_step}"
        texts.append(f"prompts_per_step: {problem}; use at most {num_train}, or more data")
    if num_held_out is not None and config.eval.num_prompts > num_held_out:
        problem = f"there {are(num_held_out)} only {counted(num_held_out, 'held-out prompt')}"
        problem += ", and an evaluation samples each of them once"
        texts.append(f"eval.num_prompts: {problem}, got {config.eval.num_prompts}; use at most {num_held_out}")
    return tuple(texts)


def check_budget(token_budget: int, longest: int, of_what: str) -> None:
    """Checks that the longest possible row of a supervised run fits the token budget."""
    problem = f"the longest row may have {counted(longest, 'token')} ({of_what})"
    remedy = f"set token_budget={longest} or more"
    require(token_budget >= longest, "token_budget", problem, got=token_budget, remedy=remedy)


def check_enough(key: str, configured: int, needed: int, available: int, of_what: str) -> None:
    """Checks that there are enough examples for one update, whose number the key sets."""
    remedy = f"use at most {available}" if available else "name other data"
    problem = f"there {are(available)} only {counted(available, of_what)} to train on"
    require(available >= needed, key, problem, got=configured, remedy=remedy)


def check_fresh_prompts(config: RunConfig, num_prompts: int) -> None:
    """Checks that dynamic sampling has train prompts besides those of the step."""
    if config.dynamic_sampling.max_rounds and num_prompts <= config.prompts_per_step:
        problem = f"samples fresh prompts, and all {num_prompts} train prompts are in each step"
        remedy = "use a lower prompts_per_step or more data, or dynamic_sampling.max_rounds=0"
        raise UserError("dynamic_sampling.max_rounds", problem, got=config.dynamic_sampling.max_rounds, remedy=remedy)


def check_ranks(cluster: ClusterConfig) -> None:
    """Refuses a number of ranks among which the lanes cannot be divided evenly."""
    lanes, sharing = cluster.num_lanes, cluster.sequence_ranks
    if lanes % (cluster.ranks // sharing):
        of_ranks = f" times cluster.sequence_ranks={sharing}" * (sharing > 1)
        problem = f"does not divide cluster.lanes={lanes}{of_ranks}, which a run keeps from its first step"
        remedy = f"use one of {divisors_of(lanes, sharing)}, or begin a run with other lanes"
        raise UserError("cluster.ranks", problem, got=cluster.ranks, remedy=remedy)


def check_sequence_ranks(config: RunConfig) -> None:
    """Refuses ranks that share the tokens of a pass where the config alone says that they cannot."""
    ranks, sharing = config.cluster.ranks, config.cluster.sequence_ranks
    if sharing == 1:
        return
    problem = f"does not divide cluster.ranks={ranks}"
    remedy = f"use one of {divisors_of(ranks)}, or set cluster.ranks={sharing} or a multiple of that"
    require(ranks % sharing == 0, "cluster.sequence_ranks", problem, got=sharing, remedy=remedy)
    problem, is_plain = "divides packed rows, and model.kernels=plain has none", config.model.kernels == "plain"
    require(not is_plain, "cluster.sequence_ranks", problem, got=sharing, remedy="set it to 1")


def divisors_of(number: int, factor: int = 1) -> str:
    """The divisors of a number, each times the factor, in words."""
    return ", ".join(str(divisor * factor) for divisor in range(1, number + 1) if number % divisor == 0)


def idle_engines(config: RunConfig, name: str) -> str | None:
    """A warning that a step has fewer parts than there are engines; None where every engine gets one."""
    cluster, num_prompts, group_size = config.cluster, config.prompts_per_step, config.group_size
    if not cluster.engines:
        return None
    engine = config.generation.named(name)
    size = units_of(engine.at_once, divisible=engine.divisible, num_engines=cluster.engines)(group_size, num_prompts)
    parts = -(-num_prompts // size)
    if parts >= cluster.engines:
        return None
    if num_prompts < cluster.engines:
        why = f"a step has {counted(num_prompts, 'prompt')}"
        remedy = f"raise prompts_per_step, or use at most {num_prompts}"
    else:
        why = f"{engine.title} computes {counted(engine.at_once, 'completion')} of a step together"
        remedy = f"use generation.{section_of(name)}.{engine.at_once_key}={num_prompts // cluster.engines * group_size}"
    problem = f"only {parts} of them will have something to sample: {why}"
    return f"cluster.engines: {problem}, got {cluster.engines}; {remedy}"


def check_shard_base(config: RunConfig) -> None:
    """Refuses cluster.shard_base where every rank needs the whole base."""
    if config.cluster.shard_base and (why := why_whole(config)) is not None:
        problem, remedy = why
        raise UserError("cluster.shard_base", problem, got="true", remedy=f"{remedy}, or leave it out")


def why_whole(config: RunConfig) -> tuple[str, str] | None:
    """Why ranks cannot divide the layers of this run's base, and what to change; None where they can."""
    if not config.cluster.engines:
        return "an engine in the run's own process needs the whole base", "set cluster.engines=1 or more"
    if config.cluster.num_parts == 1:  # the policy then learns on sums of base and adapter, which need all weights
        return "is for ranks that share lanes, and there is one lane", "set cluster.ranks=2 or cluster.lanes=2, or more"
    if config.model.quantization is not None:
        return "layers in 4 bits are not divided", "set model.quantization=null"
    if config.lora is None:
        return "what is divided is frozen, and lora=null trains it", "train an adapter"
    if config.lora.use_dora:
        return "DoRA asks for the lengths of all weights before there are ranks", "set lora.use_dora=false"
    return None
