"""Rules for the folders of adapters and reward models that a config names; only small files are read, never weights.

First what needs no model: files, rank, alpha. Then whether an adapter was made for this base: by the fingerprint in its
rlft.json where there is one, and always by its tensors' names and shapes, against a base that has no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.model.adapter_folder import (
    OLD,
    POLICY,
    REFERENCE,
    Shapes,
    adapter_shapes,
    check_adapter_folder,
    check_head,
    head_shapes,
    is_adapter,
    read_record,
)
from rlft.model.config import CriticKind, LoraSettings, ModelConfig
from rlft.reward.spec import RewardSpec
from rlft.roots import RunConfig
from rlft.types import UserError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig, PreTrainedModel

BASE_CHANGES = ("modules_to_save", "layer_replication", "trainable_token_indices")
"""Fields of adapter_config.json with which, as with `bias`, an adapter changes the base that all roles share."""

VARIANTS = ("lora_bias", "rank_pattern", "alpha_pattern")
"""Fields with which the same tensors would be another function in a role that rlft makes."""

KINDS = ("use_rslora", "use_dora")
"""Such fields that `lora` has, too."""


class Wanted(Enum):
    """What the run makes of a folder.

    policy: its adapter is where the policy begins. reference: its adapter, as PEFT reads it. scalar: its adapter and
    head are where a critic or a reward begins. head: only its head is. any: its adapter is, whatever role it had, with
    its head if it has one.
    """

    policy = auto()
    reference = auto()
    scalar = auto()
    head = auto()
    any = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A folder, the config key that names it, and what is wanted of it."""

    key: str
    path: str
    wanted: Wanted

    @property
    def has_adapter(self) -> bool:
        return self.wanted is not Wanted.head

    @property
    def has_head(self) -> bool:
        return self.wanted in (Wanted.scalar, Wanted.head)

    @property
    def starts_role(self) -> bool:
        """Whether a role that the run makes begins as this adapter, and so has its rank, alpha and targets."""
        return self.wanted in (Wanted.policy, Wanted.scalar, Wanted.any)


def uses(config: RunConfig, rewards: Mapping[str, RewardSpec]) -> list[Use]:
    """The adapter folders this config names, in the order of its sections."""
    found = []
    if config.lora.path is not None:
        found.append(Use(key="lora.path", path=config.lora.path, wanted=Wanted.policy))
    if config.snapshot.reference not in ("none", "base", "copy", "ema"):
        found.append(Use(key="snapshot.reference", path=config.snapshot.reference, wanted=Wanted.reference))
    if config.critic.kind is not CriticKind.none and config.critic.init not in ("base", "reward"):
        wanted = Wanted.scalar if config.critic.kind is CriticKind.adapter else Wanted.head
        found.append(Use(key="critic.init", path=config.critic.init, wanted=wanted))
    return [*found, *uses_of_rewards(rewards)]


def uses_of_rewards(rewards: Mapping[str, RewardSpec]) -> list[Use]:
    """Those of learned rewards that are adapters."""
    return [
        Use(key=f"reward.{spec.name}.path", path=spec.kwargs["path"], wanted=Wanted.scalar)
        for spec in rewards.values()
        if spec.runs_in_trainer and spec.kwargs["path"] is not None and is_adapter(spec.kwargs["path"])
    ]


# -- without the model -----------------------------------------------------------------------------------------------
def check_folders(used: Sequence[Use], lora: LoraSettings) -> None:
    """Every adapter folder has the files that are wanted of it, of the run's rank.

    Raises:
        UserError: with the key, what is wrong and the way out.
    """
    for use in used:
        _check_there(use)
        if use.has_adapter:
            _check_fields(lora, use, check_adapter_folder(use.path, use.key))
        if use.has_head:
            check_head(use.path, use.key)
        role = read_record(use.path, use.key).get("role", POLICY)
        if use.wanted is not Wanted.any and not use.has_head and role not in (POLICY, OLD, REFERENCE):
            problem = f"holds the adapter of the role {role}, which is no policy"
            raise UserError(use.key, problem, got=use.path, remedy="point it at the adapter of a policy")


def _check_there(use: Use) -> None:
    if use.path and Path(use.path).expanduser().is_dir():
        return
    words = {"snapshot.reference": "none, base, copy or ema", "critic.init": "base or reward"}
    if use.key in words:
        problem, remedy = f"is neither {words[use.key]} nor a folder that is there", "use one of these"
    else:
        problem, remedy = "there is no such folder", "point it at a PEFT adapter folder"
    raise UserError(use.key, problem, got=use.path or "nothing", remedy=remedy)


