"""Checks of an `rlft rm` config by itself, without torch, the model or the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.config.compose import build
from rlft.config.schema import RmConfig
from rlft.logger.loggers import loggers_of
from rlft.model.adapter_folder import has_head
from rlft.plan import rules
from rlft.plan.adapters import AdapterUse, Use, check_folders
from rlft.plan.files import check_data
from rlft.types import Logger, UserError


def check_config(plain: Mapping[str, Any]) -> tuple[RmConfig, tuple[Logger, ...]]:
    """The typed config and its loggers, after every rule that needs neither libraries nor the contents of files.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    config = build(plain, RmConfig, "rm")
    rules.check_name(config.name)
    rules.check_model(config.model)
    longest = config.prompts.max_tokens + config.max_completion_tokens + 1
    rules.check_budget(config.token_budget, longest, "prompts.max_tokens, max_completion_tokens and an ending")
    check_folders(uses_of(config), config.lora)
    check_data(config.preferences, "preferences")
    if config.replay.path is not None:
        try:
            check_data(replayed(config), "preferences")
        except UserError as error:
            raise UserError("replay.path", error.problem, got=error.got, remedy=error.remedy) from None
    return config, loggers_of(config.logger)


def uses_of(config: RmConfig) -> list[Use]:
    """The adapter folder that the run starts from, if it names one."""
    path = config.lora.path
    if path is None:
        return []
    return [Use(key="lora.path", path=path, accepts=AdapterUse.scalar if has_head(path) else AdapterUse.any)]


def replayed(config: RmConfig) -> Mapping[str, Any]:
    """The section that reads the earlier rounds' preferences.

    Their held-out rankings stay held out: those files are split by the same hash.
    """
    no_held_out = {key: None for key in ("held_out_path", "held_out_split") if key in config.preferences}
    return {**config.preferences, "path": config.replay.path, **no_held_out}
