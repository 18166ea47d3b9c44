"""Attention over a packed row: each prompt attends to itself, each completion to its prompt and to itself.

Registered with transformers under `NAME`, so that any model whose attention goes through the AttentionInterface can use
it; without a `packed` argument (generation, evaluation) it is plain SDPA. No N x N mask is ever made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

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
    packed: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[1, N, H, D]` from query `[1, H, N, D]` and key, value `[1, K, N, D]` with K key heads (H a multiple of K)."""
    if packed is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    assert kwargs.get("sliding_window") is None, "sliding windows go through the padded forward"
    repeat = query.shape[1] // key.shape[1]
    query_HND, key_HND, value_HND = query[0], _repeat(key[0], repeat), _repeat(value[0], repeat)

    prompt_q, prompt_k, prompt_v = (_gather(x, packed.prompt_index) for x in (query_HND, key_HND, value_HND))
    prompt_out = F.scaled_dot_product_attention(
        prompt_q, prompt_k, prompt_v, is_causal=True, scale=scaling, dropout_p=dropout
    )
    own_q, own_k, own_v = (_gather(x, packed.completion_index) for x in (query_HND, key_HND, value_HND))
    keys = torch.cat([prompt_k[packed.owner], own_k], dim=2)
    values = torch.cat([prompt_v[packed.owner], own_v], dim=2)
    completion_out = F.scaled_dot_product_attention(
        own_q, keys, values, attn_mask=_completion_mask(packed), scale=scaling, dropout_p=dropout
    )
    flat = torch.cat([_flatten(prompt_out), _flatten(completion_out)])
    return flat[packed.unpack][None], None


def _repeat(x_KND: Tensor, repeat: int) -> Tensor:
    return x_KND if repeat == 1 else x_KND.repeat_interleave(repeat, dim=0)


def _gather(x_HND: Tensor, index_RC: Tensor) -> Tensor:
    """`[R, H, C, D]`: the packed tokens at these places, padded places hold token 0."""
    heads, _, size = x_HND.shape
    rows, width = index_RC.shape
    return x_HND.index_select(1, index_RC.flatten()).view(heads, rows, width, size).transpose(0, 1)


def _completion_mask(packed: PackedRows) -> Tensor:
    """Bool `[R, 1, C, P + C]`: the completion's prompt, then itself causally. Padded queries see something: no NaN."""
    rows, width = packed.completion_index.shape
    causal = torch.ones(width, width, dtype=torch.bool, device=packed.owner.device).tril()
    prompt = packed.prompt_mask[packed.owner][:, None, :].expand(rows, width, -1)
    return torch.cat([prompt, causal.expand(rows, width, width)], dim=2)[:, None]


def _flatten(x_RHCD: Tensor) -> Tensor:
    """`[R * C, H, D]`."""
    return x_RHCD.transpose(1, 2).flatten(0, 1)


def install(model: PreTrainedModel) -> None:
    """Gives the model this attention, or leaves it the one that is right for it (`obstacle`)."""
    if obstacle(model) is None:
        model.set_attn_implementation(NAME)
    elif model._can_set_attn_implementation():
        # transformers' SDPA leaves out what it does not know, without a word; eager is always complete.
        model.set_attn_implementation("eager")


def obstacle(model: PreTrainedModel) -> str | None:
    """Why plain scaled dot-product attention would give this model wrong numbers; None where it gives right ones."""
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
