"""What a forward with gradient keeps for its backward, and whether to recompute it instead (gradient checkpointing).

The sizes of each decoder layer come from a model's config alone, whichever of its layers are unlike.

A checkpointed layer keeps its input alone, and its activations are computed again in the backward. Beyond that, gated
MLPs can be computed some tokens at a time (`decoder_layer.mlp_branch`), and layers' inputs be kept in main memory
(torch's `save_on_cpu`), for rows that would not fit otherwise. The numbers are the same bits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlft.config.model import OFFLOAD, Recompute
from rlft.model.kernels import elementwise
from rlft.model.kernels.flash_attention import HEAD_SIZE_STEP, MAX_HEAD_SIZE, backward_scratch

# -- gradient checkpointing --------------------------------------------------------------------------------------------
MLP_TILE = 4096
"""Tokens of a gated MLP that are computed at a time: few enough that its activations are small next to those of a long
row, and enough that its products fill a GPU."""


_is_recomputing: ContextVar[bool] = ContextVar("_is_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether a layer with tiles is being computed again, for its activations alone: nothing reads its output."""
    return _is_recomputing.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledCheckpoint:
    """Checkpoints a layer whose gated MLP is computed in tiles; it is called as torch's `checkpoint`."""

    offloads: bool  # whether the layers' inputs are kept in main memory, and not on the device
    draws_again: bool  # whether the recomputation has to be told which random numbers the forward had

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True) if self.offloads else nullcontext():
            return checkpoint(function, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """(context of a forward, of its recomputation)."""
        forward, again = drawing_again() if self.draws_again else (nullcontext(), nullcontext())
        return forward, _recomputation(again)


@contextmanager
def _recomputation(again: AbstractContextManager[None]) -> Iterator[None]:
    token = _is_recomputing.set(True)
    try:
        with again:
            yield
    finally:
        _is_recomputing.reset(token)


def tile_of(layer: nn.Module) -> int | None:
    """How many tokens of this layer's gated MLP are computed at a time; None: all together."""
    return MLP_TILE if isinstance(getattr(layer, "_gradient_checkpointing_func", None), TiledCheckpoint) else None


def drawing_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """(context of a forward, of its recomputation), which draws the same numbers on an Apple GPU. torch's own code
    (`had_device_in_fwd` in torch/utils/checkpoint.py) passes over devices whose module has no `_initialized`."""
    state = torch.mps.get_rng_state()

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices=["mps"], device_type="mps"):
            torch.mps.set_rng_state(state)
            yield

    return nullcontext(), again()


def set_checkpointing(model: PreTrainedModel, how: Recompute) -> None:
    """Sets what is recomputed (`model.gradient_checkpointing`). It has an effect in training mode only."""
    if how:
        draws_again = model.device.type == "mps"
        _method(model, "enable")({"use_reentrant": False, **({"context_fn": drawing_again} if draws_again else {})})
        model.disable_input_require_grads()  # only re-entrant checkpointing needs the hook that sets this
        if how is not True:
            own = TiledCheckpoint(offloads=how == OFFLOAD, draws_again=draws_again)
            modules: Iterator[Any] = model.modules()
            for module in modules:
                if hasattr(module, "_gradient_checkpointing_func"):
                    module._gradient_checkpointing_func = own
    elif model.supports_gradient_checkpointing:
        _method(model, "disable")()


def _method(model: PreTrainedModel, verb: str) -> Callable[..., None]:
    """transformers 5.23 renamed gradient checkpointing to activation checkpointing; the first argument is the same."""
    return getattr(model, f"activation_checkpointing_{verb}", None) or getattr(model, f"gradient_checkpointing_{verb}")


