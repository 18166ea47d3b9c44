"""PEFT's config of an adapter, and which linear layers an adapter can learn on, known before weights are loaded.

A gradient does not reach every linear layer from the log-probs of a text: not a vision tower, not an indexer of which
only the largest places are used, not a layer whose weight is read past its module. `all-linear` leaves these out. They
are found by a forward pass on torch's meta device, where tensors have shapes and an autograd graph, but no numbers.
Experts and routers (`rlft.model.experts`) are left out unless `lora.experts` and `lora.router` ask for them.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils import transformers_weight_conversion
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlft.config.model import ALL_LINEAR, LoraSettings
from rlft.model.activations import peft_is_quiet
from rlft.model.adapter_folder import OF_THE_FUNCTION, adapted_modules, is_neutral
from rlft.model.experts import Mixture, mixture_of, named_for_peft, named_in
from rlft.model.kernels.decoder_layer import FAMILIES
from rlft.model.text_model import ModuleNames, names_of

NUM_TOKENS = 4
"""Tokens of the row of the pass: what a row so short does not reach would miss its gradient in some micro-batch."""

NOT_REACHED = "no gradient reaches it from the log-probs of a text"
SHARED = "another layer has the same weights, so that its adapter could not be exported"
FORBIDDEN = "this type of model may read its weight without calling the layer"
ROUTER = "it is a router of experts, and lora.router is false"
ONE_EXPERT = "it is a layer of one expert, which no token of a batch may reach"

_found: dict[tuple[type, str], Mapping[str, str]] = {}


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """{name: layer} of the layers that PEFT's `all-linear` stands for: all but the output head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def left_out(model: PreTrainedModel) -> Mapping[str, str]:
    """{name: why} of the linear layers of a model, loaded or empty, that no adapter can learn on.

    It depends on the model's class and config alone, and so is the same in a plan, on every rank and in a resume. Empty
    for a model whose pass needs real numbers; `Roles.check_gradients` then finds what is missing.
    """
    if model.config.model_type in FAMILIES:  # tests/model/test_lora_config.py: all of their layers are reached
        return {}
    key = type(model), model.config.to_json_string()
    if key not in _found:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            config = copy.deepcopy(model.config)
            _found[key] = _find(type(model)._from_config(config, attn_implementation="eager"))
    return _found[key]


def without_adapter(model: PreTrainedModel, lora: LoraSettings) -> Mapping[str, str]:
    """{name: why} of the layers of a model, and of its routers, that adapters of these settings are never on."""
    mixture = mixture_of(model)
    routers = {} if lora.router else dict.fromkeys(mixture.routers, ROUTER)
    return {**routers, **left_out(model), **dict.fromkeys(mixture.linear, ONE_EXPERT)}


def unadapted(model: PreTrainedModel, lora: LoraSettings) -> list[nn.Linear]:
    """The linear layers and the head that have no adapter and whose weights only their own products read; no router."""
    left, head = without_adapter(model, replace(lora, router=False)), model.get_output_embeddings()
    inside = re.compile(r"\.(base_layer|lora_\w+)(\.|$)")  # a layer with an adapter
    layers = [each for name, each in linear_layers(model).items() if name not in left and not inside.search(name)]
    return [layer for layer in (*layers, head) if type(layer) is nn.Linear]


def exclusion(model: PreTrainedModel, lora: LoraSettings) -> str | None:
    """PEFT's `exclude_modules` for this model: a regular expression over names; None if nothing is left out."""
    layers = linear_layers(model)
    names = without_adapter(model, lora).keys() & layers.keys()
    kept = {_pattern(name) for name in layers.keys() - names}
    # Layers of one kind are left out together, except where blocks differ, as those that share keys with others do.
    patterns = {re.escape(name) if _pattern(name) in kept else _pattern(name) for name in names}
    return "|".join(sorted(patterns)) or None


def _pattern(name: str) -> str:
    return re.sub(r"\d+", r"\\d+", re.escape(name))