def _check_fields(lora: LoraSettings, use: Use, fields: Mapping[str, Any]) -> None:
    """adapter_config.json against the run's `lora`."""
    changes = [name for name in BASE_CHANGES if fields.get(name)]
    changes += ["bias"] if fields.get("bias", "none") != "none" else []
    if changes:
        problem = f"its {changes[0]} changes the base, which all roles share"
        raise UserError(use.key, problem, got=use.path, remedy="use an adapter without it")
    variants = [name for name in VARIANTS if fields.get(name)]
    if use.starts_role and variants:
        problem = f"adapters with {variants[0]} are not served"
        raise UserError(use.key, problem, got=use.path, remedy="use a plain one")
    for name in KINDS if use.starts_role else ():
        has, runs = bool(fields.get(name)), getattr(lora, name)
        if has != runs:
            raise UserError(
                f"lora.{name}",
                f"the adapter at {use.key} was trained with {name}={str(has).lower()} and would be another function",
                got=str(runs).lower(),
                remedy=f"set lora.{name}={str(has).lower()}, or another {use.key}",
            )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if rank != lora.rank:
        raise UserError(
            "lora.rank",
            f"the adapter at {use.key} has rank {rank}",
            got=lora.rank,
            remedy=f"set lora.rank={rank}, or another {use.key}",
        )
    if use.starts_role and alpha != lora.alpha:
        raise UserError(
            "lora.alpha",
            f"the adapter at {use.key} was trained with {alpha} and would be another function",
            got=lora.alpha,
            remedy=f"set lora.alpha={alpha}, or another {use.key}",
        )


# -- with the base's config ------------------------------------------------------------------------------------------
def check_learned(rewards: Mapping[str, RewardSpec]) -> None:
    """A learned reward of a run that trains none comes from a folder."""
    for spec in rewards.values():
        if spec.runs_in_trainer and spec.kwargs["path"] is None:
            problem = "a fresh head says 0 of every completion, and nothing trains it here"
            remedy = "give it a folder, such as a run of rlft rm"
            raise UserError(f"reward.{spec.name}.path", problem, got="null", remedy=remedy)


def check_classifiers(rewards: Mapping[str, RewardSpec]) -> None:
    """Reward models that are networks of their own give one score."""
    from rlft.model.reward_model import read_classifier

    for spec in rewards.values():
        if spec.runs_in_trainer and not is_adapter(spec.kwargs["path"]):
            read_classifier(spec.kwargs["path"], f"reward.{spec.name}.path")


def check_adapters(
    used: Sequence[Use], lora: LoraSettings, settings: ModelConfig, base_fingerprint: str, model: PreTrainedConfig
) -> None:
    """Every adapter was made for the base whose fingerprint and config these are; after `check_folders`.

    Raises:
        UserError: with the key, the first tensor that does not fit, and the way out.
    """
    for use in used:
        made_for = read_record(use.path, use.key).get("base_fingerprint")
        if made_for not in (None, base_fingerprint):
            problem = f"its rlft.json says it was made for base {made_for}, and this base is {base_fingerprint}"
            raise _other_base(use, problem)
        if use.has_head:
            _check_head(use, model.get_text_config().hidden_size)
        if use.has_adapter:
            _check_tensors(lora, settings, use, model)


def _check_head(use: Use, hidden_size: int) -> None:
    there = head_shapes(use.path, use.key)
    for name, shape in {"weight": (1, hidden_size), "bias": (1,)}.items():
        if there.get(name) != shape:
            found = f"{name} {there[name]}" if name in there else f"no {name}"
            raise _other_base(use, f"its head has {found}, and this base takes {shape}")


def _check_tensors(lora: LoraSettings, settings: ModelConfig, use: Use, model: PreTrainedConfig) -> None:
    empty = empty_model(settings, model)
    modules = {name for name, _ in empty.named_modules()}
    there = adapter_shapes(use.path, use.key)
    for name in sorted(there):
        if name.removeprefix("base_model.model.").partition(".lora_")[0] not in modules:
            raise _other_base(use, f"this base has no module for its tensor {name}")
    here = fresh_shapes(empty, _lora_config(lora, use))
    for name in sorted(there.keys() & here.keys()):
        if there[name] != here[name]:
            raise _other_base(use, f"its tensor {name} is {there[name]}, and this base takes {here[name]}")
    for name in sorted(there.keys() ^ here.keys()):
        said = "lora.target_modules" if use.starts_role else "its adapter_config.json"
        problem = f"{'it has' if name in there else 'it lacks'} the tensor {name}, unlike what {said} says"
        remedy = "set lora.target_modules as in its adapter_config.json" if use.starts_role else "save it anew"
        raise UserError(use.key, problem, got=use.path, remedy=remedy)


def _other_base(use: Use, problem: str) -> UserError:
    return UserError(use.key, problem, got=use.path, remedy="use the base it was made for, or an adapter for this one")


def _lora_config(lora: LoraSettings, use: Use) -> PeftConfig:
    """That of the role which the adapter is loaded into."""
    from peft import PeftConfig

    from rlft.model.lora_config import lora_config

    if not use.starts_role:
        return PeftConfig.from_pretrained(str(Path(use.path).expanduser()))
    return lora_config(lora)


def empty_model(config: ModelConfig, model: PreTrainedConfig) -> PreTrainedModel:
    """The base with its modules and shapes, and no weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model, trust_remote_code=config.trust_remote_code)


def fresh_shapes(empty: PreTrainedModel, lora: PeftConfig) -> Shapes:
    """The shapes that a new adapter's tensors would have, under PEFT's names; leaves it on the empty base."""
    import torch
    from peft import PeftModel, get_peft_model_state_dict

    from rlft.model.activations import peft_reads_the_old_name

    with torch.device("meta"), peft_reads_the_old_name():
        model = PeftModel(empty, lora, adapter_name=POLICY)
    state = get_peft_model_state_dict(model, adapter_name=POLICY, save_embedding_layers=False)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
