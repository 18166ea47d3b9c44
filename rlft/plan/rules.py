"""What each command refuses in its config alone, and rules for sizes, sampling, rewards, environments and processes.

They are called before the model or the contents of data are read, and import no heavy library for that. Like every
check of this room, they raise a UserError with the key, what is wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.algorithm.objective import Objective
from rlft.algorithm.preference import BradleyTerry, PreferenceLoss, RankingLoss
from rlft.config import catalog, schema
from rlft.config.instantiate import instantiate, locate
from rlft.config.model import LoraSettings, Old, is_adapter
from rlft.config.trainer import FLAT, ClusterConfig
from rlft.environment.protocol import Environment, read_environment
from rlft.generation.engine import Engine, units_of
from rlft.model.adapter_folder import check_adapter_folder, check_shape, has_head, layers_of, switches_of
from rlft.plan import model_rules, roles
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.system.device import kind_of
from rlft.tokens.text import RunTokenizer
from rlft.types import NOTHING, Prompt, Shown, UserError, are, counted, require

if TYPE_CHECKING:
    import torch

    from rlft.data.prompts import PromptSet


# -- what each command refuses in its config ---------------------------------------------------------------------------
def check_components(config: schema.RunConfig, *, trains: bool = True) -> Objective:
    """The algorithm, after every rule that needs neither model nor data; `trains`: False if it is only evaluated."""
    algorithm = instantiate(config.algorithm, "algorithm")
    check_name(config.name)
    _sizes(config, algorithm)
    if trains:
        _weights(config, algorithm)
        _sampling(config, algorithm)
        _overlap(config, algorithm)
        _curriculum(config)
    check_evaluation(config.eval, config.generation)
    check_time_limits(config.reward, config.scoring)
    model_rules.check_engine(config.generation, config.model)
    _resampling(config, algorithm)
    check_cluster(config)
    model_rules.check_model(config.model)
    roles.check_learner(config)
    if trains:
        check_ranks(config)
    check_environment(config)
    check_rewarded(config)
    rewards = specs(config.reward)
    roles.check_roles(config, algorithm, rewards, trains=trains)
    check_stops_and_rewards(config.generation, rewards)
    roles.check_folders(roles.uses(config, rewards), config.lora)
    if trains:
        check_stop(config)
    return algorithm


def check_contents(config: schema.RunConfig) -> None:
    """Reads a little of the data and of the pretraining text of `rlft train`."""
    if config.data:
        check_data(config.data)
    if (text := config.pretrain).path is not None:
        from rlft.data.examples import check_texts  # with numpy, which a refusal does without

        check_texts(text.path, text.field, text.given_field, text.rows)


def check_sft(config: schema.SftConfig) -> None:
    """Makes nothing for `rlft sft`."""
    check_name(config.name)
    model_rules.check_engine(config.generation, config.model)
    roles.check_learner(config)
    model_rules.check_model(config.model)
    check_evaluation(config.eval, config.generation)
    check_time_limits(config.reward, config.scoring)
    rewards = specs(config.reward) if config.data else {}
    check_stops_and_rewards(config.generation, rewards)
    longest = config.prompts.max_tokens + max(config.max_completion_tokens, config.generation.max_tokens)
    check_budget(config.token_budget, longest, "prompts.max_tokens and a completion")
    if config.data:
        check_rewarded(config)
    check_learned(rewards)
    roles.check_folders(
        [*roles.use_of_policy("lora.path", roles.start_of(config.lora)), *roles.uses_of_rewards(rewards)], config.lora
    )
    for key, section in (("data", config.data), ("demonstrations", config.demonstrations)):
        if section:
            check_data(section, key)
    check_stop(config)


def check_sample(config: schema.SampleConfig) -> None:
    """Makes nothing for `rlft sample`."""
    check_name(config.name)
    model_rules.check_model(config.model)
    model_rules.check_engine(config.generation, config.model)
    check_time_limits(config.reward, config.scoring)
    keep, number, least = config.keep, config.max_per_prompt, config.min_reward
    problem, remedy = "keep=best keeps one completion of each prompt", "leave it out, or set keep=all"
    require(keep != "best" or number is None, "max_per_prompt", problem, got=number, remedy=remedy)
    problem, remedy = "is null, and keep=above needs it", "set min_reward=1.0, or keep=all"
    require(keep != "above" or least is not None, "min_reward", problem, remedy=remedy)
    problem, remedy = f"is read by keep=above only, and keep={keep}", "set keep=above, or leave it out"
    require(keep == "above" or least is None, "min_reward", problem, got=least, remedy=remedy)
    check_stops_and_rewards(config.generation, specs(config.reward))
    check_environment(config)
    check_rewarded(config)
    check_learned(specs(config.reward))
    roles.check_folders(uses_of_sample(config), lora_of(config))
    check_data(config.data)


def check_preferences(config: schema.RmConfig | schema.DpoConfig) -> RankingLoss:
    """The loss of `rlft rm` and `rlft dpo`."""
    check_name(config.name)
    model_rules.check_model(config.model)
    longest, what = config.prompts.max_tokens + config.max_completion_tokens, "prompts.max_tokens and a completion"
    if isinstance(config, schema.RmConfig):
        longest, what = longest + 1, "prompts.max_tokens, max_completion_tokens and an ending"
    check_budget(config.token_budget, longest, what)
    loss = _loss_of(config)
    roles.check_folders(uses_of_preferences(config, loss), config.lora)
    check_data(config.preferences, "preferences")
    if isinstance(config, schema.RmConfig) and config.replay.path is not None:
        with replay_is_meant():
            check_data(replayed(config), "preferences")
    check_stop(config)
    return loss


# -- names, data, what ends a run --------------------------------------------------------------------------------------
def check_name(name: str) -> None:
    """Refuses a run's name that cannot be a folder's name."""
    if not name.strip() or name == ".." or Path(name).name != name:
        problem = "names a folder under runs/, and must be one plain word or several"
        raise UserError("name", problem, got=name or "nothing", remedy="leave out slashes, for instance name=first_try")


def check_data(section: Mapping[str, Any], key: str = "data") -> None:
    """Makes the component that a section describes, and calls its `check()`, if it has one, which reads little."""
    check = getattr(instantiate(section, key), "check", None)
    if callable(check):
        check()


def check_stop(config: schema.RunConfig | schema.SftConfig | schema.RmConfig | schema.DpoConfig) -> None:
    """Refuses a run that its evaluations end, and that has none."""
    if config.stop.when == FLAT:
        problem, got = "ends a run by its evaluations, and there are none", config.stop.when
        require(config.eval.every, "stop.when", problem, got=got, remedy="set eval.every to a number of steps")


# -- the sizes of a step -----------------------------------------------------------------------------------------------
def _sizes(config: schema.RunConfig, algorithm: Objective) -> None:
    problem = f"this algorithm compares the completions of a group and needs at least {algorithm.min_group_size}"
    remedy = f"set group_size={max(8, algorithm.min_group_size)}"
    require(config.group_size >= algorithm.min_group_size, "group_size", problem, got=config.group_size, remedy=remedy)
    batches, groups = config.minibatches, config.prompts_per_step
    problem = f"whole groups are dealt to them, and a step has only prompts_per_step={counted(groups, 'group')}"
    require(batches <= groups, "minibatches", problem, got=batches, remedy=f"use at most {groups}")
    problem, remedy = f"does not divide prompts_per_step={groups}", f"use one of {divisors_of(groups)}"
    require(groups % batches == 0, "minibatches", problem, got=batches, remedy=remedy)
    longest = config.prompts.max_tokens + config.generation.max_tokens
    problem = f"the longest row may have prompts.max_tokens + generation.max_tokens = {counted(longest, 'token')}"
    remedy = f"set token_budget={longest} or more, or shorten the rows"
    require(config.token_budget >= longest, "token_budget", problem, got=config.token_budget, remedy=remedy)
    if config.pretrain.path is not None and config.token_budget < config.pretrain.max_tokens:
        problem = f"a pretraining text may have pretrain.max_tokens={counted(config.pretrain.max_tokens, 'token')}"
        remedy = f"set token_budget={config.pretrain.max_tokens} or more, or a lower pretrain.max_tokens"
        raise UserError("token_budget", problem, got=config.token_budget, remedy=remedy)


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


def check_fresh_prompts(config: schema.RunConfig, num_prompts: int) -> None:
    """Checks that dynamic sampling has train prompts besides those of the step."""
    if config.dynamic_sampling.max_rounds and num_prompts <= config.prompts_per_step:
        problem = f"samples fresh prompts, and all {num_prompts} train prompts are in each step"
        remedy = "use a lower prompts_per_step or more data, or dynamic_sampling.max_rounds=0"
        raise UserError("dynamic_sampling.max_rounds", problem, got=config.dynamic_sampling.max_rounds, remedy=remedy)


def warnings_of_sizes(config: schema.RunConfig, num_train: int | None, num_held_out: int | None) -> tuple[str, ...]:
    """Warnings about a run that needs more prompts than exist; a number is None if no such prompts are sampled."""
    texts = []
    if num_train is not None and config.prompts_per_step > num_train:
        problem = f"there {are(num_train)} only {counted(num_train, 'train prompt')}"
        problem += f", so that each step has some of them more than once, got {config.prompts_per_step}"
        texts.append(f"prompts_per_step: {problem}; use at most {num_train}, or more data")
    usual = catalog.root_entries("train")["eval.num_prompts"].default  # of which each run takes as many as there are
    if num_held_out is not None and config.eval.num_prompts > num_held_out and str(config.eval.num_prompts) != usual:
        problem = f"there {are(num_held_out)} only {counted(num_held_out, 'held-out prompt')}"
        problem += ", and an evaluation samples each of them once"
        texts.append(f"eval.num_prompts: {problem}, got {config.eval.num_prompts}; use at most {num_held_out}")
    return tuple(texts)


def divisors_of(number: int, factor: int = 1) -> str:
    """The divisors of a number, each times the factor, in words."""
    return ", ".join(str(divisor * factor) for divisor in range(1, number + 1) if number % divisor == 0)


# -- sampling ----------------------------------------------------------------------------------------------------------
def _sampling(config: schema.RunConfig, algorithm: Objective) -> None:
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


def _overlap(config: schema.RunConfig, algorithm: Objective) -> None:
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


def _resampling(config: schema.RunConfig, algorithm: Objective) -> None:
    rounds, key = config.dynamic_sampling.max_rounds, "dynamic_sampling.max_rounds"
    if rounds:
        problem = "replaces groups of equal rewards, and a teacher teaches by their tokens all the same"
        uses_rewards = not algorithm.needs_teacher or config.algorithm.get("reward_coef", 0)
        require(uses_rewards, key, problem, got=rounds, remedy="use 0")
        problem = "replaces groups that are all right or all wrong, and with group_size=1 each of them is"
        remedy = "set group_size=8, or dynamic_sampling.max_rounds=0"
        require(config.group_size != 1, key, problem, got=rounds, remedy=remedy)


def _curriculum(config: schema.RunConfig) -> None:
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


def check_evaluation(settings: schema.EvalConfig, generation: schema.GenerationConfig) -> None:
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


def warnings_of_config(config: schema.RunConfig, algorithm: Objective) -> tuple[str, ...]:
    """Warnings about valid settings that are usually mistakes, which the run prints at its start."""
    texts, keys, generation = [*algorithm.warnings], config.algorithm, config.generation
    defaults, silent = _of_the_family(algorithm), without_effect(config, algorithm)
    chosen = {
        key: keys[key] for key in defaults if f"algorithm.{key}" in silent and keys[key] not in (None, defaults[key])
    }
    for remedy in dict.fromkeys(silent[f"algorithm.{key}"] for key in chosen):
        alike = {key: value for key, value in chosen.items() if silent[f"algorithm.{key}"] == remedy}
        names, values = ", ".join(f"algorithm.{key}" for key in alike), ", ".join(map(str, alike.values()))
        verbs = ("has", "it acts") if len(alike) == 1 else ("have", "they act")
        texts.append(f"{names}: {verbs[0]} no effect, got {values}; {verbs[1]} with {remedy}")
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


def without_effect(config: schema.RunConfig, algorithm: Objective) -> dict[str, str]:
    """{key of the algorithm that changes no gradient of this run: what would let it act}."""
    moved = config.updates_per_step > 1 or config.snapshot.old is Old.sampled
    lacking = algorithm.without_effect(moved=moved)
    return {f"algorithm.{key}": " and ".join(map(_in_words, parts)) for key, parts in lacking.items()}


FACTS = {
    "moved=true": "several updates a step (epochs or minibatches above 1)",
    "rewards=true": "algorithm.reward_coef above 0",
    "advantages=true": "algorithm.reward_coef above 0",
    "token_advantages=true": "advantages that differ between the tokens of a completion",
}
"""{part of a condition that is not about a key of the algorithm: what to set}."""


def _in_words(part: str) -> str:
    """A part of a condition of `Key.acts` as something to type.

    >>> _in_words("surrogate=clipped|gmpo")
    'algorithm.surrogate=clipped or gmpo'
    """
    text = part.replace("|", " or ").replace("!=", " other than ").replace(" > ", " above ").replace(" < ", " below ")
    return FACTS.get(part, f"algorithm.{text}")


def check_acts(key: str, got: str, configs: Sequence[schema.RunConfig]) -> None:
    """Refuses to sweep a key of the algorithm that changes no gradient in any of these runs."""
    remedies = [without_effect(one, instantiate(one.algorithm, "algorithm")).get(key, "") for one in configs]
    problem, remedy = "cannot be swept: it has no effect in any of the runs", f"it acts with {remedies[0]}"
    require(not all(remedies), key, problem, got=got, remedy=remedy)


def _of_the_family(algorithm: Objective) -> dict[str, Any]:
    """{key: its default} in the YAML of the algorithm's family; {} for a family that is not rlft's."""
    import yaml

    file = catalog.files("algorithm").get(type(algorithm).__module__.removeprefix("rlft.algorithm."))
    defaults: dict[str, Any] = {}
    for one in catalog.lineage(file, "algorithm") if file is not None else ():
        defaults |= yaml.safe_load(one.read_text(encoding="utf-8"))
    return defaults


# -- rewards -----------------------------------------------------------------------------------------------------------
def check_rewarded(config: schema.SamplingRoot) -> None:
    """Refuses a run in which neither rewards nor the environment would score completions."""
    environment = read_environment(config.environment)
    if not config.reward and (environment is None or not environment.rewards_turns):
        raise UserError("reward", "is empty: nothing would be learned", remedy="try reward=[exact_match,format]")


def _weights(config: schema.RunConfig, algorithm: Objective) -> None:
    rewards = config.reward
    if not rewards or not all(isinstance(keys, Mapping) and keys.get("weight") == 0 for keys in rewards.values()):
        return
    remedy = f"set for instance reward.{next(iter(rewards))}.weight=1"
    if not algorithm.needs_teacher:
        problem = "has no weight but 0: nothing would be learned"
        raise UserError("reward", problem, got=f"[{','.join(rewards)}]", remedy=remedy)
    if of_rewards := config.algorithm.get("reward_coef", 0):
        problem = f"multiplies the advantages of rewards, and [{','.join(rewards)}] has no weight but 0"
        raise UserError("algorithm.reward_coef", problem, got=of_rewards, remedy=f"use 0, or {remedy}")


def check_time_limits(rewards: Mapping[str, Any], scoring: schema.ScoringConfig) -> None:
    """Refuses a reward whose group_timeout is longer than the scorer's time limit."""
    for name, keys in rewards.items():
        group_timeout = keys.get("group_timeout") if isinstance(keys, Mapping) else None
        if isinstance(group_timeout, int | float) and group_timeout > scoring.timeout:
            problem = f"exceeds scoring.timeout={scoring.timeout:g}, which cuts the reward off"
            remedy = f"leave it out and set scoring.timeout={group_timeout:g}"
            raise UserError(f"reward.{name}.group_timeout", problem, got=f"{group_timeout:g}", remedy=remedy)


