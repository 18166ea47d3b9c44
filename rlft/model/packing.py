"""Packs the rows of a Batch into one row in which every group's prompt stands once and nothing is padded.

Layout of the packed row, N tokens: prompt_1 completion_11 .. completion_1G prompt_2 completion_21 .., or, for CUDA's
kernel, prompt_1 prompt_2 .. completion_11 .. completion_1G completion_21 ..
Positions of each completion continue those of its prompt. A completion's first token is predicted from the last prompt
position, which all siblings share.

A row may be a tree. Its trunk is everything before its first branch; every later part reads a path: runs of the row's
own columns that end with the token before the part's first one. In the packed row branches come last, each once, so
that it is a tree, too. For a forward on padded rows, every path becomes a row (`paths_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlft.batch import to_device
from rlft.model.images import both_ways
from rlft.model.kernels.flash_attention import RowLengths, row_lengths
from rlft.model.kernels.split_attention import Block, BranchSpans, Span, buckets, make_blocks
from rlft.model.sequence import TokenShare
from rlft.system.device import repeatable
from rlft.types import Batch, ImageRows

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPart:
    """A run of columns of a row whose tokens are read one after the other."""

    columns: Span  # (first column, length)
    read: tuple[Span, ...] = ()  # the runs of columns that are read before the part, in order

    @property
    def depth(self) -> int:
        """The position of its first token."""
        return sum(length for _, length in self.read)


def parts_of(batch: Batch) -> list[list[BranchPart]]:
    """The parts of each row: the trunk, which begins with the row's first column, and then its branches."""
    lengths_B = batch.attention_mask.sum(1).tolist()
    if batch.previous is None:
        return [[BranchPart(columns=(0, length))] for length in lengths_B]
    usual_T = torch.arange(-1, batch.token_ids.shape[1] - 1)
    previous_BT = batch.previous.cpu()
    return [
        _parts(previous_BT[b], (previous_BT[b, :length] != usual_T[:length]).nonzero()[:, 0].tolist(), length)
        for b, length in enumerate(lengths_B)
    ]


def _parts(previous_T: Tensor, starts: Sequence[int], length: int) -> list[BranchPart]:
    """The parts of one row whose branches begin with the columns `starts`."""
    parts: list[BranchPart] = []
    for start, end in zip([0, *starts], [*starts, length], strict=True):
        read = _path(parts, int(previous_T[start])) if parts else ()
        parts.append(BranchPart(columns=(start, end - start), read=read))
    return parts


