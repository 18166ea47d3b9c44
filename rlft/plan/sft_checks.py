"""Checks of an `rlft sft` config by itself, without torch, the model or the data."""

from __future__ import annotations

from rlft.config.schema import AUTO, GenerationConfig, SftConfig
from rlft.logger.loggers import loggers_of
from rlft.plan import rules
from rlft.plan.adapters import AdapterUse, Use, check_folders, check_learned, uses_of_rewards
from rlft.plan.environments import check_rewarded
from rlft.reward.workers.reward_spec import specs
from rlft.types import Logger, UserError


def check_config(config: SftConfig) -> tuple[Logger, ...]:
    """The loggers, after every rule that needs neither libraries nor the contents of files.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    rules.check_name(config.name)
    rules.check_engine(config.generation, config.model)
    if config.lora is None:
        _check_whole(config)
    rules.check_model(config.model)
    rules.check_evaluation(config.eval, config.generation)
    rules.check_time_limits(config.reward, config.scoring)
    if config.data:
        rules.check_stops_and_rewards(config.generation, specs(config.reward))
    longest = config.prompts.max_tokens + max(config.max_completion_tokens, config.generation.max_tokens)
    rules.check_budget(config.token_budget, longest, "prompts.max_tokens and a completion")
    if config.lora is not None:
        if config.data:
            check_rewarded(config)
        rewards = specs(config.reward) if config.data else {}
        check_learned(rewards)
        check_folders([*uses_of(config), *uses_of_rewards(rewards)], config.lora)
        rules.check_served(config.generation, config.lora)
    for key, section in (("data", config.data), ("demonstrations", config.demonstrations)):
        if section:
            rules.check_data(section, key)
    return loggers_of(config.logger)


def _check_whole(config: SftConfig) -> None:
    problem = None
    if config.model.quantization is not None:
        problem = ("model.quantization", "4-bit weights cannot be trained", "set it to null, or train an adapter")
    elif not _serves_whole_models(config.generation):
        problem = ("generation.engine", "is given adapters only, and lora=null has none", "use transformers")
    elif config.eval.kl_base:
        problem = ("eval.kl_base", "lora=null changes the base itself", "set it to false, or train an adapter")
    elif config.data and any(spec.runs_in_trainer for spec in specs(config.reward).values()):
        problem = ("reward", "learned rewards stand on a frozen base, which lora=null changes", "use rule rewards")
    elif config.checkpoint.on_signal != "step" and config.checkpoint.every != 1:
        no_copy = "with lora=null, no copy of all weights is kept that could be saved in place of a step's"
        problem = ("checkpoint.on_signal", no_copy, "set it to step, or checkpoint.every=1")
    if problem is not None:
        raise UserError(problem[0], problem[1], remedy=problem[2])
    if config.model.dtype != "auto":
        check_trainable(config.model.dtype)


def _serves_whole_models(generation: GenerationConfig) -> bool:
    return generation.engine == AUTO or generation.named(generation.engine).serves_whole_models


def check_trainable(dtype: str) -> None:
    """Refuses a dtype in which the small steps of an optimizer are lost."""
    if dtype not in ("float32", "float64"):
        problem = f"updates of AdamW are lost in the rounding of {dtype} weights"
        remedy = "set model.dtype=float32, or train an adapter (whose weights are float32)"
        raise UserError("model.dtype", problem, remedy=remedy)


def uses_of(config: SftConfig) -> list[Use]:
    """The adapter folder that the run starts from, if it names one."""
    if config.lora is None or config.lora.path is None:
        return []
    return [Use(key="lora.path", path=config.lora.path, accepts=AdapterUse.policy)]
