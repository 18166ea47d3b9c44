"""The files of an export: the adapter, or the model with the adapter merged, and what its base has besides weights."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from rlft.batch import score_sequences
from rlft.config.instantiate import from_mapping
from rlft.config.model import ModelConfig
from rlft.config.schema import AUTO
from rlft.model.activations import peft_is_quiet
from rlft.model.adapter_folder import CONFIG, HEAD, RECORD, WEIGHTS as ADAPTER_WEIGHTS, adapted_modules, own_tensors
from rlft.model.backbone import read_config, resolve_path, source
from rlft.model.network_files import file_of, load_network
from rlft.model.text_model import empty_model, names_of, network_of, own_class, text_model_of
from rlft.runs.find import CheckpointKind
from rlft.system.disk import writing
from rlft.system.files import size_of
from rlft.system.memory import Doing, explained
from rlft.tokens.text import RunTokenizer
from rlft.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlft.commands.export.model_card import Export

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UNUSED = "model-unused.safetensors"  # where tensors go that the class of the export leaves out
GENERATION_CONFIG = "generation_config.json"
PROCESSORS = (
    "preprocessor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""Files of a model that also reads images, video or sound; vLLM does not load it without them."""
TEXT = "What is 17 + 25? The answer is 42, because 17 + 25 = 42."
"""The adapter and the merged model are compared on these tokens; any text would do."""
TOLERANCE = 1e-3  # of log-probs, in nats: both models compute in float32 but add in different orders


class MergeError(RuntimeError):
    """The merged model does not compute what the adapter on its base does; nothing was written."""


