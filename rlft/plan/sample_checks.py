"""Checks of an `rlft sample` config by itself, without torch, the model or the data."""

from __future__ import annotations

from pathlib import Path

from rlft.config.model import LoraSettings
from rlft.config.schema import Keep, SampleConfig
from rlft.model.adapter_fields import check_shape
from rlft.model.adapter_folder import check_adapter_folder
from rlft.plan import rules
from rlft.plan.adapters import AdapterUse, Use, check_folders, check_learned, uses_of_rewards
from rlft.plan.environments import check_environment, check_rewarded
from rlft.reward.workers.reward_spec import specs
from rlft.types import UserError


def check_config(config: SampleConfig) -> None:
    """Checks every rule that needs neither libraries nor the contents of files.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    rules.check_name(config.name)
    rules.check_model(config.model)
    rules.check_engine(config.generation, config.model)
    rules.check_time_limits(config.reward, config.scoring)
    if config.keep is Keep.best and config.max_per_prompt is not None:
        problem = "keep=best keeps one completion of each prompt"
        raise UserError("max_per_prompt", problem, got=config.max_per_prompt, remedy="leave it out, or set keep=all")
    if config.keep is Keep.above and config.min_reward is None:
        raise UserError("min_reward", "is null, and keep=above needs it", remedy="set min_reward=1.0, or keep=all")
    if config.keep is not Keep.above and config.min_reward is not None:
        problem = f"is read by keep=above only, and keep={config.keep}"
        raise UserError("min_reward", problem, got=config.min_reward, remedy="set keep=above, or leave it out")
    rules.check_stops_and_rewards(config.generation, specs(config.reward))
    check_environment(config)
    check_rewarded(config)
    check_learned(specs(config.reward))
    check_folders(uses_of(config), lora_of(config))
    rules.check_data(config.data)


def uses_of(config: SampleConfig) -> list[Use]:
    """The adapter folders that the config names: the policy's, and those of learned rewards."""
    used = [] if config.adapter is None else [Use(key="adapter", path=config.adapter, accepts=AdapterUse.policy)]
    return [*used, *uses_of_rewards(specs(config.reward))]


def lora_of(config: SampleConfig) -> LoraSettings:
    """The shape of the named adapter, of the policy or of a reward; the smallest shape if none is named."""
    for use in uses_of(config):
        if use.path and Path(use.path).expanduser().is_dir():  # otherwise `check_folders` says what is wrong
            fields = check_adapter_folder(use.path, use.key)
            check_shape(fields, use.path, use.key)
            return LoraSettings(
                rank=fields["r"],
                alpha=fields["lora_alpha"],
                dropout=0.0,
                target_modules=fields["target_modules"],
                path=config.adapter,
                use_rslora=bool(fields.get("use_rslora")),
                use_dora=bool(fields.get("use_dora")),
            )
    return LoraSettings(rank=1, alpha=1.0, dropout=0.0, target_modules="all-linear", path=config.adapter)
