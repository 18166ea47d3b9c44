"""Decoding with each prompt's keys once on a CUDA GPU: two variable-length flash calls a layer, merged.

The completions of a prompt are one run of queries to its keys; each completion's own keys are the filled part of its
buffer. Nothing is padded, masked or copied: the calls get the beginnings of runs and the numbers of real tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlft.model.kernels import flash_attention
from rlft.model.kernels.attention_blocks import Span
from rlft.model.kernels.flash_attention import Runs, attend, merge, one_call, row_lengths, runs_of
from rlft.model.kernels.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from rlft.model.forward import Forward


class FlashPrefixCache(PrefixCache):
    """The state of decoding U prompts x n completions on a CUDA GPU, in 16 bits. No gradient."""

    token_axis = 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """`[N, H, D]` from the query `[N, H, D]` and the key and value `[N, K, D]` of the tokens that just came in."""
        if not self._decoded:
            self._prompt.append((key.contiguous(), value.contiguous()))
            return attend(query, key, value, self._row, scale)[0]
        rows, heads, size = query.shape
        own, own_lse = self._attend_to_own(layer, query, key, value, scale)
        prompt, prompt_lse = one_call(query, *self._prompt[layer], self._siblings_of, self._row.prompts, scale)
        return merge(own.view(rows, heads, size), own_lse, prompt, prompt_lse)[0]

    def _attend_to_own(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """(attention `[R, H, D]`, its log-sum-exp `[H, R]`) of each row's new token over the row's own tokens.

        A token sees all tokens of its row, so the query heads that share a key head can be passed as a run of queries:
        each key is read once for them.
        """
        self._put(layer, key, value)
        rows, heads, size = query.shape
        key_heads = key.shape[1]
        shared = heads // key_heads
        queries = query.view(rows, key_heads, shared, size).transpose(1, 2).reshape(rows * shared, key_heads, size)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
        keys, values = self._own[layer]
        used = starts.new_full((rows,), self._decoded)
        out, lse = one_call(
            queries,
            keys.flatten(0, 1),
            values.flatten(0, 1),
            Runs(starts=starts * shared, longest=shared),
            Runs(starts=starts * self.max_tokens, longest=self._decoded),
            scale,
            used=used,
        )
        out = out.view(rows, shared, key_heads, size).transpose(1, 2).reshape(rows, heads, size)
        return out, lse.view(key_heads, rows, shared).transpose(1, 2).reshape(heads, rows)

    def _prepare(self, spans: Sequence[Span]) -> None:
        row = row_lengths(spans, (), (), self.model.device)
        assert row is not None, "prompts stand side by side and none is empty"
        self._row = row

    def _arrange(self, owner_R: Tensor) -> None:
        """Notes which rows belong to which prompt; they stay in the order of prompts, so that siblings are a run."""
        self._owner = owner_R
        counts_U = torch.bincount(owner_R, minlength=len(self._lengths))
        self._siblings_of = runs_of(counts_U.tolist(), owner_R.device)


def open_prefix_cache(forward: Forward, prompts: Sequence[Sequence[int]], max_tokens: int) -> PrefixCache | None:
    """A cache for decoding these prompts; None if the model's attention is not rlft's, or its heads are such that flash
    attention does not take them on a CUDA GPU."""
    if not forward.packed:
        return None
    model = forward.model
    if flash_attention.takes(model.dtype, flash_attention.head_size(model), model.device):
        return FlashPrefixCache(model, prompts, max_tokens)
    return PrefixCache(model, prompts, max_tokens) if model.device.type == "cpu" else None
