"""The frozen base model and its tokenizer: loaded once, never written to, which a fingerprint of its weights proves."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel

from rlft.batch import collate
from rlft.config.model import LESS_MEMORY, ModelConfig, check_local, resolve_path
from rlft.model.activations import set_checkpointing
from rlft.model.families import recorded_family
from rlft.model.images import ImageEncoder
from rlft.model.kernels import selection
from rlft.model.kernels.selection import Kernels
from rlft.model.network_files import check_files, check_quantized, source_of
from rlft.model.text_model import load_model, network_of, own_class
from rlft.system.device import resolve_device, resolve_dtype
from rlft.tokens import text
from rlft.tokens.images import processor_of, read_processor
from rlft.tokens.text import AUTO_DATE, RunTokenizer, TurnEnds, configured_ids, today, turn_ends
from rlft.types import Batch, Group, ImageRows, Prompt, Scores, UserError, counted, require

SENTENCE = "the sum of two and three is five"
"""What every tokenizer gives back, whatever it does to capitals and punctuation."""


def source(config: ModelConfig) -> dict[str, Any]:
    """transformers' keyword arguments for loading config, tokenizer and weights."""
    return source_of(resolve_path(config.path), config.revision, trusts=config.trust_remote_code)


def read_config(config: ModelConfig) -> Any:
    """The model's config.json as a transformers config, without weights.

    Raises UserError: it cannot be read, or the model does not predict the next token from those before it.
    """
    check_local(config.path)
    try:
        model = AutoConfig.from_pretrained(**source(config))
    except (ImportError, OSError, ValueError) as error:
        raise _unreadable(source(config), "model.path", config.path, "the model", error) from None
    if (problem := why_not_causal(model)) is not None:
        remedy = "use a causal language model, such as Qwen3 or Llama"
        raise UserError("model.path", f"a {model.model_type} {problem}", got=config.path, remedy=remedy)
    if (problem := recorded_family(model.model_type, model.get_text_config().model_type).wrong) is not None:
        remedy = "use another model"
        raise UserError("model.path", f"with a {model.model_type}, {problem}", got=config.path, remedy=remedy)
    own_class(model)  # refuses what has no class of causal language models
    check_quantized(model, config.path, "model.path")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        is_known = isinstance(getattr(model.get_text_config(), name, None), int)
        problem = f"is no causal language model: its config.json, of type {model.model_type}, has no {name}"
        require(is_known, "model.path", problem, got=config.path, remedy="use a decoder-only language model")
    return model


def check_weights(config: ModelConfig) -> None:
    """Refuses a base whose files lack tensors, have others, or are cut off, by their headers alone."""
    check_files(network_of(read_config(config), source(config)))


def why_not_causal(config: PreTrainedConfig) -> str | None:
    """Why transformers' model of this config does not predict each token from those before it; None if it may."""
    if config.is_encoder_decoder:
        return "is an encoder-decoder, whose decoder reads more than the tokens before"
    # An encoder that becomes a decoder by this field, and otherwise reads the tokens behind as well. GPT-NeoX also has
    # the field, but no cross-attention, and never reads it.
    if hasattr(config, "add_cross_attention") and getattr(config, "is_decoder", None) is False:
        return "is an encoder, which also reads the tokens behind (is_decoder is false in its config.json)"
    return None


def configured_ends(config: ModelConfig) -> Any:
    """`eos_token_id` of the model's generation_config.json, or else of its config.json: a number, a list, or None."""
    ends = generation_ends(source(config))
    return getattr(read_config(config).get_text_config(), "eos_token_id", None) if ends is None else ends


def generation_ends(source: Mapping[str, Any]) -> Any:
    """`eos_token_id` of the generation_config.json of the model of these arguments; None without it."""
    where: dict[str, Any] = {name: source.get(name) for name in ("revision", "local_files_only")}
    with contextlib.suppress(OSError):  # there is no such file
        return GenerationConfig.from_pretrained(source["pretrained_model_name_or_path"], **where).eos_token_id
    return None


def ends_of(model: ModelConfig, style: str, tokenizer: RunTokenizer) -> TurnEnds:
    """What ends a turn with this model; `style` is prompts.style."""
    return turn_ends(tokenizer, style, configured_ends(model))


def load_tokenizer(config: ModelConfig, variables: Mapping[str, Any] | None = None) -> RunTokenizer:
    """The model's tokenizer, whose chat template writes the run's date and has these variables.

    Raises:
        UserError: it cannot be read, loses characters of a sentence, or has tokens that the model has not; or its
            template does not read a variable.
    """
    rows = read_config(config).get_text_config().vocab_size  # first: it says what to do where the hub does not answer
    tokenizer = _read_tokenizer(config)
    check_sentence(tokenizer, config.path)
    check_embedding(tokenizer, rows, config.path)
    return tokenizer.with_variables(variables or {})


