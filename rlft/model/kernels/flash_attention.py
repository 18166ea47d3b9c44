"""Attention over a packed row on a CUDA GPU: two variable-length flash calls, forward and backward.

In the first, every prompt and every completion attends to itself, causally; in the second, all completions of a prompt,
as one run of queries, attend to that prompt. Their results are merged by log-sum-exp, and each backward is given the
output and the log-sum-exp of the whole, as in `split_attention`, which explains why that is exact. No mask is made and
no key is copied, neither for siblings nor for heads that share it.

A sliding window that rows exceed is an argument of the kernel, which counts it from the ends of queries and keys that
stand side by side. The two calls are then one for prompts, and one for completions whose keys are copied behind those
of their prompt that the window reaches.

What an image's tokens see behind them, where a model reads images both ways, is one more causal call: over the image's
tokens in the opposite order.

The row holds all prompts and then all completions (`rlft.model.packing.pack`), so that the queries and keys of both
calls are slices of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlft.model.kernels.elementwise import fused
from rlft.model.kernels.split_attention import Span, places_of
from rlft.system.device import kind_of, repeatable

# The operations behind torch.nn.attention.varlen, whose public function has no gradient of a merged result.
_FORWARD: Any = torch.ops.aten._flash_attention_forward
_BACKWARD: Any = torch.ops.aten._flash_attention_backward

MAX_HEAD_SIZE = 256
HEAD_SIZE_STEP = 8
SIZES_WITHOUT_GRADIENT = range(200, 225)
"""Head sizes whose backward needs more shared memory than cards of compute capability 8.6 to 8.9 and 12.x have, from
torch's own check (`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`)."""
OLDEST_CARD = (8, 0)  # compute capability of Ampere, the first that flash attention runs on
QUERY_BLOCK = 128  # so many rows lie between the runs of the float32 numbers that the backward adds up
Index = Tensor | slice  # places of tokens in a packed row


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of tokens that follow each other without a gap, as the kernel takes them."""

    starts: Tensor  # int32 `[n + 1]`, the start of each run, and the end of the last one
    longest: int  # number of tokens of the longest run


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What tokens of images see behind them: query i of an image sees its keys up to number i."""

    queries: Tensor  # int64, the places of each image's tokens but the last, from the last to the first
    keys: Tensor  # int64, those of each image's tokens but the first, in the same order
    runs: Runs  # the images among these


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """The runs of a packed row that holds all prompts and then all completions."""

    num_prompt_tokens: int  # where the first completion begins
    own: Runs  # all prompts and completions that are not empty
    prompts: Runs  # every prompt
    regions: Runs  # for each prompt all its completions as one run, counted from the first completion
    window: int | None = None  # the attention's sliding window in tokens; None if it exceeds every row
    completions: Runs | None = None  # all that are not empty, counted from the first one; only with a window
    reach: Runs | None = None  # for each of these, the keys that it sees, as runs of `reached`
    reached: Tensor | None = None  # int64, the places of these keys
    ahead: Ahead | None = None  # what is seen in images that are read both ways; None: there are none


def row_lengths(
    prompts: Sequence[Span],
    completions: Sequence[Span],
    owner: Sequence[int],
    device: torch.device,
    window: int | None = None,
    images: Sequence[Span] = (),
) -> RowLengths | None:
    """The lengths of a packed row (as in `PackedRows`), on its device; `window` is None if it exceeds every row.
    `images` are the spans, of two or more tokens, that are read both ways.

    None if prompts do not come first, or one is empty, which the kernel cannot take.
    """
    spans = [*prompts, *completions]
    ends = list(accumulate(length for _, length in spans))
    if [start for start, _ in spans] != [0, *ends[:-1]] or list(owner) != sorted(owner):
        return None
    if not all(length for _, length in prompts):
        return None
    regions = [0] * len(prompts)
    for (_, length), unit in zip(completions, owner, strict=True):
        regions[unit] += length
    lengths = RowLengths(
        num_prompt_tokens=sum(length for _, length in prompts),
        own=runs_of([length for _, length in spans if length], device),
        prompts=runs_of([length for _, length in prompts], device),
        regions=runs_of(regions, device),
        window=window,
        ahead=_ahead(images, device) if images else None,
    )
    reached = [
        [(sum(prompts[unit]) - seen, seen), span]
        for span, unit in zip(completions, owner, strict=True)
        if span[1] and window is not None
        for seen in [min(prompts[unit][1], window - 1)]
    ]
    if not reached:
        return lengths
    return replace(
        lengths,
        completions=runs_of([own for _, (_, own) in reached], device),
        reach=runs_of([seen + own for (_, seen), (_, own) in reached], device),
        reached=torch.cat([places_of(spans) for spans in reached]).to(device),
    )


