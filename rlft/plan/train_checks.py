"""Checks of an `rlft train` config by itself, without torch, the model or the data."""

from __future__ import annotations

from rlft.algorithm.objective import Objective
from rlft.config.instantiate import instantiate
from rlft.config.schema import RunConfig
from rlft.data.jsonl import existing_file
from rlft.logger.loggers import loggers_of
from rlft.plan import rules
from rlft.plan.adapters import check_folders, uses
from rlft.plan.environments import check_environment, check_rewarded
from rlft.plan.ranks import check_ranks, check_shard_base
from rlft.plan.roles import check_roles
from rlft.reward.workers.reward_spec import specs
from rlft.types import Logger


def check_config(config: RunConfig, *, trains: bool = True) -> tuple[Objective, tuple[Logger, ...]]:
    """The algorithm and the loggers, after every rule that needs neither libraries nor files' contents.

    Args:
        config: the typed config.
        trains: False if the policy is only evaluated.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    components = check_components(config, trains=trains)
    if config.data:
        rules.check_data(config.data)
    if config.pretrain.path is not None:
        existing_file(config.pretrain.path, "pretrain.path")
    return components


def check_components(config: RunConfig, *, trains: bool = True) -> tuple[Objective, tuple[Logger, ...]]:
    """The algorithm and the loggers, after every rule that needs neither model nor data."""
    algorithm = instantiate(config.algorithm, "algorithm")
    rules.check(config, algorithm, trains=trains)
    if trains:
        check_ranks(config.cluster)
        check_shard_base(config)
    check_environment(config)
    check_rewarded(config)
    rewards = specs(config.reward)
    check_roles(config, algorithm, rewards, trains=trains)
    rules.check_stops_and_rewards(config.generation, rewards)
    check_folders(uses(config, rewards), config.lora)
    return algorithm, loggers_of(config.logger)
