"""Attention over a packed row on a CUDA GPU: two variable-length flash calls, forward and backward.

In the first, every prompt and every completion attends to itself, causally; in the second, all completions of a prompt,
as one run of queries, attend to that prompt. Their results are merged by log-sum-exp, and each backward is given the
output and the log-sum-exp of the whole, as in `split_attention`, which explains why that is exact. No mask is made and
no key is copied, neither for siblings nor for heads that share it.

The row holds all prompts and then all completions (`rlft.model.packing.pack`), so that the queries and keys of both
calls are slices of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlft.model.kernels.elementwise import fused
from rlft.model.kernels.split_attention import Span
from rlft.system.repeatable import repeatable

# The operations behind torch.nn.attention.varlen, whose public function has no gradient of a merged result.
_FORWARD: Any = torch.ops.aten._flash_attention_forward
_BACKWARD: Any = torch.ops.aten._flash_attention_backward

MAX_HEAD_SIZE = 256
HEAD_SIZE_STEP = 8
SIZES_WITHOUT_GRADIENT = range(200, 225)
"""Head sizes whose backward needs more shared memory than cards of compute capability 8.6 to 8.9 and 12.x have, from
torch's own check (`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`)."""
OLDEST_CARD = (8, 0)
"""Compute capability of Ampere, the first that flash attention runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of tokens that follow each other without a gap, as the kernel takes them.

    Attributes:
        starts: int32 `[n + 1]`, the start of each run, and the end of the last one.
        longest: number of tokens of the longest run.
    """

    starts: Tensor
    longest: int

    @property
    def longest_query(self) -> int:
        """`longest` as the kernel's forward gets it for runs of queries: at least 2.

        For 1 with heads that share keys, torch (`mha_varlen_fwd`, `seqlenq_ngroups_swapped`) takes it that each run has
        exactly one query and reshapes to `[n, ..]`, which fails where a run is empty.
        """
        return max(2, self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """The runs of a packed row that holds all prompts and then all completions.

    Attributes:
        num_prompt_tokens: where the first completion begins.
        own: all prompts and completions that are not empty.
        prompts: every prompt.
        regions: for each prompt all its completions as one run, counted from the first completion.
    """

    num_prompt_tokens: int
    own: Runs
    prompts: Runs
    regions: Runs


def row_lengths(
    prompts: Sequence[Span], completions: Sequence[Span], owner: Sequence[int], device: torch.device
) -> RowLengths | None:
    """The lengths of a packed row (as in `PackedRows`), on its device.

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
    return RowLengths(
        num_prompt_tokens=sum(length for _, length in prompts),
        own=runs_of([length for _, length in spans if length], device),
        prompts=runs_of([length for _, length in prompts], device),
        regions=runs_of(regions, device),
    )


def runs_of(lengths: Sequence[int], device: torch.device) -> Runs:
    """Runs of these lengths, one after the other."""
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return Runs(starts=starts, longest=max(lengths))


def obstacle(dtype: torch.dtype, head_size: int, device: torch.device) -> str | None:
    """Why the kernel cannot take such heads; None if it can."""
    if device.type != "cuda":
        return f"flash attention runs on CUDA GPUs, not on {device.type}"
    if torch.version.hip is not None:
        return "flash attention was not tried on GPUs other than NVIDIA's"
    if torch.cuda.get_device_capability(device) < OLDEST_CARD:
        return f"flash attention needs compute capability 8.0, which {torch.cuda.get_device_name(device)} lacks"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention computes in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if head_size > MAX_HEAD_SIZE or head_size % HEAD_SIZE_STEP:
        return f"flash attention takes heads of 8, 16 .. up to {MAX_HEAD_SIZE} numbers, not of {head_size}"
    major, minor = torch.cuda.get_device_capability(device)
    if head_size in SIZES_WITHOUT_GRADIENT and ((major == 8 and minor >= 6) or major == 12):
        return (
            f"flash attention has no gradient for heads of {head_size} numbers on {torch.cuda.get_device_name(device)}"
        )
    return None


def head_size(model: PreTrainedModel) -> int:
    """The size of a query's head."""
    text = model.config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def takes(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
    """Whether the kernel takes keys and values with heads of this size."""
    return obstacle(dtype, head_size, device) is None


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: RowLengths, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(attention `[N, H, D]`, its log-sum-exp `[H, N]`, two tensors for the kernel's backward); no gradient."""
    own, first = lengths.own, lengths.num_prompt_tokens
    own_runs = (own.starts, own.starts, own.longest_query, own.longest)
    out, lse, random, unused, _ = _FORWARD(query, key, value, *own_runs, 0.0, True, False, scale=scale)
    if len(query) > first:
        prompt = one_call(query[first:], key[:first], value[:first], lengths.regions, lengths.prompts, scale)
        merge_into(out[first:], lse[:, first:], *prompt)
    return out, lse, random, unused


def one_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Runs,
    keys: Runs,
    scale: float | None,
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(attention `[N, H, D]`, its log-sum-exp `[H, N]`) of every run of queries over its whole run of keys.

    `used` (int32 `[n]`) is how many keys at the beginning of each run are used; None: all.
    """
    runs = (queries.starts, keys.starts, queries.longest_query, keys.longest)
    out, lse, *_ = _FORWARD(query, key, value, *runs, 0.0, False, False, scale=scale, seqused_k=used)
    return out, lse


def attention_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Tensor,
    unused: Tensor,
    lengths: RowLengths,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (new tensors) from that of `out`; `out` to `unused` are results of `attend`."""
    own, first = lengths.own, lengths.num_prompt_tokens
    own_runs = (own.starts, own.starts, own.longest, own.longest)
    with repeatable():
        query_grad, key_grad, value_grad = _BACKWARD(
            grad, query, key, value, out, lse, *own_runs, 0.0, True, random, unused, scale=scale
        )
    if len(query) > first:
        tensors = (grad[first:], query[first:], key[:first], value[:first], out[first:], lse[:, first:].contiguous())
        regions, prompts = lengths.regions, lengths.prompts
        runs = (regions.starts, prompts.starts, regions.longest, prompts.longest)
        with repeatable():
            parts = _BACKWARD(*tensors, *runs, 0.0, False, random, unused, scale=scale)
        query_grad[first:] += parts[0]
        key_grad[:first] += parts[1]
        value_grad[:first] += parts[2]
    return query_grad, key_grad, value_grad


@fused
def merge_into(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Overwrites attention `[C, H, D]` and log-sum-exp `[H, C]` over a set of keys by those over both sets.

    No gradient. The weights have the normaliser's precision.
    """
    both = torch.logaddexp(one_lse, other_lse)
    one_share, other_share = ((lse - both).exp().t()[..., None] for lse in (one_lse, other_lse))
    one.copy_(one * one_share + other * other_share)
    one_lse.copy_(both)
