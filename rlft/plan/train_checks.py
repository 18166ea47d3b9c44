"""Checks of an `rlft train` config by itself, without torch, the model or the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.algorithm.objective import Objective
from rlft.config.compose import build
from rlft.config.instantiate import instantiate
from rlft.config.schema import RunConfig
from rlft.data.jsonl import existing_file
from rlft.logger.loggers import loggers_of
from rlft.plan import rules
from rlft.plan.adapters import check_folders, uses
from rlft.plan.environments import check_environment, check_rewarded
from rlft.plan.files import check_data
from rlft.plan.ranks import check_ranks, check_shard_base
from rlft.plan.roles import check_roles
from rlft.reward.workers.reward_spec import specs
from rlft.types import Logger


def check_config(plain: Mapping[str, Any], *, trains: bool = True) -> tuple[RunConfig, Objective, tuple[Logger, ...]]:
    """The typed config, its algorithm and loggers, after every rule that needs neither libraries nor files' contents.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    config = build(plain)
    algorithm, loggers = check_components(config, trains=trains)
    if config.data:
        check_data(config.data)
    if config.pretrain.path is not None:
        existing_file(config.pretrain.path, "pretrain.path")
    return config, algorithm, loggers


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
