"""The forwards of Llama-like attention modules and decoder layers, and the model types that have them.

Any other model computes packed rows, too, if its attention does (`attention`); here is what is faster still.

In a packed row most tokens of a prompt only provide keys and values for later tokens. In the last layer nothing more is
needed of them, so its MLP and the final norm get only the positions from which a completion token is predicted.

Each of the two branches of a layer is one autograd function, including the residual sum, where its parts are known:
norms, attention and MLP replaced by rlft's, and linear layers that are frozen or have one plain adapter.

    attention_branch(x) = x + o(attend(turn(q(norm x)), turn(k(norm x)), v(norm x)))
    mlp_branch(x)       = x + down(silu(gate(norm x)) * up(norm x))

In a chain of functions, each passes its gradient to the next in a new tensor, and autograd adds up those that meet.
Here a tensor that nothing else reads is overwritten by the next result, one that several need is kept once, and q, k
and v share the low-rank products of their input. The modules of a branch are then not called, so that hooks on them do
not run; otherwise they are called one by one. Attention is Llama's in families that differ only in names, and in Qwen3,
which has norms over each head in addition.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import eager_attention_forward

from rlft.model.activations import is_recomputing, tile_of
from rlft.model.kernels import elementwise
from rlft.model.kernels.attention import Spans, attend, attention_gradients, spans_of, window_of
from rlft.model.kernels.elementwise import (
    Heads,
    Norm,
    as_written,
    fused,
    norm_gradient,
    normed,
    silu_product,
    turned,
    turned_back,
)
from rlft.model.kernels.lora_linear import (
    Layers,
    Operands,
    add_product,
    dense,
    gradients,
    layers_of,
    products,
    products_of_few,
)
from rlft.model.kernels.prefix_cache import FlashPrefixCache
from rlft.model.kernels.split_attention import Scoring
from rlft.model.packing import PackedRows


# -- the two branches, each one autograd function ----------------------------------------------------------------------
def attention_branch(x: Tensor, heads: Heads, spans: Spans, scale: float, layers: Layers) -> Tensor:
    """`[1, N, hidden]` from x of the same shape, a packed row.

    `spans` say which tokens see which, `scale` is the factor of the scores, and `layers` are those of q, k, v and o.
    """
    if not torch.is_grad_enabled():
        return _attention(x, heads, spans, scale, layers.operands)[0]
    return cast(Tensor, _Attention.apply(x, heads, spans, scale, layers.operands, *layers.learned))


def mlp_branch(x: Tensor, norm: Norm, layers: Layers, tile: int | None = None) -> Tensor:
    """`[.., hidden]` from x of the same shape; `layers` are those of gate, up and down.

    `tile`: how many tokens are computed at a time, x alone being kept for the backward; None: all together.
    """
    if not torch.is_grad_enabled():
        return _mlp_in_tiles(x.detach(), norm, dense(layers.operands, x.dtype), tile)
    if tile is None:
        return cast(Tensor, _Mlp.apply(x, norm, layers.operands, *layers.learned))
    return cast(Tensor, _TiledMlp.apply(x, norm, layers.operands, tile, *layers.learned))


# -- in decoding -------------------------------------------------------------------------------------------------------
def decoded_attention(
    x: Tensor, heads: Heads, cache: FlashPrefixCache, window: int | None, scale: float, layers: Sequence[Operands]
) -> Tensor:
    """`attention_branch` for the next token of each completion, x `[1, R, hidden]`, which is overwritten; no gradient.

    There are so few numbers that the number of launches decides: products are added up in their results.
    """
    inner, _ = normed(x, *heads.norm)
    q_RHD, k_RKD, v_RKD = (part.view(len(part), -1, heads.size) for part in products_of_few(inner, layers[:3]))
    out_RHD = cache.attend(q_RHD, k_RKD, v_RKD, Scoring(scale), window, heads=heads)
    return add_product(x, out_RHD.flatten(1), layers[3])


def decoded_mlp(x: Tensor, norm: Norm, layers: Sequence[Operands]) -> Tensor:
    """`mlp_branch` for the next token of each completion, x `[1, R, hidden]`, which is overwritten; no gradient."""
    inner, _ = normed(x, *norm)
    gate, up = products_of_few(inner, layers[:2])
    return add_product(x, silu_product(gate, up), layers[2])


# -- attention ---------------------------------------------------------------------------------------------------------
def _attention(
    x: Tensor, heads: Heads, spans: Spans, scale: float, layers: Sequence[Operands]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """(x plus the branch, tensors that its gradients need)."""
    x = x.detach()  # else it would be compiled once for an x that needs a gradient, and once for one that does not
    q_NHD, k_NKD, v_NKD, *kept = _attention_inputs(x, heads, dense(layers[:3], x.dtype))
    out_NHD, *attention_kept = attend(q_NHD, k_NKD, v_NKD, spans, Scoring(scale))
    y, low_o = _attention_output(x, out_NHD, dense(layers[3:], x.dtype))
    return y, (x, q_NHD, k_NKD, v_NKD, out_NHD, *attention_kept, low_o, *kept)


@fused
def _attention_inputs(x: Tensor, heads: Heads, layers: Sequence[Operands]) -> tuple[Any, ...]:
    """(queries, keys, values, then what the gradients need: the scale of the norm, its output as a matrix, low-rank
    products, and of queries and keys what their norms get and their scales, or None)."""
    inner, scale = as_written(normed)(x, *heads.norm)
    parts, flat, low = products(inner, layers)
    q_NHD, k_NKD, v_NKD = (part.view(part.shape[1], -1, heads.size) for part in parts)
    results, kept = [], []
    for x_NHD, head_norm in ((q_NHD, heads.query_norm), (k_NKD, heads.key_norm)):
        y, head_scale = (x_NHD, None) if head_norm is None else as_written(normed)(x_NHD, *head_norm)
        results.append(as_written(turned)(y, *heads.angles))
        kept += [None if head_norm is None else x_NHD, head_scale]
    return *results, v_NKD, scale, flat, low, *kept


@fused
def _attention_output(x: Tensor, out_NHD: Tensor, layers: Sequence[Operands]) -> tuple[Tensor, Tensor]:
    """(x plus o of the attention, low-rank products)."""
    [y], _, low = products(out_NHD.view(*x.shape[:2], -1), layers)
    return y.add_(x), low


@fused
def _output_gradients(
    grad: Tensor, out_NHD: Tensor, low: Tensor, layers: Sequence[Operands]
) -> tuple[Tensor, list[Tensor]]:
    """(gradient of the attention, those of A and B of o)."""
    out_grad, learned_grads = gradients(layers, out_NHD.flatten(1), low, [grad], of_x=True)
    return cast(Tensor, out_grad).view_as(out_NHD), learned_grads


@fused
def _input_gradients(
    grad: Tensor,  # of the branch's result
    head_grads: Sequence[Tensor],  # of queries, keys and values
    x: Tensor,
    heads: Heads,
    kept: Sequence[Tensor | None],  # the last results of `_attention_inputs`
    layers: Sequence[Operands],
    needs_x: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """(gradient of x through the branch and the residual sum, those of A and B of q, k and v)."""
    scale, flat, low, *of_heads = kept
    grads = []
    for grad_NHD, head_norm, x_NHD, head_scale in (
        (head_grads[0], heads.query_norm, *of_heads[:2]),
        (head_grads[1], heads.key_norm, *of_heads[2:]),
    ):
        back = as_written(turned_back)(grad_NHD, *heads.angles)
        if head_norm is not None:
            back = as_written(norm_gradient)(back, head_norm, cast(Tensor, x_NHD), cast(Tensor, head_scale))
        grads.append(back.flatten(1))
    grads.append(head_grads[2].flatten(1))
    inner_grad, learned_grads = gradients(layers, cast(Tensor, flat), cast(Tensor, low), grads, needs_x)
    return _summed(inner_grad, x, cast(Tensor, scale), heads.norm, grad) if needs_x else None, learned_grads


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: Heads, spans: Spans, scale: float, layers: Sequence[Operands], *learned: Tensor
    ) -> Tensor:
        y, kept = _attention(x, heads, spans, scale, layers)
        ctx.save_for_backward(*kept)
        ctx.heads, ctx.spans, ctx.scale, ctx.layers = heads, spans, scale, layers
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad], layers = grad_outputs, ctx.layers
        x, q_NHD, k_NKD, v_NKD, out_NHD, lse, random, unused, low_o, *kept = ctx.saved_tensors
        out_grad, o_grads = _output_gradients(grad, out_NHD, low_o, dense(layers[3:], x.dtype))
        of_attention = (q_NHD, k_NKD, v_NKD, out_NHD, lse, random, unused)
        head_grads = attention_gradients(out_grad, of_attention, ctx.spans, Scoring(ctx.scale))
        layers, needs_x = dense(layers[:3], x.dtype), ctx.needs_input_grad[0]
        x_grad, qkv_grads = _input_gradients(grad, head_grads, x, ctx.heads, kept, layers, needs_x)
        return x_grad, None, None, None, None, *qkv_grads, *o_grads


# -- MLP ---------------------------------------------------------------------------------------------------------------
@fused
def _mlp(x: Tensor, norm: Norm, layers: Sequence[Operands]) -> tuple[Tensor, ...]:
    """(x plus the branch, tensors that its gradients need)."""
    inner, scale = as_written(normed)(x, *norm)
    (gate, up), flat, low = products(inner, layers[:2])
    [y], _, low_down = products(as_written(silu_product)(gate, up), layers[2:])
    return y.add_(x), scale, flat, low, gate, up, low_down


@fused
def _mlp_gradients(
    grad: Tensor, x: Tensor, norm: Norm, kept: Sequence[Tensor], layers: Sequence[Operands], needs_x: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """(gradient of x through the branch and the residual sum, those of A and B of gate, up and down).

    kept: the results of `_mlp` but the first.
    """
    scale, flat, low, gate, up, low_down = kept
    gate, up = gate.flatten(0, -2), up.flatten(0, -2)
    silu = F.silu(gate)
    product_grad, down_grads = gradients(layers[2:], silu * up, low_down, [grad], of_x=True)
    product_grad = cast(Tensor, product_grad)
    grads = (torch.ops.aten.silu_backward(product_grad * up, gate), silu.mul_(product_grad))
    inner_grad, gate_up_grads = gradients(layers[:2], flat, low, grads, needs_x)
    return _summed(inner_grad, x, scale, norm, grad) if needs_x else None, gate_up_grads + down_grads


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm, layers: Sequence[Operands], *learned: Tensor) -> Tensor:
        x = x.detach()
        y, *kept = _mlp(x, norm, dense(layers, x.dtype))
        ctx.save_for_backward(x, *kept)
        ctx.norm, ctx.layers = norm, layers
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad], (x, *kept) = grad_outputs, ctx.saved_tensors
        layers = dense(ctx.layers, x.dtype)
        x_grad, learned_grads = _mlp_gradients(grad, x, ctx.norm, kept, layers, ctx.needs_input_grad[0])
        return x_grad, None, None, *learned_grads


def _mlp_in_tiles(x: Tensor, norm: Norm, layers: Sequence[Operands], tile: int | None) -> Tensor:
    """x plus the branch; no gradient."""
    if tile is None:
        return _mlp(x, norm, layers)[0]
    y = torch.empty_like(x)
    for part, of_y in zip(x.split(tile, -2), y.split(tile, -2), strict=True):
        of_y.copy_(_mlp(part, norm, layers)[0])
    return y


class _TiledMlp(torch.autograd.Function):
    """`_Mlp` for so many tokens at a time: x alone is kept, and each tile is computed again for its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm, layers: Sequence[Operands], tile: int, *learned: Tensor) -> Tensor:
        x = x.detach()
        ctx.save_for_backward(x)
        ctx.norm, ctx.layers, ctx.tile = norm, layers, tile
        if is_recomputing():  # a checkpoint wants what is saved, and its last function's output is not
            return x.new_empty(()).expand_as(x)
        return _mlp_in_tiles(x, norm, dense(layers, x.dtype), tile)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad], [x], needs_x = grad_outputs, ctx.saved_tensors, ctx.needs_input_grad[0]
        layers, x_grad = dense(ctx.layers, x.dtype), torch.empty_like(x)
        totals: list[Tensor] = []
        for part, part_grad, of_x in zip(*(t.split(ctx.tile, -2) for t in (x, grad, x_grad)), strict=True):
            _, *kept = _mlp(part, ctx.norm, layers)
            part_x_grad, learned_grads = _mlp_gradients(part_grad, part, ctx.norm, kept, layers, needs_x)
            if part_x_grad is not None:
                of_x.copy_(part_x_grad)
            totals = [a.add_(b) for a, b in zip(totals, learned_grads, strict=True)] if totals else learned_grads
        return x_grad if needs_x else None, None, None, None, *totals


