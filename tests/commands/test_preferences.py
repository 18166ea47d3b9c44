"""Which rankings are rehearsed before the first update of `rlft rm` and `rlft dpo`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlft.commands.preferences import LOGPROBS, PreferenceTask
from rlft.data.examples import RankedTokens
from rlft.model.forward import Forward


def largest_part(rankings: list[RankedTokens], token_budget: int, per_step: int, *, packed: bool) -> list[RankedTokens]:
    """The rehearsed micro-batch of a policy that learns from these rankings."""
    task = object.__new__(PreferenceTask)  # without a model
    forward = Forward(model=None, packed=packed, reason="")  # type: ignore[arg-type]
    task.head, task.roles = LOGPROBS, SimpleNamespace(forward=forward)  # type: ignore[assignment]
    task.config = SimpleNamespace(token_budget=token_budget, rankings_per_step=per_step)
    task.plan = SimpleNamespace(train=SimpleNamespace(rankings=rankings))  # type: ignore[assignment]
    return task.largest_part()


def ranking(prompt: int, *completions: int, token: int = 1) -> RankedTokens:
    return RankedTokens(
        prompt=(token,) * prompt, completions=tuple((2,) * n for n in completions), scores=(1.0,) * len(completions)
    )


@pytest.mark.parametrize(
    ("packed", "largest"),
    [
        # A prompt of 50 and 2 x 4 against one of 1 with 20 and 1: packed 58 and 22, padded 2 x 54 and 2 x 21.
        (True, (50, 4, 4)),
        (False, (50, 4, 4)),
    ],
)
def test_a_long_prompt_counts(packed: bool, largest: tuple[int, ...]) -> None:
    rankings = [ranking(1, 20, 1), ranking(*largest)]
    assert largest_part(rankings, 200, 1, packed=packed) == [rankings[1]]


def test_completions_of_unlike_lengths_take_most_where_rows_are_padded() -> None:
    # Packed 1 + 30 + 1 = 32 and 20 + 10 + 10 = 40; padded 2 x 31 = 62 and 2 x 30 = 60.
    unlike, alike = ranking(1, 30, 1), ranking(20, 10, 10)
    for packed, expected in ((True, alike), (False, unlike)):
        assert largest_part([unlike, alike], 200, 1, packed=packed) == [expected]


def test_two_that_fit_together_may_be_more_than_the_largest_alone() -> None:
    # 60, 50 and 50 tokens under a budget of 100: the second micro-batch has both of 50.
    first, *others = ranking(10, 25, 25, token=3), ranking(10, 20, 20, token=4), ranking(10, 20, 20, token=5)
    assert largest_part([first, *others], 100, 3, packed=True) == others
