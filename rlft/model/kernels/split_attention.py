"""Attention over a packed row, in blocks of equal shape: by torch's flash kernel on a CPU, else by plain products.

A prompt sees itself, causally, and so does a completion; in addition, all completions of a prompt see all of it. A
branch sees itself and each of the spans that it reads. The parts that a token sees are attended to separately and
merged by their log-sum-exp, so that no key is copied for siblings and no N x N mask is made.

Where a model reads images both ways, each of an image's tokens but the last also sees those behind it in its image.

With a sliding window a token sees the keys at the last `window` positions up to its own, whether they are its prompt's
or its completion's. Spans are then cut into chunks of a window: a chunk sees itself causally, and of what is before it
as much as the window reaches. Only blocks at the window's edge need a mask.

A token's attention over two sets of keys is the mean of its attentions over each, weighted by their shares of the
normaliser: out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i). The kernel's backward needs out and lse
only to recompute the weights exp(score - lse) and the correction sum(grad x out); given out and lse of the whole, each
block's backward gives exactly its part of the gradients (as in ring attention, Liu et al. 2023, arXiv 2310.01889).
The kernel caps no scores. Plain products hold some scores at a time, and compute them again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# -- a block of queries and a block of keys ----------------------------------------------------------------------------
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


# -- blocks of a packed row --------------------------------------------------------------------------------------------
T = TypeVar("T")

Span = tuple[int, int]  # a run of tokens in a packed row: (start, length)

BranchSpans = tuple[Span, tuple[Span, ...]]
"""A branch of a row: its own span, and the spans that it reads before it, in order."""

MAX_WASTE = 1.5
"""Spans of different lengths share a block while its scores (rows x longest^2) are at most this many times the needed
ones ..."""

SMALL_BLOCK = 2**16
"""... or at most this many in all: below that a further kernel call costs more than the padding."""

TILE = 256  # queries that share a block at a window's edge, whose mask grows with the square of their number


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Rows of places in a packed row, some of them padded."""

    # int64 `[R * C]`, or a slice if the places are consecutive, so that reading them needs no copy.
    index: Tensor | slice
    real: Tensor | slice  # the places that are not padded, in the same form
    slots: Tensor | None  # int64, the positions of the real places among all; None if nothing is padded


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
    """R rows of up to C queries, each with up to K keys."""

    shape: tuple[int, int, int]  # (R, C, K)
    queries: Places  # places of the R * C queries in the packed row; token 0 where padded
    keys: Places  # places of the R * K keys; those of the queries in a causal block
    # `[R, 1, C, K]`, or with 1 for C, 0 for keys that are seen and -inf for others; None if all are, and for causal
    # blocks, in which padding comes last.
    bias: Tensor | None
    causal: bool  # whether each query sees only keys up to its own place


def make_blocks(
    prompts: Sequence[Span],
    completions: Sequence[Span],
    owner: Sequence[int],
    device: torch.device,
    branches: Sequence[BranchSpans] = (),
    window: int | None = None,
    images: Sequence[Span] = (),
) -> tuple[Block, ...]:
    """The blocks of a packed row (as in `PackedRows`), without empty spans, on its device.

    Causal blocks come first: in them every token is a query once. `window` is None if it exceeds every row. `images`
    are the spans, of two or more tokens, that are read both ways.
    """
    spans = [span for span in (*prompts, *completions, *(own for own, _ in branches)) if span[1]]
    ahead = _ahead_blocks(images, device)
    if window is not None:
        return (*_window_blocks(spans, prompts, completions, owner, device, branches, window), *ahead)
    pairs = [(region, prompts[u]) for u, region in _regions(completions, owner).items() if prompts[u][1] and region[1]]
    cross = [
        _block([Pair(places_of([queries]), places_of([keys])) for queries, keys in part], device)
        for crossing in (pairs, *_apart([(own, span) for own, spans in branches for span in spans]))
        for part in buckets(crossing, [queries[1] + keys[1] for queries, keys in crossing])
    ]
    return (*_causal_blocks(spans, device), *cross, *ahead)