def _summed(inner_grad: Tensor | None, x: Tensor, scale: Tensor, norm: Norm, grad: Tensor) -> Tensor:
    """The gradient of x through the branch and through the residual sum; it overwrites that of the norm's output."""
    return as_written(norm_gradient)(cast(Tensor, inner_grad).view_as(x), norm, x, scale, grad)


# -- the families ------------------------------------------------------------------------------------------------------
TESTED = ("5.17", "5.24")
"""Releases of transformers, the first and the last, whose modules the kernels are tested against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What can be replaced in a model type besides attention, norms and gated MLPs, which are known by what they do."""

    # `self_attn` of every layer is Llama's: q, k, v and o projections, perhaps norms over each head, and rotary
    # positions by halves.
    attention: bool = False
    # Every layer is x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)), and nothing else,
    # with an MLP that returns one tensor.
    layer: bool = False
    # The attention's sliding window is `config.sliding_window`; otherwise it is the module's, if that has one.
    window_of_config: bool = False


FAMILIES: Mapping[str, Family] = {
    "gemma": Family(attention=True, layer=True),
    "granite": Family(attention=True),
    "llama": Family(attention=True, layer=True),
    "mistral": Family(attention=True, layer=True, window_of_config=True),
    "mixtral": Family(attention=True, window_of_config=True),
    "qwen2": Family(attention=True, layer=True),
    "qwen2_5_vl_text": Family(attention=True, layer=True),
    "qwen2_moe": Family(attention=True),
    "qwen3": Family(attention=True, layer=True),
    "qwen3_moe": Family(attention=True),
    "qwen3_vl_text": Family(attention=True, layer=True),
    "smollm3": Family(layer=True),
}
"""{model type (`model_type` in config.json): its family}."""


