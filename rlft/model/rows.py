"""Makes rows of a Batch from token ids, divides them into micro-batches, and has a role compute a number for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rlft.batch import select
from rlft.model.roles import Roles
from rlft.types import Batch

Row = tuple[int, Sequence[int], Sequence[int]]
"""(group, prompt ids, completion ids). Rows of a group with the same prompt share its forward where possible."""

Tokens = tuple[int, ...]
Item = TypeVar("Item")


def batch_of_rows(rows: Sequence[Row]) -> Batch:
    """The Batch of these rows, on the CPU; sampled log-probs and rewards, which they do not have, are 0."""
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

    Args:
        items: the items.
        texts_of: gives the (prompt, completion) of each of an item's rows; called once for each item.
        token_budget: the most tokens of a part.
        packed: whether a prompt counts once in a part; otherwise every row counts as much as the longest.
        ending: number of tokens that are added to each row.
    """
    parts: list[list[Item]] = []
    prompts: set[Tokens] = set()
    tokens = longest = num_rows = 0
    for item in items:
        texts = texts_of(item)
        item_prompts = {prompt for prompt, _ in texts}
        completions = sum(len(completion) + ending for _, completion in texts)
        length = max(len(prompt) + len(completion) + ending for prompt, completion in texts)
        total = tokens + completions + sum(map(len, item_prompts - prompts))
        if not packed:
            total = max(longest, length) * (num_rows + len(texts))
        if parts and total <= token_budget:
            parts[-1].append(item)
        else:
            parts.append([item])
            prompts, tokens, longest, num_rows = set(), 0, 0, 0
        tokens += completions + sum(map(len, item_prompts - prompts))
        prompts |= item_prompts
        longest, num_rows = max(longest, length), num_rows + len(texts)
    return parts


def numbers_of_rows(
    roles: Roles, role: str | None, batch: Batch, token_budget: int, of_rows: Callable[[Batch], Tensor]
) -> Tensor:
    """float64 `[B]` on the CPU: a number for each row, computed with this role without gradient or dropout.

    Args:
        roles: the adapters on their base.
        role: the role; None: the bare base.
        batch: the rows.
        token_budget: the most tokens in a forward.
        of_rows: computes the numbers `[rows]` of a micro-batch on the device.
    """
    numbers_B = torch.zeros(len(batch.rewards), dtype=torch.float64)
    with torch.no_grad(), roles.using(role):
        for part in roles.forward.micro_batches(batch, torch.arange(len(batch.rewards)), token_budget):
            numbers_B[part] = of_rows(roles.to_device(select(batch, part))).double().cpu()
    return numbers_B
