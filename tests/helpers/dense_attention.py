"""Attention over a packed row from its definition, through a mask of every token by every token."""

import torch
from torch import Tensor

from rlft.model.packing import PackedRows


def mask_of(packed: PackedRows, window: int | None = None) -> Tensor:
    """Bool `[N, N]`: a token sees itself and what is before it on its path, if fewer than `window` tokens away."""
    prompts = [((), span) for span in packed.prompts]
    completions = [((packed.prompts[u],), span) for u, span in zip(packed.owner, packed.completions, strict=True)]
    mask = torch.zeros(packed.num_tokens, packed.num_tokens, dtype=torch.bool)
    for read, own in (*prompts, *completions, *((read, own) for own, read in packed.branches)):
        places = torch.tensor([place for start, length in (*read, own) for place in range(start, start + length)])
        if own[1]:
            seen = torch.ones(len(places), len(places), dtype=torch.bool).tril()
            if window is not None:
                seen = seen.triu(1 - window)
            mask[own[0] : sum(own)] = False
            mask[places[-own[1] :, None], places] = seen[-own[1] :]
    return mask.to(packed.token_ids.device)


def masked(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, scale: float, window: int | None = None,
    cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`[N, H, D]`: the attention of a packed row."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask_of(packed, window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)
