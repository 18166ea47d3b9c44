"""Checks of an `rlft dpo` config by itself, without torch, the model or the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.algorithm.preference.preference_loss import PreferenceLoss
from rlft.config.compose import build
from rlft.config.instantiate import instantiate
from rlft.config.schema import DpoConfig
from rlft.logger.loggers import loggers_of
from rlft.plan import rules
from rlft.plan.adapters import AdapterUse, Use, check_folders
from rlft.plan.files import check_data
from rlft.types import Logger, UserError

REFERENCE = "snapshot.reference"
MOVING = "ema"
"""A reference that only `rlft train` has: its log-probs would have to be recomputed in every step."""


def check_config(plain: Mapping[str, Any]) -> tuple[DpoConfig, PreferenceLoss, tuple[Logger, ...]]:
    """The typed config, its loss and loggers, after every rule that needs neither libraries nor the contents of files.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    config = build(plain, DpoConfig, "dpo")
    rules.check_name(config.name)
    rules.check_model(config.model)
    longest = config.prompts.max_tokens + config.max_completion_tokens
    rules.check_budget(config.token_budget, longest, "prompts.max_tokens and a completion")
    loss = loss_of(config)
    _check_reference(config, loss)
    check_folders(uses_of(config, loss), config.lora)
    check_data(config.preferences, "preferences")
    return config, loss, loggers_of(config.logger)


def loss_of(config: DpoConfig) -> PreferenceLoss:
    """The loss that the config describes. Raises UserError."""
    loss = instantiate(config.loss, "loss", "dpo")
    if not isinstance(loss, PreferenceLoss):
        problem, got = "is no rlft.algorithm.preference.preference_loss.PreferenceLoss", config.loss["_target_"]
        raise UserError("loss._target_", problem, got=got, remedy="derive it from that class")
    return loss


def reference_of(config: DpoConfig, loss: PreferenceLoss) -> str:
    """The reference that rewards are relative to: `none`, `base`, or the folder of an adapter."""
    configured = config.snapshot.reference
    if configured == "auto":
        configured = "copy" if loss.needs_reference else "none"
    return (config.lora.path or "base") if configured == "copy" else configured


def uses_of(config: DpoConfig, loss: PreferenceLoss) -> list[Use]:
    """The adapter folders that the config names: the one that the policy starts from, and the reference's."""
    used = []
    if config.lora.path is not None:
        used.append(Use(key="lora.path", path=config.lora.path, accepts=AdapterUse.policy))
    reference = reference_of(config, loss)
    if reference not in ("none", "base", config.lora.path):
        words = "auto, none, base or copy"
        used.append(Use(key=REFERENCE, path=reference, accepts=AdapterUse.frozen, words=words))
    return used


def _check_reference(config: DpoConfig, loss: PreferenceLoss) -> None:
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
