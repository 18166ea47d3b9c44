"""What each command refuses in its config alone, without torch, the model or the contents of data.

Each check returns the components that it has made of the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlft.algorithm.objective import Objective
from rlft.algorithm.preference import BradleyTerry, PreferenceLoss, RankingLoss
from rlft.config.instantiate import instantiate
from rlft.config.model import LoraSettings
from rlft.config.schema import DpoConfig, Keep, RmConfig, RunConfig, SampleConfig, SftConfig
from rlft.config.trainer import FLAT
from rlft.data.files import files_at
from rlft.logger.interface import Logger
from rlft.logger.loggers import declares, loggers_of
from rlft.model.adapter_folder import check_adapter_folder, check_shape, has_head, layers_of, switches_of
from rlft.plan.adapters import AdapterUse, Use, check_folders, use_of_policy, uses, uses_of_rewards
from rlft.plan.learner_rules import check_learner, start_of
from rlft.plan.model_rules import check_engine, check_model
from rlft.plan.roles import check_roles
from rlft.plan.rules import (
    check_budget,
    check_data,
    check_evaluation,
    check_name,
    check_ranks,
    check_run,
    check_sequence_ranks,
    check_shard_base,
)
from rlft.plan.scoring_rules import (
    check_environment,
    check_learned,
    check_rewarded,
    check_stops_and_rewards,
    check_time_limits,
)
from rlft.reward.workers.reward_spec import specs
from rlft.types import UserError, require

REFERENCE = "snapshot.reference"
MOVING = "ema"
"""A reference that only `rlft train` has: its log-probs would have to be recomputed in every step."""
FIXED = "copy, base or an adapter's folder"


def check_train(config: RunConfig, *, trains: bool = True) -> tuple[Objective, tuple[Logger, ...]]:
    """The algorithm and the loggers of a run, which is only evaluated unless it `trains`."""
    components = check_components(config, trains=trains)
    if config.data:
        check_data(config.data)
    if config.pretrain.path is not None:
        files_at(config.pretrain.path, "pretrain.path")
    return components


def check_components(config: RunConfig, *, trains: bool = True) -> tuple[Objective, tuple[Logger, ...]]:
    """The algorithm and the loggers, after every rule that needs neither model nor data."""
    algorithm = instantiate(config.algorithm, "algorithm")
    check_run(config, algorithm, trains=trains)
    if trains:
        check_sequence_ranks(config)
        check_ranks(config.cluster)
        check_shard_base(config)
    check_environment(config)
    check_rewarded(config)
    rewards = specs(config.reward)
    check_roles(config, algorithm, rewards, trains=trains)
    check_stops_and_rewards(config.generation, rewards)
    check_folders(uses(config, rewards), config.lora)
    return algorithm, checked_loggers(config) if trains else loggers_of(config.logger)


def check_sft(config: SftConfig) -> tuple[Logger, ...]:
    """The loggers of `rlft sft`."""
    check_name(config.name)
    check_engine(config.generation, config.model)
    check_learner(config)
    check_model(config.model)
    check_evaluation(config.eval, config.generation)
    check_time_limits(config.reward, config.scoring)
    if config.data:
        check_stops_and_rewards(config.generation, specs(config.reward))
    longest = config.prompts.max_tokens + max(config.max_completion_tokens, config.generation.max_tokens)
    check_budget(config.token_budget, longest, "prompts.max_tokens and a completion")
    rewards = specs(config.reward) if config.data else {}
    if config.data:
        check_rewarded(config)
    check_learned(rewards)
    check_folders([*uses_of_sft(config), *uses_of_rewards(rewards)], config.lora)
    for key, section in (("data", config.data), ("demonstrations", config.demonstrations)):
        if section:
            check_data(section, key)
    return checked_loggers(config)


def uses_of_sft(config: SftConfig) -> list[Use]:
    """The adapter folder that the run starts from, if it names one."""
    return use_of_policy("lora.path", start_of(config.lora))


def check_sample(config: SampleConfig) -> None:
    """Makes nothing for `rlft sample`."""
    check_name(config.name)
    check_model(config.model)
    check_engine(config.generation, config.model)
    check_time_limits(config.reward, config.scoring)
    keep, number, least = config.keep, config.max_per_prompt, config.min_reward
    problem, remedy = "keep=best keeps one completion of each prompt", "leave it out, or set keep=all"
    require(keep is not Keep.best or number is None, "max_per_prompt", problem, got=number, remedy=remedy)
    problem, remedy = "is null, and keep=above needs it", "set min_reward=1.0, or keep=all"
    require(keep is not Keep.above or least is not None, "min_reward", problem, remedy=remedy)
    problem, remedy = f"is read by keep=above only, and keep={keep}", "set keep=above, or leave it out"
    require(keep is Keep.above or least is None, "min_reward", problem, got=least, remedy=remedy)
    check_stops_and_rewards(config.generation, specs(config.reward))
    check_environment(config)
    check_rewarded(config)
    check_learned(specs(config.reward))
    check_folders(uses_of_sample(config), lora_of(config))
    check_data(config.data)


def uses_of_sample(config: SampleConfig) -> list[Use]:
    """The adapter folders that the config names: the policy's, and those of learned rewards."""
    return [*use_of_policy("adapter", config.adapter), *uses_of_rewards(specs(config.reward))]


