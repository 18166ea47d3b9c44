"""Texts of tokens as rows: the batch, micro-batches that tear no item, and a number of each row by a role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from in_one_test import each
from torch import Tensor

from rlft.model.backbone import Backbone
from rlft.model.packing import num_packed_tokens
from rlft.model.roles import POLICY, Roles
from rlft.model.rows import batch_of_rows, numbers_of_rows, parts_within, rows_of
from rlft.types import Batch

ROWS = [(0, (5, 6, 7), (20, 21, 2)), (0, (5, 6, 7), (22,)), (1, (9,), (30, 31))]


def test_rows_are_padded_on_the_right_and_their_completions_are_learned() -> None:
    batch = batch_of_rows(ROWS)
    assert batch.token_ids.tolist() == [[5, 6, 7, 20, 21, 2], [5, 6, 7, 22, 0, 0], [9, 30, 31, 0, 0, 0]]
    assert batch.attention_mask.sum(1).tolist() == [6, 4, 3]
    assert batch.loss_mask.nonzero().tolist() == [[0, 3], [0, 4], [0, 5], [1, 3], [2, 1], [2, 2]]
    assert batch.group_ids.tolist() == [0, 0, 1]


def test_each_rows_number_is_the_same_in_micro_batches_of_any_size(
    make_roles: Callable[..., Roles], make_double: Callable[[], Backbone]
) -> None:
    """The sum of the log-probs of a row, by the policy and by the bare base, which is not the policy."""
    roles = make_roles(noise=0.05, backbone=make_double())

    def total(batch: Batch) -> Tensor:
        return roles.forward(batch, 1.0).logprobs.sum(1)

    found = {role: numbers_of_rows(roles, role, batch_of_rows(ROWS), 10**6, total) for role in (POLICY, None)}
    assert found[POLICY].dtype == torch.float64
    assert (found[POLICY] - found[None]).abs().min() > 1e-3
    for role, numbers in found.items():
        for token_budget in (1, 8):
            again = numbers_of_rows(roles, role, batch_of_rows(ROWS), token_budget, total)
            torch.testing.assert_close(again, numbers, rtol=1e-12, atol=1e-12)


# -- parts within the token budget -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Item:
    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]


def drawn(number: int) -> list[Item]:
    """Items of one to four completions, some prompts in several items."""
    random = torch.Generator().manual_seed(number)

    def draw(high: int, low: int = 1) -> int:
        return int(torch.randint(low, high, (), generator=random))

    prompts = [tuple(draw(9) for _ in range(draw(12))) for _ in range(3)]
    return [
        Item(prompts[draw(3, 0)], tuple(tuple(draw(9) for _ in range(draw(20))) for _ in range(draw(5))))
        for _ in range(number)
    ]


def tokens_by_hand(items: Sequence[Item], packed: bool, ending: int) -> int:
    """What enters the network for these items, counted in the batch that is made of them."""
    batch = batch_of_rows(rows_of(items, (0,) * ending))
    return num_packed_tokens(batch) if packed else int(batch.attention_mask.sum(1).max()) * len(batch.rewards)


@each("ending", [0, 1])
@each("packed", [True, False])
@each("budget", [1, 40, 100, 300, 10_000])
def test_parts_are_those_that_counting_each_batch_gives(budget: int, packed: bool, ending: int) -> None:
    items = drawn(60)
    by_hand: list[list[Item]] = []
    for item in items:
        if by_hand and tokens_by_hand([*by_hand[-1], item], packed, ending) <= budget:
            by_hand[-1].append(item)
        else:
            by_hand.append([item])
    assert parts_within(items, budget, packed=packed, ending=ending) == by_hand
    assert {1: 60, 10_000: 1}.get(budget, len(by_hand)) == len(by_hand)
