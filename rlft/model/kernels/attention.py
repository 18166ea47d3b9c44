"""Attention over a packed row: each prompt attends to itself, each completion to its prompt and to itself.

Registered with transformers under `NAME`, so that any model whose attention goes through the AttentionInterface can use
it; without a `packed` or `prefix_cache` argument it is plain SDPA. No N x N mask is ever made. Scale, cap and sinks are
arguments of a layer's own call, and its sliding window comes with its mask, so that no model is known by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlft.model.kernels import elementwise, flash_attention
from rlft.model.kernels.block_attention import Scoring, wide
from rlft.model.kernels.layer_attention import AttentionProbe, attention_of_layers, mask_of_layers, window_of
from rlft.model.kernels.row_attention import RowAttention, spans_of

if TYPE_CHECKING:
    from rlft.model.kernels.prefix_cache import PrefixCache
    from rlft.model.packing import PackedRows

NAME = "rlft_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedRows | AttentionProbe | None = None,
    prefix_cache: PrefixCache | None = None,
    softcap: float | None = None,  # scores are `softcap * tanh(score / softcap)`
    s_aux: Tensor | None = None,  # `[H]`, scores of sinks, which take a share of a query's attention and give nothing
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[1, N, H, D]` from query `[1, H, N, D]` and key, value `[1, K, N, D]` with K key heads (H a multiple of K)."""
    if isinstance(packed, AttentionProbe):
        return packed.attend(module, query, value, attention_mask, softcap, kwargs), None
    if packed is None and prefix_cache is None:
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
        return _row_attention(query, key, value, attention_mask, Scoring(scaling, softcap), s_aux), None
    assert dropout == 0, "dropout is set to 0 where models are loaded"
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)
    window, size = window_of(attention_mask), value.shape[-1]
    width = max(query.shape[-1], size)
    # Zeros behind heads change no score, and nothing of what is before them.
    query_NHD, key_NKD, value_NKD = (_widened(x[0].transpose(0, 1), width) for x in (query, key, value))
    if prefix_cache is not None:
        out = prefix_cache.attend(query_NHD, key_NKD, value_NKD, scoring, window, s_aux)
    else:
        assert packed is not None
        spans = spans_of(packed, query, width, window, softcap)
        out = cast(Tensor, RowAttention.apply(query_NHD, key_NKD, value_NKD, s_aux, spans, scoring))
    return out[None, ..., :size], None


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _row_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """`[B, N, H, D]` of rows as transformers has them, by plain products; the mask is SDPA's, True where a key is seen.

    SDPA itself leaves out caps and sinks.
    """
    heads, (width, reach) = query.shape[1], (query.shape[2], key.shape[2])
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = (query * scale @ key.transpose(-1, -2)).to(wide(query))
    if scoring.cap is not None:
        scores = (scores / scoring.cap).tanh() * scoring.cap
    if mask is None:  # left out by transformers where all is causal
        mask = torch.ones(width, reach, dtype=torch.bool, device=query.device).tril(reach - width)
    # A query without keys, in the padding, gives no NaN.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :reach].to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


# -- which models have it ----------------------------------------------------------------------------------------------
def prepare(packed: PackedRows, model: PreTrainedModel) -> None:
    """Makes what attention on the model's device reads of a packed row, so that it goes there together with the row."""
    if model.device.type == "cpu":
        return
    for layer in set(attention_of_layers(model)):
        x = torch.empty(0, dtype=model.dtype, device=model.device)
        spans_of(packed, x, layer.head_size, layer.window, 1.0 if layer.cap else None)


def on_this_device(model: PreTrainedModel) -> str:
    """How a packed row is computed on the model's device, in words; empty on a CPU, where there is only one way."""
    if model.device.type == "cpu":
        return ""
    heads = ((layer.head_size, layer.cap) for layer in attention_of_layers(model))
    problems = (flash_attention.obstacle(model.dtype, size, model.device, caps=cap) for size, cap in heads)
    why_not = next(filter(None, problems), None)
    fusion_obstacle = elementwise.obstacle(model.device)
    return ", ".join(
        [
            "attention by variable-length flash calls"
            if why_not is None
            else f"attention by plain products, since {why_not}",
            "fused steps" if fusion_obstacle is None else f"steps one by one, since {fusion_obstacle}",
        ]
    )


def install(model: PreTrainedModel) -> None:
    """Gives the model this attention, if it lets its attention be chosen."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)


def install_plain(model: PreTrainedModel) -> None:
    """Leaves transformers' own attention: SDPA, or eager where SDPA would silently leave something out."""
    caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    if (caps or not model._supports_sdpa) and model._can_set_attn_implementation():
        model.set_attn_implementation("eager")


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, mask_of_layers)
