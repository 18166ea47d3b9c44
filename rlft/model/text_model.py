"""The text model inside a folder's own class, as of a folder with a vision tower, such as Qwen3.5's.

Such a folder's config has a `text_config`, and its class contains the language model. Only that is trained: the class
of causal language models that transformers has for the text config, made of the folder's own modules. Its modules have
other names there (`model.layers..` for `model.language_model.layers..`), so whatever leaves the trainer, or comes from
outside, has the names of the folder's own class, which PEFT and vLLM use too (`ModuleNames`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel, Qwen2ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from rlft.model.network_files import Network, load_network
from rlft.types import UserError

PEFT = "base_model.model."  # begins the names of an adapter's tensors

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Names of modules and of what is in them, in the trained model and in the folder's own class."""

    # {a module of the trained model: the same module in the folder's own class}; empty if they are one class.
    prefixes: Mapping[str, str]

    def outside(self, name: str) -> str:
        """The name in the folder's own class of what has this name in either.

        >>> names = ModuleNames({"model": "model.language_model"})
        >>> names.outside("base_model.model.model.layers.0"), names.outside("model.language_model.layers.0")
        ('base_model.model.model.language_model.layers.0', 'model.language_model.layers.0')
        """
        return _renamed(self.inside(name), self.prefixes)

    def inside(self, name: str) -> str:
        """The name in the trained model of what has this name in either.

        >>> names = ModuleNames({"model": "model.language_model"})
        >>> names.inside("model.language_model.layers.0"), names.inside("model.visual.blocks.0")
        ('model.layers.0', 'model.visual.blocks.0')
        """
        return _renamed(name, {theirs: own for own, theirs in self.prefixes.items()})

    def all_outside(self, named: Mapping[str, Value]) -> dict[str, Value]:
        return {self.outside(name): value for name, value in named.items()}

    def all_inside(self, named: Mapping[str, Value]) -> dict[str, Value]:
        return {self.inside(name): value for name, value in named.items()}


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    start = PEFT if name.startswith(PEFT) else ""
    rest = name.removeprefix(PEFT)
    for old, new in prefixes.items():
        if rest == old or rest.startswith(f"{old}."):
            return f"{start}{new}{rest[len(old) :]}"
    return name


def names_of(model: nn.Module) -> ModuleNames:
    """The names of this trained model's modules in its folder's own class."""
    return getattr(model, "own_names", ModuleNames({}))