def _ahead(images: Sequence[Span], device: torch.device) -> Ahead:
    places = [places_of([image]).flip(0) for image in images]
    return Ahead(
        queries=torch.cat([each[1:] for each in places]).to(device),
        keys=torch.cat([each[:-1] for each in places]).to(device),
        runs=runs_of([size - 1 for _, size in images], device),
    )


def runs_of(lengths: Sequence[int], device: torch.device) -> Runs:
    """Runs of these lengths, one after the other."""
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return Runs(starts=starts, longest=max(lengths))


def obstacle(dtype: torch.dtype, head_size: int, device: torch.device, *, caps: bool = False) -> str | None:
    """Why the kernel cannot take such heads, or scores that are capped; None if it can."""
    if not kind_of(device).has_kernels:
        return f"flash attention was tried on NVIDIA's GPUs only, not on {kind_of(device).title}"
    if torch.cuda.get_device_capability(device) < OLDEST_CARD:
        return f"flash attention needs compute capability 8.0, which {torch.cuda.get_device_name(device)} lacks"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention computes in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if caps:
        return "torch's flash attention does not cap scores"
    if head_size > MAX_HEAD_SIZE or head_size % HEAD_SIZE_STEP:
        return f"flash attention takes heads of 8, 16 .. up to {MAX_HEAD_SIZE} numbers, not of {head_size}"
    major, minor = torch.cuda.get_device_capability(device)
    if head_size in SIZES_WITHOUT_GRADIENT and ((major == 8 and minor >= 6) or major == 12):
        return (
            f"flash attention has no gradient for heads of {head_size} numbers on {torch.cuda.get_device_name(device)}"
        )
    return None


def takes(dtype: torch.dtype, head_size: int, device: torch.device, *, caps: bool = False) -> bool:
    """Whether the kernel takes such heads and scores."""
    return obstacle(dtype, head_size, device, caps=caps) is None


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: RowLengths, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(attention `[N, H, D]`, its log-sum-exp `[H, N]`, two tensors for the kernel's backward); no gradient."""

    def call(own: Index, keys: Index, queries: Runs, runs: Runs, **settings: Any) -> Sequence[Tensor]:
        return one_call(query[own], key[keys], value[keys], queries, runs, scale=scale, **settings)

    first, ahead = lengths.num_prompt_tokens, lengths.ahead
    if lengths.window is not None:
        calls = _windowed(lengths)
        parts = [call(own, keys, *runs, is_causal=True, **window) for own, keys, *runs, window in calls]
        out, lse = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], 1)
        random, unused = parts[0][2:4]
        del parts  # whose outputs are as large as `out`
    else:
        out, lse, random, unused, *_ = call(slice(None), slice(None), lengths.own, lengths.own, is_causal=True)
        if len(query) > first:
            prompt = call(slice(first, None), slice(first), lengths.regions, lengths.prompts)
            merge_into(out[first:], lse[:, first:], *prompt[:2])
    if ahead is not None:
        part, part_lse, *_ = call(ahead.queries, ahead.keys, ahead.runs, ahead.runs, is_causal=True)
        both, both_lse = out[ahead.queries], lse[:, ahead.queries]
        merge_into(both, both_lse, part, part_lse)
        out[ahead.queries], lse[:, ahead.queries] = both, both_lse
    return out, lse, random, unused


def _windowed(lengths: RowLengths) -> Iterator[tuple[Index, Index, Runs, Runs, dict[str, Any]]]:
    """The calls with a window, none of which shares a query with another: (queries, keys, their runs, the window)."""
    assert lengths.window is not None
    window = {"window_size_left": lengths.window - 1, "window_size_right": 0}
    first = lengths.num_prompt_tokens
    yield slice(first), slice(first), lengths.prompts, lengths.prompts, window
    if lengths.completions is not None and lengths.reach is not None and lengths.reached is not None:
        yield slice(first, None), lengths.reached, lengths.completions, lengths.reach, window


