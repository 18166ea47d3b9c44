"""Updates on the pretended card: the numbers are the CPU's, and the host hardly ever waits for the card."""

from __future__ import annotations

import json
import math
from typing import Any

import card_updates
import pytest

MOST_WAITS, MOST_UPLOADS = 3, 3
OF_TRANSFORMERS = {"plain kernels": 2}
"""Waits of a micro-batch inside of transformers, which looks whether a mask is all True before it makes its own."""

ROUNDINGS = 2**9 * 2.0**-23
"""Float32 sums of some hundred numbers in another order, one after the other, are off by so much of the whole."""

SLACK = 1.25
"""In 16 bits the card, which rounds less often, may be so much farther from float32 than the CPU is."""


@pytest.fixture(scope="session", params=["quick", pytest.param("all others", marks=pytest.mark.slow)])
def updates(request: pytest.FixtureRequest, on_card, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{case: what `card_updates` found}."""
    quick = card_updates.QUICK
    names = quick if request.param == "quick" else [name for name in card_updates.CASES if name not in quick]
    folder = tmp_path_factory.mktemp("updates")
    on_card.run("updates", "found.json", *names, cwd=folder)
    return json.loads((folder / "found.json").read_text())


def test_gradients_and_metrics_are_those_of_the_cpu(updates: dict[str, Any]) -> None:
    wrong = []
    for name, found in updates.items():
        host, card = found["metrics"]
        assert host.keys() == card.keys()
        assert all(map(math.isfinite, card.values())), name
        if found["to_truth"] is None:
            far = {key: (host[key], card[key]) for key in host if not near(host[key], card[key])}
            wrong += [(name, far, found["distance"])] if far or found["distance"] > ROUNDINGS else []
        else:
            of_host, of_card = found["to_truth"]
            wrong += [(name, of_host, of_card)] if of_card > SLACK * of_host else []
    assert not wrong


def near(one: float, other: float) -> bool:
    return abs(one - other) <= ROUNDINGS * max(1.0, abs(one))


def test_an_update_waits_and_uploads_a_few_times_whatever_the_number_of_micro_batches(updates: dict[str, Any]) -> None:
    wrong = []
    for name, found in updates.items():
        for number, counts in found["counts"].items():
            waits, uploads = counts["waits"], counts["uploads"]
            allowed = MOST_WAITS + OF_TRANSFORMERS.get(name, 0) * int(number)
            if sum(waits.values()) > allowed or sum(uploads.values()) > MOST_UPLOADS:
                lines = [f"{count} x {line}" for line, count in (*waits.items(), *uploads.items())]
                wrong.append("\n    ".join([f"{name}, {number} micro-batches:", *lines]))
    assert not wrong, "\n".join(wrong)