def check_stops_and_rewards(generation: schema.GenerationConfig, rewards: Mapping[str, RewardSpec]) -> None:
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


def check_learned(rewards: Mapping[str, RewardSpec]) -> None:
    """Refuses a learned reward without a folder, in a run that does not train it."""
    for spec in rewards.values():
        if spec.runs_in_trainer and spec.kwargs["path"] is None:
            problem = "an untrained head scores every completion 0, and nothing trains it here"
            remedy = "give it a folder, such as a run of rlft rm"
            raise UserError(f"reward.{spec.name}.path", problem, got="null", remedy=remedy)


def check_classifiers(rewards: Mapping[str, RewardSpec]) -> dict[str, str]:
    """The fingerprints of reward models that are networks of their own; refuses one that lacks tensors or one score."""
    from rlft.model.reward_model import check_classifier
    from rlft.plan.identity import of_source

    found: dict[str, str] = {}
    for spec in rewards.values():
        if spec.runs_in_trainer and not is_adapter(path := spec.kwargs["path"]):
            key = f"reward.{spec.name}.path"
            network = check_classifier(path, key)
            found |= of_source(network.source, network.config, key, key)
    return found


def models_of(config: Any) -> list[tuple[str, str]]:
    """(key, path) of all models, and of no adapter, that a run of this typed config loads."""
    models = [("model.path", config.model.path)]
    if (teacher := getattr(getattr(config, "snapshot", None), "teacher_model", None)) is not None:
        models.append(("snapshot.teacher", teacher))
    rewards = specs(getattr(config, "reward", {})).values()
    networks = [(spec, spec.kwargs["path"]) for spec in rewards if spec.runs_in_trainer]
    return [*models, *((f"reward.{spec.name}.path", path) for spec, path in networks if not is_adapter(path))]


