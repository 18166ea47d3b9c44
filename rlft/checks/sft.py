"""What of an `rlft sft` config is wrong by itself; needs neither torch nor the model nor the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft import check
from rlft.check_adapters import Use, Wanted, check_folders, check_learned, uses_of_rewards
from rlft.checks.files import check_data
from rlft.config import build_sft
from rlft.reward.spec import specs
from rlft.roots import SftConfig
from rlft.targets import instantiate
from rlft.types import Logger, UserError


def check_config(plain: Mapping[str, Any]) -> tuple[SftConfig, tuple[Logger, ...]]:
    """The typed config and its loggers, after every rule that needs neither libraries nor the contents of files.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    config = build_sft(plain)
    check.check_name(config.name)
    if config.lora is None:
        _check_whole(config)
    check.check_model(config.model)
    check.check_engine(config.generation)
    check.check_evaluation(config.eval, config.generation)
    check.check_time_limits(config.reward, config.scoring)
    if config.data:
        check.check_stops_and_rewards(config.generation, specs(config.reward))
    longest = config.prompts.max_tokens + max(config.max_completion_tokens, config.generation.max_tokens)
    check.check_budget(config.token_budget, longest, "prompts.max_tokens and a completion")
    if config.lora is not None:
        rewards = specs(config.reward) if config.data else {}
        check_learned(rewards)
        check_folders([*uses_of(config), *uses_of_rewards(rewards)], config.lora)
        if config.generation.engine == "vllm":
            check.check_vllm(config.lora)
    for key, section in (("data", config.data), ("demonstrations", config.demonstrations)):
        if section:
            check_data(section, key)
    return config, tuple(instantiate(logger, f"logger.{name}") for name, logger in config.logger.items())


def _check_whole(config: SftConfig) -> None:
    problem = None
    if config.model.quantization is not None:
        problem = ("model.quantization", "4-bit weights cannot be trained", "set it to null, or train an adapter")
    elif config.generation.engine == "vllm" or "." in config.generation.engine:
        problem = ("generation.engine", "is given adapters only, and lora=null has none", "use transformers")
    elif config.eval.kl_base:
        problem = ("eval.kl_base", "lora=null changes the base itself", "set it to false, or train an adapter")
    elif config.data and any(spec.runs_in_trainer for spec in specs(config.reward).values()):
        problem = ("reward", "learned rewards stand on a frozen base, which lora=null changes", "use rule rewards")
    if problem is not None:
        raise UserError(problem[0], problem[1], remedy=problem[2])
    if config.model.dtype != "auto":
        check_trainable(config.model.dtype)


def check_trainable(dtype: str) -> None:
    """Weights of this dtype take the small steps of an optimizer."""
    if dtype not in ("float32", "float64"):
        problem = f"updates of AdamW are lost in the rounding of {dtype} weights"
        remedy = "set model.dtype=float32, or train an adapter (whose weights are float32)"
        raise UserError("model.dtype", problem, remedy=remedy)


def uses_of(config: SftConfig) -> list[Use]:
    """The adapter folder that the run begins with, if it names one."""
    if config.lora is None or config.lora.path is None:
        return []
    return [Use(key="lora.path", path=config.lora.path, wanted=Wanted.policy)]
