"""Adapter folders on disk: PEFT's two files, a scalar head where there is one, and a record of what they belong to.

    adapter_config.json, adapter_model.safetensors   PEFT's own
    head.safetensors                                 weight [1, H], bias [1]: of a critic or a reward
    rlft.json                                        {"role", "base_fingerprint", ..}: written by rlft, absent elsewhere

An adapter is LoRA, rsLoRA or DoRA on an unchanged base: every other field of adapter_config.json must have a neutral
value, and is refused by name otherwise. PEFT itself ignores fields that it does not know, and changes the base for some
that it knows. What each field does was read in PEFT 0.21 (tuners/lora/config.py and layer.py);
tests/model/test_adapter_folder.py fails for a field or an initialisation of the installed PEFT that is not decided
here.

Nothing pickled is ever loaded. Only `load_tensors` reads weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rlft.system.terminal import command_line
from rlft.types import UserError, require

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor  # not at run time: a bad folder is refused before torch is imported

CONFIG, WEIGHTS, HEAD, RECORD = "adapter_config.json", "adapter_model.safetensors", "head.safetensors", "rlft.json"

PICKLED = "adapter_model.bin"
UNPICKLE = (
    "import sys, torch, safetensors.torch as s; f = sys.argv[1] + '/adapter_model'; "
    "t = torch.load(f + '.bin', map_location='cpu', weights_only=True); "
    "s.save_file({n: x.clone().contiguous() for n, x in t.items()}, f + '.safetensors')"
)
"""Python code that writes the pickled weights of a folder as WEIGHTS."""

POLICY, OLD, REFERENCE, TEACHER, SAMPLER = "policy", "old", "reference", "teacher", "sampler"
"""Names of roles, as rlft.json records them; critics and rewards have their own."""

WORDS = {WEIGHTS: "the adapter", HEAD: "the scalar head"}

Shapes = dict[str, tuple[int, ...]]  # {tensor's name: its shape}

REQUIRED = ("r", "lora_alpha", "target_modules")

OF_THE_FUNCTION = (
    *REQUIRED, "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "use_rslora", "use_dora", "lora_bias",
    "fan_in_fan_out",  # PEFT corrects it by the layer's type
)  # fmt: skip
"""Fields that say what the tensors compute; PEFT gets these, and no others (`rlft.model.lora_config`)."""

WITHOUT_EFFECT = (
    # where the adapter is from; names and shapes of the tensors say whether this base fits
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config",
    # how it was trained, and how it was initialised, where `init_lora_weights` says so
    "lora_dropout", "corda_config", "eva_config", "loftq_config", "lora_ga_config",
    # read only with other fields, which are refused
    "ensure_weight_tying", "megatron_core", "qalora_group_size",
)  # fmt: skip
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
    "alora_invocation_tokens", "arrow_config", "kasa_config", "megatron_config", "monteclora_config",
    "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""Fields with which the tensors compute something else than LoRA on linear layers."""

CONVERTED = ("corda", "lora_ga", "olora", "pissa")
"""Beginnings of initialisations that PEFT can convert to plain LoRA when it saves."""


def is_neutral(value: object) -> bool:
    """Whether a field with this value says nothing, in PEFT as elsewhere: null, false, or empty."""
    return value is None or value is False or value in ("", [], {})


