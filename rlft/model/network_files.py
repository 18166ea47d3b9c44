"""Loads networks whose files have all of their tensors, and refuses others by name before weights are read.

transformers fills what a file lacks with random numbers. So the names and shapes in the files' headers first go through
transformers' own loading as tensors without numbers, which knows its renamings, stacked experts and tied weights. What
it then says of missing, other and additional tensors is judged here, and once more after the weights have been read.

Prefixes of wrappers (torch.compile, DDP, FSDP, PEFT, value heads) are taken off where they leave each name once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.utils.hub import cached_file, cached_files

from rlft.config.model import WEIGHT_FILES
from rlft.system.device import not_finite
from rlft.system.hub import hub_answers
from rlft.types import UserError, counted, require

INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Modules that wrappers put between others: torch.compile, FSDP, and activation checkpointing."""

DEQUANTIZED = ("fp8", "mxfp4")  # methods of quantised weights that transformers turns into 16 bits while it reads them

SCALES = re.compile(r"(_scale_inv|\.(activation|input)_scale)$")
"""Names of an fp8 file's tensors that belong to another tensor."""

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
"""Of safetensors, tables of ids among them; numbers of other types stand for others, as a quantization_config says."""

LEGACY = re.compile(r"(^|\.)(masked_bias|(original_)?inv_freq|position_ids|rope\.freqs)$")
"""Names of buffers that older releases of transformers wrote, and that models compute."""

AGAIN = "download it again, or save the model again with save_pretrained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network to be loaded."""

    loader: Any  # its class, or transformers' auto class for it
    config: PreTrainedConfig
    source: Mapping[str, Any]  # transformers' keyword arguments that say where it is
    key: str  # the config key that names it
    # Gives the names of the tensors of which none may be missing, of a model without weights; None: all.
    part: Callable[[PreTrainedModel], Collection[str]] | None = None

    @property
    def path(self) -> str:
        return self.source["pretrained_model_name_or_path"]

    def refusal(self, problem: str, remedy: str) -> UserError:
        return UserError(self.key, problem, got=self.path, remedy=remedy)


def load_network(network: Network, **options: Any) -> PreTrainedModel:
    """The network with its weights; `options` are those of transformers' `from_pretrained`.

    Raises UserError: its files lack tensors, have others, or cannot be read, or a number is not finite.
    """
    renamings, config = check_files(network, downloads=True), network.config
    if quantized_by(config) is not None:  # GPUs could compute with such weights, but gradients would end there
        config = deepcopy(config)
        config.quantization_config = {**_fields(config), "dequantize": True}
    model, found = network.loader.from_pretrained(
        config=config, key_mapping=renamings or None, output_loading_info=True, **network.source, **options
    )
    _judge(network, model, found)
    # Else transformers would put the wrapper's names into every file that it saves.
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [each for each in conversions if each.source_patterns[0] not in renamings]
    broken = not_finite(model.named_parameters())
    remedy = "use weights that are whole; if float16 is too small for them, set model.dtype=bfloat16 or float32"
    require(broken is None, network.key, f"its tensor {broken} holds NaN or infinity", got=network.path, remedy=remedy)
    return model


