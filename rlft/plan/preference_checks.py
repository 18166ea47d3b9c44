"""Checks of an `rlft rm` or `rlft dpo` config by itself, without torch, the model or the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.algorithm.preference.bradley_terry import BradleyTerry
from rlft.algorithm.preference.preference_loss import PreferenceLoss, RankingLoss
from rlft.config.instantiate import instantiate
from rlft.config.schema import DpoConfig, RmConfig
from rlft.logger.loggers import loggers_of
from rlft.model.adapter_folder import has_head
from rlft.plan import rules
from rlft.plan.adapters import AdapterUse, Use, check_folders
from rlft.types import Logger, UserError

REFERENCE = "snapshot.reference"
MOVING = "ema"
"""A reference that only `rlft train` has: its log-probs would have to be recomputed in every step."""


def check_config(config: RmConfig | DpoConfig) -> tuple[RankingLoss, tuple[Logger, ...]]:
    """The loss and the loggers, after every rule that needs neither libraries nor the contents of files.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    rules.check_name(config.name)
    rules.check_model(config.model)
    longest, what = config.prompts.max_tokens + config.max_completion_tokens, "prompts.max_tokens and a completion"
    if isinstance(config, RmConfig):
        longest, what = longest + 1, "prompts.max_tokens, max_completion_tokens and an ending"
    rules.check_budget(config.token_budget, longest, what)
    loss = _loss_of(config)
    check_folders(uses_of(config, loss), config.lora)
    rules.check_data(config.preferences, "preferences")
    if isinstance(config, RmConfig) and config.replay.path is not None:
        try:
            rules.check_data(replayed(config), "preferences")
        except UserError as error:
            raise UserError("replay.path", error.problem, got=error.got, remedy=error.remedy) from None
    return loss, loggers_of(config.logger)


def _loss_of(config: RmConfig | DpoConfig) -> RankingLoss:
    """The loss that the config describes, with a reference if it needs one. Raises UserError."""
    if isinstance(config, RmConfig):
        return BradleyTerry(margin=config.margin)
    loss = instantiate(config.loss, "loss", "dpo")
    if not isinstance(loss, PreferenceLoss):
        problem, got = "is no rlft.algorithm.preference.preference_loss.PreferenceLoss", config.loss["_target_"]
        raise UserError("loss._target_", problem, got=got, remedy="derive it from that class")
    configured, reference = config.snapshot.reference, reference_of(config, loss)
    if configured == MOVING:
        problem = "its log-probs are computed once for each completion, so it cannot move"
        raise UserError(REFERENCE, problem, got=configured, remedy="use copy, base or an adapter's folder")
    if loss.needs_reference and reference == "none":
        remedy = "use copy, base or an adapter's folder, or loss=simpo or orpo"
        raise UserError(REFERENCE, "this loss compares the policy with a reference", got=configured, remedy=remedy)
    if not loss.needs_reference and reference != "none":
        remedy = "leave it out, or use loss=dpo or ipo"
        raise UserError(REFERENCE, "this loss uses no reference", got=configured, remedy=remedy)
    return loss


def reference_of(config: RmConfig | DpoConfig, loss: RankingLoss) -> str:
    """What the loss compares the policy with: `none`, `base`, or the folder of an adapter."""
    configured = "auto" if isinstance(config, RmConfig) else config.snapshot.reference
    if configured == "auto":
        configured = "copy" if loss.needs_reference else "none"
    return (config.lora.path or "base") if configured == "copy" else configured


def uses_of(config: RmConfig | DpoConfig, loss: RankingLoss) -> list[Use]:
    """The adapter folders that the config names: the one that training starts from, and the reference's."""
    used, path, reference = [], config.lora.path, reference_of(config, loss)
    if path is not None:
        accepts = AdapterUse.policy
        if isinstance(config, RmConfig):
            accepts = AdapterUse.scalar if has_head(path) else AdapterUse.any
        used.append(Use(key="lora.path", path=path, accepts=accepts))
    if reference not in ("none", "base", path):
        words = "auto, none, base or copy"
        used.append(Use(key=REFERENCE, path=reference, accepts=AdapterUse.frozen, words=words))
    return used


def replayed(config: RmConfig) -> Mapping[str, Any]:
    """The section that reads the earlier rounds' preferences.

    Their held-out rankings stay held out: those files are split by the same hash.
    """
    no_held_out = {key: None for key in ("held_out_path", "held_out_split") if key in config.preferences}
    return {**config.preferences, "path": config.replay.path, **no_held_out}
