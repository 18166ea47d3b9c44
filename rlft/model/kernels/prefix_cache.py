"""Keys and values while a group's completions are decoded: each prompt's once, and each completion's own.

Nothing of a prompt is repeated for its completions: their queries attend to its keys together, and each to its own
keys; the two are merged as in `split_attention`. Tokens go through the network as one packed row, so neither prompts
nor completions are padded there. On a CUDA GPU these are two variable-length flash calls a layer, which get the
beginnings of runs and the numbers of real tokens: nothing is padded, masked or copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlft.model.kernels import flash_attention, split_attention
from rlft.model.kernels.flash_attention import Runs, one_call, row_lengths, runs_of
from rlft.model.kernels.split_attention import Span, flash, make_blocks, padded_places

if TYPE_CHECKING:
    from rlft.model.forward import Forward


class PrefixCache:
    """The state of decoding U prompts x n completions on a CPU, by a model whose attention is `rlft_packed`.

    No gradient. The prompts are token ids, none is empty; a completion has at most `max_tokens` tokens.
    """

    token_axis = 2
    """The axis of tokens in the buffers of completions' own keys and values, `[R, K, max_tokens, D]` here."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self.model, self.max_tokens = model, max_tokens
        device = model.device
        lengths = [len(p) for p in prompts]
        ends = torch.tensor(lengths).cumsum(0)
        spans = [(int(end) - length, length) for end, length in zip(ends, lengths, strict=True)]
        self._token_ids = torch.tensor([t for p in prompts for t in p], device=device)
        self._positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self._last = (ends - 1).to(device)
        self._lengths = torch.tensor(lengths, device=device)
        self._prompt: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor]] = []
        self._owner = torch.empty(0, dtype=torch.int64, device=device)
        self._decoded = 0
        self._prepare(spans)

    def _prepare(self, spans: Sequence[Span]) -> None:
        """Prepares what attention needs to know about the prompts."""
        self._blocks = make_blocks(spans, (), (), self.model.device)
        index, mask = padded_places(spans)
        self._prompt_index = index.flatten()
        # The bias must have the queries' dtype: the kernel reads it as such numbers, whatever type it has.
        zeros = torch.zeros(mask.shape, dtype=self.model.dtype)
        self._bias = None if mask.all() else zeros.masked_fill(~mask, -torch.inf)[:, None, None]

    def prefill(self, n: int) -> Tensor:
        """Logits `[U * n, V]` of the first completion token; each prompt goes through the network once."""
        hidden_UH = self._forward(self._token_ids, self._positions).index_select(0, self._last)
        self._arrange(torch.arange(len(self._lengths), device=hidden_UH.device).repeat_interleave(n))
        return self._logits(hidden_UH).repeat_interleave(n, 0)

    def step(self, token_R: Tensor) -> Tensor:
        """Logits `[R, V]` after one more token in each row."""
        positions_R = self._lengths[self._owner] + self._decoded
        self._decoded += 1
        return self._logits(self._forward(token_R, positions_R))

    def fill(self) -> None:
        """Takes all the memory that the longest completions would take, for a rehearsal; later results are wrong."""
        for pair in self._own:
            for buffer in pair:
                buffer.zero_()

    def keep(self, rows: Tensor) -> None:
        """Drops every other row from the batch."""
        self._own = [(self._kept(k, rows), self._kept(v, rows)) for k, v in self._own]
        self._arrange(self._owner[rows])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """`[N, H, D]` from the query `[N, H, D]` and the key and value `[N, K, D]` of the tokens that just came in."""
        if not self._decoded:
            self._prompt.append((self._as_prompts(key), self._as_prompts(value)))
            return split_attention.attend(query, key, value, self._blocks, scale)[0]
        rows, heads, size = query.shape
        keys, values = self._put(layer, key, value)
        own, own_lse = flash(query.view(rows, keys.shape[1], -1, size), keys, values, None, scale)
        arranged = query if self._in_order else query.index_select(0, self._arranged)
        arranged = arranged.view(-1, self._siblings, heads, size).transpose(1, 2)
        prompt, prompt_lse = flash(arranged, *self._prompt[layer], self._bias, scale)
        prompt, prompt_lse = (x.transpose(1, 2).flatten(0, 1) for x in (prompt, prompt_lse[..., None]))
        if not self._in_order:
            prompt, prompt_lse = (x.index_select(0, self._back) for x in (prompt, prompt_lse))
        return split_attention.merge(own.flatten(1, 2), own_lse.flatten(1)[..., None], prompt, prompt_lse)[0]

    def _forward(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        """`[N, hidden]` of these tokens, after the final norm."""
        unread_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=token_N.device)
        return self.model.base_model(
            input_ids=token_N[None],
            position_ids=position_N[None],
            attention_mask=unread_mask,
            use_cache=False,
            prefix_cache=self,
        ).last_hidden_state[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module), "a causal language model has an output embedding"
        return head(hidden)

    def _as_prompts(self, x_NKD: Tensor) -> Tensor:
        """`[U, K, P, D]`, contiguous, since it is read at every step."""
        rows = x_NKD.index_select(0, self._prompt_index).view(len(self._lengths), -1, *x_NKD.shape[1:])
        return rows.transpose(1, 2).contiguous()

    def _put(self, layer: int, key_RKD: Tensor, value_RKD: Tensor) -> tuple[Tensor, Tensor]:
        """Adds these keys and values to the completions' own; returns all of them so far."""
        if layer == len(self._own):
            self._own.append((self._buffer(key_RKD), self._buffer(value_RKD)))
        pair = self._own[layer]
        for buffer, new in zip(pair, (key_RKD, value_RKD), strict=True):
            buffer.select(self.token_axis, self._decoded - 1).copy_(new)
        return self._filled(pair[0]), self._filled(pair[1])

    def _buffer(self, x_RKD: Tensor) -> Tensor:
        """A buffer for all tokens that may come; its pages take no memory until something is written to them."""
        shape = list(x_RKD.shape)
        shape.insert(self.token_axis, self.max_tokens)
        return x_RKD.new_empty(shape)

    def _filled(self, buffer: Tensor) -> Tensor:
        return buffer.narrow(self.token_axis, 0, self._decoded)

    def _kept(self, old: Tensor, rows: Tensor) -> Tensor:
        buffer = self._buffer(old.select(self.token_axis, 0)[: len(rows)])
        self._filled(buffer).copy_(self._filled(old).index_select(0, rows))
        return buffer

    def _arrange(self, owner_R: Tensor) -> None:
        """Computes where each row goes when siblings are put side by side, padded to the most siblings of a prompt."""
        self._owner = owner_R
        counts_U = torch.bincount(owner_R, minlength=len(self._lengths))
        self._siblings = int(counts_U.max())
        start_U = counts_U.cumsum(0) - counts_U
        self._back = owner_R * self._siblings + torch.arange(len(owner_R)) - start_U[owner_R]
        self._arranged = torch.zeros(len(counts_U) * self._siblings, dtype=torch.int64)
        self._arranged[self._back] = torch.arange(len(owner_R))
        self._in_order = torch.equal(self._arranged, torch.arange(len(owner_R)))


class FlashPrefixCache(PrefixCache):
    """The state of decoding U prompts x n completions on a CUDA GPU, in 16 bits. No gradient."""

    token_axis = 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """`[N, H, D]` from the query `[N, H, D]` and the key and value `[N, K, D]` of the tokens that just came in."""
        if not self._decoded:
            self._prompt.append((key.contiguous(), value.contiguous()))
            return flash_attention.attend(query, key, value, self._row, scale)[0]
        rows, heads, size = query.shape
        own, own_lse = self._attend_to_own(layer, query, key, value, scale)
        prompt, prompt_lse = one_call(query, *self._prompt[layer], self._siblings_of, self._row.prompts, scale)
        own = own.view(rows, heads, size)
        flash_attention.merge_into(own, own_lse, prompt, prompt_lse)
        return own

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