def check_sentence(tokenizer: RunTokenizer, path: str) -> None:
    """Refuses a tokenizer that loses the spaces or letters of a plain sentence, as one of a wrong class does."""
    ids: Any = tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
    if tokenizer.unk_token_id in ids:  # a small vocabulary without these words
        return
    read = str(tokenizer.decode(ids)).lower()
    problem = f"its tokenizer reads {SENTENCE!r} as {read.strip()!r}"
    remedy = "put the model's own config.json, which chooses the tokenizer's class, and tokenizer.json into the folder"
    require(read.split() == SENTENCE.split(), "model.path", problem, got=path, remedy=remedy)


def ids_without_token(tokenizer: RunTokenizer, rows: int) -> frozenset[int]:
    """The rows of an embedding for which the tokenizer has no token, as in vocabularies that are padded."""
    return frozenset(range(rows)).difference(tokenizer.get_vocab().values())


def check_embedding(tokenizer: RunTokenizer, rows: int, path: str) -> None:
    """Refuses a tokenizer with tokens beyond the embedding's `rows`, except those that no text ever has.

    These are the special tokens that neither the template nor the model writes, such as one that only pads.
    """
    if max(tokenizer.vocab_size - 1, *tokenizer.added_tokens_decoder) < rows:
        return
    written = {*text.written_special_tokens(tokenizer), *text.said_special_ids(tokenizer)}
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special} - written
    beyond = {token: name for name, token in tokenizer.get_vocab().items() if token >= rows and token not in special}
    if beyond:
        first = min(beyond)
        problem = (
            f"its embedding has {counted(rows, 'row')}, which lacks {len(beyond)} of the tokenizer's tokens, first"
        )
        remedy = "use the model's own tokenizer, or enlarge the embedding (resize_token_embeddings) and train it"
        raise UserError("model.path", f"{problem} {beyond[first]!r} ({first})", got=path, remedy=remedy)


def _read_tokenizer(config: ModelConfig) -> RunTokenizer:
    try:
        own = AutoTokenizer.from_pretrained(**source(config))
        # transformers would write it into the tokenizer_config.json of everything that is saved.
        own.init_kwargs.pop("local_files_only", None)
        return RunTokenizer(
            own,
            date=today() if config.date == AUTO_DATE else config.date,
            ends=tuple(configured_ids(generation_ends(source(config)))),
            processor=functools.cache(partial(read_processor, own, source(config), read_config(config))),
        )
    except (ImportError, OSError, ValueError) as error:
        raise _unreadable(source(config), "model.path", config.path, "its tokenizer", error) from None