def is_checkpointed(model: PreTrainedModel) -> bool:
    """Whether gradient checkpointing is on, by the model's own answer, which was renamed in the same release."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return next((bool(getattr(model, name)) for name in names if hasattr(model, name)), False)


# -- sizes -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class FlashRows:
    """A packed row as flash attention gets it."""

    tokens: int  # number of its tokens
    predicted: int  # number of its completions' tokens
    prompts: int  # number of its prompts
    completions: int  # number of its completions


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Numbers of elements for a token."""

    queries: int  # of all heads' queries, and of their outputs
    keys: int  # of all heads' keys, and of their values; 0 in a model without attention
    # Of the MLP's gate; in a mixture of experts of the gates of all experts that a token has, with half of their inputs
    # and outputs, which are kept for each of them.
    mlp: int
    state: int = 0  # of what a recurrent layer keeps besides, in float32 whatever the model's dtype is
    heads: int = 0  # number of the heads that have queries; 0 in a model without attention

    def flash_gradients(self, hidden: int, row: FlashRows, ranks: int, multiprocessors: int) -> int:
        """Bytes that the backward of flash attention makes of a row in 16 bits, whose tokens so many ranks share.

        In one call everything attends to itself, in another one completions attend to their prompts; each of the two
        makes gradients, the first one those of the layer's hidden states as well.
        """
        head_size = self.queries // max(1, self.heads)
        if not self.keys or head_size > MAX_HEAD_SIZE or head_size % HEAD_SIZE_STEP:
            return 0
        queries, keys, heads = (max(1, size // ranks) for size in (self.queries, self.keys, self.heads))
        scratch = partial(
            backward_scratch,
            heads=heads,
            key_heads=max(1, keys // head_size),
            head_size=head_size,
            multiprocessors=multiprocessors,
        )
        first = row.tokens - row.predicted
        of_itself = scratch(row.tokens, row.tokens, row.prompts + row.completions)
        of_prompts = scratch(row.predicted, first, row.prompts) + 2 * (row.predicted * queries + 2 * first * keys)
        return 2 * row.tokens * (hidden // ranks + 2 * queries + 2 * keys) + max(of_itself, of_prompts)


def layer_sizes(config: Any) -> list[LayerSizes]:
    """The sizes of the decoder layers of a model with this transformers config, in their order.

    A config has a number, a list with one for each layer (Gemma 3n's MLPs), or a config for each layer (Gemma 4's
    heads). A model without attention counts two hidden states for what replaces queries.
    """
    text = config.get_text_config()
    number = text.num_hidden_layers
    of_layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * number
    return [_of_layer(of_layers[i], i, number) for i in range(number)]


def _of_layer(layer: Any, i: int, number: int) -> LayerSizes:
    def size(name: str) -> int:
        value = getattr(layer, name, None)
        if isinstance(value, Sequence):
            value = value[i] if len(value) == number else max(value)
        return value or 0

    heads, hidden = size("num_attention_heads"), layer.hidden_size
    head = size("head_dim") or (hidden // heads if heads else 0)
    key_heads = size("num_key_value_heads") or heads
    mlp = size("intermediate_size") or 4 * hidden
    if experts := size("num_experts_per_tok"):
        expert = size("moe_intermediate_size") or mlp
        shared = size("shared_expert_intermediate_size") or expert * size("n_shared_experts")
        mlp = experts * (expert + hidden // 2) + shared
    kinds = getattr(layer, "layer_types", None) or getattr(layer, "layers_block_type", None)
    is_mamba = hasattr(layer, "mamba_d_state") or hasattr(layer, "state_size")
    kind = kinds[i] if kinds and len(kinds) == number else "hybrid" if is_mamba else ""
    if is_mamba and kind in ("linear_attention", "hybrid"):  # transformers' names for it differ by release
        kind = "mamba"
    state = hidden * STATE_BYTES.get(kind, 0)
    return LayerSizes(queries=head * heads or 2 * hidden, keys=head * key_heads, mlp=mlp, state=state, heads=heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModules:
    """What decoder layers consist of, as far as it says what they keep."""

    norms: int = 2  # number of norms over hidden states
    # Initials of queries, keys and values that attention keeps twice: before their norm, or in the output that a single
    # layer gives for all three, and as they are attended to.
    kept_twice: str = ""
    # How the MLP is gated: `silu` (one function of rlft), `other`, or `none`.
    gate: Literal["silu", "other", "none"] = "silu"
    # Number of tensors of its width that an MLP for which rlft has no function keeps of its activation, with what it
    # returns.
    activation: int = 2


def layer_modules(layers: Sequence[nn.Module]) -> LayerModules:
    """What these decoder layers, empty or loaded, consist of; of unlike ones what keeps most.

    In a hybrid model nothing further counts: STATE_BYTES was measured with all that its layers consist of.
    """
    if any(isinstance(module, nn.Conv1d) for layer in layers for module in layer.modules()):
        return LayerModules()
    norms, twice, gates, activation = 2, set[str](), set[str](), 0
    for layer in layers:
        norms = max(norms, sum(_is_norm(child) for child in layer.children()))
        for name, child in layer.named_children():
            if "attn" in name or "attention" in name:
                twice |= {inner[0] for inner, module in child.named_children() if _is_norm(module)} & set("qkv")
                twice |= set("qk") if sum(isinstance(module, nn.Linear) for module in child.children()) == 2 else set()
            elif any(part in name for part in ("mlp", "feed_forward", "ffn", "fc")):
                gates.add(_gate_of(child))
        activation = max([activation, *map(_kept_by, _activations(layer))])
    gate = next((kind for kind in ("other", "none", "silu") if kind in gates), "silu")
    kept_twice = "".join(sorted(twice))
    return LayerModules(norms=norms, kept_twice=kept_twice, gate=cast(Any, gate), activation=activation or 2)


def _activations(layer: nn.Module) -> Iterator[nn.Module]:
    """The functions of a layer that are modules."""
    for name, module in layer.named_modules():
        if "act" in name.rpartition(".")[2] and not list(module.children()) and not list(module.parameters()):
            yield module


def _kept_by(activation: nn.Module) -> int:
    """Number of tensors of its input's size that are alive between an activation's forward and its backward."""
    kept: list[Tensor] = []
    noting = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with torch.enable_grad(), noting:
        kept.append(activation(torch.ones(2, requires_grad=True)))
    return len({tensor.data_ptr() for tensor in kept if tensor.numel() == 2})


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _gate_of(mlp: nn.Module) -> str:
    if elementwise.can_be_gated(mlp) or hasattr(mlp, "experts"):
        return "silu"  # what experts keep is in LayerSizes.mlp
    if any(isinstance(module, Conv1D) for module in mlp.modules()):
        return "none"  # GPT-2's linear layers
    linear = [module for module in mlp.modules() if isinstance(module, nn.Linear)]
    if not linear:
        return "silu"
    last = linear[-1]
    # A gate and its factor are twice as wide together as what the last layer reads, in one layer or in two.
    return "other" if sum(x.out_features for x in linear[:-1]) >= 2 * last.in_features else "none"


STATE_BYTES = {"conv": 6, "linear_attention": 59, "mamba": 46}
"""{kind of layer: numbers a token in units of the hidden size}, counted with transformers' own torch functions at usual
sizes (hidden 512; states of 64; chunks of 64). A short convolution's are the three parts of its input's projection, the
product of two of them, the convolution of that, and its product with the third."""


LOGIT_CHUNK = {"cpu": 2**21, "cuda": 2**24}
"""Number of logits alive at a time: 8 MiB in float32 fit into a CPU's cache; a GPU's are 32 MiB in 16 bits."""
BUSY_ROWS, MOST_LOGITS = 512, 2**26
"""A GPU takes so many tokens at a time if their logits are not more than that: with fewer, reading the head's weights
takes longer than the product (an H100 computes 240 operations in bfloat16 while it reads a byte)."""
TILE = 128


def logit_rows(vocabulary: int, device: str, tokens: int) -> int:
    """How many of so many tokens have their logits alive at a time.

    On a GPU the passes over the head are about equal and multiples of a product's tiles, if there are so many tokens.

    >>> [logit_rows(151936, "cuda", tokens) for tokens in (100, 384, 500, 900)]
    [100, 384, 256, 384]
    >>> logit_rows(49152, "cuda", 2048), logit_rows(4096, "cuda", 2048), logit_rows(2**20, "cuda", 500)
    (512, 2048, 64)
    >>> logit_rows(151936, "cpu", 500)
    13
    """
    tokens, most = max(1, tokens), max(1, LOGIT_CHUNK["cpu" if device == "cpu" else "cuda"] // vocabulary)
    if device == "cpu":
        return min(most, tokens)
    most = max(most, min(BUSY_ROWS, MOST_LOGITS // vocabulary))
    if most >= TILE:
        passes = math.ceil(tokens / (most // TILE * TILE))
        most = math.ceil(tokens / passes / TILE) * TILE
    return min(most, tokens)


ADAPTER_ITEM = 4
"""Bytes of an adapter's weight, which is float32 whatever the base's are, and of a number computed with it."""


@contextmanager
def peft_is_quiet() -> Iterator[None]:
    """Inside, PEFT may wrap a model without two warnings about which nobody can do anything; others are shown.

    One is about the line `if getattr(model, "is_gradient_checkpointing", True)` in PeftModel.__init__
    (peft/peft_model.py, PEFT 0.21); transformers 5.23 deprecates the name, a property of PreTrainedModel that no
    attribute of a model can hide. In the other one PEFT says that it reads GPT-2's layers as it should.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message="`is_gradient_checkpointing` is deprecated",
            category=FutureWarning,
            module=r"transformers\.modeling_utils$",
        )
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", module=r"peft\.tuners\.lora\.layer$")
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayers:
    """The linear layers that an adapter lies on, and what PEFT's layers keep of a token in addition to the base's.

    The fused functions of the fast kernels keep only a few numbers. They serve adapters without dropout and DoRA.
    """

    inputs: int = 0  # sum of these layers' input sizes
    shared_inputs: int = 0  # the same, with an input that several layers of a module share (queries, keys, values) once
    outputs: int = 0  # sum of their output sizes
    ranks: int = 0  # sum of their ranks
    largest: tuple[int, int] = (0, 0)  # (input size, output size) of the largest of them
    dropout: bool = False  # whether inputs are dropped at random
    dora: bool = False  # whether outputs are scaled by learned magnitudes (DoRA, arXiv 2402.09353)

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], *, dropout: bool, dora: bool) -> AdapterLayers:
        """The layers of an adapter whose tensors have these shapes, by PEFT's names."""
        inputs = {name.partition(".lora_A")[0]: shape[1] for name, shape in shapes.items() if ".lora_A" in name}
        outputs = {name.partition(".lora_B")[0]: shape[0] for name, shape in shapes.items() if ".lora_B" in name}
        ranks = sum(shape[0] for name, shape in shapes.items() if ".lora_A" in name)
        shared = {(name.rpartition(".")[0], size) for name, size in inputs.items()}
        sizes = [(inputs[name], outputs[name]) for name in inputs]
        return cls(
            inputs=sum(inputs.values()),
            shared_inputs=sum(size for _, size in shared),
            outputs=sum(outputs.values()),
            ranks=ranks,
            largest=max(sizes, key=lambda size: size[0] * size[1], default=(0, 0)),
            dropout=dropout,
            dora=dora,
        )

    def serves_fused(self, *, plain: bool) -> bool:
        """Whether the fused functions of the fast kernels can have this adapter; `plain`: whether there are none."""
        return not (plain or self.dropout or self.dora)

    def bytes_of_a_token(self, itemsize: int, device: str, *, plain: bool) -> int:
        """Bytes of a token that all layers keep for the backward.

        `itemsize` is that of the base's activations; `plain` layers are computed as PEFT does it.
        """
        if self.serves_fused(plain=plain):
            return itemsize * self.ranks
        kept = ADAPTER_ITEM * self.ranks
        if self.dropout or itemsize != ADAPTER_ITEM:
            # Each layer keeps an input of its own, dropped or in float32, instead of the one that layers share.
            kept += ADAPTER_ITEM * self.inputs - itemsize * self.shared_inputs
        if self.dropout:
            kept += (ADAPTER_ITEM if device == "cpu" else 1) * self.inputs  # the noise; on a GPU a mask of booleans
        if self.dora:  # separate outputs of base and adapter; with dropout the base gets the adapter's input
            kept += (ADAPTER_ITEM + (ADAPTER_ITEM if self.dropout else itemsize)) * self.outputs
        return kept

    def bytes_of_a_norm(self, itemsize: int) -> int:
        """Bytes alive while PEFT computes the norm of the largest layer's weight for DoRA: an identity matrix, and
        three copies of the weight, or four if the base's weights are not float32."""
        rows, columns = self.largest
        weights = 3 + (itemsize != ADAPTER_ITEM)
        return ADAPTER_ITEM * (rows * rows + weights * rows * columns) if self.dora else 0


NO_ADAPTER = AdapterLayers()


def activation_bytes(
    config: Any,
    tokens: int,
    itemsize: int,
    *,
    device: str = "cpu",
    plain: bool = False,
    is_fused: bool = False,
    adapter: int = 0,
    predicted: int | None = None,
    tile: int | None = None,
    modules: LayerModules = LayerModules(),
) -> int:
    """Bytes that a forward of `tokens` tokens, of `itemsize` bytes a number, keeps for its backward, in all layers.

    A layer keeps the inputs and outputs of its two norms, queries, keys, values and attention output, and of its gated
    MLP the gate, up and, unless it is computed again (`is_fused`), their product. Further norms keep their inputs
    (`modules`), and an MLP that rlft has no function for keeps its activation. In 16 bits the norms' inputs are kept in
    float32, except by the kernels of a CUDA GPU. Normalisers are left out (less than a per cent), and so are logits,
    which are alive for a chunk of tokens only.

    `plain` layers are transformers' own, whose MLP keeps the gate's activation; `is_fused` says whether the kernels
    have one function for a whole branch of a layer and can have the adapter, which they do in 16 bits on a GPU only;
    `adapter` is what an adapter keeps of a token (`AdapterLayers.bytes_of_a_token`); the device is a kind, one of
    `rlft.system.device.KINDS`. `predicted`: number of tokens whose hidden states the last layer's MLP gets; None: all
    of them. `tile`: number of tokens of a gated MLP that are computed at a time, which keeps its input of all tokens;
    None: all together.
    """
    text = config.get_text_config()
    of_a_norm = itemsize if device == "cuda" and not plain else 4
    norm = text.hidden_size * (itemsize + of_a_norm)
    attentions = 0
    for layer in layer_sizes(config):
        attentions += norm + 2 * (layer.queries + layer.keys) * itemsize + 4 * layer.state
        attentions += sum(layer.queries if name == "q" else layer.keys for name in modules.kept_twice) * of_a_norm
    layers = {"device": device, "plain": plain, "is_fused": is_fused, "predicted": predicted, "tile": tile}
    return tokens * (attentions + adapter) + sum(mlp_bytes(config, tokens, itemsize, modules=modules, **layers))


def mlp_bytes(
    config: Any,
    tokens: int,
    itemsize: int,
    *,
    device: str,
    plain: bool,
    is_fused: bool,
    predicted: int | None,
    tile: int | None,
    modules: LayerModules,
    **_: Any,
) -> list[int]:
    """The bytes that the MLP of each layer keeps for its backward; the arguments are those of `activation_bytes`."""
    text = config.get_text_config()
    is_fused = is_fused and (device == "cuda" or itemsize >= ADAPTER_ITEM)
    of_a_norm = itemsize if device == "cuda" and not plain else 4
    norms = text.hidden_size * (itemsize + (modules.norms - 1) * of_a_norm)
    passes = 4 if plain else 2 if is_fused else 3
    copies = {"other": 2 + modules.activation, "none": modules.activation, "silu": passes}[modules.gate]
    of_a_token = [norms + copies * layer.mlp * itemsize for layer in layer_sizes(config)]
    if tile is not None:
        return [min(tile, tokens) * size + tokens * text.hidden_size * itemsize for size in of_a_token]
    *others, last = of_a_token
    return [tokens * size for size in others] + [(tokens if predicted is None else predicted) * last]


def checkpointed_bytes(
    config: Any, tokens: int, itemsize: int, *, offloaded: bool = False, **layers: Any
) -> tuple[int, int]:
    """(bytes of the layers' inputs on the device, which gradient checkpointing keeps, or offloads; those of one layer's
    activations)."""
    text = config.get_text_config()
    whole = activation_bytes(config, tokens, itemsize, **layers)
    inputs = 1 if offloaded else text.num_hidden_layers  # that of the layer whose activations are computed again
    return tokens * text.hidden_size * inputs * itemsize, whole // text.num_hidden_layers
