"""Decoding and publishing on the pretended card: few launches a layer, and the host hardly ever waits for the card."""

from __future__ import annotations

import pytest
from card_decoding import LAYERED, OTHERS, TOKENS
from slow_cases import slow

MOST_LAUNCHES = 25
"""Of a layer and token, with an adapter in 16 bits."""

READS = 1
"""Of the tokens that are counted: one in eight, whatever the number of rows; with a callback each of them is read."""


@pytest.mark.parametrize("name", ["qwen2", *(slow(name) for name in (*LAYERED, *OTHERS) if name != "qwen2")])
def test_a_token_takes_few_launches_and_waits_and_a_publish_a_few_waits(on_card, name: str) -> None:
    """Launches are as many for any number of rows, and waits of a publish for any number of layers: what the engine
    holds is read back per kind of tensors."""
    found = on_card.found("card_decoding:counted", name)
    few, many = found["launches"]
    assert few == many
    assert len(found["waits"]) == 4
    for way, lines in found["waits"].items():
        assert 0 < sum(lines.values()) <= (TOKENS if way == "a callback" else READS), (way, lines)
    if name in LAYERED:
        assert 0 < sum(found["layer"].values()) <= MOST_LAUNCHES, found["layer"]
        shallow, deep = found["published"]
        assert shallow == deep


@pytest.mark.slow
def test_a_rehearsal_takes_what_drafts_and_ways_of_sampling_take_at_most_and_the_plan_counts_it(on_card) -> None:
    found = on_card.found("card_decoding:widest")
    assert found.keys() == {"0", "12", "96", "top_p"}
    for rows, (planned, rehearsed, taken) in found.items():
        assert rehearsed == pytest.approx(taken, rel=0.01), (rows, found)
        assert taken <= planned <= 1.35 * taken, (rows, found)
    assert found["96"][1] > 3 * found["0"][1]
    assert found["top_p"][1] > 1.4 * found["0"][1]
