"""Keys and values while a group's completions are decoded: each prompt's once, and each completion's own.

Nothing of a prompt is repeated for its completions: their queries attend to its keys together, and each to its own
keys; the two are merged as in `split_attention`. Tokens go through the network as one packed row, so neither prompts
nor completions are padded there. On a CUDA GPU these are two variable-length flash calls a layer, which get the
beginnings of runs and the numbers of real tokens: nothing is padded, masked or copied. A layer with a sliding window
attends to the tokens inside it, of the prompt and of the completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor

from rlft.model.images import both_ways
from rlft.model.kernels import flash_attention, split_attention
from rlft.model.kernels.attention import attention_of_layers, hidden_states, with_sinks
from rlft.model.kernels.elementwise import Heads, as_written, fused, normed, turned
from rlft.model.kernels.fixed_keys import FixedKeys
from rlft.model.kernels.flash_attention import RowLengths, Runs, one_call, row_lengths, runs_of
from rlft.model.kernels.lm_head import head_of
from rlft.model.kernels.lora_linear import LoraLinear, scales_of
from rlft.model.kernels.split_attention import Block, Scoring, Span, flash, make_blocks, padded, places_of

if TYPE_CHECKING:
    from rlft.types import ImageRows


R = TypeVar("R")


class PrefixCache:
    """The state of decoding U prompts x n completions on a CPU, by a model whose attention is `rlft_packed`.

    No gradient. The prompts are token ids, none is empty; a completion has at most `max_tokens` tokens. `images` are
    those of the prompts, padded on the right.
    """

    token_axis = 2
    """The axis of tokens in the buffers of completions' own keys and values, `[R, K, max_tokens, D]` here."""

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, images: ImageRows | None = None
    ) -> None:
        self.model, self.max_tokens = model, max_tokens
        device = model.device
        lengths = [len(p) for p in prompts]
        self._lengths = torch.tensor(lengths)
        ends = self._lengths.cumsum(0)
        spans = [(int(end) - length, length) for end, length in zip(ends, lengths, strict=True)]
        self._token_ids = torch.tensor([t for p in prompts for t in p], device=device)
        self._positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self._images, self._ends = None, self._lengths  # positions of the first completion tokens
        self._images_on_host: ImageRows | None = None
        if images is not None:
            width = images.rows.shape[1]
            sources_N = torch.cat([torch.arange(p * width, p * width + length) for p, length in enumerate(lengths)])
            self._images_on_host = images.gathered(sources_N[None])
            self._images = self._images_on_host.to(device)
            self._ends = self._lengths + images.shifts(self._lengths)
        self._last = (ends - 1).to(device)
        # By number of the call of attention in a pass: a layer may call it twice.
        self._prompt: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor]] = []
        self._calls = 0
        self._owner = torch.empty(0, dtype=torch.int64)  # the prompt of each row; on the host, as _lengths
        self._decoded = 0  # of how many of a row's own tokens the buffers hold keys and values
        # In `check`: row and place of each token that comes in, among the rows' own tokens; and where it goes when the
        # tokens of a row are padded to the most of any row.
        self._places: tuple[Tensor, Tensor] | None = None
        self._columns, self._width = torch.empty(0, dtype=torch.int64), 1
        self._prepare(spans)

    def _prepare(self, spans: Sequence[Span]) -> None:
        """Prepares what attention needs to know about the prompts."""
        self._spans = spans
        self._blocks: dict[int | None, tuple[Block, ...]] = {}  # by window
        index, self._real = padded([places_of([span]) for span in spans])
        self._prompt_index = index.flatten()

    def prefill(self, n: int) -> Tensor:
        """Logits `[U * n, V]` of the first completion token; each prompt goes through the network once."""
        hidden_UH = self._forward(self._token_ids, self._positions, self._images).index_select(0, self._last)
        self._arrange(torch.arange(len(self._lengths)).repeat_interleave(n))
        return self._logits(hidden_UH).repeat_interleave(n, 0)

    def step(self, token_R: Tensor) -> Tensor:
        """Logits `[R, V]` after one more token in each row."""
        positions_R = self._after_prompt + self._decoded
        self._decoded += 1
        return self._logits(self._forward(token_R, positions_R))

    def checks(self) -> bool:
        """Whether `check` is right for these prompts: no row may exceed a sliding window."""
        most = self._longest + self.max_tokens
        return all(layer.window is None or layer.window >= most for layer in attention_of_layers(self.model))

    def check(self, token_N: Tensor, row_N: Tensor, place_N: Tensor) -> Tensor:
        """Logits `[N, V]` after each of these tokens, which go through the network together.

        row_N, place_N: each token's row, ascending, and its place among the row's own tokens, int64 on the host. The
            places of a row, at least one, follow each other; what the row had from the first of them on is forgotten.
        """
        lengths_R = torch.bincount(row_N)
        if self._places is None:
            self._places = row_N, place_N
            self.keep(torch.arange(len(lengths_R)))  # to buffers of zeros, since what is masked must be numbers
        self._arrange_tokens(lengths_R)
        self._decoded = int(place_N.max()) + 1
        self._width, first_R = int(lengths_R.max()), lengths_R.cumsum(0) - lengths_R
        self._columns = row_N * self._width + torch.arange(len(row_N)) - first_R[row_N]
        row_N, place_N = torch.stack([row_N, place_N]).to(self._token_ids.device)
        self._places = row_N, place_N
        return self._logits(self._forward(token_N, self._after_prompt[row_N] + place_N))

    def fill(self) -> None:
        """Takes all the memory that the longest completions would take, for a rehearsal; later results are wrong."""
        for pair in self._own:
            for buffer in pair:
                buffer.zero_()

    def keep(self, rows: Tensor) -> None:
        """Drops every other row from the batch. The rows to keep, int64 in ascending order, are on the host."""
        there = rows.to(self._token_ids.device)
        for layer, pair in enumerate(self._own):  # one after the other, so that memory holds one layer twice
            self._own[layer] = self._kept(pair[0], there), self._kept(pair[1], there)
        self._arrange(self._owner[rows])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`[N, H, D]` from the query `[N, H, D]` and the key and value `[N, K, D]` of the tokens that just came in.

        As in `attention.packed_attention`; a window is None if there is none.
        """
        if not self._decoded:
            out, lse = self._attend_to_prompts(query, key, value, scoring, window)
        else:
            layer, self._calls = self._calls, self._calls + 1
            slots = self._slots(layer, key, value)
            for slot, new in zip(slots, (key, value), strict=True):
                slot.copy_(new)
            self._put(layer, slots)
            first = 0 if window is None else max(0, self._decoded - window)
            # How many of a prompt's last tokens the window reaches.
            reach = self._longest if window is None else window - self._decoded
            out, lse = self._attend_to_own(layer, query, scoring, first)
            if reach > 0:
                self._merge_prompts(layer, query, scoring, min(reach, self._longest), out, lse)
        if sinks is not None:
            with_sinks(out, lse, sinks)
        return out

    @property
    def _longest(self) -> int:
        return self._real.shape[1]

    def _attend_to_prompts(
        self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """(attention `[N, H, D]` of the prompts' tokens, its log-sum-exp `[N, H, 1]`); their keys are kept."""
        self._prompt.append((self._as_prompts(key), self._as_prompts(value)))
        if window not in self._blocks:
            images, exceeded = self._both_ways(window), self._exceeded(window)
            self._blocks[window] = make_blocks(self._spans, (), (), self.model.device, (), exceeded, images)
        return split_attention.attend(query, key, value, self._blocks[window], scoring)

    def _both_ways(self, window: int | None) -> Sequence[Span]:
        """The images that are read both ways by layers with this sliding window."""
        return () if self._images_on_host is None else both_ways(self._images_on_host, self._spans, window)

    def _exceeded(self, window: int | None) -> int | None:
        """The window, or None if no prompt exceeds it."""
        return window if window is not None and window < self._longest else None

    def _attend_to_own(self, layer: int, query: Tensor, scoring: Scoring, first: int) -> tuple[Tensor, Tensor]:
        """(attention `[R, H, D]`, its log-sum-exp `[R, H, 1]`) of each row's new token over the row's own tokens, from
        number `first` on.

        A single token sees all of them, so the query heads that share a key head can be passed as a run of queries.
        """
        keys, values = (self._filled(x)[:, :, first:] for x in self._own[layer])
        if self._places is not None:
            rows, bias = len(keys) * self._width, self._once_a_step("own", self._bias_of_own)
            padded = query.new_zeros(rows, *query.shape[1:]).index_copy_(0, self._columns, query)
            own, lse = flash(padded.unflatten(0, (len(keys), -1)).transpose(1, 2), keys, values, bias, scoring)
            own, lse = (x.transpose(1, 2).flatten(0, 1).index_select(0, self._columns) for x in (own, lse[..., None]))
            return own, lse
        own, lse = flash(query.unflatten(1, (keys.shape[1], -1)), keys, values, None, scoring)
        return own.flatten(1, 2), lse.flatten(1)[..., None]

    def _bias_of_own(self) -> Tensor:
        """`[R, 1, W, T]`, 0 for the own tokens of a row that each of its new ones sees, and -inf for others."""
        assert self._places is not None
        place_RW = torch.zeros(len(self._owner) * self._width, dtype=torch.int64)
        place_RW[self._columns] = self._places[1]
        hidden = torch.arange(self._decoded) > place_RW.view(-1, 1, self._width, 1)
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def _merge_prompts(self, layer: int, query: Tensor, scoring: Scoring, reach: int, out: Tensor, lse: Tensor) -> None:
        """Adds attention over the last `reach` tokens of each prompt to that over the rows' own."""
        _, heads, size = query.shape
        arranged = query if self._in_order else query.index_select(0, self._arranged)
        arranged = arranged.view(-1, self._siblings, heads, size).transpose(1, 2)
        bias = self._once_a_step(reach, lambda: self._bias_of(reach))
        prompt, prompt_lse = flash(arranged, *self._prompt[layer], bias, scoring)
        prompt, prompt_lse = (x.transpose(1, 2).flatten(0, 1) for x in (prompt, prompt_lse[..., None]))
        if not self._in_order:
            prompt, prompt_lse = (x.index_select(0, self._back) for x in (prompt, prompt_lse))
        lse.copy_(split_attention.merge(out, lse, prompt, prompt_lse)[1])

    def _bias_of(self, reach: int) -> Tensor | None:
        """`[U, 1, 1, P]`, 0 for the last `reach` tokens of each prompt and -inf for others; None if all are among
        them."""
        seen = self._real & (torch.arange(self._longest) >= self._lengths[:, None] - reach)
        return None if seen.all() else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[:, None, None]

    def _once_a_step(self, key: Any, make: Callable[[], R]) -> R:
        """What is the same for all layers with this key."""
        if key not in self._of_step:
            self._of_step[key] = make()
        return self._of_step[key]

    def _forward(self, token_N: Tensor, position_N: Tensor, images: ImageRows | None = None) -> Tensor:
        """`[N, hidden]` of these tokens, after the final norm."""
        self._calls = 0
        self._of_step: dict[Any, Any] = {}
        return hidden_states(self.model, token_N[None], position_N[None], images, prefix_cache=self)[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        return head_of(self.model).logits(hidden)

    def _as_prompts(self, x_NKD: Tensor) -> Tensor:
        """`[U, K, P, D]`, contiguous, since it is read at every step."""
        rows = x_NKD.index_select(0, self._prompt_index).view(len(self._lengths), -1, *x_NKD.shape[1:])
        return rows.transpose(1, 2).contiguous()

    def _slots(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> tuple[Tensor, Tensor]:
        """Where these keys and values are to be written: among the completions' own, or for `_put` to take them
        there."""
        if layer == len(self._own):
            self._own.append((self._buffer(key_NKD[: len(self._owner)]), self._buffer(value_NKD[: len(self._owner)])))
        if self._places is not None:
            return torch.empty_like(key_NKD), torch.empty_like(value_NKD)
        keys, values = (buffer.select(self.token_axis, self._decoded - 1) for buffer in self._own[layer])
        return keys, values

    def _put(self, layer: int, slots: tuple[Tensor, Tensor]) -> None:
        """Brings what was written to `_slots` to the places of its tokens."""
        if self._places is not None:
            for buffer, new in zip(self._own[layer], slots, strict=True):
                buffer.movedim(self.token_axis, 1)[self._places] = new

    def _buffer(self, x_RKD: Tensor) -> Tensor:
        """A buffer for all tokens that may come; its pages take no memory until something is written to them."""
        shape = list(x_RKD.shape)
        shape.insert(self.token_axis, self.max_tokens)
        return (x_RKD.new_empty if self._places is None else x_RKD.new_zeros)(shape)

    def _filled(self, buffer: Tensor) -> Tensor:
        return buffer.narrow(self.token_axis, 0, self._decoded)

    def _kept(self, old: Tensor, rows: Tensor) -> Tensor:
        buffer = self._buffer(old.select(self.token_axis, 0)[: len(rows)])
        self._filled(buffer).copy_(self._filled(old).index_select(0, rows))
        return buffer

    def _arrange(self, owner_R: Tensor) -> None:
        self._owner = owner_R
        self._after_prompt = self._ends[owner_R].to(self._token_ids.device)
        self._arrange_tokens(torch.ones_like(owner_R))

    def _arrange_tokens(self, lengths_R: Tensor) -> None:
        """Computes where each row's tokens, as many as this, go when siblings are put side by side, padded to the most
        that a prompt has."""
        owner_N = self._owner.repeat_interleave(lengths_R)
        counts_U = torch.bincount(owner_N, minlength=len(self._lengths))
        self._siblings = int(counts_U.max())
        start_U = counts_U.cumsum(0) - counts_U
        self._back = owner_N * self._siblings + torch.arange(len(owner_N)) - start_U[owner_N]
        self._arranged = torch.zeros(len(counts_U) * self._siblings, dtype=torch.int64)
        self._arranged[self._back] = torch.arange(len(owner_N))
        self._in_order = torch.equal(self._arranged, torch.arange(len(owner_N)))


class FlashPrefixCache(PrefixCache):
    """The state of decoding U prompts x n completions on a CUDA GPU, in 16 bits. No gradient."""

    token_axis = 1
    _fixed: FixedKeys | None = None  # what `advance` reads, after `fix`

    def obstacle_to_graphs(self) -> str | None:
        """Why no CUDA graph computes the steps; None if one can (`advance`)."""
        if not self.checks():
            return "completions move through a sliding window"
        hooked = any(module._forward_pre_hooks or module._forward_hooks for module in self.model.modules())
        return "hooks of its modules have to run" if hooked else None

    def addresses(self) -> tuple[float, ...]:
        """Where all lies that `advance` reads, after the numbers of the host that it takes: sizes of the room for keys
        and values, and adapters' scales."""
        assert self._fixed is not None, "`fix` comes first"
        tensors: list[Tensor | None] = [*self._fixed.tensors]
        numbers: list[float] = [*self._fixed.sizes]
        for module in self.model.modules():
            tensors += (*module._parameters.values(), *module._buffers.values())
            tensors += (x for p in module._parameters.values() for x in scales_of(getattr(p, "quant_state", None)))
            tensors += module.in_use() if isinstance(module, LoraLinear) else ()
            numbers += module.scaling.values() if isinstance(module, LoraLayer) else ()
        return (*numbers, *(x.data_ptr() for x in tensors if x is not None))

    def fix(self, keys: FixedKeys | None, rows: Tensor, enlarged: Callable[[int, int], int]) -> FixedKeys:
        """Continues with these rows in `keys` (None: in new ones), which it returns, with `advance` in place of `step`.

        rows: int64 on the host, in ascending order; one may be there several times. `enlarged`: as in `FixedKeys.fit`.
        """
        keys = FixedKeys() if keys is None else keys
        keys.fit(len(rows), self.max_tokens, len(self._lengths), self._prompt, enlarged)
        self._row = replace(self._row, prompts=keys.hold(self._prompt, self._row.prompts.starts))
        self._fixed, self._prompt = keys, list(keys.of_prompts)
        self._decoded = self.max_tokens = keys.tokens  # of a row's own keys those up to its place are used
        self._arrange(self._owner[rows])
        return keys

    def advance(self, token_R: Tensor) -> Tensor:
        """As `step`, reading and changing nothing but tensors that stay where they are."""
        fixed, rows = self._fixed, len(token_R)
        assert fixed is not None, "`fix` comes first"
        self._places = fixed.row_R[:rows], fixed.place.expand(rows)
        self._own = [(k[:rows], v[:rows]) for k, v in fixed.own]
        logits = self._logits(self._forward(token_R, fixed.first_R[:rows] + fixed.place))
        fixed.place.add_(1)
        return logits

    def compact(self, rows: Tensor, written: int) -> None:
        """As `keep` after `fix`: each row has so many own tokens."""
        assert self._fixed is not None, "`fix` comes first"
        self._fixed.keep(rows.to(self._token_ids.device), written)
        self._arrange(self._owner[rows])

    @property
    def is_decoding(self) -> bool:
        """Whether the tokens that come in are the next ones of completions."""
        return self._decoded > 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
        window: int | None,
        sinks: Tensor | None = None,
        heads: Heads | None = None,
    ) -> Tensor:
        """As in `PrefixCache`; with `heads`, queries and keys are still without their norms and positions.

        A token sees all of its row's own, so the query heads that share a key head can be passed as a run of queries.
        """
        if not self.is_decoding:
            return super().attend(query, key, value, scoring, window, sinks)
        window = window if self._fixed is None else None  # it reaches all tokens (`obstacle_to_graphs`)
        layer, self._calls = self._calls, self._calls + 1
        rows, shared = len(query), query.shape[1] // key.shape[1]
        slots = self._slots(layer, key, value)
        query, folded = _arrive(query, key, value, *slots, heads)
        self._put(layer, slots)
        number = self._decoded if window is None else min(self._decoded, window)
        reach = self._longest if window is None else min(window - self._decoded, self._longest)
        keys, values = (x.flatten(0, 1)[self._decoded - number :] for x in self._own[layer])
        runs = self._once_a_step((shared, number), lambda: self._own_runs(shared, number))
        own, lse, *_ = one_call(folded.flatten(0, 1), keys, values, *runs, scale=scoring.scale)
        prompt = prompt_lse = None
        if reach > 0:
            runs = self._once_a_step(reach, lambda: self._runs_of_prompts(reach))
            prompt, prompt_lse, *_ = one_call(query, *self._prompt[layer], *runs, scale=scoring.scale)
        return _merged(own.view_as(folded), lse.view(-1, rows, shared), prompt, prompt_lse, sinks)

    def _attend_to_prompts(
        self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, window: int | None
    ) -> tuple[Tensor, Tensor]:
        self._prompt.append((key.contiguous(), value.contiguous()))
        if window not in self._rows:
            self._rows[window] = self._lengths_of(self._exceeded(window), self._both_ways(window))
        out, lse, *_ = flash_attention.attend(query, key, value, self._rows[window], scoring.scale)
        return out, lse.t()[..., None]

    def _own_runs(self, shared: int, number: int) -> tuple[Runs, Runs, Tensor]:
        """(queries, keys, how many keys are used) of each row's last `number` own tokens, or of those up to each new
        token's place."""
        if self._places is not None:
            row_N, place_N = (x.int() for x in self._places)
            starts, used = F.pad(row_N * self.max_tokens, (0, 1)), place_N + 1
            queries = torch.arange(len(row_N) + 1, dtype=torch.int32, device=row_N.device) * shared
            return Runs(starts=queries, longest=shared), Runs(starts=starts, longest=number), used
        starts = torch.arange(len(self._owner) + 1, dtype=torch.int32, device=self._token_ids.device)
        keys = Runs(starts=starts * self.max_tokens, longest=number)
        return Runs(starts=starts * shared, longest=shared), keys, torch.full_like(starts[1:], number)

    def _runs_of_prompts(self, reach: int) -> tuple[Runs, Runs, Tensor | None]:
        """(queries, keys, how many keys are used) of the last `reach` tokens of each prompt."""
        keys, used = self._row.prompts, None
        if reach < self._longest:
            used = keys.starts.diff().clamp(max=reach)
            keys = Runs(starts=F.pad(keys.starts[1:] - used, (0, 1)), longest=reach)
        return self._siblings_of, keys, used

    def _prepare(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._row = self._lengths_of(None, ())
        self._rows: dict[int | None, RowLengths] = {}  # by window

    def _lengths_of(self, window: int | None, images: Sequence[Span]) -> RowLengths:
        row = row_lengths(self._spans, (), (), self.model.device, window, images)
        assert row is not None, "prompts stand side by side and none is empty"
        return row

    @property
    def _longest(self) -> int:
        return self._row.prompts.longest

    def _arrange_tokens(self, lengths_R: Tensor) -> None:
        """Notes which tokens belong to which prompt; rows stay in the order of prompts, so that siblings are a run."""
        counts_U = torch.bincount(self._owner.repeat_interleave(lengths_R), minlength=len(self._lengths))
        if self._fixed is not None:
            self._siblings_of = self._fixed.arrange(counts_U, self._after_prompt)
        else:
            self._siblings_of = runs_of(counts_U.tolist(), self._token_ids.device)


@fused
def _arrive(
    query: Tensor, key: Tensor, value: Tensor, key_slot: Tensor, value_slot: Tensor, heads: Heads | None
) -> tuple[Tensor, Tensor]:
    """(queries `[R, H, D]`, those as `[R, H / K, K, D]`); keys and values `[R, K, D]` are written to their slots."""
    if heads is not None:
        query, key = (
            as_written(turned)(x if norm is None else as_written(normed)(x, *norm)[0], *heads.angles)
            for x, norm in ((query, heads.query_norm), (key, heads.key_norm))
        )
    key_slot.copy_(key)
    value_slot.copy_(value)
    return query, query.unflatten(1, (key.shape[1], -1)).transpose(1, 2).contiguous()


@fused
def _merged(
    own: Tensor, own_lse: Tensor, prompt: Tensor | None, prompt_lse: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attention `[R, H, D]` over own tokens, `[R, H / K, K, D]`, its log-sum-exp `[K, R, H / K]`, and over prompts, if
    they are seen, `[R, H, D]` and `[H, R]`; sinks `[H]` take their share."""
    out, lse = own.transpose(1, 2).flatten(1, 2), own_lse.transpose(0, 1).flatten(1)
    if prompt is not None and prompt_lse is not None:
        as_written(flash_attention.merge_into)(out, lse.t(), prompt, prompt_lse)
    if sinks is not None:
        with_sinks(out, lse[..., None], sinks)
    return out
