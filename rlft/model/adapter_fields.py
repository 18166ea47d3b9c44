"""The fields of adapter_config.json with which an adapter is taken: LoRA, rsLoRA or DoRA on an unchanged base. Every
other field must have a neutral value, and is refused by name otherwise.

PEFT itself ignores fields that it does not know, and changes the base for some that it knows. What each field does was
read in PEFT 0.21 (tuners/lora/config.py and layer.py); tests/model/test_adapter_fields.py fails for a field or an
initialisation of the installed PEFT that is not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlft.types import UserError

REQUIRED = ("r", "lora_alpha", "target_modules")

OF_THE_FUNCTION = (
    *REQUIRED,
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",  # PEFT corrects it by the layer's type
)
"""Fields that say what the tensors compute; PEFT gets these, and no others (`rlft.model.lora_config`)."""

WITHOUT_EFFECT = (
    # where the adapter is from
    "auto_mapping",
    "base_model_name_or_path",  # names and shapes of the tensors say whether this base fits
    "inference_mode",
    "peft_version",
    "revision",
    "runtime_config",
    # how it was trained
    "lora_dropout",
    # how it was initialised, where `init_lora_weights` says so
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",
    # read only with other fields, which are refused
    "ensure_weight_tying",
    "megatron_core",
    "qalora_group_size",
)
"""Fields that may have any value: they change nothing of what a saved adapter computes."""

VALUES: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    # These set an adapter's first weights, and leave the base as it is.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
"""{field: the values, besides neutral ones, with which an adapter is taken}."""

CHANGING_THE_BASE = ("bias", "layer_replication", "modules_to_save", "trainable_token_indices")
"""Fields by which an adapter changes the base that all roles share."""

ANOTHER_FUNCTION = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "megatron_config",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
"""Fields with which the tensors compute something else than LoRA on linear layers."""

CONVERTED = ("corda", "lora_ga", "olora", "pissa")
"""Beginnings of initialisations that PEFT can convert to plain LoRA when it saves."""


def is_neutral(value: object) -> bool:
    """Whether a field with this value says nothing, in PEFT as elsewhere: null, false, or empty."""
    return value is None or value is False or value in ("", [], {})


def check_fields(fields: Mapping[str, Any], path: str | Path, key: str) -> None:
    """Refuses an adapter_config.json of anything else than plain LoRA, rsLoRA or DoRA on an unchanged base.

    Args:
        fields: what the file holds.
        path: the adapter's folder.
        key: the config key that names the folder.

    Raises:
        UserError: with the first field in the way, and what to do.
    """
    for name in sorted(fields, key=lambda name: name not in VALUES):  # the kind first: it explains the others
        value = fields[name]
        if name in OF_THE_FUNCTION or name in WITHOUT_EFFECT or is_neutral(value) or _is_taken(name, value):
            continue
        problem, remedy = _objection(name, value)
        raise UserError(key, problem, got=path, remedy=remedy)


def check_shape(fields: Mapping[str, Any], path: str | Path, key: str) -> None:
    """Refuses an adapter_config.json that does not say rank, alpha and targets; arguments as for `check_fields`."""
    rank, alpha, targets = (fields.get(name) for name in REQUIRED)
    named = _is_pattern(targets) or (isinstance(targets, list) and all(isinstance(t, str) for t in targets))
    for name, is_right, kind in (
        ("r", type(rank) is int and rank > 0, "whole number above 0"),
        ("lora_alpha", type(alpha) in (int, float), "number"),
        ("target_modules", targets and named, "list of names or regular expression"),
    ):
        if not is_right:
            is_absent = fields.get(name) is None
            problem = f"has no {name}" if is_absent else f"has {name}={_short(fields[name])}, which is no {kind}"
            remedy = "point it at an adapter that PEFT or rlft has saved"
            raise UserError(key, f"adapter_config.json {problem}", got=path, remedy=remedy)


def _is_taken(name: str, value: object) -> bool:
    return (value.lower() if name == "init_lora_weights" and isinstance(value, str) else value) in VALUES.get(name, ())


def _is_pattern(value: object) -> bool:
    """Whether the value is a regular expression."""
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _objection(name: str, value: object) -> tuple[str, str]:
    """What is wrong with a field that is in the way, and what to do."""
    if name == "peft_type":
        return f"holds an adapter of the kind {_short(value)}", "point it at a LoRA adapter"
    if name == "task_type":
        problem = f"was trained for another task than generating text (task_type={_short(value)})"
        return problem, "use an adapter of the task CAUSAL_LM"
    if name == "init_lora_weights":
        merge = "merge it into the base that it was trained on, and set model.path to the result"
        if isinstance(value, str) and value.lower().startswith(CONVERTED):
            save = "save_pretrained(<folder>, path_initial_model_for_weight_conversion=<the untrained adapter>)"
            return _changed_base(value), f"convert it to plain LoRA with PEFT's {save}, or {merge}"
        if value == "loftq":
            return _changed_base(value), merge
        problem = f"init_lora_weights={_short(value)} is not known to leave the base unchanged"
        return problem, f"set it to true in adapter_config.json if it does; if not, {merge}"
    if name in CHANGING_THE_BASE:
        return f"its {name} changes the base, which all roles share", "use an adapter without it"
    if name == "target_parameters":
        problem = "its target_parameters adapts parameters that are no linear layers, such as stacked experts"
        return problem, "use an adapter of linear layers only, such as target_modules=[q_proj,k_proj,v_proj,o_proj]"
    if name in ANOTHER_FUNCTION:
        return f"adapters with {name} are not supported", "use an adapter without it"
    problem = f"adapter_config.json has {name}={_short(value)}, which may change what the adapter computes"
    return problem, "remove that field if it does not, or use an adapter without it"


def _changed_base(value: object) -> str:
    return f"init_lora_weights={_short(value)} has changed the base that it was trained on, and would change this one"


def _short(value: object) -> str:
    """The value in a message."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
