"""Attention over a packed row on a CPU, in blocks of equal shape that need no mask: torch's flash kernel.

A prompt sees itself, causally, and so does a completion; in addition, all completions of a prompt see all of it. A
branch sees itself and each of the spans that it reads. The parts that a token sees are attended to separately and
merged by their log-sum-exp, so that no key is copied for siblings and no N x N mask is made.

A token's attention over two sets of keys is the mean of its attentions over each, weighted by their shares of the
normaliser: out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i). The kernel's backward needs out and lse
only to recompute the weights exp(score - lse) and the correction sum(grad x out); given out and lse of the whole, each
block's backward gives exactly its part of the gradients (as in ring attention, Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Span = tuple[int, int]
"""A run of tokens in a packed row: (start, length)."""

BranchSpans = tuple[Span, tuple[Span, ...]]
"""A branch of a row: its own span, and the spans that it reads before it, in order."""

MAX_WASTE = 1.5
"""Spans of different lengths share a block while its scores (rows x longest^2) are at most this many times the needed
ones ..."""

SMALL_BLOCK = 2**16
"""... or at most this many in all: below that a further kernel call costs more than the padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Rows of places in a packed row, some of them padded.

    Attributes:
        index: int64 `[R * C]`, or a slice if the places are consecutive, so that reading them needs no copy.
        real: the places that are not padded, in the same form.
        slots: int64, the positions of the real places among all; None if nothing is padded.
    """

    index: Tensor | slice
    real: Tensor | slice
    slots: Tensor | None


def take(x: Tensor, places: Tensor | slice) -> Tensor:
    """`x[places]`, as a view if possible."""
    return x[places] if isinstance(places, slice) else x.index_select(0, places)


def put(x: Tensor, places: Tensor | slice, values: Tensor) -> None:
    """`x[places] = values`; no place may occur twice."""
    if isinstance(places, slice):
        x[places] = values
    else:
        x.index_copy_(0, places, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """R rows of up to C queries, each with up to K keys.

    Attributes:
        shape: (R, C, K).
        queries: places of the R * C queries in the packed row; token 0 where padded.
        keys: places of the R * K keys; those of the queries in a causal block.
        key_bias: `[R, 1, 1, K]`, 0 for real keys and -inf for padded ones; None if none is padded, and for causal
            blocks, in which padding comes last.
        causal: whether each query sees only keys up to its own place.
    """

    shape: tuple[int, int, int]
    queries: Places
    keys: Places
    key_bias: Tensor | None
    causal: bool


def make_blocks(
    prompts: Sequence[Span],
    completions: Sequence[Span],
    owner: Sequence[int],
    device: torch.device,
    branches: Sequence[BranchSpans] = (),
) -> tuple[Block, ...]:
    """The blocks of a packed row (as in `PackedRows`), without empty spans, on its device.

    Causal blocks come first: in them every token is a query once.
    """
    spans = [span for span in (*prompts, *completions, *(own for own, _ in branches)) if span[1]]
    causal = [_block([(s, s) for s in part], device, causal=True) for part in _buckets(spans, [n for _, n in spans])]
    pairs = [(region, prompts[u]) for u, region in _regions(completions, owner).items() if prompts[u][1] and region[1]]
    cross = [
        _block(part, device, causal=False)
        for crossing in (pairs, *_apart([(own, span) for own, spans in branches for span in spans]))
        for part in _buckets(crossing, [queries[1] + keys[1] for queries, keys in crossing])
    ]
    return (*causal, *cross)


def _apart(pairs: Sequence[tuple[Span, Span]]) -> list[list[tuple[Span, Span]]]:
    """The (queries, keys) in lists within which no token is twice a query or twice a key: a block adds to each once."""
    result: list[list[tuple[Span, Span]]] = []
    for pair in pairs:
        free = (part for part in result if not any(_overlap(pair[i], other[i]) for other in part for i in (0, 1)))
        part = next(free, None)
        if part is None:
            result.append([pair])
        else:
            part.append(pair)
    return result


def _overlap(a: Span, b: Span) -> bool:
    return max(a[0], b[0]) < min(sum(a), sum(b))


def _regions(completions: Sequence[Span], owner: Sequence[int]) -> dict[int, Span]:
    """{prompt: the run of tokens of all its completions}."""
    regions: dict[int, Span] = {}
    for (start, length), unit in zip(completions, owner, strict=True):
        first, so_far = regions.get(unit, (start, 0))
        regions[unit] = (first, so_far + length)
    return regions


def _buckets(items: Sequence[T], lengths: Sequence[int]) -> list[list[T]]:
    """Buckets of items with similar lengths, the longest first; a bucket's items are padded to its first one."""
    result: list[list[T]] = []
    longest = area = 0
    for i in sorted(range(len(items)), key=lambda i: -lengths[i]):
        padded = (len(result[-1]) + 1) * longest**2 if result else 0
        if result and padded <= max(SMALL_BLOCK, MAX_WASTE * (area + lengths[i] ** 2)):
            result[-1].append(items[i])
            area += lengths[i] ** 2
        else:
            result.append([items[i]])
            longest, area = lengths[i], lengths[i] ** 2
    return result


