"""Attention of a block of queries to a block of keys: by torch's flash kernel on a CPU, else by plain products.

The kernel caps no scores. Plain products hold some scores at a time, and compute them again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

AT_ONCE = 2**23  # scores that plain products hold at a time

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Scoring(NamedTuple):
    """The scores of queries q and keys k are `scale * (q @ k)`, or, with a cap, `cap * tanh(scale * (q @ k) / cap)`.

    A scale of None is 1 / sqrt(D).
    """

    scale: float | None = None
    cap: float | None = None


def flash(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: Scoring, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """(attention `[R, H, C, D]` to all keys except those with a bias of -inf, its log-sum-exp `[R, H, C]`); no grad."""
    if _has_kernel(query, scoring):
        bias = None if bias is None else bias.to(query.dtype)
        return _FORWARD(query, key, value, 0.0, causal, attn_mask=bias, scale=scoring.scale)
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:-1], dtype=wide(query))
    for rows, columns, seen in _parts(query, key, causal):
        k, v = key[rows, :, :seen], value[rows, :, :seen]
        scores, _ = _scores(query[rows, :, columns], k, scoring)
        scores = _hidden(scores, bias, causal, rows, columns)
        lse[rows, :, columns] = normaliser = scores.logsumexp(-1)
        weights = scores.sub_(normaliser[..., None]).exp_().to(v.dtype)
        out[rows, :, columns] = _of_heads(_by_key_head(weights, k) @ v, scores)
    return out, lse


def flash_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scoring: Scoring,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of query, key and value; `out` and `lse` are of the whole."""
    if _has_kernel(query, scoring):
        bias = None if bias is None else bias.to(query.dtype)
        return _BACKWARD(grad, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scoring.scale)
    query_grad = torch.empty_like(query)
    key_grad, value_grad = (torch.zeros_like(x, dtype=wide(x)) for x in (key, value))
    mean = (grad.to(lse.dtype) * out).sum(-1)
    for rows, columns, seen in _parts(query, key, causal):
        k, v = key[rows, :, :seen], value[rows, :, :seen]
        q, g = (_by_key_head(x[rows, :, columns], k) for x in (query, grad))
        scores, slope = _scores(query[rows, :, columns], k, scoring)
        weights = (_hidden(scores, bias, causal, rows, columns) - lse[rows, :, columns, None]).exp_()
        value_grad[rows, :, :seen] += _by_key_head(weights.to(g.dtype), k).transpose(-1, -2) @ g
        of_weights = _of_heads(g @ v.transpose(-1, -2), weights).to(lse.dtype)
        of_scores = of_weights.sub_(mean[rows, :, columns, None]).mul_(weights).mul_(slope)
        folded = _by_key_head(of_scores.to(q.dtype), k)
        query_grad[rows, :, columns] = _of_heads(folded @ k, weights)
        key_grad[rows, :, :seen] += folded.transpose(-1, -2) @ q
    return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype)


def _has_kernel(query: Tensor, scoring: Scoring) -> bool:
    """Whether torch has the two functions for this device, which cap no scores."""
    return query.device.type == "cpu" and scoring.cap is None


def _parts(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice, int]]:
    """(rows, queries, number of keys) of which scores are held at a time."""
    number, heads, width, _ = query.shape
    of_query = heads * key.shape[2]
    rows, columns = max(1, AT_ONCE // (of_query * width)), max(1, min(width, AT_ONCE // of_query))
    for row in range(0, number, rows):
        for column in range(0, width, columns):
            end = min(width, column + columns)
            yield slice(row, row + rows), slice(column, end), end if causal else key.shape[2]


def _scores(query: Tensor, key: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor | float]:
    """(scores `[R, H, C, K]` of all queries and keys, their derivative with respect to the product)."""
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    # Scaled before the product, which in float16 would overflow where keys are large.
    scores = _of_heads(_by_key_head(query * scale, key) @ key.transpose(-1, -2), query).to(wide(query))
    if scoring.cap is None:
        return scores, scale
    capped = scores.div_(scoring.cap).tanh_()
    return capped * scoring.cap, capped.square_().neg_().add_(1).mul_(scale)


def _hidden(scores: Tensor, bias: Tensor | None, causal: bool, rows: slice, columns: slice) -> Tensor:
    """The scores, with -inf where a key is not seen."""
    if bias is not None:
        seen = bias[rows] if bias.shape[2] == 1 else bias[rows, :, columns]
        scores = scores.add_(seen)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(columns.start)
        scores = scores.masked_fill_(~mask, -torch.inf)
    return scores


def _by_key_head(x_RHCD: Tensor, key: Tensor) -> Tensor:
    """`[R, K, C * H / K, D]`: heads that share keys, side by side."""
    return x_RHCD.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _of_heads(x: Tensor, like_RHCD: Tensor) -> Tensor:
    """`[R, H, C, D]`, what was put side by side."""
    return x.unflatten(2, (-1, like_RHCD.shape[2])).flatten(1, 2)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