def one_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Runs,
    keys: Runs,
    used: Tensor | None = None,
    *,
    scale: float | None,
    is_causal: bool = False,
    **window: int,
) -> Sequence[Tensor]:
    """(attention `[N, H, D]`, its log-sum-exp `[H, N]`, what the kernel's backward needs) of every run of queries over
    its run of keys.

    `used` (int32 `[n]`) is how many keys at the beginning of each run are used; None: all.
    """
    # At least 2: for 1 with heads that share keys, torch (`mha_varlen_fwd`, `seqlenq_ngroups_swapped`) takes it that
    # each run has exactly one query and reshapes to `[n, ..]`, which fails where a run is empty.
    runs = (queries.starts, keys.starts, max(2, queries.longest), keys.longest)
    return _FORWARD(query, key, value, *runs, 0.0, is_causal, False, scale=scale, seqused_k=used, **window)


def attention_gradients(
    grad: Tensor, kept: Sequence[Tensor], lengths: RowLengths, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (new tensors) from that of the attention.

    `kept` are query, key, value and the results of `attend`.
    """
    query, key, value, out, lse, random, unused = kept

    def call(own: Index, keys: Index, *runs: Runs, is_causal: bool = True, **window: int) -> tuple[Tensor, ...]:
        tensors = (grad[own], query[own], key[keys], value[keys], out[own], lse[:, own].contiguous())
        of_runs = (*(each.starts for each in runs), *(each.longest for each in runs))
        with repeatable():
            return _BACKWARD(*tensors, *of_runs, 0.0, is_causal, random, unused, scale=scale, **window)

    first, ahead = lengths.num_prompt_tokens, lengths.ahead
    if lengths.window is not None:
        query_grad = torch.empty_like(query)
        # In 32 bits, since siblings add to the same keys one after the other.
        wide = torch.promote_types(key.dtype, lse.dtype)
        key_grad, value_grad = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        for own, keys, *runs, window in _windowed(lengths):
            query_grad[own], *parts = call(own, keys, *runs, **window)
            for total, part in zip((key_grad, value_grad), parts, strict=True):
                if isinstance(keys, slice):
                    total[keys] += part
                else:
                    with repeatable():
                        total.index_add_(0, keys, part.to(total.dtype))
        key_grad, value_grad = key_grad.to(key.dtype), value_grad.to(value.dtype)
    else:
        query_grad, key_grad, value_grad = call(slice(None), slice(None), lengths.own, lengths.own)
        if len(query) > first:
            own, keys = slice(first, None), slice(first)
            parts = call(own, keys, lengths.regions, lengths.prompts, is_causal=False)
            for total, places, part in zip((query_grad, key_grad, value_grad), (own, keys, keys), parts, strict=True):
                total[places] += part
    if ahead is not None:
        parts = call(ahead.queries, ahead.keys, ahead.runs, ahead.runs)
        places_of_parts = (ahead.queries, ahead.keys, ahead.keys)
        for total, places, part in zip((query_grad, key_grad, value_grad), places_of_parts, parts, strict=True):
            total[places] += part
    return query_grad, key_grad, value_grad


def backward_scratch(
    queries: int, keys: int, runs: int, *, heads: int, key_heads: int, head_size: int, multiprocessors: int
) -> int:
    """Bytes that a backward in 16 bits holds besides its arguments and results, where it adds up in a fixed order.

    The multiprocessors are divided among the heads of all runs, and each has float32 sums of its own for the gradients
    of a head's queries; keys and values have a gradient for each head that shares them (torch 2.11 to 2.14,
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_varlen_bwd`). So one long run takes the most.

    queries: number of tokens that have a query; `keys`: that have a key.
    runs: number of runs among which they are divided.
    """
    step = 32 if head_size <= 128 else 64
    rounded, rows = math.ceil(head_size / step) * step, queries + QUERY_BLOCK * runs
    splits = math.ceil(multiprocessors / (runs * heads))
    expanded = 0 if key_heads == heads else 2 * keys * heads * head_size * 2
    return 4 * rows * heads * (splits * rounded + 1) + expanded


@fused
def merge_into(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Overwrites attention `[C, H, D]` and log-sum-exp `[H, C]` over a set of keys by those over both sets.

    No gradient. The weights have the normaliser's precision.
    """
    both = torch.logaddexp(one_lse, other_lse)
    one_share, other_share = ((lse - both).exp().t()[..., None] for lse in (one_lse, other_lse))
    one.copy_(one * one_share + other * other_share)
    one_lse.copy_(both)
