"""What of an `rlft train` config is wrong by itself; needs neither torch nor the model nor the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft import check
from rlft.algorithm.protocol import Algorithm
from rlft.check_adapters import check_folders, uses
from rlft.check_roles import check_roles
from rlft.checks.files import check_data
from rlft.config import build
from rlft.data.jsonl import existing_file
from rlft.reward.spec import specs
from rlft.roots import RunConfig
from rlft.targets import instantiate
from rlft.types import Logger


def check_config(plain: Mapping[str, Any], *, trains: bool = True) -> tuple[RunConfig, Algorithm, tuple[Logger, ...]]:
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


def check_components(config: RunConfig, *, trains: bool = True) -> tuple[Algorithm, tuple[Logger, ...]]:
    """The algorithm and the loggers, after every rule that needs neither model nor data."""
    algorithm = instantiate(config.algorithm, "algorithm")
    check.check(config, algorithm, trains=trains)
    rewards = specs(config.reward)
    check_roles(config, algorithm, rewards)
    check.check_stops_and_rewards(config.generation, rewards)
    check_folders(uses(config, rewards), config.lora)
    return algorithm, tuple(instantiate(logger, f"logger.{name}") for name, logger in config.logger.items())