# -- the forward of attention ------------------------------------------------------------------------------------------
def install_attention(model: PreTrainedModel, family: Family) -> None:
    """Replaces the forward of every layer's attention."""
    layers: Any = model.base_model.layers
    for layer in layers:
        attention = layer.self_attn
        holder = attention.config if family.window_of_config else attention
        attention.forward = functools.partial(_attention_forward, attention, getattr(holder, "sliding_window", None))


def _attention_forward(
    attention: Any,
    window: int | None,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(`[B, N, hidden]`, attention weights if the attention function gives any) from hidden states `[B, N, hidden]`.

    The cache of earlier keys and values comes as `cache` since transformers 5.24, before that as `past_key_values`.
    """
    cache = past_key_values if cache is None else cache
    shape = hidden_states.shape[:-1]
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (layer(hidden_states).view(*shape, -1, attention.head_dim) for layer in layers)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    query, key = elementwise.rotated(query, key, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    implementation = attention.config._attn_implementation
    attend = AttentionInterface().get_interface(implementation, eager_attention_forward)
    out, weights = attend(
        attention,
        query,
        key,
        value,
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        sliding_window=window,
        **kwargs,
    )
    return attention.o_proj(out.reshape(*shape, -1).contiguous()), weights


# -- the forward of a layer --------------------------------------------------------------------------------------------
def install(model: PreTrainedModel) -> None:
    """Replaces the forward of every layer. Call it after `elementwise.install` and `install_attention`."""
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, layer.forward, layer is layers[-1])


def narrows(model: PreTrainedModel) -> bool:
    """Whether the model returns only the predicting positions `[1, M, hidden]` of a packed row."""
    layers = getattr(model.base_model, "layers", None)
    return bool(layers) and elementwise.is_replaced(layers[-1], _forward)


def _forward(layer: Any, plain: Any, is_last: bool, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """`[1, N, hidden]`, or `[1, M, hidden]` in the last layer, from `[1, N, hidden]` of a packed row, or of the next
    tokens in decoding on a GPU; for other inputs what the layer itself gives."""
    packed, cache = kwargs.get("packed"), kwargs.get("prefix_cache")
    if isinstance(cache, FlashPrefixCache) and cache.is_decoding:
        packed = cache
    elif not isinstance(packed, PackedRows):
        return plain(hidden_states, **kwargs)
    if not kwargs.pop("is_checkpointed", not _needs_checkpoint(layer)):
        # The whole module, as older releases do it: its hooks bring the weights of a divided base in the backward, too.
        inner = functools.partial(layer, is_checkpointed=True, **kwargs)
        return layer._gradient_checkpointing_func(inner, hidden_states)
    attended = None
    if elementwise.is_replaced(layer.self_attn, _attention_forward):
        window = window_of(kwargs.get("attention_mask"))
        attended = _fused_attention(layer, hidden_states, packed, window, *kwargs["position_embeddings"])
    if attended is None:
        attended = hidden_states + layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
    if isinstance(packed, FlashPrefixCache):
        return _with_mlp(layer, attended, decodes=True)
    return _with_mlp(layer, packed.predicting(attended) if is_last else attended)


def _needs_checkpoint(layer: Any) -> bool:
    """Whether this pass has to be checkpointed in the layer's forward, which is replaced.

    Since transformers 5.24 a class derived from GradientCheckpointingLayer does that in its `forward`, before that in
    `__call__`.
    """
    if "__call__" in vars(GradientCheckpointingLayer) or not isinstance(layer, GradientCheckpointingLayer):
        return False
    return layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()


def _fused_attention(
    layer: Any, x: Tensor, packed: PackedRows | FlashPrefixCache, window: int | None, cos: Tensor, sin: Tensor
) -> Tensor | None:
    """The attention branch as one function; None if its parts do not allow that."""
    attention = layer.self_attn
    norms_of_heads = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    norm, *head_norms = (elementwise.norm_of(module) for module in (layer.input_layernorm, *norms_of_heads))
    if norm is None or None in head_norms or not elementwise.serves(x):
        return None
    layers = layers_of(x, (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj))
    if layers is None or (layers.in_4_bits and isinstance(packed, FlashPrefixCache)):
        return None  # bitsandbytes multiplies a few tokens with the 4-bit numbers themselves
    query_norm, key_norm = head_norms or (None, None)
    heads = Heads(norm=norm, query_norm=query_norm, key_norm=key_norm, size=attention.head_dim, cos=cos, sin=sin)
    if isinstance(packed, FlashPrefixCache):
        return decoded_attention(x, heads, packed, window, attention.scaling, layers.operands)
    spans = spans_of(packed, x, attention.head_dim, window)
    return attention_branch(x, heads, spans, attention.scaling, layers)


def _with_mlp(layer: Any, x: Tensor, *, decodes: bool = False) -> Tensor:
    mlp, norm = layer.mlp, elementwise.norm_of(layer.post_attention_layernorm)
    layers = None
    if norm is not None and elementwise.serves(x) and elementwise.is_gated(mlp):
        layers = layers_of(x, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    if norm is None or layers is None or (layers.in_4_bits and decodes):
        return x + mlp(layer.post_attention_layernorm(x))
    if decodes:
        return decoded_mlp(x, norm, layers.operands)
    return mlp_branch(x, norm, layers, tile_of(layer))