def check_metadata(rewards: Mapping[str, RewardSpec], prompt: Prompt) -> None:
    """Checks that the prompt's metadata have the fields that a reward reads (`needs_metadata`, `metadata_keys`)."""
    kept = f"the data keep no such field with their prompts, only {list(prompt.metadata) or 'none'}"
    for name, spec in rewards.items():
        needed = getattr(locate(spec.target, f"reward.{name}._target_"), "needs_metadata", None)
        if needed is not None and needed not in prompt.metadata:
            problem = f"scores prompts of data={needed} only"
            remedy = f"use data={needed}, or another reward"
            raise UserError(f"reward.{name}", problem, got=f"prompt {prompt.id}", remedy=remedy)
        for column in (column for column in spec.columns if column not in prompt.metadata):
            problem = f"{spec.target} takes {column}, and {kept}"
            remedy = f"set data.metadata_fields=[{column}], or give it a value in the reward's YAML"
            raise UserError(f"reward.{name}", problem, remedy=remedy)
        for key in getattr(locate(spec.target, f"reward.{name}._target_"), "metadata_keys", ()):
            field = spec.kwargs.get(key)
            if field is not None and field not in prompt.metadata:
                remedy = f"set data.metadata_fields=[{field}]"
                raise UserError(f"reward.{name}.{key}", kept, got=field, remedy=remedy)


