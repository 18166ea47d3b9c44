"""Updates on the pretended card: the numbers are the CPU's, and the host hardly ever waits for the card."""

from __future__ import annotations

import math

import pytest
from card_updates import CASES, QUICK
from slow_cases import slow

MOST_WAITS, MOST_UPLOADS = 3, 3
OF_TRANSFORMERS = {"plain kernels": 2}
"""Waits of a micro-batch inside of transformers, which looks whether a mask is all True before it makes its own."""

ROUNDINGS = 2**9 * 2.0**-23
"""Float32 sums of some hundred numbers in another order, one after the other, are off by so much of the whole."""

SLACK = 1.25
"""In 16 bits the card, which rounds less often, may be so much farther from float32 than the CPU is."""


@pytest.mark.parametrize("names", [QUICK, slow([name for name in CASES if name not in QUICK])], ids=["quick", "others"])
def test_numbers_are_those_of_the_cpu_with_few_waits_and_uploads_for_any_number_of_micro_batches(
    on_card, names: list[str]
) -> None:
    wrong = []
    for name, found in on_card.found("card_updates:main", *names).items():
        host, card = found["metrics"]
        assert host.keys() == card.keys()
        assert all(map(math.isfinite, card.values())), name
        if found["to_truth"] is None:
            far = {key: (host[key], card[key]) for key in host if not near(host[key], card[key])}
            wrong += [(name, far, found["distance"])] if far or found["distance"] > ROUNDINGS else []
        else:
            of_host, of_card = found["to_truth"]
            wrong += [(name, of_host, of_card)] if of_card > SLACK * of_host else []
        for number, counts in found["counts"].items():
            most_waits = MOST_WAITS + OF_TRANSFORMERS.get(name, 0) * int(number)
            if sum(counts["waits"].values()) > most_waits or sum(counts["uploads"].values()) > MOST_UPLOADS:
                wrong.append((name, number, counts["waits"], counts["uploads"]))
    assert not wrong


def near(one: float, other: float) -> bool:
    return abs(one - other) <= ROUNDINGS * max(1.0, abs(one))