def _ahead_blocks(images: Sequence[Span], device: torch.device) -> list[Block]:
    """What the tokens of images see behind them."""
    pairs = [
        Pair(
            places_of([(start, size - 1)]),
            places_of([(start + 1, size - 1)]),
            torch.ones(size - 1, size - 1).triu() > 0,
        )
        for start, size in images
    ]
    return [_block(part, device) for part in buckets(pairs, [len(pair.queries) for pair in pairs])]


def _causal_blocks(spans: Sequence[Span], device: torch.device) -> list[Block]:
    blocks = []
    for part in buckets(spans, [length for _, length in spans]):
        index, mask = padded([places_of([span]) for span in part])
        places = _places(index, mask, device)
        rows, width = index.shape
        blocks.append(Block(shape=(rows, width, width), queries=places, keys=places, bias=None, causal=True))
    return blocks


class Pair(NamedTuple):
    """A row of a block: places of queries `[C]` and of keys `[K]`, and which see which, `[C, K]`; None: each sees all.

    Each query sees a key, and each key is seen.
    """

    queries: Tensor
    keys: Tensor
    sees: Tensor | None = None


def places_of(spans: Sequence[Span]) -> Tensor:
    """int64, all places of these spans, in order."""
    return torch.cat([torch.arange(start, start + length) for start, length in spans])


def _window_blocks(
    spans: Sequence[Span],
    prompts: Sequence[Span],
    completions: Sequence[Span],
    owner: Sequence[int],
    device: torch.device,
    branches: Sequence[BranchSpans],
    window: int,
) -> tuple[Block, ...]:
    """The same with a sliding window."""
    chunks = [
        (start + first, min(window, length - first)) for start, length in spans for first in range(0, length, window)
    ]
    within = [
        ([(start + first, min(window, length - first))], (start + first - window, window), 0)
        for start, length in spans
        for first in range(window, length, window)
    ]
    siblings: dict[int, list[Span]] = {}
    for span, unit in zip(completions, owner, strict=True):
        siblings.setdefault(unit, []).append(span)
    after = [(group, prompts[unit], 0) for unit, group in siblings.items() if prompts[unit][1]]
    reading = []
    for own, read in branches:
        between = 0
        for span in reversed(read):
            reading.append([([own], span, between)])
            between += span[1]
    cross = [block for group in (within, after, *reading) for block in _edge_blocks(group, window, device)]
    return (*_causal_blocks(chunks, device), *cross)


def _edge_blocks(
    group: Sequence[tuple[Sequence[Span], Span, int]], window: int, device: torch.device
) -> Iterator[Block]:
    """Blocks for (runs of queries, the keys before each of them, how many tokens are between), no two of which share
    queries or keys. Tiles at the same place of their runs share blocks."""
    longest = max((length for runs, _, _ in group for _, length in runs), default=0)
    for first in range(0, min(longest, window - 1), TILE):
        tiles = [_tile(*each, first, window) for each in group]
        for pairs in zip(*tiles, strict=True):
            real = [pair for pair in pairs if pair is not None]
            for part in buckets(real, [len(pair.queries) + len(pair.keys) for pair in real]):
                yield _block(part, device)


def _tile(runs: Sequence[Span], keys: Span, between: int, first: int, window: int) -> tuple[Pair | None, Pair | None]:
    """The queries from number `first` of each run on, with (the keys that all of them see, those that only some see).

    Query i sees a key if i + between + its distance from the end of the keys, which is 1 for the last, is less than the
    window.
    """
    start, length = keys
    last = min(first + TILE, max(size for _, size in runs))
    by_all = min(length, max(0, window - last - between))  # so many of the last keys
    by_some = min(length, max(0, window - 1 - first - between))
    # The last query of the tile sees none of the keys that not all see; nor do others where the keys end before.
    seeing = min(last, window - 1 - by_all - between)

    def queries(end: int) -> tuple[Tensor, Tensor]:
        """(places, numbers within their runs)."""
        tiles = [(a, first, min(end, size)) for a, size in runs if min(end, size) > first]
        return (
            torch.cat([torch.arange(a + low, a + high) for a, low, high in tiles]),
            torch.cat([torch.arange(low, high) for _, low, high in tiles]),
        )

    whole = edge = None
    if by_all and last > first:
        whole = Pair(queries(last)[0], places_of([(start + length - by_all, by_all)]))
    if by_some > by_all and seeing > first:
        places, numbers = queries(seeing)
        distance = torch.arange(by_some, by_all, -1)
        sees = numbers[:, None] + between + distance < window
        edge = Pair(places, places_of([(start + length - by_some, by_some - by_all)]), sees)
    return whole, edge


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
    regions: dict[int, Span] = {}
    for (start, length), unit in zip(completions, owner, strict=True):
        first, so_far = regions.get(unit, (start, 0))
        regions[unit] = (first, so_far + length)
    return regions