def _path(parts: Sequence[BranchPart], column: int) -> tuple[Span, ...]:
    """The runs of columns that are read up to this one."""
    part = next(p for p in parts if p.columns[0] <= column < sum(p.columns))
    return (*part.read, (part.columns[0], column + 1 - part.columns[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """A Batch whose rows are the paths of another Batch."""

    batch: Batch  # the paths as rows; the loss mask is that of each path's own part
    index: Tensor  # int64 `[B, T]`, where each token of the other Batch is in the flattened paths; 0 for padding

    def fold(self, values: Tensor) -> Tensor:
        """`[B, T, ..]` from the paths' values: each token's value in its own part; padding gets arbitrary values."""
        return values.flatten(0, 1)[self.index]


def paths_of(batch: Batch) -> Paths:
    """A row for each part of each row, which holds what is read before the part, and the part itself."""
    parts = [(b, part) for b, row in enumerate(parts_of(batch)) for part in row]
    device = batch.token_ids.device
    runs = [[torch.arange(start, start + length) for start, length in (*part.read, part.columns)] for _, part in parts]
    paths = [torch.cat(of_path) for of_path in runs]
    columns = pad_sequence(paths, batch_first=True)
    attention = pad_sequence([torch.ones_like(path, dtype=torch.bool) for path in paths], batch_first=True)
    own_part = attention & (torch.arange(columns.shape[1]) >= torch.tensor([[part.depth] for _, part in parts]))
    index = torch.zeros(batch.token_ids.shape, dtype=torch.int64)
    for r, (b, part) in enumerate(parts):
        index[b, runs[r][-1]] = r * columns.shape[1] + torch.arange(part.depth, len(paths[r]))
    columns, attention, own_part, index = (x.to(device) for x in (columns, attention, own_part, index))
    rows = torch.tensor([b for b, _ in parts], device=device)
    return Paths(
        batch=Batch(
            token_ids=batch.token_ids[rows].gather(1, columns),
            attention_mask=attention,
            loss_mask=batch.loss_mask[rows].gather(1, columns) & own_part,
            sampled_logprobs=batch.sampled_logprobs.new_zeros(columns.shape),
            rewards=batch.rewards[rows],
            group_ids=batch.group_ids[rows],
            teacher_top_k_ids=None
            if batch.teacher_top_k_ids is None
            else batch.teacher_top_k_ids[rows.unsqueeze(1), columns],
            experts=None if batch.experts is None else batch.experts[rows.unsqueeze(1), columns],
        ),
        index=index,
    )


# -- packed rows -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """U distinct prompts, R completions, N packed tokens, M of them sampled (an environment's tokens are only read)."""

    token_ids: Tensor  # int64 `[1, N]`
    position_ids: Tensor  # int64 `[1, N]`
    prompts: tuple[Span, ...]  # span of each prompt in the packed row
    completions: tuple[Span, ...]  # span of each completion, or of its trunk if it has branches
    owner: tuple[int, ...]  # index of each completion's prompt
    predictor: Tensor  # int64 `[M]`, the packed position whose hidden state predicts the sampled token
    target: Tensor  # int64 `[M]`, the sampled token
    rows: Tensor  # int64 `[M]`, the row of the sampled token in the Batch
    columns: Tensor  # int64 `[M]`, its column
    branches: tuple[BranchSpans, ...] = ()  # the span of each branch, and the spans that it reads
    # Of each row of the Batch its runs of columns, each with the packed position where it begins.
    runs: tuple[tuple[tuple[Span, int], ...], ...] = ()
    images: ImageRows | None = None  # those of the whole packed row; None if the Batch has none
    # Which tokens of the row these are; None: all of them. Spans are those of the whole row.
    share: TokenShare | None = None

    @property
    def num_tokens(self) -> int:
        """N, of the whole row."""
        return sum(length for _, length in (*self.prompts, *self.completions, *(own for own, _ in self.branches)))

    def divided(self, share: TokenShare | None) -> PackedRows:
        """The tokens of this row that a rank has."""
        if share is None:
            return self
        mine_M = self.predictor % share.ranks == share.rank
        return replace(
            self,
            token_ids=share.own(self.token_ids),
            position_ids=share.own(self.position_ids),
            predictor=self.predictor[mine_M] // share.ranks,
            **{name: getattr(self, name)[mine_M] for name in ("target", "rows", "columns")},
            share=share,
        )

    @property
    def own_images(self) -> ImageRows | None:
        """The images of this rank's tokens."""
        images, share = self.images, self.share
        if images is None or share is None:
            return images
        positions = None if images.positions is None else share.own(images.positions.mT).mT
        return replace(images, rows=share.own(images.rows), positions=positions)

    def predicting(self, hidden: Tensor) -> Tensor:
        """`[.., M, H]` of `[.., N, H]`: the hidden states from which a sampled token is predicted."""
        return cast(Tensor, _RowsAt.apply(hidden, self.predictor))

    def blocks(self, window: int | None = None) -> tuple[Block, ...]:
        """The blocks for `split_attention`, which are made once for all layers with this sliding window."""
        return self._windowed("blocks", window, partial(make_blocks, branches=self.branches))

    def lengths(self, window: int | None = None) -> RowLengths | None:
        """The lengths for `flash_attention` with this sliding window; None if it cannot take this row."""
        return None if self.branches else self._windowed("lengths", window, row_lengths)

    @cached_property
    def state_rows(self) -> StateRows:
        """The runs for recurrent layers, which are made once for all layers, forward and backward."""
        return state_rows(self.prompts, self.completions, self.owner, self.token_ids.device, self.branches)

    def sources(self, width: int) -> Tensor:
        """int64 `[N]`, or `[n]` of this rank's tokens: where each packed token stands in the flattened rows of a Batch
        of this width; of a prompt's tokens, in the first row that has it."""

        def make(device: torch.device) -> Tensor:
            sources_N = torch.empty(self.num_tokens, dtype=torch.int64)
            for b, runs in reversed([*enumerate(self.runs)]):
                for (first, size), place in runs:
                    sources_N[place : place + size] = torch.arange(b * width + first, b * width + first + size)
            return (sources_N if self.share is None else self.share.own(sources_N)).to(device)

        return self._made(f"sources {width}", make)

    def places(self, width: int) -> Tensor:
        """int64 `[B, width]`: the packed position, in the whole row, of each token of the rows; 0 for padding."""

        def make(device: torch.device) -> Tensor:
            places_BT = torch.zeros(len(self.runs), width, dtype=torch.int64)
            for b, runs in enumerate(self.runs):
                for (first, size), place in runs:
                    places_BT[b, first : first + size] = torch.arange(place, place + size)
            return places_BT.to(device)

        return self._made(f"places {width}", make)

    def _windowed(self, name: str, window: int | None, make: Callable[..., T]) -> T:
        """What is made of the row's spans for a sliding window, and for the images that are read both ways with it."""
        images: tuple[Span, ...] = ()
        if (own := self.images) is not None:
            images = self._made(f"images {window}", lambda _: both_ways(own, self.prompts, window))
        window = window if window is not None and window < self._longest else None  # None: no row exceeds it
        spans, of_layers = (self.prompts, self.completions, self.owner), {"window": window, "images": images}
        return self._made(f"{name} {window} {bool(images)}", lambda device: make(*spans, device, **of_layers))

    @cached_property
    def _longest(self) -> int:
        completions = [self.prompts[u][1] + length for u, (_, length) in zip(self.owner, self.completions, strict=True)]
        branches = [sum(length for _, length in (*read, own)) for own, read in self.branches]
        return max([length for _, length in self.prompts] + completions + branches)

    def _made(self, name: str, make: Callable[[torch.device], T]) -> T:
        """Made on the device of the row at the first call, and kept, so that `to_device` moves it as well."""
        made = vars(self)
        if name not in made:
            made[name] = make(self.token_ids.device)
        return made[name]


class _RowsAt(torch.autograd.Function):
    """`x.index_select(-2, index)`. Siblings read the same row, so that their gradients are added in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(-2, index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        [grad], [index] = grad_outputs, ctx.saved_tensors
        with repeatable():
            return grad.new_zeros(ctx.shape).index_add_(-2, index, grad), None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedLayout:
    """How padded rows go through a network."""

    width: int  # number of columns up to the end of the longest row
    paths: Paths | None  # the rows that stand in the place of rows with branches; None if there are none


Layout = PackedRows | PaddedLayout  # the form in which a batch goes through the network, packed or padded


def padded_layout(batch: Batch) -> PaddedLayout:
    """The layout of a batch for the padded forward."""
    paths = None if batch.previous is None else paths_of(batch)
    return PaddedLayout(width=int(batch.attention_mask.sum(1).max()), paths=paths)


def prompt_lengths(batch: Batch) -> Tensor:
    """int64 `[B]`: number of tokens before the first completion token (all tokens if there is no completion)."""
    lengths_B = batch.attention_mask.sum(1)
    first_B = batch.loss_mask.int().argmax(1)
    return torch.where(batch.loss_mask.any(1), first_B, lengths_B)


def micro_batches(batch: Batch, rows: Tensor, token_budget: int) -> list[Tensor]:
    """Splits rows (int64 `[N]`) into micro-batches of at most `token_budget` packed tokens.

    A group stays together if it fits. Groups come in the order of their first row. A row that exceeds the budget is a
    micro-batch by itself.
    """
    prompts_B = prompt_lengths(batch).tolist()
    lengths_B = batch.attention_mask.sum(1).tolist()
    groups_B = batch.group_ids.tolist()
    prefixes_B = _prefixes(batch.token_ids.cpu(), prompts_B)
    siblings_of: dict[int, list[int]] = {}
    for b in rows.tolist():
        siblings_of.setdefault(groups_B[b], []).append(b)
    result: list[list[int]] = []
    current: list[int] = []
    used = 0
    for siblings in siblings_of.values():
        distinct = {prefixes_B[b]: prompts_B[b] for b in siblings}
        whole = sum(distinct.values()) + sum(lengths_B[b] - prompts_B[b] for b in siblings)
        if current and used + whole > token_budget:
            result.append(current)
            current, used = [], 0
        present: set[bytes] = set()
        for b in siblings:
            cost = lengths_B[b] - (prompts_B[b] if prefixes_B[b] in present else 0)
            if current and used + cost > token_budget:
                result.append(current)
                current, used, cost, present = [], 0, lengths_B[b], set()
            current.append(b)
            used += cost
            present.add(prefixes_B[b])
    if current:
        result.append(current)
    return [torch.tensor(part) for part in result]


def padded_micro_batches(batch: Batch, rows: Tensor, token_budget: int) -> list[Tensor]:
    """Splits padded rows, each of which costs as much as the longest in its micro-batch; rows keep their order."""
    rows_B, lengths_B = padded_sizes(batch)
    result: list[list[int]] = []
    longest = height = 0
    for b in rows.tolist():
        longest = max(longest, lengths_B[b])
        if result and (height + rows_B[b]) * longest <= token_budget:
            result[-1].append(b)
            height += rows_B[b]
        else:
            result.append([b])
            longest, height = lengths_B[b], rows_B[b]
    return [torch.tensor(part) for part in result]


def padded_sizes(batch: Batch) -> tuple[list[int], list[int]]:
    """(number of padded rows that each row becomes, which is its number of paths; tokens of the longest of them)."""
    parts_B = parts_of(batch)
    return list(map(len, parts_B)), [max(part.depth + part.columns[1] for part in parts) for parts in parts_B]


def pack(batch: Batch, *, prompts_first: bool | None = None) -> PackedRows:
    """The packed form of a batch. Siblings share a prompt only if its tokens are the same.

    `prompts_first`: whether all prompts stand before all completions; None: only on a CUDA GPU.
    """
    if prompts_first is None:
        prompts_first = batch.token_ids.device.type == "cuda"
    prompts_B = prompt_lengths(batch).tolist()
    parts_B = parts_of(batch)
    tokens, sampled_BT = batch.token_ids.cpu(), batch.loss_mask.cpu()
    members = _sharing(tokens, prompts_B, batch.group_ids.tolist())

    ids, positions, predictor, target, rows, columns = [], [], [], [], [], []
    prompts: list[Span] = []
    completions: list[Span] = []
    owner: list[int] = []
    branches: list[BranchSpans] = []
    placed: list[list[tuple[Span, int]]] = [
        [] for _ in parts_B
    ]  # for each row (columns, their place in the packed row)
    offset = 0

    def add(b: int, columns_of: Span, position: int, before: int) -> None:
        """Appends these columns of row b, whose positions begin with `position`, and which follow token `before`."""
        nonlocal offset
        first, size = columns_of
        placed[b].append((columns_of, offset))
        if size:
            added = torch.arange(first, first + size)
            ids.append(tokens[b, added])
            positions.append(added + (position - first))
            predicted_from = torch.arange(offset - 1, offset + size - 1)
            predicted_from[0] = before
            sampled = sampled_BT[b, added]
            columns.append(added[sampled])
            predictor.append(predicted_from[sampled])
            target.append(ids[-1][sampled])
            rows.append(torch.full((len(target[-1]),), b))
        offset += size

    pieces = [(unit, b) for unit, siblings in enumerate(members) for b in (None, *siblings)]  # None: the prompt
    if prompts_first:
        pieces.sort(key=lambda piece: piece[1] is not None)
    for unit, b in pieces:
        first = members[unit][0]
        length = prompts_B[first]
        if b is None:
            ids.append(tokens[first, :length])
            positions.append(torch.arange(length))
            prompts.append((offset, length))
            offset += length
            continue
        [_, trunk] = parts_B[b][0].columns
        placed[b].append(((0, length), prompts[unit][0]))
        completions.append((offset, trunk - length))
        owner.append(unit)
        add(b, (length, trunk - length), length, sum(prompts[unit]) - 1)
    for b, parts in enumerate(parts_B):
        for part in parts[1:]:
            read = tuple(span for run in part.read for span in _spans(run, placed[b]))
            branches.append(((offset, part.columns[1]), read))
            add(b, part.columns, part.depth, sum(read[-1]) - 1)
    empty = torch.empty(0, dtype=torch.int64)
    packed = PackedRows(
        token_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        prompts=tuple(prompts),
        completions=tuple(completions),
        owner=tuple(owner),
        predictor=torch.cat([empty, *predictor]),
        target=torch.cat([empty, *target]),
        rows=torch.cat([empty, *rows]),
        columns=torch.cat([empty, *columns]),
        branches=tuple(branches),
        runs=tuple(map(tuple, placed)),
    )
    if batch.images is not None:
        sources_N = packed.sources(batch.token_ids.shape[1])
        packed = replace(packed, images=batch.images.gathered(sources_N[None]))
    return to_device(packed, batch.token_ids.device)


def _spans(run: Span, placed: Sequence[tuple[Span, int]]) -> list[Span]:
    """The spans of the packed row that hold a run of a row's columns."""
    first, end = run[0], sum(run)
    spans = []
    for (start, length), place in placed:
        low, high = max(first, start), min(end, start + length)
        if low < high:
            spans.append((place + low - start, high - low))
    return spans


def num_packed_tokens(batch: Batch) -> int:
    """The number of tokens of `pack(batch)`, without packing."""
    prompts_B = prompt_lengths(batch).tolist()
    members = _sharing(batch.token_ids.cpu(), prompts_B, batch.group_ids.tolist())
    repeated = sum(prompts_B[siblings[0]] * (len(siblings) - 1) for siblings in members)
    return int(batch.attention_mask.sum()) - repeated


def _sharing(tokens_BT: Tensor, prompts_B: list[int], groups_B: list[int]) -> list[list[int]]:
    """Lists of the rows that share a prompt, in the order of their first rows."""
    members: dict[tuple[int, bytes], list[int]] = {}
    for b, prefix in enumerate(_prefixes(tokens_BT, prompts_B)):
        members.setdefault((groups_B[b], prefix), []).append(b)
    return list(members.values())


def _prefixes(tokens_BT: Tensor, prompts_B: list[int]) -> list[bytes]:
    """Each row's tokens before the first sampled one, as bytes."""
    ids_BT = tokens_BT.numpy()
    return [ids_BT[b, :length].tobytes() for b, length in enumerate(prompts_B)]


# -- runs of recurrent layers ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """R runs of tokens that go through a layer together, each in C columns."""

    index: Tensor  # int64 `[R, C]`, places in the packed row, 0 where padded
    mask: Tensor | None  # bool `[R, C]`, True on real tokens; None if nothing is padded
    # int64 `[R]`, the runs, among all that begin without a state, with whose states these begin; None: they begin
    # without one.
    after: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """A packed row as runs."""

    runs: tuple[Runs, ...]  # those that begin without a state come first
    place: Tensor  # int64 `[N]`, where each packed token is among the columns of all runs


def state_rows(
    prompts: Sequence[Span],
    completions: Sequence[Span],
    owner: Sequence[int],
    device: torch.device,
    branches: Sequence[BranchSpans] = (),
) -> StateRows:
    """The runs of a packed row (as in `PackedRows`). A branch is computed together with all that it reads.

    Runs without a state are padded on the left: the state of a prompt is the one after the last column.
    """
    firsts = [(_range(span), span[1], unit) for unit, span in enumerate(prompts) if span[1]]
    firsts += [(torch.cat([_range(span) for span in (*read, own)]), own[1], None) for own, read in branches]
    lasts = [(_range(span), span[1], unit) for span, unit in zip(completions, owner, strict=True) if span[1]]

    runs: list[Runs] = []
    place = torch.empty(sum(own for _, own, _ in (*firsts, *lasts)), dtype=torch.int64)
    offset, begun, state_of = 0, 0, dict[int | None, int]()
    for group, follow in ((firsts, False), (lasts, True)):
        for part in buckets(group, [len(places) for places, _, _ in group]):
            # transformers' modules update the state of a single new token in place, for decoding.
            width = max(len(part[0][0]), 2 if follow else 1)
            index, mask = torch.zeros(len(part), width, dtype=torch.int64), torch.zeros(len(part), width).bool()
            for r, (places, own, _) in enumerate(part):
                columns = slice(0, len(places)) if follow else slice(width - len(places), width)
                index[r, columns], mask[r, columns] = places, True
                place[places[-own:]] = torch.arange(offset + r * width, offset + (r + 1) * width)[columns][-own:]
            offset += index.numel()
            after = torch.tensor([state_of[unit] for *_, unit in part], device=device) if follow else None
            if not follow:
                state_of |= {unit: begun + r for r, (*_, unit) in enumerate(part)}
                begun += len(part)
            runs.append(Runs(index=index.to(device), mask=None if mask.all() else mask.to(device), after=after))
    return StateRows(runs=tuple(runs), place=place.to(device))


def _range(span: Span) -> Tensor:
    return torch.arange(span[0], sum(span))


class States:
    """What a layer keeps of its runs, in the form of transformers' caches, for one call of its module.

    Nothing is written in place, so gradients go from completions to their prompts. Its entries are `[R, ..]`.
    """

    def __init__(self, mask: Tensor | None, before: States | None = None, rows: Tensor | None = None) -> None:
        self.mask = mask
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}
        self._continues = before is not None
        if before is not None and rows is not None:
            self.conv_states = {i: x.index_select(0, rows) for i, x in before.conv_states.items()}
            self.recurrent_states = {i: x.index_select(0, rows) for i, x in before.recurrent_states.items()}

    def join(self, other: States) -> None:
        """Appends the other's runs."""
        for mine, theirs in ((self.conv_states, other.conv_states), (self.recurrent_states, other.recurrent_states)):
            for i, x in theirs.items():
                mine[i] = torch.cat([mine[i], x]) if i in mine else x

    # -- what transformers' modules ask of a cache, up to 5.23 by its layers, since 5.24 by methods --------------------
    record_past = False

    @property
    def layers(self) -> States:
        return self

    def __getitem__(self, layer: int) -> States:
        return self

    def has_previous_state(self, layer: int | None = None, state_idx: int = 0) -> bool:
        return self._continues

    def is_recording_past(self, layer: int) -> bool:
        return False

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent_states.get(state_idx)

    def update_conv_state(self, x: Tensor, layer: int, state_idx: int = 0, *, conv_kernel_size: int) -> Tensor:
        """`[R, D, kernel + C]` of new inputs `[R, D, C]`, with those of the state before them.

        Inputs at padding become 0, as they are before the first token: a projection's bias would change them.
        """
        if self.mask is not None:
            x = x * self.mask[:, None]
        before = self.conv_states.get(state_idx)
        x = F.pad(x, (conv_kernel_size, 0)) if before is None else torch.cat([before, x], -1)
        self.conv_states[state_idx] = x[..., -conv_kernel_size:]
        return x

    def update_recurrent_state(self, x: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.recurrent_states[state_idx] = x
        return x