# -- environments and images -------------------------------------------------------------------------------------------
def check_environment(config: schema.SamplingRoot) -> None:
    """Refuses an environment whose keys are wrong, or whose limits do not fit those of the run."""
    environment = read_environment(config.environment)
    if environment is None:
        return
    environment.check()
    generation, turn_tokens = config.generation, environment.turn_tokens
    if turn_tokens is not None and turn_tokens > generation.max_tokens:
        problem = f"is more than all turns have together (generation.max_tokens={generation.max_tokens})"
        remedy = f"set it to {generation.max_tokens} or less, or raise generation.max_tokens"
        raise UserError("environment.turn_tokens", problem, got=turn_tokens, remedy=remedy)
    if environment.timeout < environment.call_timeout:
        problem = f"is less than a single call may take (environment.call_timeout={environment.call_timeout:g})"
        remedy = f"raise it to {environment.call_timeout:g} or more, or lower environment.call_timeout"
        raise UserError("environment.timeout", problem, got=f"{environment.timeout:g}", remedy=remedy)
    problem = "has no turns: only a chat template says how the policy's turns and the answers to them are separated"
    remedy = "set prompts.style=chat, or environment=null"
    require(config.prompts.style != "raw", "prompts.style", problem, got="raw", remedy=remedy)
    if isinstance(config, schema.RunConfig) and environment.plays_itself:
        problem = "a resume repeats conversations of environment=endpoint from a record, which holds no experts"
        by_engine = config.snapshot.routing == "engine"
        require(not by_engine, "snapshot.routing", problem, got="engine", remedy="use old or free")
    if isinstance(config, schema.RunConfig) and config.cluster.engines:
        problem = "agents of environment=endpoint speak to the engine of the run's own process"
        remedy = "set it to 0, or use another environment"
        require(not environment.plays_itself, "cluster.engines", problem, got=config.cluster.engines, remedy=remedy)
        limit, timeout = config.cluster.timeout, f"{environment.timeout:g}"
        problem = f"leaves an engine no time: one that has not answered for cluster.timeout={limit:g} is taken for dead"
        remedy = f"lower it, or raise cluster.timeout above {timeout}"
        require(environment.timeout < limit, "environment.timeout", problem, got=timeout, remedy=remedy)


