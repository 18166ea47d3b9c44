"""Makes rows of a Batch from token ids, divides them into micro-batches, and has a role compute a number for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rlft.batch import select
from rlft.model.roles import Roles
from rlft.types import Batch

Row = tuple[int, Sequence[int], Sequence[int]]
"""(group, prompt ids, completion ids). Rows of a group with the same prompt share its forward where possible."""


class Ranked(Protocol):
    """Completions of one prompt, which a loss compares with each other."""

    @property
    def prompt(self) -> tuple[int, ...]: ...
    @property
    def completions(self) -> Sequence[tuple[int, ...]]: ...


Item = TypeVar("Item", bound=Ranked)


def rows_of(items: Sequence[Ranked], ending: tuple[int, ...] = ()) -> list[Row]:
    """Every completion once, in order, with `ending` after it; those of one prompt are a group even across items."""
    groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(item.prompt for item in items))}
    return [(groups[item.prompt], item.prompt, (*c, *ending)) for item in items for c in item.completions]


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


def parts_within(items: Sequence[Item], token_budget: int, *, packed: bool, ending: int = 0) -> list[list[Item]]:
    """The items in order, as many at a time as fit the token budget; one that exceeds it stands by itself.

    Args:
        items: the items.
        token_budget: the most tokens of a part.
        packed: whether a prompt counts once in a part; otherwise every row counts as much as the longest.
        ending: number of tokens that are added to each row.
    """
    parts: list[list[Item]] = []
    prompts: set[tuple[int, ...]] = set()
    tokens = longest = num_rows = 0
    for item in items:
        lengths = [len(completion) + ending for completion in item.completions]
        length = len(item.prompt) + max(lengths)
        total = tokens + sum(lengths) + (0 if item.prompt in prompts else len(item.prompt))
        fits = (total if packed else max(longest, length) * (num_rows + len(lengths))) <= token_budget
        if parts and fits:
            parts[-1].append(item)
        else:
            parts.append([item])
            prompts, longest, num_rows = set(), 0, 0
            total = len(item.prompt) + sum(lengths)
        prompts.add(item.prompt)
        tokens, longest, num_rows = total, max(longest, length), num_rows + len(lengths)
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