def _block(pairs: Sequence[tuple[Span, Span]], device: torch.device, *, causal: bool) -> Block:
    query_index, query_mask = padded_places([queries for queries, _ in pairs])
    queries = _places(query_index, query_mask, device)
    if causal:
        width = query_index.shape[1]
        return Block(shape=(len(pairs), width, width), queries=queries, keys=queries, key_bias=None, causal=True)
    key_index, key_mask = padded_places([keys for _, keys in pairs])
    bias = None
    if not key_mask.all():
        bias = torch.zeros(key_mask.shape).masked_fill(~key_mask, -torch.inf)[:, None, None].to(device)
    shape = (len(pairs), query_index.shape[1], key_index.shape[1])
    keys = _places(key_index, key_mask, device)
    return Block(shape=shape, queries=queries, keys=keys, key_bias=bias, causal=False)


def _places(index_RC: Tensor, mask_RC: Tensor, device: torch.device) -> Places:
    index, mask = index_RC.flatten(), mask_RC.flatten()
    if not mask.all():
        slots = mask.nonzero()[:, 0]
        return Places(index=index.to(device), real=index[slots].to(device), slots=slots.to(device))
    start = int(index[0])
    whole: Tensor | slice = index.to(device)
    if torch.equal(index, torch.arange(start, start + len(index))):
        whole = slice(start, start + len(index))
    return Places(index=whole, real=whole, slots=None)


def padded_places(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """(places int64 `[R, longest]`, at least one wide, 0 where padded; bool mask of real ones)."""
    starts, lengths = torch.tensor(spans).unbind(1)
    offsets = torch.arange(max(1, int(lengths.max())))
    mask = offsets < lengths[:, None]
    return (starts[:, None] + offsets).where(mask, 0), mask


# -- attention ---------------------------------------------------------------------------------------------------------
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """(attention `[R, H, C, D]` to all keys except those with a bias of -inf, its log-sum-exp `[R, H, C]`); no grad."""
    return _FORWARD(query, key, value, 0.0, False, attn_mask=bias, scale=scale)


def merge(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(attention over both sets of keys, which overwrites `one`; its log-sum-exp), from attentions over disjoint sets.

    `one` and `other` are `[.., D]`, `one_lse` and `other_lse` are `[.., 1]`.
    """
    both = torch.logaddexp(one_lse, other_lse)
    # The weights have the normaliser's precision, which is at least float32.
    merged = one.mul_((one_lse - both).exp_().to(one.dtype))
    return merged.addcmul_(other, (other_lse - both).exp_().to(one.dtype)), both


def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float | None
) -> tuple[Tensor, Tensor]:
    """(attention `[N, H, D]`, its log-sum-exp `[N, H, 1]`); no gradient."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(*query.shape[:2], 1, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    for block in blocks:
        q, k, v = _gathered(block, query, key, value)
        part, part_lse = _FORWARD(q, k, v, 0.0, block.causal, attn_mask=_bias(block, q), scale=scale)
        part, part_lse = _tokens(block.queries, part), _tokens(block.queries, part_lse[..., None])
        places = block.queries.real
        if not block.causal:
            part, part_lse = merge(take(out, places), take(lse, places), part, part_lse)
        if block.causal or not isinstance(places, slice):  # otherwise it was merged in place
            put(out, places, part)
        put(lse, places, part_lse)
    return out, lse


def attention_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: Sequence[Block],
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (new tensors) from that of `out`; `out` and `lse` are results of `attend`."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    for block in blocks:
        q, k, v = _gathered(block, query, key, value)
        g, o = (_rows(x, block.queries, block) for x in (grad, out))
        normaliser = _rows(lse, block.queries, block)[..., 0].contiguous()
        if block.queries.slots is not None:
            # A padded query has no weight: exp(score - inf) = 0.
            padded = torch.ones(block.shape[0] * block.shape[1], dtype=torch.bool)
            padded = padded.index_fill_(0, block.queries.slots, False).view(block.shape[0], 1, block.shape[1])
            normaliser = normaliser.masked_fill(padded, torch.inf)
        parts = _BACKWARD(g, q, k, v, o, normaliser, 0.0, block.causal, attn_mask=_bias(block, q), scale=scale)
        sides = (block.queries, block.keys, block.keys)
        for total, part, places in zip(grads, parts, sides, strict=True):
            _add(total, places.real, _tokens(places, part), first=block.causal)
    return grads[0], grads[1], grads[2]


def _gathered(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(query, block.queries, block), _rows(key, block.keys, block), _rows(value, block.keys, block)


def _rows(x_NHD: Tensor, places: Places, block: Block) -> Tensor:
    """`[R, H, C, D]`: the packed tokens at these places."""
    return take(x_NHD, places.index).unflatten(0, (block.shape[0], -1)).transpose(1, 2)


def _tokens(places: Places, x_RHCD: Tensor) -> Tensor:
    """`[n, H, D]`: the tokens of the real places, in their order."""
    flat = x_RHCD.transpose(1, 2).flatten(0, 1)
    return flat if places.slots is None else flat.index_select(0, places.slots)


def _bias(block: Block, query: Tensor) -> Tensor | None:
    return None if block.key_bias is None else block.key_bias.to(query.dtype)


def _add(total: Tensor, places: Tensor | slice, part: Tensor, *, first: bool) -> None:
    """Sets these places to the part, or adds it to them. No place occurs twice, so the order of additions is fixed."""
    if first:
        put(total, places, part)
    elif isinstance(places, slice):
        total[places] += part
    else:
        total.index_copy_(0, places, part.add_(total.index_select(0, places)))