def prompt_additions(environment: Environment | None, tokenizer: RunTokenizer, prompts: Sequence[Prompt]) -> Shown:
    """What prompts show of the environment, for `rlft.data.prompts.scan`; nothing without one.

    Refuses a tool without types or a docstring, and a chat template that cannot hold such conversations.
    """
    if environment is None or not len(prompts):
        return NOTHING
    from rlft.environment.turn_template import Dialect, TurnTemplate

    if environment.plays_itself:
        TurnTemplate(tokenizer, {"user"}, opening=prompts[0].messages)
        return NOTHING
    return Dialect(environment, tokenizer, prompts[0].messages).shown


def check_images(config: Any, kind: str, engine: Engine, *sets: PromptSet | None) -> None:
    """Refuses what does not go with images, if a prompt of the sets has any; kind: the type of the config's model."""
    from rlft.model.backbone import read_config, source
    from rlft.model.images import network_of_tower
    from rlft.model.network_files import check_files
    from rlft.system.device import resolve_device

    if not any(prompts.images for prompts in sets if prompts is not None):
        return
    if (missing := engine.why_no_images(kind, resolve_device(config.model.device).type)) is not None:
        got = config.generation.engine
        raise UserError("generation.engine", missing.problem, got=got, remedy=missing.remedy)
    problem, environment = "continues with texts alone, and the data have images", config.environment
    require(environment is None, "environment", problem, remedy="leave it out, or use data without images")
    for name, spec in specs(config.reward).items():
        problem = "reads texts alone, and the data have images"
        require(not spec.runs_in_trainer, f"reward.{name}", problem, remedy="use a reward of the answer")
    check_files(network_of_tower(read_config(config.model), source(config.model)))
    if not isinstance(config, schema.RunConfig):
        return
    snapshot, remedy = config.snapshot, "leave it out, or use data without images"
    is_apart = snapshot.teacher_model is not None or snapshot.teacher_hint is not None
    problem = "reads no images: it is another model, or reads other prompts"
    require(not is_apart, "snapshot.teacher", problem, got=snapshot.teacher, remedy=remedy)


