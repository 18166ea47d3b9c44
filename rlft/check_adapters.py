"""Rules for the adapter folders that a config names, kept by looking at their small files; no weight is read.

First what needs no model: files, rank, alpha. Then whether they were made for this base: by the fingerprint in rlft.json
where there is one, and always by the names and shapes of their tensors, against a model that has no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlft.config import RunConfig
from rlft.model.adapter_folder import (
    Shapes,
    adapter_shapes,
    check_adapter_folder,
    check_head,
    head_shapes,
    read_record,
)
from rlft.model.config import CriticKind, ModelConfig
from rlft.model.reward_model import is_adapter
from rlft.model.roles import OLD, POLICY, REFERENCE
from rlft.reward.spec import RewardSpec
from rlft.types import UserError

BASE_CHANGES = ("modules_to_save", "layer_replication", "trainable_token_indices")
"""Fields of adapter_config.json, beside `bias`, with which an adapter holds changes of the base, which all roles share."""

VARIANTS = ("use_rslora", "use_dora", "lora_bias", "rank_pattern", "alpha_pattern")
"""Fields with which the same tensors would be another function in a role that rlft makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A folder that the config names under `key`, and what the run wants of it.

    adapter: its adapter; without, only its head. head: its head. starts_role: a role that the run makes begins as this
    adapter, so it must be of the run's rank, alpha and targets; else PEFT takes it as it is (the reference). policy: it
    stands for a policy, so it must not be that of a critic or a reward.
    """

    key: str
    path: str
    adapter: bool
    head: bool
    starts_role: bool
    policy: bool


def uses(config: RunConfig, rewards: Mapping[str, RewardSpec]) -> list[Use]:
    """The folders this config names, in the order of its sections."""
    found = []
    if config.lora.path is not None:
        found.append(Use(key="lora.path", path=config.lora.path, adapter=True, head=False, starts_role=True, policy=True))
    if config.snapshot.reference not in ("none", "base", "copy", "ema"):
        path = config.snapshot.reference
        found.append(
            Use(key="snapshot.reference", path=path, adapter=True, head=False, starts_role=False, policy=True)
        )
    if config.critic.kind is not CriticKind.none and config.critic.init not in ("base", "reward"):
        own = config.critic.kind is CriticKind.adapter
        path = config.critic.init
        found.append(Use(key="critic.init", path=path, adapter=own, head=True, starts_role=own, policy=False))
    for spec in rewards.values():
        path = spec.kwargs.get("path") if spec.runs_in_trainer else None
        if path is not None and is_adapter(path):
            key = f"reward.{spec.name}.path"
            found.append(Use(key=key, path=path, adapter=True, head=True, starts_role=True, policy=False))
    return found


# -- without the model -----------------------------------------------------------------------------------------------
def check_folders(config: RunConfig, rewards: Mapping[str, RewardSpec]) -> None:
    """Every folder has the files that are wanted of it, of the run's rank.

    Raises:
        UserError: with the key, what is wrong and the way out.
    """
    for use in uses(config, rewards):
        if not Path(use.path).expanduser().is_dir():
            choices = {"snapshot.reference": "none, base, copy or ema", "critic.init": "base or reward"}
            known = choices.get(use.key)
            problem = f"is neither {known} nor a folder that is there" if known else "there is no such folder"
            remedy = "use one of these" if known else "point it at a PEFT adapter folder"
            raise UserError(use.key, problem, got=use.path or "nothing", remedy=remedy)
        if use.adapter:
            _check_fields(config, use, check_adapter_folder(use.path, use.key))
        if use.head:
            check_head(use.path, use.key)
        role = read_record(use.path, use.key).get("role")
        if use.policy and role is not None and role not in (POLICY, OLD, REFERENCE):
            problem = f"holds the adapter of a {role.partition('_')[0]}, which is no policy"
            raise UserError(use.key, problem, got=use.path, remedy="point it at the adapter of a policy")


def _check_fields(config: RunConfig, use: Use, fields: Mapping[str, Any]) -> None:
    """What adapter_config.json says, against the run's `lora`."""
    base_changes = [name for name in BASE_CHANGES if fields.get(name)]
    if fields.get("bias", "none") != "none":
        base_changes.append("bias")
    if base_changes:
        problem = f"its {base_changes[0]} changes the base, which all roles share"
        raise UserError(use.key, problem, got=use.path, remedy="use an adapter without it")
    variants = [name for name in VARIANTS if fields.get(name)]
    if use.starts_role and variants:
        problem = f"adapters with {variants[0]} are not served"
        raise UserError(use.key, problem, got=use.path, remedy="use a plain one")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if rank != config.lora.rank:
        raise UserError(
            "lora.rank",
            f"the adapter at {use.key} has rank {rank}",
            got=config.lora.rank,
            remedy=f"set lora.rank={rank}, or another {use.key}",
        )
    if use.starts_role and alpha != config.lora.alpha:
        raise UserError(
            "lora.alpha",
            f"the adapter at {use.key} was trained with {alpha} and would be another function",
            got=config.lora.alpha,
            remedy=f"set lora.alpha={alpha}, or another {use.key}",
        )


