"""Rows of a Batch -> one packed row in which every group's prompt stands once and nothing is padded.

Layout of the packed row, N tokens: prompt_1 completion_11 .. completion_1G prompt_2 completion_21 ..
Positions of each completion go on from the end of its prompt. A completion's first token is predicted from the last
prompt position, which all siblings share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlft.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """U distinct prompts, R completions, N packed tokens, M completion tokens.

    prompt_index int64 `[U, Pmax]` and completion_index int64 `[R, Cmax]` are places in the packed row, 0 where padded;
    the masks of the same shapes are True on real tokens. owner int64 `[R]` is each completion's prompt.
    unpack int64 `[N]`: where each packed token stands in (prompts flattened, then completions flattened).
    predictor int64 `[M]`: the packed place whose hidden state predicts the token; target int64 `[M]`: that token.
    rows, columns int64 `[M]`: the token's place in the Batch.
    """

    token_ids: Tensor
    position_ids: Tensor
    prompt_index: Tensor
    prompt_mask: Tensor
    completion_index: Tensor
    completion_mask: Tensor
    owner: Tensor
    unpack: Tensor
    predictor: Tensor
    target: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]


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
    prompt_places, completion_places, owner = [], [], []
    offset = 0
    for unit, siblings in enumerate(members):
        length = prompts_B[siblings[0]]
        ids.append(tokens[siblings[0], :length])
        positions.append(torch.arange(length))
        prompt_places.append(torch.arange(offset, offset + length))
        last_prompt = offset + length - 1
        offset += length
        for b in siblings:
            size = lengths_B[b] - length
            ids.append(tokens[b, length : length + size])
            positions.append(torch.arange(length, length + size))
            completion_places.append(torch.arange(offset, offset + size))
            owner.append(unit)
            if size:
                predictor.append(torch.tensor([last_prompt, *range(offset, offset + size - 1)]))
                target.append(tokens[b, length : length + size])
                rows.append(torch.full((size,), b))
                columns.append(torch.arange(length, length + size))
            offset += size
    prompt_index, prompt_mask = _pad(prompt_places)
    completion_index, completion_mask = _pad(completion_places)
    flat = torch.cat([prompt_index.flatten(), completion_index.flatten()])
    real = torch.cat([prompt_mask.flatten(), completion_mask.flatten()])
    unpack = torch.empty(offset, dtype=torch.int64)
    unpack[flat[real]] = torch.arange(len(flat))[real]
    device = batch.token_ids.device
    empty = torch.empty(0, dtype=torch.int64)
    packed = {
        "token_ids": torch.cat(ids)[None],
        "position_ids": torch.cat(positions)[None],
        "prompt_index": prompt_index,
        "prompt_mask": prompt_mask,
        "completion_index": completion_index,
        "completion_mask": completion_mask,
        "owner": torch.tensor(owner),
        "unpack": unpack,
        "predictor": torch.cat([empty, *predictor]),
        "target": torch.cat([empty, *target]),
        "rows": torch.cat([empty, *rows]),
        "columns": torch.cat([empty, *columns]),
    }
    return PackedRows(**{name: value.to(device) for name, value in packed.items()})


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


def _pad(places: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ragged index rows -> (int64 [rows, longest] padded with 0, bool mask)."""
    width = max(1, *(len(p) for p in places)) if len(places) > 1 else max(1, len(places[0]))
    index = torch.zeros(len(places), width, dtype=torch.int64)
    mask = torch.zeros(len(places), width, dtype=torch.bool)
    for i, place in enumerate(places):
        index[i, : len(place)] = place
        mask[i, : len(place)] = True
    return index, mask
