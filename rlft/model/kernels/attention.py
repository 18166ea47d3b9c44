"""Attention over a packed row: each prompt attends to itself, each completion to its prompt and to itself.

Registered with transformers under `NAME`, so that any model whose attention goes through the AttentionInterface can use
it; without a `packed` or `prefix_cache` argument it is plain SDPA. No N x N mask is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlft.model.kernels import elementwise, flash_attention, split_attention
from rlft.model.kernels.flash_attention import RowLengths
from rlft.model.kernels.split_attention import Block

if TYPE_CHECKING:
    from rlft.model.kernels.prefix_cache import PrefixCache
    from rlft.model.packing import PackedRows, PaddedRows

NAME = "rlft_packed"

Spans = Sequence[Block] | RowLengths
"""Which tokens of a packed row see which: blocks for a CPU's attention, lengths for a CUDA GPU's."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedRows | None = None,
    prefix_cache: PrefixCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[1, N, H, D]` from query `[1, H, N, D]` and key, value `[1, K, N, D]` with K key heads (H a multiple of K)."""
    if packed is None and prefix_cache is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    query_NHD, key_NKD, value_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    if prefix_cache is not None:
        layer = cast(int, module.layer_idx)
        return prefix_cache.attend(layer, query_NHD, key_NKD, value_NKD, scaling)[None], None
    assert packed is not None
    assert kwargs.get("sliding_window") is None, "sliding windows go through the padded forward"
    head_size = query.shape[-1]
    spans = spans_of(packed, query, head_size) if dropout == 0 and head_size == value.shape[-1] else None
    if spans is not None:
        return cast(Tensor, _Attention.apply(query_NHD, key_NKD, value_NKD, spans, scaling))[None], None
    return _masked_attention(query[0], key[0], value[0], packed.padded, scaling, dropout)[None], None


# -- without a mask ----------------------------------------------------------------------------------------------------
def spans_of(packed: PackedRows, x: Tensor, head_size: int) -> Spans | None:
    """Which tokens of this row see which; None if no kernel takes heads of this size and of the dtype of x."""
    if flash_attention.takes(x.dtype, head_size, x.device) and packed.lengths is not None:
        return packed.lengths
    return packed.blocks if x.device.type == "cpu" else None


def prepare(packed: PackedRows, model: PreTrainedModel) -> None:
    """Makes what attention on the model's device reads of a packed row, so that it goes there together with the row."""
    if model.device.type == "cpu":
        return
    takes = flash_attention.takes(model.dtype, flash_attention.head_size(model), model.device)
    _ = packed.lengths if takes and packed.lengths is not None else packed.padded


def attend(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(attention `[N, H, D]`, three further tensors that `attention_gradients` needs); no gradient."""
    if isinstance(spans, RowLengths):
        return flash_attention.attend(query, key, value, spans, scale)
    return *split_attention.attend(query, key, value, spans, scale), None, None


def attention_gradients(
    grad: Tensor, kept: Sequence[Tensor], spans: Spans, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (new tensors) from that of the attention.

    `kept` are query, key, value and the results of `attend`.
    """
    query, key, value, out, lse, random, unused = kept
    if isinstance(spans, RowLengths):
        return flash_attention.attention_gradients(grad, query, key, value, out, lse, random, unused, spans, scale)
    return split_attention.attention_gradients(grad, query, key, value, out, lse, spans, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None) -> Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out, *kept = attend(query, key, value, spans, scale)
        ctx.save_for_backward(query, key, value, out, *kept)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grad_outputs
        return *attention_gradients(grad.contiguous(), ctx.saved_tensors, ctx.spans, ctx.scale), None, None


# -- through a mask ----------------------------------------------------------------------------------------------------
def _masked_attention(
    query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, rows: PaddedRows, scaling: float | None, dropout: float
) -> Tensor:
    """`[N, H, D]` through two calls of SDPA: prompts causally, completions with a mask of C x (P + C).

    Each branch needs another call.
    """
    repeat = query_HND.shape[0] // key_KND.shape[0]
    key_HND, value_HND = _repeat(key_KND, repeat), _repeat(value_KND, repeat)
    prompt_q, prompt_k, prompt_v = (_gather(x, rows.prompt_index) for x in (query_HND, key_HND, value_HND))
    prompt_out = F.scaled_dot_product_attention(
        prompt_q, prompt_k, prompt_v, is_causal=True, scale=scaling, dropout_p=dropout
    )
    own_q, own_k, own_v = (_gather(x, rows.completion_index) for x in (query_HND, key_HND, value_HND))
    keys = torch.cat([prompt_k[rows.owner], own_k], dim=2)
    values = torch.cat([prompt_v[rows.owner], own_v], dim=2)
    completion_out = F.scaled_dot_product_attention(
        own_q, keys, values, attn_mask=_completion_mask(rows), scale=scaling, dropout_p=dropout
    )
    branches = [_branch(query_HND, key_HND, value_HND, *places, scaling, dropout) for places in rows.branches]
    return torch.cat([_flatten(prompt_out), _flatten(completion_out), *branches])[rows.unpack]


def _branch(
    query_HND: Tensor,
    key_HND: Tensor,
    value_HND: Tensor,
    read_K: Tensor,
    own_C: Tensor,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """`[C, H, D]` of one branch, which attends to all that it reads, and causally to itself."""
    keys_index = torch.cat([read_K, own_C])
    mask = torch.ones(len(own_C), len(keys_index), dtype=torch.bool, device=keys_index.device).tril(len(read_K))
    query, key, value = query_HND[:, own_C], key_HND[:, keys_index], value_HND[:, keys_index]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, dropout_p=dropout).transpose(
        0, 1
    )


def _repeat(x_KND: Tensor, repeat: int) -> Tensor:
    return x_KND if repeat == 1 else x_KND.repeat_interleave(repeat, dim=0)


def _gather(x_HND: Tensor, index_RC: Tensor) -> Tensor:
    """`[R, H, C, D]`: the packed tokens at these places; padded places get token 0."""
    heads, _, size = x_HND.shape
    rows, width = index_RC.shape
    return x_HND.index_select(1, index_RC.flatten()).view(heads, rows, width, size).transpose(0, 1)


def _completion_mask(rows: PaddedRows) -> Tensor:
    """Bool `[R, 1, C, P + C]`: the completion's prompt, then itself causally. Padded queries see keys, too: no NaN."""
    number, width = rows.completion_index.shape
    causal = torch.ones(width, width, dtype=torch.bool, device=rows.owner.device).tril()
    prompt = rows.prompt_mask[rows.owner][:, None, :].expand(number, width, -1)
    return torch.cat([prompt, causal.expand(number, width, width)], dim=2)[:, None]


def _flatten(x_RHCD: Tensor) -> Tensor:
    """`[R * C, H, D]`."""
    return x_RHCD.transpose(1, 2).flatten(0, 1)


# -- which models have it ----------------------------------------------------------------------------------------------
def on_this_device(model: PreTrainedModel) -> str:
    """How a packed row is computed on the model's device, in words; empty on a CPU, where there is only one way."""
    if model.device.type == "cpu":
        return ""
    size = flash_attention.head_size(model)
    flash_obstacle = flash_attention.obstacle(model.dtype, size, model.device)
    fusion_obstacle = elementwise.obstacle(model.device)
    return ", ".join(
        [
            "attention by variable-length flash calls"
            if flash_obstacle is None
            else f"attention through a mask, since {flash_obstacle}",
            "fused steps" if fusion_obstacle is None else f"steps one by one, since {fusion_obstacle}",
        ]
    )


def install(model: PreTrainedModel) -> None:
    """Gives the model this attention, or leaves it transformers' own if only that is right for it (`obstacle`)."""
    if obstacle(model) is None:
        model.set_attn_implementation(NAME)
    else:
        install_plain(model)


def install_plain(model: PreTrainedModel) -> None:
    """Leaves the model transformers' own attention: SDPA, or eager where SDPA would be incomplete.

    SDPA silently leaves out what it does not know; eager attention is always complete.
    """
    if obstacle(model) is not None and model._can_set_attn_implementation():
        model.set_attn_implementation("eager")


def obstacle(model: PreTrainedModel) -> str | None:
    """Why plain scaled dot-product attention would give this model wrong numbers; None if it gives the right ones."""
    name, cap = type(model).__name__, getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None:
        return f"{name} caps its attention logits (attn_logit_softcapping={cap:g})"
    if not model._can_set_attn_implementation():
        return f"{name} has an attention of its own"
    if not model._supports_sdpa:
        return f"{name} needs more than scaled dot-product attention"
    return None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
