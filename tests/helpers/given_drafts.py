"""Drafts that a test gives, right ones and wrong ones."""

import random
from collections.abc import Callable, Sequence

from rlft.generation.drafts import MOST, Drafts, key_of
from rlft.types import Group

Offer = Callable[[int, Sequence[int], int], list[int]]


class GivenDrafts(Drafts):
    """`offer` gives the drafts of a row: (key of its prompt, its tokens so far, how many at most)."""

    def __init__(self, offer: Offer, rows: int = 1000) -> None:
        super().__init__(rows)
        self.given = offer

    def _offer(self, key: int, said: Sequence[int], room: int, lead: int) -> list[int]:
        return self.given(key, list(said), max(0, min(MOST, room)))


def nothing(key: int, said: Sequence[int], most: int) -> list[int]:
    return []


def anything(vocabulary: int, seed: int = 0) -> Offer:
    """Random drafts, and another number of them each time."""
    dice = random.Random(seed)
    return lambda key, said, most: [dice.randrange(vocabulary) for _ in range(dice.randint(0, most))]


def right(groups: Sequence[Group], vocabulary: int, wrong: float = 0.0) -> Offer:
    """What these completions say next, but for a share that is wrong."""
    rows = {}
    for group in groups:
        rows.setdefault(key_of(group.prompt.token_ids), []).extend(r.completion.token_ids for r in group.rollouts)
    dice = random.Random(1)

    def offer(key: int, said: list[int], most: int) -> list[int]:
        row = next((row for row in rows[key] if list(row[: len(said)]) == said), ())
        return [(token + (dice.random() < wrong)) % vocabulary for token in row[len(said) : -1][:most]]

    return offer