# -- an adapter --------------------------------------------------------------------------------------------------------
def write_adapter(source: Path, config: ModelConfig, folder: Path) -> None:
    """Writes PEFT's two files, and the head and the record if there are any.

    The base's path is written so that it can be loaded from any working directory.
    """
    for name in (ADAPTER_WEIGHTS, HEAD, RECORD):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    fields = json.loads((source / CONFIG).read_text())
    names = names_of(empty_model(read_config(config), trust_remote_code=config.trust_remote_code))
    if names.prefixes:  # rlft has not always written the names of the folder's own class
        tensors = names.all_outside(load_file(source / ADAPTER_WEIGHTS))
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        fields["target_modules"] = sorted(adapted_modules(tensors))
    base = resolve_path(config.path)
    base_name = str(Path(base).resolve()) if Path(base).is_dir() else base
    fields |= {"base_model_name_or_path": base_name, "revision": config.revision}
    (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


# -- a model -----------------------------------------------------------------------------------------------------------
def write_model(
    request: Export, config: ModelConfig, tokenizer: RunTokenizer, folder: Path, say: Callable[[str], None]
) -> None:
    """Writes weights, config, tokenizer and the base's own generation config.

    `config` is the base's, or that of the checkpoint's own weights, which are copied unless dtype changes them.
    """
    base = from_mapping(ModelConfig, request.source.config["model"], "model")
    holds_weights = request.checkpoint_kind is CheckpointKind.weights
    trained_alone = holds_weights and containing_class(base) is not None
    if holds_weights and request.dtype == AUTO and not trained_alone:
        with writing(request.out, size_of(Path(config.path))):
            shutil.copytree(config.path, folder, dirs_exist_ok=True)
        return
    if config.quantization is not None:
        say(f"the adapter was trained on the base in {config.quantization}, and is merged into its full weights")
    written = base if trained_alone else config
    with explained(Doing(current="change dtype" if holds_weights else "merge"), config):
        model, dtypes = load_float32(written)
        if request.checkpoint_kind is CheckpointKind.policy:
            with tempfile.TemporaryDirectory() as adapter:
                write_adapter(request.checkpoint / CheckpointKind.policy, config, Path(adapter))
                model = merge(model, tokenizer, Path(adapter))
        elif trained_alone:
            names, whole = names_of(text_model_of(model)), model.state_dict()
            for name, tensor in load_float32(config)[0].state_dict().items():
                whole[names.outside(name)].copy_(tensor)
        round_weights(model, dtypes, request.dtype)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        with writing(request.out, needed):
            save(model, tokenizer, written, folder)
            add_unused(model, written, folder, say)


def containing_class(base: ModelConfig) -> type[PreTrainedModel] | None:
    """The class of this base if what is trained is a part of it; None, too, if the base is no longer there."""
    try:
        return own_class(read_config(base))
    except UserError:
        return None


def load_float32(config: ModelConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of the folder's own class in float32 on the CPU, and the dtype that each of its tensors has on disk."""
    if getattr(read_config(config), "quantization_config", None) is not None:
        problem = "the base's own weights are quantised, and merged ones would be rounded to its grid"
        raise UserError("as", problem, got="model", remedy="use as=adapter")
    network = replace(network_of(read_config(config), source(config)), part=None)  # also what else is in the folder
    model = load_network(network, dtype="auto")
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    return model.float().eval(), dtypes


def merge(model: PreTrainedModel, tokenizer: RunTokenizer, adapter: Path) -> PreTrainedModel:
    """Adds the adapter's products to the model's weights, in place: W + scale x B A.

    MergeError: log-probs differ from the adapter's, for instance because an adapted weight is tied to another one.
    """
    device = torch.device("cpu")
    ids: Any = tokenizer(TEXT)["input_ids"]
    with peft_is_quiet():
        adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    for name, own in own_tensors(adapted, "default").items():
        own.copy_(tensors[name])
    with torch.no_grad():
        expected = score_sequences(adapted, [ids], device)[0]
        merged: Any = adapted.merge_and_unload()
        actual = score_sequences(merged, [ids], device)[0]
    gap = max(abs(a - b) for a, b in zip(expected, actual, strict=True))
    if not gap <= TOLERANCE:
        problem = f"its log-probs differ from the adapter's by {gap:.2e} nats (at most {TOLERANCE:.0e} is rounding)"
        raise MergeError(f"the merged model is not the policy: {problem}; nothing was written, use as=adapter")
    return merged


def round_weights(model: PreTrainedModel, dtypes: Mapping[str, Any], dtype: str) -> None:
    """Casts each tensor to the dtype that it had on disk (`auto`), or to the given one, which may be too small."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in ((name, tensor) for name, tensor in tensors if name in dtypes and tensor.is_floating_point()):
        tensor.data = tensor.data.to(dtypes[name] if dtype == AUTO else getattr(torch, dtype))
        if not torch.isfinite(tensor.data).all():
            problem = f"cannot hold the numbers of {name}"
            raise UserError("dtype", problem, got=tensor.dtype, remedy="use dtype=bfloat16 or dtype=float32")


def save(model: PreTrainedModel, tokenizer: RunTokenizer, config: ModelConfig, folder: Path) -> None:
    """Writes a Hugging Face folder. Generation config and processors are copies of the base's files, if it has them."""
    model.generation_config = GenerationConfig()  # a base's own may be one that transformers reads but refuses to write
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / GENERATION_CONFIG).unlink(missing_ok=True)
    for name in (GENERATION_CONFIG, *PROCESSORS):
        if (base_file := file_of(source(config), name)) is not None:
            shutil.copyfile(base_file, folder / name)


def write_ends(folder: Path, base_file: Path | None, ends: Sequence[int]) -> None:
    """Writes the base's generation config with these end tokens: what loads the folder stops where the run did."""
    fields = {} if base_file is None else json.loads(base_file.read_text())
    text = json.dumps({**fields, "eos_token_id": list(ends)}, indent=2, sort_keys=True) + "\n"
    (folder / GENERATION_CONFIG).write_text(text)


# -- what its base has besides -----------------------------------------------------------------------------------------
def add_unused(model: PreTrainedModel, config: ModelConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Adds to the written weights those tensors of the base that its class says it leaves out, bit for bit."""
    written = tensors_of(folder / INDEX, folder / WEIGHTS)
    base = tensors_of(file_of(source(config), INDEX), file_of(source(config), WEIGHTS))
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    missing = sorted(base.keys() - written.keys())
    unused = [name for name in missing if any(re.search(pattern, name) for pattern in patterns)]
    known = model.state_dict().keys()  # a tied head is written once, under another name
    others = [name for name in missing if name not in unused and name not in known]
    if len(others) > len(written.keys() - base.keys()):  # else they may just have new names
        say(f"left out, as the class of the export does not read it: {others[0]} (of {len(others)} such)")
    if not unused:
        return
    tensors = {}
    for name in unused:
        with safe_open(str(file_of(source(config), base[name])), framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    save_file(tensors, folder / UNUSED, metadata={"format": "pt"})
    places = {**written, **dict.fromkeys(unused, UNUSED)}
    size = sum((folder / name).stat().st_size for name in set(places.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def tensors_of(index: Path | None, weights: Path | None) -> dict[str, str]:
    """{tensor: its file's name} of a model with an index or with one file; empty if it has neither."""
    if index is not None and index.is_file():
        return json.loads(index.read_text())["weight_map"]
    if weights is None or not weights.is_file():
        return {}
    with safe_open(str(weights), framework="pt") as file:
        return dict.fromkeys(file.keys(), weights.name)