# -- with the model's config -----------------------------------------------------------------------------------------
def check_adapters(
    config: RunConfig, rewards: Mapping[str, RewardSpec], base_fingerprint: str, model: PreTrainedConfig
) -> None:
    """Every folder was made for this base: the one whose fingerprint and config these are. Comes after `check_folders`.

    Raises:
        UserError: with the key, the first tensor that does not fit, and the way out.
    """
    found = uses(config, rewards)
    for use in found:
        made_for = read_record(use.path, use.key).get("base_fingerprint")
        if made_for not in (None, base_fingerprint):
            raise _other_base(use, f"by its rlft.json it was trained on base {made_for}, and this one is {base_fingerprint}")
        if use.head:
            _check_head(use, model.get_text_config().hidden_size)
    if not any(use.adapter for use in found):
        return
    modules = {name for name, _ in empty_model(config.model, model).named_modules()}
    for use in (use for use in found if use.adapter):
        _check_modules(use, modules)
        _check_shapes(use, fresh_shapes(config.model, model, _lora_config(config, use)))


def _check_head(use: Use, hidden_size: int) -> None:
    there, here = head_shapes(use.path, use.key), {"weight": (1, hidden_size), "bias": (1,)}
    for name in here:
        if there.get(name) != here[name]:
            there_name = there.get(name, "nothing")
            raise _other_base(use, f"its head has {there_name} as {name}, and this base takes {here[name]}")


def _check_modules(use: Use, modules: set[str]) -> None:
    for name in sorted(adapter_shapes(use.path, use.key)):
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        if module not in modules:
            raise _other_base(use, f"this base has no module for its tensor {name}")


def _check_shapes(use: Use, here: Shapes) -> None:
    there = adapter_shapes(use.path, use.key)
    for name in sorted(there.keys() & here.keys()):
        if there[name] != here[name]:
            raise _other_base(use, f"its tensor {name} is {there[name]}, and this base takes {here[name]}")
    if odd := sorted(there.keys() ^ here.keys()):
        problem = f"{'it has' if odd[0] in there else 'it lacks'} a tensor {odd[0]}"
        said = "lora.target_modules" if use.starts_role else "its adapter_config.json"
        remedy = "set lora.target_modules as in its adapter_config.json" if use.starts_role else "make it anew"
        raise UserError(use.key, f"{problem}, against what {said} says", got=use.path, remedy=remedy)


def _other_base(use: Use, problem: str) -> UserError:
    return UserError(use.key, problem, got=use.path, remedy="use the base it was made for, or an adapter for this one")


def _lora_config(config: RunConfig, use: Use) -> LoraConfig:
    """That of the role the adapter is loaded into."""
    if not use.starts_role:
        return LoraConfig.from_pretrained(str(Path(use.path).expanduser()))
    targets = config.lora.target_modules
    return LoraConfig(
        r=config.lora.rank,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


def empty_model(config: ModelConfig, model: PreTrainedConfig) -> nn.Module:
    """The base with its modules and shapes, and no weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model, trust_remote_code=config.trust_remote_code)


def fresh_shapes(config: ModelConfig, model: PreTrainedConfig, lora: LoraConfig) -> Shapes:
    """The shapes of the tensors that a new adapter of this kind has on this base, under PEFT's names."""
    with torch.device("meta"):
        peft = PeftModel(empty_model(config, model), lora, adapter_name=POLICY)  # type: ignore[arg-type]
    state = get_peft_model_state_dict(peft, adapter_name=POLICY, save_embedding_layers=False)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