# -- engines, ranks and their devices ----------------------------------------------------------------------------------
def check_cluster(config: schema.RunConfig) -> None:
    """Checks the keys of `cluster` that are about engines in processes of their own, and about Ray."""
    cluster, engine = config.cluster, config.generation.engine
    if cluster.address is not None and cluster.kind == "local":
        remedy = "set cluster=ray, or leave it out"
        raise UserError("cluster.address", "is the address of a Ray cluster", got=cluster.address, remedy=remedy)
    if cluster.gpus_per_engine > 1 and not cluster.engines:
        problem = "applies to engines in processes of their own, and there are none"
        remedy = "set cluster.engines=1 or more, or leave it out"
        raise UserError("cluster.gpus_per_engine", problem, got=cluster.gpus_per_engine, remedy=remedy)
    problem = "scoring.workers=0 scores in the run's own process"
    remedy = "set scoring.workers=1 or more, or leave it out"
    require(not cluster.scoring or config.scoring.workers, "cluster.scoring", problem, got="true", remedy=remedy)
    if cluster.engines and engine != schema.AUTO:
        model_rules.check_apart(config, engine)


def check_cluster_has_devices(cluster: ClusterConfig, device: torch.device) -> None:
    """Refuses engines and ranks in other processes on devices whose processes cannot exchange tensors."""
    kind = kind_of(device)
    for key, number, alone in (("cluster.ranks", cluster.ranks, 1), ("cluster.engines", cluster.engines, 0)):
        problem = f"other processes need CPUs or CUDA devices, and model.device is {kind.title}"
        require(kind.collective or number <= alone, key, problem, got=number, remedy=f"set {key}={alone}")