def lora_of(config: SampleConfig) -> LoraSettings:
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


def check_preferences(config: RmConfig | DpoConfig) -> tuple[RankingLoss, tuple[Logger, ...]]:
    """The loss and the loggers of `rlft rm` and `rlft dpo`."""
    check_name(config.name)
    check_model(config.model)
    longest, what = config.prompts.max_tokens + config.max_completion_tokens, "prompts.max_tokens and a completion"
    if isinstance(config, RmConfig):
        longest, what = longest + 1, "prompts.max_tokens, max_completion_tokens and an ending"
    check_budget(config.token_budget, longest, what)
    loss = _loss_of(config)
    check_folders(uses_of_preferences(config, loss), config.lora)
    check_data(config.preferences, "preferences")
    if isinstance(config, RmConfig) and config.replay.path is not None:
        with replay_is_meant():
            check_data(replayed(config), "preferences")
    return loss, checked_loggers(config)


def checked_loggers(config: RunConfig | SftConfig | RmConfig | DpoConfig) -> tuple[Logger, ...]:
    """The loggers of a run that trains, which write what stop.when needs."""
    loggers = loggers_of(config.logger)
    if config.stop.when == FLAT:
        problem, got = "ends a run by its evaluations, and there are none", config.stop.when
        require(config.eval.every, "stop.when", problem, got=got, remedy="set eval.every to a number of steps")
        problem = "ends a run by eval.jsonl, which no logger writes"
        writes = any(declares(logger, "writes_metrics") for logger in loggers)
        require(writes, "stop.when", problem, got=got, remedy="add jsonl to logger")
    return loggers


def _loss_of(config: RmConfig | DpoConfig) -> RankingLoss:
    """The loss that the config describes, with a reference if it needs one. Raises UserError."""
    if isinstance(config, RmConfig):
        return BradleyTerry(margin=config.margin)
    loss = instantiate(config.loss, "loss", "dpo")
    if not isinstance(loss, PreferenceLoss):
        problem, got = "is no rlft.algorithm.preference.PreferenceLoss", config.loss["_target_"]
        raise UserError("loss._target_", problem, got=got, remedy="derive it from that class")
    configured, reference = config.snapshot.reference, reference_of(config, loss)
    problem, remedy = "its log-probs are computed once for each completion, so it cannot move", f"use {FIXED}"
    require(configured != MOVING, REFERENCE, problem, got=configured, remedy=remedy)
    is_given = reference != "none"
    problem, remedy = "this loss compares the policy with a reference", f"use {FIXED}, or loss=simpo or orpo"
    require(is_given or not loss.needs_reference, REFERENCE, problem, got=configured, remedy=remedy)
    problem, remedy = "this loss uses no reference", "leave it out, or use loss=dpo or ipo"
    require(not is_given or loss.needs_reference, REFERENCE, problem, got=configured, remedy=remedy)
    return loss


def reference_of(config: RmConfig | DpoConfig, loss: RankingLoss) -> str:
    """What the loss compares the policy with: `none`, `base`, or the folder of an adapter."""
    configured = "auto" if isinstance(config, RmConfig) else config.snapshot.reference
    if configured == "auto":
        configured = "copy" if loss.needs_reference else "none"
    return (config.lora.path or "base") if configured == "copy" else configured


def uses_of_preferences(config: RmConfig | DpoConfig, loss: RankingLoss) -> list[Use]:
    """The adapter folders that the config names: the one that training starts from, and the reference's."""
    path, reference = config.lora.path, reference_of(config, loss)
    used = use_of_policy("lora.path", path)
    if path is not None and isinstance(config, RmConfig):
        used = [Use(key="lora.path", path=path, accepts=AdapterUse.scalar if has_head(path) else AdapterUse.any)]
    if reference not in ("none", "base", path):
        words = "auto, none, base or copy"
        used.append(Use(key=REFERENCE, path=reference, accepts=AdapterUse.frozen, words=words))
    return used


@contextmanager
def replay_is_meant() -> Iterator[None]:
    """Gives UserErrors raised inside the key of earlier rounds' preferences."""
    try:
        yield
    except UserError as error:
        raise UserError("replay.path", error.problem, got=error.got, remedy=error.remedy) from None


def replayed(config: RmConfig) -> Mapping[str, Any]:
    """The section that reads the earlier rounds' preferences.

    Their held-out rankings stay held out: those files are split by the same hash.
    """
    no_held_out = {key: None for key in ("held_out_path", "held_out_split") if key in config.preferences}
    return {**config.preferences, "path": config.replay.path, **no_held_out}
