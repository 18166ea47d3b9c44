"""Attention over a packed row from its definition, through a mask of every token by every token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlft.model.packing import PackedRows


def masked(query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, scale: float) -> Tensor:
    """`[N, H, D]`: prompts and completions attend to themselves, causally, and completions to their prompt."""
    mask = torch.zeros(packed.num_tokens, packed.num_tokens, dtype=torch.bool, device=query.device)
    for start, length in (*packed.prompts, *packed.completions):
        mask[start : start + length, start : start + length] = torch.ones(length, length).tril().bool()
    for (start, length), unit in zip(packed.completions, packed.owner, strict=True):
        first, size = packed.prompts[unit]
        mask[start : start + length, first : first + size] = True
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)
