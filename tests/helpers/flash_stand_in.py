"""CUDA's variable-length flash operators on a CPU, so that code written for them runs in the suite.

Contract, as in torch 2.11 to 2.14 (torch/nn/attention/varlen.py, whose `seqused_k` says how many keys of each run are
real): query `[Tq, H, D]`, key and value `[Tk, K, D]` with
H a multiple of K; starts int32 `[n + 1]`. The forward gives (out `[Tq, H, D]`, natural log-sum-exp `[H, Tq]`, the state
of dropout's generator, an unused tensor, a mask for debugging). The backward reads of out and log-sum-exp no more than
exp(score - lse) and rowsum(grad x out): given those of a whole, it gives exactly its part of the gradients.

As on a GPU, what the kernel does not take is refused: a query without a key, runs of queries that are not those of the
tensor, or of keys that are not in it, and a `longest` that a run exceeds. A longest run of 1 may be passed as 2: 1
means to torch that every run has one query, which it then folds with the heads that share keys.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CALLS: list[str] = []
"""The names of the operators that ran, in their order."""


def install() -> torch.library.Library:
    """Registers both; they stand as long as what is returned is held."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


def forward(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, longest_query: int,
    longest_key: int, dropout: float, causal: bool, debug: bool, *, scale: float | None = None,
    window_size_left: int | None = None, seqused_k: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    CALLS.append("forward")
    _check(query, key, query_starts, key_starts, longest_query, longest_key, seqused_k)
    _fold(query, key, query_starts, longest_query)
    out = torch.zeros_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=wide)
    for queries, keys in _runs(query_starts, key_starts, seqused_k):
        scores = _scores(query[queries], key[keys], scale, causal, window_size_left)
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = (scores.softmax(-1) @ _heads(value[keys], query).to(wide)).transpose(0, 1).to(query.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), query.new_empty(0)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, query_starts: Tensor,
    key_starts: Tensor, longest_query: int, longest_key: int, dropout: float, causal: bool, random: Tensor,
    unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    CALLS.append("backward")
    _check(query, key, query_starts, key_starts, longest_query, longest_key)
    assert lse.is_contiguous(), "the kernel reads it by its own strides"
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    shared = (key.shape[1], query.shape[1] // key.shape[1])
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for queries, keys in _runs(query_starts, key_starts):
        weights = (_scores(query[queries], key[keys], scale, causal, window_size_left) - lse[:, queries, None]).exp()
        g, o, q = (x[queries].transpose(0, 1).to(weights.dtype) for x in (grad, out, query))
        k, v = (_heads(x[keys], query).to(weights.dtype) for x in (key, value))
        of_scores = weights * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * factor
        grads[0][queries] = (of_scores @ k).transpose(0, 1).to(query.dtype)
        grads[1][keys] = (of_scores.transpose(1, 2) @ q).transpose(0, 1).unflatten(1, shared).sum(2).to(key.dtype)
        grads[2][keys] = (weights.transpose(1, 2) @ g).transpose(0, 1).unflatten(1, shared).sum(2).to(value.dtype)
    return grads


def _check(
    query: Tensor, key: Tensor, query_starts: Tensor, key_starts: Tensor, longest_query: int, longest_key: int,
    used: Tensor | None = None,
) -> None:  # fmt: skip
    for tensor, starts in ((query, query_starts), (key, key_starts)):
        assert tensor.stride(-1) == 1, "the last dimension is contiguous"
        assert starts.dtype == torch.int32
        if used is None or tensor is query:
            assert starts[0] == 0
            assert starts[-1] == len(tensor) or (tensor is key and starts[-1] < len(tensor))
    keys = key_starts.diff() if used is None else used
    assert keys.dtype == torch.int32
    assert (key_starts[:-1] + keys <= len(key)).all(), "more keys than there are"
    assert query_starts.diff().max() <= longest_query
    assert keys.max() <= longest_key
    assert not ((query_starts.diff() > 0) & (keys == 0)).any(), "a query without a key: lse = +inf"


def _fold(query: Tensor, key: Tensor, query_starts: Tensor, longest_query: int) -> None:
    """What torch does before the kernel if heads share keys and no run is longer than 1 (`mha_varlen_fwd`,
    `seqlenq_ngroups_swapped`); the result of the attention is the same, or the shapes do not fit."""
    heads, key_heads, size = query.shape[1], key.shape[1], query.shape[2]
    if longest_query == 1 and heads > key_heads and size % 8 == 0:
        query.reshape(len(query_starts) - 1, key_heads, heads // key_heads, size)


def _runs(query_starts: Tensor, key_starts: Tensor, used: Tensor | None = None) -> list[tuple[slice, slice]]:
    """used: of each run of keys, how many from its first one on."""
    queries = [slice(a, b) for a, b in pairwise(query_starts.tolist())]
    sizes = key_starts.diff() if used is None else used
    keys = [slice(a, a + n) for a, n in zip(key_starts[:-1].tolist(), sizes.tolist(), strict=True)]
    return list(zip(queries, keys, strict=True))


def _heads(x_NKD: Tensor, query: Tensor) -> Tensor:
    """`[H, N, D]`: each key head as often as query heads share it."""
    return x_NKD.repeat_interleave(query.shape[1] // x_NKD.shape[1], 1).transpose(0, 1)


def _scores(query: Tensor, key: Tensor, scale: float | None, causal: bool, window: int | None = None) -> Tensor:
    """window: how many keys before its own place a query sees, counted from the ends of both runs."""
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.transpose(0, 1).to(wide) @ _heads(key, query).to(wide).transpose(1, 2) * factor
    if not causal:
        return scores
    rows, columns = scores.shape[1:]
    seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    if window is not None:
        seen = seen.triu(columns - rows - window)
    return scores.masked_fill(~seen, -torch.inf)