def own_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that contains the text model of a folder with this config; None if the folder is a text model itself.

    Raises UserError: the folder holds no causal language model that transformers has a class for.
    """
    if hasattr(config, "auto_map") or config.model_type in INSIDE:  # its code is in the folder, or below
        return None
    text = config.get_text_config(decoder=True)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if text is not config and not config.is_encoder_decoder and causal_class(text) is not None:
        if not _contains_text_model(named, config) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            named = cast(Any, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])
        if _contains_text_model(named, config):
            return named
    # Some types are listed with the class of the text model inside, whose names of weights are others.
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        listed = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
        if listed.config_class is None or issubclass(type(config), listed.config_class):
            return None
    kind = config.model_type if text is config else f"{text.model_type}, the text model of a {config.model_type}"
    problem = f"transformers has no class of causal language models for a {kind}"
    raise UserError("model.path", problem, got=config.name_or_path, remedy="use another model")


def _contains_text_model(named: Any, config: PreTrainedConfig) -> bool:
    """Whether this is a class of models for the whole config, and not for its text model."""
    is_model = isinstance(named, type) and issubclass(named, PreTrainedModel)
    return is_model and named.config_class is type(config)


def text_model_of(own: PreTrainedModel) -> PreTrainedModel:
    """The causal language model made of this model's modules, whose names `names_of` gives.

    Raises UserError: the model does not contain what a causal language model consists of.
    """
    config = own.config.get_text_config(decoder=True)
    head, embeddings = own.get_output_embeddings(), own.get_input_embeddings()
    config.tie_word_embeddings = head is not None and head.weight is embeddings.weight
    with torch.device("meta"):
        model = cast(type[PreTrainedModel], causal_class(config))._from_config(config)
    prefixes = {}
    for name, part in list(model.named_children()):
        is_head = part is model.get_output_embeddings()
        theirs = [n for n, m in own.named_modules() if (m is head if is_head else type(m) is type(part))]
        if len(theirs) != 1:
            problem = (
                f"a {type(own).__name__} does not contain one {type(part).__name__}, as {type(model).__name__} does"
            )
            raise UserError("model.path", problem, got=config.name_or_path, remedy="use another model")
        setattr(model, name, own.get_submodule(theirs[0]))
        prefixes[name] = theirs[0]
    for name, value in vars(own).items():  # as of a base in 4 bits, that it is
        if name not in vars(model) and name != "_weight_conversions":
            setattr(model, name, value)
    model.generation_config = own.generation_config
    cast(Any, model).own_names = ModuleNames({own: theirs for own, theirs in prefixes.items() if own != theirs})
    return model


def empty_model(config: PreTrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model that is trained, with modules and shapes, but without weights. UserError if it cannot be made."""
    contains = own_class(config)
    try:
        with torch.device("meta"):
            if config.model_type in INSIDE:
                return cast(type[PreTrainedModel], causal_class(config))._from_config(config)
            if contains is None:
                return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            own = contains._from_config(config)
    except ImportError as error:
        problem = f"its class needs a library that is not installed ({str(error).strip().splitlines()[0]})"
        raise UserError("model.path", problem, got=config.name_or_path, remedy="install it") from None
    return text_model_of(own)


def network_of(config: PreTrainedConfig, source: Mapping[str, Any]) -> Network:
    """The network in a folder of a model that is trained; `source` is transformers' keyword arguments for loading it.

    Of a folder's own class only what the text model consists of has to be there.
    """
    contains = own_class(config)
    loader = causal_class(config) if config.model_type in INSIDE else contains or AutoModelForCausalLM
    part = None if contains is None else _text_names
    return Network(loader=loader, config=config, source=source, key="model.path", part=part)


def _text_names(own: PreTrainedModel) -> list[str]:
    text = text_model_of(own)
    return [names_of(text).outside(name) for name in text.state_dict()]


def load_model(config: PreTrainedConfig, source: Mapping[str, Any], **options: Any) -> PreTrainedModel:
    """The model that is trained, with its weights; `options` are those of transformers' `from_pretrained`.

    Raises UserError: its files lack tensors, have others, or cannot be read.
    """
    network = network_of(config, source)
    model = load_network(network, **options)
    return model if network.part is None else text_model_of(model)


# -- text models for which transformers has a class only inside one with a vision tower --------------------------------
INSIDE = {"qwen2_5_vl_text": "Qwen2_5_VL", "qwen3_vl_text": "Qwen3VL"}
"""{type of the text model: how transformers' names of its classes begin}."""


def causal_class(text: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of causal language models with this config; None if there is none.

    One that is only inside another in transformers is made when it is needed, of the text model and an output head, as
    all others are: its modules take a while to import.
    """
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        return found
    return _with_head(text.model_type) if text.model_type in INSIDE else None


@cache
def _with_head(kind: str) -> type[PreTrainedModel]:
    name, folder = INSIDE[kind], kind.removesuffix("_text")
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    text_model, pretrained = getattr(module, f"{name}TextModel"), getattr(module, f"{name}PreTrainedModel")

    class CausalTextModel(pretrained, GenerationMixin):
        config_class = text_model.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  # as in transformers
        forward = Qwen2ForCausalLM.forward

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = text_model(config)
            self.vocab_size = config.vocab_size
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    CausalTextModel.__name__ = f"{name}ForCausalLM"
    return CausalTextModel
