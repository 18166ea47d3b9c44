"""Rows of a Batch that are trees: the parts of each, and the same rows as paths, each linear.

A row's trunk is everything before its first branch. Every later part reads a path: runs of the row's own columns that
end with the token before the part's first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlft.model.kernels.attention_blocks import Span
from rlft.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPart:
    """A run of columns of a row whose tokens are read one after the other.

    Attributes:
        columns: (first column, length).
        read: the runs of columns that are read before the part, in order.
    """

    columns: Span
    read: tuple[Span, ...] = ()

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
    """A Batch whose rows are the paths of another Batch.

    Attributes:
        batch: the paths as rows; the loss mask is that of each path's own part.
        index: int64 `[B, T]`, where each token of the other Batch is in the flattened paths; 0 for padding.
    """

    batch: Batch
    index: Tensor

    def fold(self, values: Tensor) -> Tensor:
        """`[B, T, ..]` from the paths' values: each token's value in its own part; padding gets arbitrary values."""
        return values.flatten(0, 1)[self.index]


def paths_of(batch: Batch) -> Paths:
    """A row for each part of each row, which holds what is read before the part, and the part itself."""
    parts = [(b, part) for b, row in enumerate(parts_of(batch)) for part in row]
    width = max(part.depth + part.columns[1] for _, part in parts)
    shape = (len(parts), width)
    device = batch.token_ids.device
    columns = torch.zeros(shape, dtype=torch.int64)
    attention, own_part = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    index = torch.zeros(batch.token_ids.shape, dtype=torch.int64)
    for r, (b, part) in enumerate(parts):
        runs = [torch.arange(start, start + length) for start, length in (*part.read, part.columns)]
        path = torch.cat(runs)
        columns[r, : len(path)] = path
        attention[r, : len(path)] = True
        own_part[r, part.depth : len(path)] = True
        index[b, runs[-1]] = r * width + torch.arange(part.depth, len(path))
    columns, attention, own_part, index = (x.to(device) for x in (columns, attention, own_part, index))
    rows = torch.tensor([b for b, _ in parts], device=device)
    return Paths(
        batch=Batch(
            token_ids=batch.token_ids[rows].gather(1, columns),
            attention_mask=attention,
            loss_mask=batch.loss_mask[rows].gather(1, columns) & own_part,
            sampled_logprobs=batch.sampled_logprobs.new_zeros(shape),
            rewards=batch.rewards[rows],
            group_ids=batch.group_ids[rows],
            teacher_top_k_ids=None
            if batch.teacher_top_k_ids is None
            else batch.teacher_top_k_ids[rows.unsqueeze(1), columns],
        ),
        index=index,
    )