def _find(empty: PreTrainedModel) -> Mapping[str, str]:
    layers = linear_layers(empty)
    result, reached = {}, set(layers)
    for truth in (False, True):
        with suppress(Exception):  # whatever a model's code does with tensors that have no numbers
            reached = _reached(empty, layers, truth)
            break
    # Which experts a token reaches depends on its numbers: in a block one stands for all.
    blocks = {_block(name) for name in reached}
    num_layers = Counter(id(module.weight) for module in empty.modules() if hasattr(module, "weight"))
    for name, layer in layers.items():
        if _block(name) not in blocks:
            result[name] = NOT_REACHED
        elif num_layers[id(layer.weight)] > 1:
            result[name] = SHARED
        elif _is_forbidden(empty, name):
            result[name] = FORBIDDEN
    return result


def _block(name: str) -> str:
    """The name with its first number, that of its block, and without later ones, such as that of an expert."""
    block, number, rest = re.match(r"(\D*)(\d*)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    return block + number + re.sub(r"\d+", "*", rest)


READ_BY_MAMBA = ("out_proj", "dt_proj")
"""Layers of a Mamba mixer that are not always called: its fused kernel, and Mamba-1, read the weights instead."""


def _is_forbidden(model: PreTrainedModel, name: str) -> bool:
    """Whether the layer's weight may be read without calling it, so that an adapter would have no effect."""
    parent, _, last = name.rpartition(".")
    mixer = model.get_submodule(parent)
    # Other recurrent layers have decays, too, but no skip connection `D`.
    if last in READ_BY_MAMBA and all(hasattr(mixer, field) for field in ("A_log", "D", "out_proj")):
        return True
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name.rpartition(".")[2])
    except ValueError:
        return True
    return False


def _reached(empty: PreTrainedModel, layers: Mapping[str, nn.Module], truth: bool) -> set[str]:
    """Names of the layers whose output, as an adapter adds to it, has a gradient from the logits.

    `truth` is what every condition on numbers counts as.
    """
    empty.requires_grad_(False).eval()
    empty.set_experts_implementation("eager")  # others ask for dtypes and devices
    added: dict[str, Tensor] = {}

    def adapter(name: str) -> Callable[..., Any]:
        def add(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, Tensor):  # PEFT could not add anything to it
                return None
            if name not in added:
                added[name] = torch.zeros((), dtype=output.dtype, device="meta", requires_grad=True)
            return output + added[name]

        return add

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(adapter(name)).remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_AnyNumbers(truth))
        ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
        logits = empty(input_ids=ids, use_cache=False).logits
    leaves = {id(leaf) for leaf in _leaves(logits)}
    return {name for name, tensor in added.items() if id(tensor) in leaves}


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """The tensors that get a gradient from this one."""
    seen, nodes = set(), [output.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            nodes += [following for following, _ in node.next_functions]


class _AnyNumbers(TorchDispatchMode):
    """Inside, code that asks a tensor without numbers for one gets 0, and for the places of nonzero ones the first.

    `truth` is what it gets from a tensor of booleans.
    """

    def __init__(self, truth: bool) -> None:
        super().__init__()
        self.truth = truth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        if tensor is not None and func is torch.ops.aten._local_scalar_dense.default:
            return self.truth if tensor.dtype is torch.bool else torch.zeros((), dtype=tensor.dtype).item()
        if tensor is not None and func is torch.ops.aten.nonzero.default:
            return torch.empty(1, tensor.dim(), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))


# -- in words ----------------------------------------------------------------------------------------------------------
def adapted_words(model: nn.Module) -> tuple[str, str, int]:
    """(kinds of layers with an adapter, kinds of layers without one, number of weights of the former) of a model that
    PEFT has wrapped, as lists.

    Embeddings and whatever is no matrix are left out. Parts of a model without any adapter are named as a whole.
    """
    adapted, others = {}, {}
    number = 0
    for name, module in model.named_modules():
        path = ".".join(part for part in name.split(".") if not part.isdigit() and part != "base_layer")
        path = path.removeprefix("base_model.model.")
        if issubclass(type(module), LoraLayer):
            layer: Any = module
            number += layer.in_features * layer.out_features * getattr(layer, "num_experts", 1)
        if ".lora_" in name:
            adapted[path.partition(".lora_")[0]] = None
        elif not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            others[path] = None
    parents = {path[:end] for path in adapted for end in range(len(path) + 1) if path[end : end + 1] in ("", ".")}
    left = dict.fromkeys(_largest(path, parents) for path in others if path not in adapted)
    return ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in adapted)), ", ".join(left), number