def check_fields(fields: Mapping[str, Any], path: str | Path, key: str) -> None:
    """Refuses an adapter_config.json of anything else than plain LoRA, rsLoRA or DoRA on an unchanged base.

    The UserError has the first field in the way, and what to do; `key` is the config key that names the folder.
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
        remedy = "merge it into its base with PEFT's merge_and_unload(), and set model.path to the result"
        return f"its {name} changes the base, which all roles share", remedy
    if name in ANOTHER_FUNCTION:
        return f"adapters with {name} are not supported", "use an adapter without it"
    problem = f"adapter_config.json has {name}={_short(value)}, which may change what the adapter computes"
    return problem, "remove that field if it does not, or use an adapter without it"


def _changed_base(value: object) -> str:
    return f"init_lora_weights={_short(value)} has changed the base that it was trained on, and would change this one"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# -- the files ---------------------------------------------------------------------------------------------------------
def load_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    from safetensors import torch

    return torch.load_file(file)


def load_tensors(path: str | Path, key: str, name: str = WEIGHTS) -> dict[str, Tensor]:
    """The tensors of the adapter, under PEFT's names, or of the scalar head (HEAD).

    Raises UserError: the file cannot be read, or a number is not finite.
    """
    from rlft.system.device import not_finite

    with _readable(name, path, key) as file:
        tensors = load_file(file)
    broken, remedy = not_finite(tensors.items()), "use an earlier checkpoint"
    require(broken is None, key, f"{WORDS[name]} holds NaN or infinity in {broken}", got=path, remedy=remedy)
    return tensors


def tensor_shapes(path: str | Path, key: str, name: str = WEIGHTS) -> Shapes:
    """The shapes of the tensors that `load_tensors` reads, from the file's header."""
    with _readable(name, path, key) as file, safe_open(file, framework="pt") as tensors:
        return {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118  # not iterable


def adapted_modules(tensors: Iterable[str]) -> set[str]:
    """The base's modules that an adapter with tensors of these names is on.

    >>> adapted_modules(["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"])
    {'model.layers.0.mlp.up_proj'}

    A module with several adapted matrices, such as those of experts, is in the file once for each of them.

    >>> adapted_modules(["base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"])
    {'model.layers.0.mlp.experts'}
    """
    layers = (name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors)
    return {re.sub(r"(\.base_layer)+$", "", name) for name in layers}


ROUTER = re.compile(r"(.*_)?router|gate|(.*_)?experts?_gate")
"""Names of routers, next to the experts that they choose; also of the gate that weighs a shared expert."""


def switches_of(fields: Mapping[str, Any]) -> dict[str, bool]:
    """What `lora.use_rslora`, `use_dora`, `experts` and `router` are for an adapter with this adapter_config.json."""
    modules, parameters = fields.get("target_modules"), fields.get("target_parameters") or ()
    return {
        "use_rslora": bool(fields.get("use_rslora")),
        "use_dora": bool(fields.get("use_dora")),
        "experts": any(not name.endswith(".weight") for name in parameters),
        "router": any(map(_is_router, [*parameters, *(() if isinstance(modules, str) else modules or ())])),
    }


def layers_of(fields: Mapping[str, Any]) -> Any:
    """What `lora.target_modules` is for an adapter with this adapter_config.json.

    A linear layer of a model with experts may be named by its weight (`rlft.model.experts.named_for_peft`).
    """
    modules, parameters = fields["target_modules"], fields.get("target_parameters") or ()
    weights = [name for name in parameters if name.endswith(".weight") and not _is_router(name)]
    return modules if isinstance(modules, str) else [*modules, *(name.removesuffix(".weight") for name in weights)]


def _is_router(name: str) -> bool:
    """Whether this module or parameter is a router's, or of a module around it that has the router's name."""
    return any(ROUTER.fullmatch(part) for part in name.removesuffix(".weight").split(".")[-2:])


def does_nothing(path: str | Path, key: str) -> bool:
    """Whether all lora_B of the adapter are 0; reads them until one is not."""
    with _readable(WEIGHTS, path, key) as file, safe_open(file, framework="pt") as tensors:
        names = [name for name in tensors.keys() if ".lora_B" in name]  # noqa: SIM118  # not iterable
        return bool(names) and not any(tensors.get_tensor(name).any() for name in names)


def num_parameters(path: str | Path, key: str) -> int:
    """Of the adapter, from the file's header."""
    return sum(math.prod(shape) for shape in tensor_shapes(path, key).values())


def own_tensors(model: PeftModel, adapter: str) -> dict[str, Tensor]:
    """{PEFT's name: tensor} of an adapter on a model; writing into them changes it.

    PEFT itself, when it loads an adapter, gives some tensors other names (in transformers' conversions of checkpoints)
    and drops them: those of the shared experts of Laguna.
    """
    from peft import get_peft_model_state_dict

    # PEFT would ask the hub about the base's vocabulary to decide on embeddings; they are frozen and never saved.
    state = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in state.items()}


def check_adapter_folder(path: str | Path, key: str) -> dict[str, Any]:
    """The fields of adapter_config.json. Refuses a folder that lacks one of PEFT's files, or is not plain LoRA."""
    folder = Path(path).expanduser()
    for name in (CONFIG, WEIGHTS):
        problem, remedy = f"there is no {name} in that folder", "point it at a PEFT adapter folder"
        if name == WEIGHTS and (folder / PICKLED).is_file():
            problem, command = f"its weights are pickled, in {PICKLED}", command_line("python", "-c", UNPICKLE, folder)
            remedy = f"write them as {WEIGHTS}: {command}"
        require((folder / name).is_file(), key, problem, got=path, remedy=remedy)
    fields = _read_json(CONFIG, path, key)
    check_fields(fields, path, key)
    return fields


def has_head(path: str | Path) -> bool:
    """Whether the folder has a scalar head, so that it is a critic's or a reward's."""
    return (Path(path).expanduser() / HEAD).is_file()


def check_head(path: str | Path, key: str) -> None:
    """Refuses a folder without head.safetensors, which cannot be a critic's or a reward's."""
    problem, remedy = f"there is no {HEAD} in that folder", "point it at the folder of a reward or a critic"
    require(has_head(path), key, problem, got=path, remedy=remedy)


def content_fingerprint(path: str | Path) -> str:
    """sha256 (hex) of the files that define an adapter: its config, its weights and its head."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS, HEAD):
        file = Path(path).expanduser() / name
        if file.is_file():
            digest.update(f"{name}:{file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def read_record(path: str | Path, key: str) -> dict[str, Any]:
    """The fields of rlft.json; {} if rlft did not make the folder."""
    return _read_json(RECORD, path, key) if (Path(path).expanduser() / RECORD).is_file() else {}


def _read_json(name: str, path: str | Path, key: str) -> dict[str, Any]:
    with _readable(name, path, key) as file:
        fields = json.loads(file.read_text())
        if not isinstance(fields, dict):
            raise ValueError("not a mapping")
        return fields


@contextmanager
def _readable(name: str, path: str | Path, key: str) -> Iterator[Path]:
    """The file of that name in the folder; an error inside the block, while it is read, becomes a UserError."""
    try:
        yield Path(path).expanduser() / name
    except (OSError, SafetensorError, ValueError) as error:
        problem = f"{WORDS.get(name, name)} cannot be read ({str(error).splitlines()[0]})"
        raise UserError(key, problem, got=path, remedy="point it at a folder that is whole") from None
