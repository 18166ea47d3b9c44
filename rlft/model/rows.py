"""Texts of token ids as rows of a Batch, in micro-batches, and one number of each by a role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rlft.batch import select
from rlft.model.roles import Roles
from rlft.types import Batch

Row = tuple[int, Sequence[int], Sequence[int]]
"""(group, prompt ids, completion ids). Rows of one group that have the same prompt share its pass where they can."""

Tokens = tuple[int, ...]
Item = TypeVar("Item")


def batch_of_rows(rows: Sequence[Row]) -> Batch:
    """The Batch of these rows, on the CPU; they were not sampled and have no reward, which are 0."""
    shape = len(rows), max(len(prompt) + len(completion) for _, prompt, completion in rows)
    token_ids_BT = torch.zeros(shape, dtype=torch.int64)
    attention_mask_BT = torch.zeros(shape, dtype=torch.bool)
    loss_mask_BT = torch.zeros(shape, dtype=torch.bool)
    for b, (_, prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        token_ids_BT[b, :end] = torch.tensor([*prompt, *completion])
        attention_mask_BT[b, :end] = True
        loss_mask_BT[b, len(prompt) : end] = True
    return Batch(
        token_ids=token_ids_BT,
        attention_mask=attention_mask_BT,
        loss_mask=loss_mask_BT,
        sampled_logprobs=torch.zeros(shape),
        rewards=torch.zeros(len(rows)),
        group_ids=torch.tensor([group for group, _, _ in rows]),
    )


def parts_within(
    items: Sequence[Item],
    texts_of: Callable[[Item], Sequence[tuple[Tokens, Tokens]]],
    token_budget: int,
    *,
    packed: bool,
    ending: int = 0,
) -> list[list[Item]]:
    """The items in order, as many at a time as fit the token budget; one that exceeds it stands by itself.

    Each item is measured once.

    Args:
        texts_of: the (prompt, completion) of an item's rows.
        packed: a prompt counts once among the items of a part; otherwise every row counts as much as the longest.
        ending: tokens by which each row is longer than its text.
    """
    parts: list[list[Item]] = []
    prompts: set[Tokens] = set()
    tokens = longest = num_rows = 0
    for item in items:
        texts = texts_of(item)
        own = {prompt for prompt, _ in texts}
        completions = sum(len(completion) + ending for _, completion in texts)
        length = max(len(prompt) + len(completion) + ending for prompt, completion in texts)
        together = tokens + completions + sum(map(len, own - prompts))
        if not packed:
            together = max(longest, length) * (num_rows + len(texts))
        if parts and together <= token_budget:
            parts[-1].append(item)
        else:
            parts.append([item])
            prompts, tokens, longest, num_rows = set(), 0, 0, 0
        tokens += completions + sum(map(len, own - prompts))
        prompts |= own
        longest, num_rows = max(longest, length), num_rows + len(texts)
    return parts


def numbers_of_rows(
    roles: Roles, role: str | None, batch: Batch, token_budget: int, of_rows: Callable[[Batch], Tensor]
) -> Tensor:
    """float64 `[B]` on the CPU: what `of_rows` makes of micro-batches by this role (None: the bare base).

    Without gradient or dropout. of_rows: a micro-batch on the device -> `[rows]`.
    """
    numbers_B = torch.zeros(len(batch.rewards), dtype=torch.float64)
    with torch.no_grad(), roles.using(role):
        for part in roles.forward.micro_batches(batch, torch.arange(len(batch.rewards)), token_budget):
            numbers_B[part] = of_rows(roles.to_device(select(batch, part))).double().cpu()
    return numbers_B