def _largest(path: str, parents: set[str]) -> str:
    """The last two names of the largest part of the model around this path that has no adapter."""
    while "." in path and path.rpartition(".")[0] not in parents:
        path = path.rpartition(".")[0]
    return ".".join(path.split(".")[-2:])


# -- PEFT's configs ----------------------------------------------------------------------------------------------------
@contextmanager
def as_configured() -> Iterator[None]:
    """Inside, PEFT puts adapters where their configs say.

    For some types of models it would read the names of transformers 4 in them, and put them on experts and routers that
    no key asks for, in place of other layers of these names.
    """
    name = "convert_peft_config_for_transformers"
    with peft_is_quiet(), mock.patch.object(transformers_weight_conversion, name):
        yield


def lora_config(settings: LoraSettings, model: PreTrainedModel) -> LoraConfig:
    """For adapters on this model, loaded or empty: a new config for each call, since PEFT writes into its configs."""
    mixture = mixture_of(model)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT annotates int, and scales by any number
        lora_dropout=settings.dropout,
        target_modules=_targets(settings, mixture),
        target_parameters=mixture.parameters(experts=settings.experts, router=settings.router) or None,
        exclude_modules=exclusion(model, settings),
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        task_type="CAUSAL_LM",
    )


def _targets(settings: LoraSettings, mixture: Mixture) -> str | list[str]:
    """PEFT's `target_modules`: those of the settings, and the routers that are linear layers if they are asked for."""
    targets, routers = settings.target_modules, sorted(mixture.linear_routers if settings.router else ())
    if not isinstance(targets, str):
        return [*targets, *routers]
    return "|".join([f"(?:{targets})", *map(re.escape, routers)]) if routers and targets != ALL_LINEAR else targets


def folder_config(fields: Mapping[str, Any], model: PreTrainedModel) -> LoraConfig:
    """Of the adapter with these fields of adapter_config.json, after `rlft.model.adapter_folder.check_fields`.

    PEFT gets only what says how the tensors compute. It initialises an adapter before it reads the saved tensors, and
    so a folder's own initialisation could change the base. ValueError if the fields contradict each other.
    """
    used = {name: fields[name] for name in OF_THE_FUNCTION if not is_neutral(fields.get(name))}
    if "target_parameters" in used:
        modules, parameters = named_in(model, map(names_of(model).inside, used["target_parameters"]))
        used["target_parameters"] = parameters or None
        if not isinstance(used["target_modules"], str):
            used["target_modules"] = sorted({*used["target_modules"], *modules})
    return LoraConfig(**used, task_type="CAUSAL_LM", inference_mode=True)


def folder_fields(config: PeftConfig, tensors: Iterable[str], model: PreTrainedModel) -> dict[str, Any]:
    """The fields of adapter_config.json for an adapter of this config, with tensors of these names, on this model."""
    fields = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    names, has_experts = names_of(model), bool(mixture_of(model).stacked)
    # Else these targets could also be found in what surrounds the text model, or among what is left out; and of models
    # with experts PEFT would adapt others (`named_for_peft`).
    if names.prefixes or fields.get("exclude_modules") or has_experts:
        parameters = [names.outside(name) for name in fields["target_parameters"] or ()]
        modules = adapted_modules(tensors) - modules_of(parameters)
        fields["target_modules"], fields["exclude_modules"] = sorted(modules), None
        if has_experts:
            named = named_for_peft(modules, parameters, model.config.model_type)
            fields["target_modules"], fields["target_parameters"] = named
            fields["lora_dropout"] = 0.0  # with which PEFT refuses parameters, also where nothing is trained
    return fields


def modules_of(parameters: Iterable[str] | None) -> set[str]:
    """The modules that hold these parameters."""
    return {name.rpartition(".")[0] for name in parameters or ()}


def named_inside(config: LoraConfig, names: ModuleNames, tensors: Iterable[str]) -> None:
    """Gives a folder's config the names of the trained model, where the folder's may be those of its own class.

    `tensors` are the names of the adapter's tensors in either; they say which modules it is on.
    """
    config.target_modules = sorted(adapted_modules(map(names.inside, tensors)) - modules_of(config.target_parameters))
    config.exclude_modules = None
    config.rank_pattern = names.all_inside(config.rank_pattern or {})
    config.alpha_pattern = names.all_inside(config.alpha_pattern or {})