def check_files(network: Network, *, downloads: bool = False) -> dict[str, str]:
    """{pattern in a name: what it becomes} for transformers, empty unless a wrapper's names are in the files.

    Reads headers alone, with the UserErrors of `load_network`. Without `downloads`, a model that is not on this machine
    yet is not checked.
    """
    if (files := _files(network, downloads=downloads)) is None:
        return {}
    tensors, method = _headers(network, files), quantized_by(network.config)
    if method == "mxfp4":  # whose tensors are others in the files
        return {}
    if method is None:
        _check_plain(network, tensors)
    else:
        tensors = {name: tensor for name, tensor in tensors.items() if not SCALES.search(name)}
    renamings = _wrapping_modules(network, tensors)
    if (read := _read_without_numbers(network, tensors, renamings)) is None:
        return renamings
    if prefix := _prefix(network, tensors, *read):
        renamings |= {f"^{re.escape(prefix)}": ""}
        read = _read_without_numbers(network, tensors, renamings) or read
    if method is None:
        _check_tables(network, tensors, read[0])
    _judge(network, *read, shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return renamings


def quantized_by(config: PreTrainedConfig) -> str | None:
    """The method by which the weights in the files are quantised, in the words of transformers; None if they are not.

    It is a refusal's business which of them can be loaded (`check_quantized`).
    """
    method = _fields(config).get("quant_method", "unnamed") if _fields(config) else None
    return None if method is None else str(getattr(method, "value", method))


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Its quantization_config; empty if it has none."""
    fields: Any = getattr(config, "quantization_config", None) or {}
    return fields if isinstance(fields, dict) else fields.to_dict()


def check_quantized(config: PreTrainedConfig, path: str, key: str) -> None:
    """Refuses weights that are quantised in the files, unless transformers turns them into 16 bits."""
    method = quantized_by(config)
    problem = f"its weights are quantised (quantization_config in its config.json: {method})"
    remedy = "use the model that it was made from, whose weights are not"
    if key == "model.path":
        remedy += "; where a GPU's memory is short, with model.quantization=4bit"
    require(method in (None, *DEQUANTIZED), key, problem, got=path, remedy=remedy)


# -- the files ---------------------------------------------------------------------------------------------------------
def source_of(path: str, revision: str | None = None, *, trusts: bool = False) -> dict[str, Any]:
    """transformers' keyword arguments for loading from this folder or hub id, whose code it may run if it `trusts` it.

    If the hub does not answer, only its cache on this machine is used, instead of half a minute of retries.
    """
    return {
        "pretrained_model_name_or_path": path,
        "revision": revision,
        "trust_remote_code": trusts,
        "local_files_only": Path(path).is_dir() or not hub_answers(),
    }


def file_of(source: Mapping[str, Any], name: str, *, downloads: bool = True) -> Path | None:
    """The path of the model's file of this name; None if it has none, or it is not here and nothing is downloaded."""
    file = cached_file(
        source["pretrained_model_name_or_path"],
        name,
        revision=source.get("revision"),
        local_files_only=source["local_files_only"] or not downloads,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if file is None else Path(file)


def _files(network: Network, *, downloads: bool) -> dict[Path, list[str]] | None:
    """{file with weights: the tensors that an index says are in it}; None if they are not on this machine."""
    source, is_folder = network.source, Path(network.path).is_dir()
    chosen = getattr(network.config, "transformers_weights", None)
    first = None
    for name in (chosen,) if chosen else WEIGHT_FILES:
        with suppress(OSError):  # a hub's, without a network
            first = first or file_of(source, name, downloads=downloads)
    if first is None:
        problem = "there is neither model.safetensors nor pytorch_model.bin in that folder, nor an index of them"
        is_none = is_folder and downloads  # a config alone is enough for a plan
        require(not is_none, network.key, problem, got=network.path, remedy="point it at the folder of a whole model")
        return None
    if not first.name.endswith(".index.json"):
        return {first: []}
    with _readable(network, first):
        places: dict[str, str] = json.loads(first.read_text())["weight_map"]
        names = sorted(set(places.values()))
    if is_folder:
        paths = [Path(network.path) / name for name in names]
    else:
        local = source["local_files_only"] or not downloads
        try:
            found = cached_files(network.path, names, revision=source.get("revision"), local_files_only=local)
        except OSError:
            return None
        paths = [Path(path) for path in found or ()]
    for name, path in zip(names, paths, strict=True):
        if not path.is_file():
            raise network.refusal(f"{first.name} names {name}, which is not there", "download that file, too")
    return {path: [n for n, place in places.items() if place == name] for name, path in zip(names, paths, strict=True)}


def _headers(network: Network, files: Mapping[Path, list[str]]) -> dict[str, Tensor]:
    """{name: tensor without numbers} of all files, each of which has the tensors that the index says."""
    result: dict[str, Tensor] = {}
    for file, listed in files.items():
        with _readable(network, file):
            found = _header(file)
        if absent := [name for name in listed if name not in found]:
            problem = f"its index says that {absent[0]} is in {file.name}, which lacks it"
            raise network.refusal(problem, "download index and files again, from one revision")
        result |= found
    return result


def _header(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # is no mapping
            return {
                name: torch.empty(found.get_shape(), dtype=PLAIN.get(found.get_dtype(), torch.uint8), device="meta")
                for name, found in slices.items()
            }
    # Unpickles tensors alone, as transformers does; files of a torch before 1.6 are no archives.
    found = torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _check_plain(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Refuses matrices of small integers or 8-bit floats of a config that does not say how they are read."""
    for name, tensor in tensors.items():
        is_plain = tensor.dtype in PLAIN.values() or tensor.dim() < 2
        if not is_plain and not LEGACY.search(name) and not name.endswith(".bias"):  # such as a causal mask
            raise _quantised(network, name)


def _check_tables(network: Network, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> None:
    """Refuses matrices of int64 that are no tables of ids, which a model keeps in buffers."""
    tables = {name.rpartition(".")[2] for name, _ in model.named_buffers()} | {"bias"}
    for name, tensor in tensors.items():
        is_matrix = tensor.dtype is torch.int64 and tensor.dim() > 1
        if is_matrix and name.rpartition(".")[2] not in tables and not LEGACY.search(name):
            raise _quantised(network, name)


def _quantised(network: Network, name: str) -> UserError:
    problem = f"its tensor {name} is quantised, and its config.json has no quantization_config to read it by"
    return network.refusal(problem, "restore its config.json, or use the model that it was made from")


@contextmanager
def _readable(network: Network, file: Path) -> Iterator[None]:
    """An error inside, while this file is read, becomes a UserError."""
    try:
        yield
    except Exception as error:  # torch's of a damaged pickle are of many kinds
        if isinstance(error, UserError):
            raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = "is damaged or cut off" if isinstance(error, SafetensorError) else "cannot be read"
        raise network.refusal(f"{file.name} {kind} ({first_line[:160]})", AGAIN) from None


# -- what a network needs and the files have ---------------------------------------------------------------------------
def _class_of(network: Network) -> Any:
    """The class itself where the loader is one of transformers' auto classes."""
    if not hasattr(network.loader, "from_config"):
        return network.loader
    trusts = {"trust_remote_code": network.source["trust_remote_code"]}
    with torch.device("meta"):
        return type(network.loader.from_config(network.config, **trusts))


def _read_without_numbers(
    network: Network, tensors: Mapping[str, Tensor], renamings: Mapping[str, str]
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """The model on torch's meta device, and what transformers says of loading these tensors into it.

    None where the code of a model does not allow that; then what loading says is judged alone.
    """
    report = "log_state_dict_report"  # in which transformers also raises, without saying which tensor
    try:
        config = deepcopy(network.config)
        config.__dict__.pop("quantization_config", None)
        with mock.patch.object(modeling_utils, report) as reported:
            model, found = _class_of(network).from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                key_mapping=dict(renamings) or None,
                device_map={"": "meta"},
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        return model, {**found, "conversion_errors": reported.call_args.kwargs["loading_info"].conversion_errors}
    except Exception:  # whatever the code of a model raises for tensors without numbers
        return None


def _judge(
    network: Network,
    model: PreTrainedModel,
    found: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Refuses a model of which transformers says this; `shapes` are those of the files' tensors, where known."""
    kind = model.config.model_type
    if lora := [name for name in shapes or () if ".lora_" in name or ".base_layer." in name]:
        problem = f"its files hold an adapter's tensors next to the model's ({lora[0]})"
        raise network.refusal(problem, "merge them with PEFT's merge_and_unload(), and save the result")
    missing = {*found["missing_keys"], *(found.get("conversion_errors") or ())}
    missing = missing - set(_tied(model)) or missing  # of those that are one, the one that is saved
    if missing and network.part is not None:
        missing &= set(network.part(model))
    if missing and shapes and not _names_read(model, found):
        problem = f"its files have no tensor of a {kind}, but others such as {min(shapes)}"
        raise network.refusal(problem, f"use the config.json that belongs to these weights, or {AGAIN}")
    if missing:
        more = f" and {counted(len(missing) - 1, 'other tensor')}" if len(missing) > 1 else ""
        problem = f"its files lack {min(missing)}{more}, which would be random numbers"
        raise network.refusal(problem, _remedy_of_missing(network, model, missing))
    for name, there, here in sorted(found["mismatched_keys"]):
        problem = f"its tensor {name} is {tuple(there)}, and a {kind} of its config.json has {tuple(here)}"
        raise network.refusal(problem, "use the config.json that belongs to these weights")
    for name in sorted(found["unexpected_keys"]):
        if shapes and _matters(name, model, shapes):
            problem = f"its files have {name}, which a {kind} of its config.json does not read"
            raise network.refusal(problem, "use the config.json that belongs to these weights")


def _names_read(model: PreTrainedModel, found: Mapping[str, Any]) -> set[str]:
    return set(model.state_dict()) - set(found["missing_keys"]) - set(_tied(model))


def _tied(model: PreTrainedModel) -> Mapping[str, str]:
    return getattr(model, "all_tied_weights_keys", None) or {}


def _remedy_of_missing(network: Network, model: PreTrainedModel, missing: Collection[str]) -> str:
    head = model.get_output_embeddings()
    if head is not None and all(model.get_submodule(name.rpartition(".")[0]) is head for name in missing):
        return f"if its head is its embedding, set tie_word_embeddings to true in config.json; else {AGAIN}"
    if network.key.startswith("reward."):
        return "point it at a model that was trained as a sequence classifier, and saved as a whole"
    return AGAIN


def _matters(name: str, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether an unread tensor is of one of the model's layers or modules with weights; other heads change nothing."""
    if LEGACY.search(name) or (name.endswith(".bias") and len(shapes.get(name, (1,))) > 1):  # a causal mask
        return False
    parts: list[str] = name.split(".")
    module: Any = model if parts[0] in model._modules else getattr(model, model.base_model_prefix, model)
    in_layers, top = False, module
    for part in parts:
        in_layers = in_layers or isinstance(module, nn.ModuleList)
        if (inner := module._modules.get(part)) is None:
            beyond = isinstance(module, nn.ModuleList) and _predicts_later_tokens(model.config)
            has_weights = module is not top and any(True for _ in module.parameters(recurse=False))
            return has_weights or (in_layers and not beyond)
        module = inner
    return False


def _predicts_later_tokens(config: PreTrainedConfig) -> bool:
    """Whether the config has layers after the last one, which transformers leaves out."""
    return any(value for name, value in vars(config.get_text_config()).items() if re.search(r"nextn|mtp", name))


# -- names that wrappers give ------------------------------------------------------------------------------------------
def _wrapping_modules(network: Network, names: Iterable[str]) -> dict[str, str]:
    """The renamings that take wrapping modules (`INNER`) out of the names. UserError if two would become the same."""
    found = [[part for part in name.split(".") if part in INNER] for name in names]
    if not any(found):
        return {}
    plain: dict[str, str] = {}
    for name in names:
        first = plain.setdefault(_unwrapped(name), name)
        problem, remedy = f"its files have one tensor twice, as {first} and as {name}", AGAIN
        require(first == name, network.key, problem, got=network.path, remedy=remedy)
    # A renaming replaces the first place alone; the comment makes as many of them as there are places.
    most = {part: max(parts.count(part) for parts in found) for part in INNER}
    return {rf"{part}\.(?#{place})": "" for part, number in most.items() for place in range(number)}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in INNER)


def _prefix(network: Network, names: Iterable[str], model: PreTrainedModel, found: Mapping[str, Any]) -> str | None:
    """What all names of the model begin with in the files; None if some of them are the model's own, or none begins so.

    UserError if the files hold the model several times, with different beginnings.
    """
    missing = sorted(found["missing_keys"])
    if not missing or _names_read(model, found):
        return None
    plain, inside = [_unwrapped(name) for name in names], f"{model.base_model_prefix}."
    for shorten in (str, lambda name: name.removeprefix(inside)):
        for wanted in map(shorten, missing):
            prefixes = sorted({name.removesuffix(wanted) for name in plain if name.endswith(f".{wanted}")})
            problem = f"its files hold a {model.config.model_type} {len(prefixes)} times: {', '.join(prefixes[:3])}"
            remedy = "save the one that is meant with save_pretrained"
            require(len(prefixes) < 2, network.key, problem, got=network.path, remedy=remedy)
            if prefixes:
                return prefixes[0]
    return None
