"""Rows of a Batch -> one packed row in which every group's prompt stands once and nothing is padded.

Layout of the packed row, N tokens: prompt_1 completion_11 .. completion_1G prompt_2 completion_21 ..
Positions of each completion go on from the end of its prompt. A completion's first token is predicted from the last
prompt position, which all siblings share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlft.model.blocks import Block, Span, make_blocks, padded_places
from rlft.types import Batch


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """U distinct prompts, R completions, N packed tokens, M completion tokens.

    token_ids, position_ids int64 `[1, N]`. prompts, completions: the run of tokens of each; owner: each completion's
    prompt. predictor int64 `[M]`: the packed place whose hidden state predicts the token; target int64 `[M]`: that
    token. rows, columns int64 `[M]`: the token's place in the Batch.
    """

    token_ids: Tensor
    position_ids: Tensor
    prompts: tuple[Span, ...]
    completions: tuple[Span, ...]
    owner: tuple[int, ...]
    predictor: Tensor
    target: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """For `split_attention`; made once for all layers, forward and backward."""
        return make_blocks(self.prompts, self.completions, self.owner, self.token_ids.device)

    @cached_property
    def padded(self) -> PaddedRows:
        """For attention through a mask."""
        return pad_rows(self.prompts, self.completions, self.owner, self.token_ids.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """Prompts and completions of a packed row as rows of their own.

    prompt_index int64 `[U, Pmax]` and completion_index int64 `[R, Cmax]` are places in the packed row, 0 where padded;
    the masks of the same shapes are True on real tokens. owner int64 `[R]` is each completion's prompt.
    unpack int64 `[N]`: where each packed token stands in (prompts flattened, then completions flattened).
    """

    prompt_index: Tensor
    prompt_mask: Tensor
    completion_index: Tensor
    completion_mask: Tensor
    owner: Tensor
    unpack: Tensor


def prompt_lengths(batch: Batch) -> Tensor:
    """int64 `[B]`: tokens before the first completion token (the whole row where there is no completion)."""
    lengths_B = batch.attention_mask.sum(1)
    first_B = batch.loss_mask.int().argmax(1)
    return torch.where(batch.loss_mask.any(1), first_B, lengths_B)


def micro_batches(batch: Batch, rows: Tensor, token_budget: int) -> list[Tensor]:
    """Splits rows into micro-batches of at most `token_budget` packed tokens, whole groups together where they fit.

    rows: int64 `[N]`. Groups come in the order of their first row. A row that exceeds the budget stands by itself.
    """
    prompts_B = prompt_lengths(batch).tolist()
    lengths_B = batch.attention_mask.sum(1).tolist()
    groups_B = batch.group_ids.tolist()
    siblings_of: dict[int, list[int]] = {}
    for b in rows.tolist():
        siblings_of.setdefault(groups_B[b], []).append(b)
    result: list[list[int]] = []
    current: list[int] = []
    used = 0
    for siblings in siblings_of.values():
        whole = prompts_B[siblings[0]] + sum(lengths_B[b] - prompts_B[b] for b in siblings)
        if current and used + whole > token_budget:
            result.append(current)
            current, used = [], 0
        prompt_is_in = False
        for b in siblings:
            cost = lengths_B[b] - (prompts_B[b] if prompt_is_in else 0)
            if current and used + cost > token_budget:
                result.append(current)
                current, used, cost = [], 0, lengths_B[b]
            current.append(b)
            used += cost
            prompt_is_in = True
    if current:
        result.append(current)
    return [torch.tensor(part) for part in result]


def padded_micro_batches(batch: Batch, rows: Tensor, token_budget: int) -> list[Tensor]:
    """The same for padded rows, which all cost as much as the longest of their micro-batch: rows stay in order."""
    lengths_B = batch.attention_mask.sum(1).tolist()
    result: list[list[int]] = []
    longest = 0
    for b in rows.tolist():
        longest = max(longest, lengths_B[b])
        if result and (len(result[-1]) + 1) * longest <= token_budget:
            result[-1].append(b)
        else:
            result.append([b])
            longest = lengths_B[b]
    return [torch.tensor(part) for part in result]


def pack(batch: Batch) -> PackedRows:
    """The packed form of every row of the batch. Siblings share a prompt when the tokens are really the same."""
    prompts_B = prompt_lengths(batch).tolist()
    lengths_B = batch.attention_mask.sum(1).tolist()
    tokens = batch.token_ids.cpu()
    members = _sharing(tokens, prompts_B, batch.group_ids.tolist())

    ids, positions, predictor, target, rows, columns = [], [], [], [], [], []
    prompts: list[Span] = []
    completions: list[Span] = []
    owner: list[int] = []
    offset = 0
    for unit, siblings in enumerate(members):
        length = prompts_B[siblings[0]]
        ids.append(tokens[siblings[0], :length])
        positions.append(torch.arange(length))
        prompts.append((offset, length))
        last_prompt = offset + length - 1
        offset += length
        for b in siblings:
            size = lengths_B[b] - length
            completions.append((offset, size))
            owner.append(unit)
            if size:
                ids.append(tokens[b, length : length + size])
                place = torch.arange(length, length + size)
                positions.append(place)
                columns.append(place)
                predictor.append(torch.arange(offset - 1, offset + size - 1))
                predictor[-1][0] = last_prompt
                target.append(ids[-1])
                rows.append(torch.full((size,), b))
            offset += size
    device = batch.token_ids.device
    empty = torch.empty(0, dtype=torch.int64)
    return PackedRows(
        token_ids=torch.cat(ids)[None].to(device),
        position_ids=torch.cat(positions)[None].to(device),
        prompts=tuple(prompts),
        completions=tuple(completions),
        owner=tuple(owner),
        predictor=torch.cat([empty, *predictor]).to(device),
        target=torch.cat([empty, *target]).to(device),
        rows=torch.cat([empty, *rows]).to(device),
        columns=torch.cat([empty, *columns]).to(device),
    )


def num_packed_tokens(batch: Batch) -> int:
    """The length of `pack(batch)`, without making it."""
    prompts_B = prompt_lengths(batch).tolist()
    members = _sharing(batch.token_ids.cpu(), prompts_B, batch.group_ids.tolist())
    repeated = sum(prompts_B[siblings[0]] * (len(siblings) - 1) for siblings in members)
    return int(batch.attention_mask.sum()) - repeated


def _sharing(tokens_BT: Tensor, prompts_B: list[int], groups_B: list[int]) -> list[list[int]]:
    """Rows that share one prompt, in the order of their first row."""
    members: dict[tuple[int, bytes], list[int]] = {}
    for b, length in enumerate(prompts_B):
        members.setdefault((groups_B[b], tokens_BT[b, :length].numpy().tobytes()), []).append(b)
    return list(members.values())


def pad_rows(
    prompts: Sequence[Span], completions: Sequence[Span], owner: Sequence[int], device: torch.device
) -> PaddedRows:
    """Prompts and completions of a packed row as padded rows."""
    prompt_index, prompt_mask = padded_places(prompts)
    completion_index, completion_mask = padded_places(completions)
    flat = torch.cat([prompt_index.flatten(), completion_index.flatten()])
    real = torch.cat([prompt_mask.flatten(), completion_mask.flatten()])
    unpack = torch.empty(int(real.sum()), dtype=torch.int64)
    unpack[flat[real]] = torch.arange(len(flat))[real]
    return PaddedRows(
        prompt_index=prompt_index.to(device),
        prompt_mask=prompt_mask.to(device),
        completion_index=completion_index.to(device),
        completion_mask=completion_mask.to(device),
        owner=torch.tensor(owner, device=device),
        unpack=unpack.to(device),
    )