def check_lag_has_devices(config: schema.RunConfig, device: str) -> None:
    """Refuses a lag where engine and trainer share a GPU (`device` is the trainer's), which gains nothing."""
    if config.overlap.lag and device != "cpu" and (not config.cluster.engines or config.cluster.placement == "pairs"):
        problem = "samples during the update, and the engine shares the trainer's GPU, so that nothing would be gained"
        remedy = "give engines GPUs of their own (cluster.engines=1 cluster.placement=divided), or set overlap.lag=0"
        raise UserError("overlap.lag", problem, got=config.overlap.lag, remedy=remedy)


def check_ranks(config: schema.RunConfig) -> None:
    """Refuses ranks that cannot share the tokens of a pass, divide the lanes evenly, or divide the base's layers."""
    cluster = config.cluster
    ranks, lanes, sharing = cluster.ranks, cluster.num_lanes, cluster.sequence_ranks
    problem = f"does not divide cluster.ranks={ranks}"
    remedy = f"use one of {divisors_of(ranks)}, or set cluster.ranks={sharing} or a multiple of that"
    require(ranks % sharing == 0, "cluster.sequence_ranks", problem, got=sharing, remedy=remedy)
    problem, packs = "divides packed rows, and model.kernels=plain has none", config.model.kernels != "plain"
    require(sharing == 1 or packs, "cluster.sequence_ranks", problem, got=sharing, remedy="set it to 1")
    of_ranks = f" times cluster.sequence_ranks={sharing}" * (sharing > 1)
    problem = f"does not divide cluster.lanes={lanes}{of_ranks}, which a run keeps from its first step"
    remedy = f"use one of {divisors_of(lanes, sharing)}, or begin a run with other lanes"
    require(lanes % (ranks // sharing) == 0, "cluster.ranks", problem, got=ranks, remedy=remedy)
    if cluster.shard_base and (why := why_whole(config)) is not None:
        problem, remedy = why
        raise UserError("cluster.shard_base", problem, got="true", remedy=f"{remedy}, or leave it out")


def why_whole(config: schema.RunConfig) -> tuple[str, str] | None:
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


def idle_engines(config: schema.RunConfig, name: str) -> str | None:
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
        section, number = schema.section_of(name), num_prompts // cluster.engines * group_size
        remedy = f"use generation.{section}.{engine.at_once_key}={number}"
    problem = f"only {parts} of them will have something to sample: {why}"
    return f"cluster.engines: {problem}, got {cluster.engines}; {remedy}"


# -- rlft sample -------------------------------------------------------------------------------------------------------
def uses_of_sample(config: schema.SampleConfig) -> list[roles.Use]:
    """The adapter folders that the config names: the policy's, and those of learned rewards."""
    return [*roles.use_of_policy("adapter", config.adapter), *roles.uses_of_rewards(specs(config.reward))]


def lora_of(config: schema.SampleConfig) -> LoraSettings:
    """The shape of the named adapter, of the policy or of a reward; the smallest shape if none is named."""
    for use in uses_of_sample(config):
        if use.path and Path(use.path).expanduser().is_dir():  # otherwise `check_folders` says what is wrong
            fields = check_adapter_folder(use.path, use.key)
            check_shape(fields, use.path, use.key)
            return LoraSettings(
                rank=fields["r"],
                alpha=fields["lora_alpha"],
                dropout=0.0,
                target_modules=layers_of(fields),
                path=config.adapter,
                **switches_of(fields),
            )
    return LoraSettings(rank=1, alpha=1.0, dropout=0.0, target_modules="all-linear", path=config.adapter)


# -- rlft rm and rlft dpo ----------------------------------------------------------------------------------------------
REFERENCE = "snapshot.reference"
FIXED = "copy, base or an adapter's folder"


def _loss_of(config: schema.RmConfig | schema.DpoConfig) -> RankingLoss:
    """The loss that the config describes, with a reference if it needs one. Raises UserError."""
    if isinstance(config, schema.RmConfig):
        return BradleyTerry(margin=config.margin)
    loss = instantiate(config.loss, "loss", "dpo")
    if not isinstance(loss, PreferenceLoss):
        problem, got = "is no rlft.algorithm.preference.PreferenceLoss", config.loss["_target_"]
        raise UserError("loss._target_", problem, got=got, remedy="derive it from that class")
    configured, reference = config.snapshot.reference, reference_of(config, loss)
    problem, remedy = "its log-probs are computed once for each completion, so it cannot move", f"use {FIXED}"
    require(configured != "ema", REFERENCE, problem, got=configured, remedy=remedy)
    is_given = reference != "none"
    problem, remedy = "this loss compares the policy with a reference", f"use {FIXED}, or loss=simpo or orpo"
    require(is_given or not loss.needs_reference, REFERENCE, problem, got=configured, remedy=remedy)
    problem, remedy = "this loss uses no reference", "leave it out, or use loss=dpo or ipo"
    require(not is_given or loss.needs_reference, REFERENCE, problem, got=configured, remedy=remedy)
    return loss


def reference_of(config: schema.RmConfig | schema.DpoConfig, loss: RankingLoss) -> str:
    """What the loss compares the policy with: `none`, `base`, or the folder of an adapter."""
    configured = "auto" if isinstance(config, schema.RmConfig) else config.snapshot.reference
    if configured == "auto":
        configured = "copy" if loss.needs_reference else "none"
    return (config.lora.path or "base") if configured == "copy" else configured


def uses_of_preferences(config: schema.RmConfig | schema.DpoConfig, loss: RankingLoss) -> list[roles.Use]:
    """The adapter folders that the config names: the one that training starts from, and the reference's."""
    path, reference = config.lora.path, reference_of(config, loss)
    used = roles.use_of_policy("lora.path", path)
    if path is not None and isinstance(config, schema.RmConfig):
        used = [roles.Use(key="lora.path", path=path, has_head=has_head(path), of_any_role=True)]
    if reference not in ("none", "base", path):
        words = "auto, none, base or copy"
        used.append(roles.Use(key=REFERENCE, path=reference, starts_role=False, words=words))
    return used


def replay_is_meant() -> AbstractContextManager[None]:
    """Gives UserErrors raised inside the key of earlier rounds' preferences."""
    return model_rules.with_keys(lambda key: "replay.path")


def replayed(config: schema.RmConfig) -> Mapping[str, Any]:
    """The section that reads the earlier rounds' preferences.

    Their held-out rankings stay held out: those files are split by the same hash.
    """
    no_held_out = {key: None for key in ("held_out_path", "held_out_split") if key in config.preferences}
    return {**config.preferences, "path": config.replay.path, **no_held_out}