def _unreadable(source: Mapping[str, Any], key: str, path: str, what: str, error: Exception) -> UserError:
    """The refusal of a model whose config or tokenizer transformers cannot read, by the cause."""
    first_line = str(error).strip().splitlines()[0][:200]
    is_here = Path(source["pretrained_model_name_or_path"]).is_dir()
    problem = f"{what} cannot be read ({first_line})"
    if not source["trust_remote_code"] and "custom code" in first_line:
        problem, remedy = f"{what} needs code of its own", "read that code, then set model.trust_remote_code=true"
    elif isinstance(error, ImportError):
        remedy = "install what its code imports, or use another model"
    elif is_here and what == "its tokenizer":
        remedy = "the folder needs tokenizer files next to config.json"
    elif is_here:
        remedy = "use a newer transformers if its config.json is of a newer model; else download it again"
    else:
        folders = "model.path=<folder>, and for the data data.path=<folder or .jsonl>"
        remedy = f"connect to the network, or use local copies: {folders}"
    return UserError(key, problem, got=path, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """A loaded model."""

    model: PreTrainedModel
    tokenizer: RunTokenizer
    device: torch.device
    path: str  # the config's model.path, as the user wrote it
    kernels: Kernels = field(default_factory=Kernels)  # what the model is computed with
    images: ImageEncoder | None = None  # gives what the model reads in place of images; None: prompts have none

    def image_rows(self, prompts: Sequence[Prompt], width: int) -> ImageRows | None:
        """Rows `[P, width]` that begin with these prompts, one each; None if none of them has images."""
        return None if self.images is None else self.images.rows_of(prompts, width)

    def collated(self, groups: Sequence[Group], scores: Scores) -> Batch:
        """The `[B, T]` view of a step, with its images (`rlft.batch.collate`)."""
        batch = collate(groups, scores, self.decode)
        rows = [rollout.prompt for group in groups for rollout in group.rollouts]
        images = self.image_rows(rows, batch.token_ids.shape[1])
        return batch if images is None else replace(batch, images=images)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text as `Completion.text` shows it."""
        return text.decode(self.tokenizer, token_ids)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text with its special tokens."""
        return self.tokenizer.batch_decode([list(token_ids)], skip_special_tokens=False)[0]


Adopt = Callable[[PreTrainedModel, torch.device], None]  # puts a model that was read into main memory on its device


def read_backbone(config: ModelConfig, adopt: Adopt | None = None) -> Backbone:
    """Loads a base that nobody else uses.

    `adopt` is called instead of `model.to(device)`, for instance to put the weights on an engine's storage.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    extra: dict[str, Any] = {}
    if config.quantization is not None:
        from transformers import BitsAndBytesConfig

        extra = {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_compute_dtype=dtype,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
            ),
            "device_map": {"": device},
        }
    model_config = read_config(config)
    silence_dropout(model_config)
    model = load_model(
        model_config,
        source(config),
        dtype=dtype,
        attn_implementation=None if config.attn_implementation == "auto" else config.attn_implementation,
        **extra,
    )
    model.requires_grad_(False).eval()
    if config.quantization is None and adopt is not None:
        adopt(model, device)
    elif config.quantization is None:
        model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
    kernels = selection.install(model, config.kernels, own_attention=config.attn_implementation == "auto")
    if config.gradient_checkpointing in LESS_MEMORY:
        set_checkpointing(model, config.gradient_checkpointing)
    tokenizer = _read_tokenizer(config)  # the plan has checked it
    images = ImageEncoder(read_config(config), source(config), dtype, device, partial(processor_of, tokenizer))
    return Backbone(model=model, tokenizer=tokenizer, device=device, path=config.path, kernels=kernels, images=images)


load_backbone = functools.lru_cache(maxsize=1)(read_backbone)  # a sweep over models must not hold them all
"""The base, which must not be written to: jobs of a sweep with the same base share it."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in their order; empty if they are not a single list of as many modules as the config says, or
    share weights."""
    number = cast(Any, model).config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    inside = {id(module) for layers in lists[:1] for module in layers.modules()}  # such as lists of experts
    if not lists or any(id(other) not in inside for other in lists):
        return []
    layers = list(lists[0])
    weights = [id(weight) for layer in layers for weight in layer_weights(layer)]
    return layers if len(set(weights)) == len(weights) else []


def layer_weights(layer: nn.Module) -> list[nn.Parameter]:
    """A decoder layer's parameters with two or more dimensions and the dtype of the first: no norms, no biases."""
    weights = [parameter for parameter in layer.parameters() if parameter.dim() > 1]
    return [weight for weight in weights if weight.dtype == weights[0].dtype]


def silence_dropout(config: PreTrainedConfig) -> None:
    """Sets dropout to 0 in the config, and in those inside it, before the model is built: some models hold a module for
    it, some a number, and others read the config in each forward."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            silence_dropout(value)
        elif isinstance(value, float) and value and "drop" in name:
            setattr(config, name, 0.0)


Switched = Sequence[tuple[nn.Module, bool]]
"""The modules of a model that updates may need in training mode, and whether each is LoRA's."""


def switched_modules(model: nn.Module) -> Switched:
    """Those of a model that computes as in decoding; a walk over thousands of modules, and so done once."""
    of_lora = ((m, issubclass(type(m), LoraLayer) or ".lora_dropout." in name) for name, m in model.named_modules())
    return [(m, is_lora) for m, is_lora in of_lora if is_lora or hasattr(m, "gradient_checkpointing")]


def set_training_mode(modules: Switched, *, recomputed: bool, dropout: bool) -> None:
    """Puts those modules into training mode that updates need in it: what is `recomputed`, and LoRA's own `dropout`.

    All others compute as in decoding. In training mode models have dropout, drop layers, draw experts at random, or
    write into their weights, and the policy's log-probs would differ from the sampled ones.
    """
    for module, is_lora in modules:
        is_recomputed = recomputed and getattr(module, "gradient_checkpointing", False) is True
        module.training = is_recomputed or (dropout and is_lora)


def fingerprint(config: ModelConfig) -> str:
    """16 hex digits of a base's config and, for a folder, of 64 blocks of each .safetensors file.

    This is all that older rlft recorded, and what is compared with its runs; `rlft.plan.identity` has the rest.
    """
    fields = {
        k: v for k, v in read_config(config).to_dict().items() if k not in ("_name_or_path", "transformers_version")
    }
    described = json.dumps(fields, sort_keys=True, default=str)
    folder = Path(resolve_path(config.path))
    if folder.is_dir():
        described += "".join(f"{f.name}:{_content(f)}" for f in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _content(file: Path) -> str:
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as stream:
        for position in range(64):
            stream.seek(max(0, size - 2**16) * position // 63)
            digest.update(stream.read(2**16))
    return f"{size}:{digest.hexdigest()}"


WORD = torch.int64.itemsize


class BaseWeights:
    """The base's parameters, before any adapter is on it.

    PEFT wraps modules and replaces parameters, so they are found in the modules themselves. By their fingerprint a load
    of an adapter that rewrites any of the weights is found.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module) for name, module in model.named_modules() if module._parameters]

    def fingerprint(self) -> dict[str, tuple[int, int]]:
        """{parameter: (its address, the sum of its bits)}, in one pass over the base at the speed of its memory."""
        return {
            f"{name}.{own}": (parameter.data_ptr(), bit_sum(parameter))
            for name, module in self._modules
            for own, parameter in module._parameters.items()
            if parameter is not None
        }


def bit_sum(tensor: Tensor) -> int:
    """The sum of the tensor's bits, read as 64-bit words, modulo 2^64: a change within one word always changes it."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD:
        data = data.clone()
    whole = len(data) // WORD * WORD
    words, rest = data[:whole].view(torch.int64), pad(data[whole:], (0, whole + WORD - len(data))).view(torch.int64)
    return int(words.sum() + rest.sum())