def buckets(items: Sequence[T], lengths: Sequence[int]) -> list[list[T]]:
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


def _block(pairs: Sequence[Pair], device: torch.device) -> Block:
    query_index, query_mask = padded([pair.queries for pair in pairs])
    key_index, key_mask = padded([pair.keys for pair in pairs])
    shape = (len(pairs), query_index.shape[1], key_index.shape[1])
    seen = key_mask[:, None]
    if any(pair.sees is not None for pair in pairs):
        seen = seen.repeat(1, shape[1], 1)
        for row, pair in zip(seen, pairs, strict=True):
            if pair.sees is not None:
                row[: len(pair.queries), : len(pair.keys)] = pair.sees
    bias = None
    if not seen.all():
        bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[:, None].to(device)
    queries, keys = _places(query_index, query_mask, device), _places(key_index, key_mask, device)
    return Block(shape=shape, queries=queries, keys=keys, bias=bias, causal=False)


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(the rows, 0 where padded; bool mask of what is real)."""
    index = pad_sequence(rows, batch_first=True)
    return index, torch.arange(index.shape[1]) < torch.tensor([[len(row)] for row in rows])


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


# -- attention ---------------------------------------------------------------------------------------------------------
def merge(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(attention over both sets of keys, which overwrites `one`; its log-sum-exp), from attentions over disjoint sets.

    `one` and `other` are `[.., D]`, `one_lse` and `other_lse` are `[.., 1]`.
    """
    both = torch.logaddexp(one_lse, other_lse)
    # The weights have the normaliser's precision, which is at least float32.
    merged = one.mul_((one_lse - both).exp_().to(one.dtype))
    return merged.addcmul_(other, (other_lse - both).exp_().to(one.dtype)), both


def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """(attention `[N, H, D]`, its log-sum-exp `[N, H, 1]`); no gradient."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(*query.shape[:2], 1, dtype=wide(query))
    for block in blocks:
        q, k, v = _gathered(block, query, key, value)
        part, part_lse = flash(q, k, v, block.bias, scoring, block.causal)
        part, part_lse = _tokens(block.queries, part), _tokens(block.queries, part_lse[..., None])
        places = block.queries.real
        if not block.causal:
            part, part_lse = merge(take(out, places), take(lse, places), part, part_lse)
        if block.causal or not isinstance(places, slice):  # otherwise it was merged in place
            put(out, places, part)
        put(lse, places, part_lse)
    return out, lse


def attention_gradients(
    grad: Tensor, kept: Sequence[Tensor], blocks: Sequence[Block], scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (new tensors) from that of the attention.

    `kept` are query, key, value and the results of `attend`.
    """
    query, key, value, out, lse = kept
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    for block in blocks:
        q, k, v = _gathered(block, query, key, value)
        g, o = (_rows(x, block.queries, block) for x in (grad, out))
        normaliser = _rows(lse, block.queries, block)[..., 0].contiguous()
        if block.queries.slots is not None:
            # A padded query has no weight: exp(score - inf) = 0.
            padded = torch.ones(block.shape[0] * block.shape[1], dtype=torch.bool, device=g.device)
            padded = padded.index_fill_(0, block.queries.slots, False).view(block.shape[0], 1, block.shape[1])
            normaliser = normaliser.masked_fill(padded, torch.inf)
        parts = flash_gradients(g, q, k, v, o, normaliser, block.bias, scoring, block.causal)
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


def _add(total: Tensor, places: Tensor | slice, part: Tensor, *, first: bool) -> None:
    """Sets these places to the part, or adds it to them. No place occurs twice, so the order of additions is fixed."""
    if first:
        put(total, places, part)
    elif isinstance(places, slice):
        total[places] += part
    else:
        total.index_copy_(0, places, part.add_(total.index_select(0, places)))
