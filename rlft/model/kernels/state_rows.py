"""A packed row as recurrent layers compute it: runs of tokens, and what a layer keeps of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlft.model.kernels.split_attention import BranchSpans, Span, buckets


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
