"""Decoding and publishing on the pretended card: few launches a layer, and the host hardly ever waits for the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import card_decoding
import pytest

MOST_LAUNCHES = 25
"""Of a layer and token, with an adapter in 16 bits."""

READS = 1
"""Of the tokens that are counted: one in eight, whatever the number of rows; with a callback each of them is read."""


@pytest.fixture(scope="session", params=["quick", pytest.param("all others", marks=pytest.mark.slow)])
def decoded(request: pytest.FixtureRequest, on_card, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{case: what `card_decoding` found}."""
    names = ["qwen2"]
    if request.param != "quick":
        names = [name for name in (*card_decoding.LAYERED, *card_decoding.OTHERS) if name not in names]
    folder = tmp_path_factory.mktemp("decoded")
    on_card.run("decoding", "found.json", *names, cwd=folder)
    return json.loads((folder / "found.json").read_text())


def test_a_layer_takes_few_launches_for_a_token(decoded: dict[str, Any]) -> None:
    of_layers = {name: found["layer"] for name, found in decoded.items() if name in card_decoding.LAYERED}
    assert of_layers
    wrong = {name: lines for name, lines in of_layers.items() if not 0 < sum(lines.values()) <= MOST_LAUNCHES}
    assert not wrong


def test_launches_are_as_many_for_any_number_of_rows(decoded: dict[str, Any]) -> None:
    for name, found in decoded.items():
        few, many = found["launches"]
        assert few == many, name


def test_the_host_waits_once_for_several_tokens_of_all_rows(decoded: dict[str, Any]) -> None:
    wrong = []
    for name, found in decoded.items():
        assert len(found["waits"]) == 4
        for way, lines in found["waits"].items():
            allowed = card_decoding.TOKENS if way == "a callback" else READS
            if not 0 < sum(lines.values()) <= allowed:
                wrong.append("\n    ".join([f"{name}, {way}:", *(f"{n} x {line}" for line, n in lines.items())]))
    assert not wrong, "\n".join(wrong)


def test_a_publish_waits_as_often_for_any_number_of_layers(decoded: dict[str, Any]) -> None:
    """What the engine holds is read back: per kind of tensors, not per layer."""
    found = {name: case["published"] for name, case in decoded.items() if "published" in case}
    wrong = {name: both for name, both in found.items() if name in card_decoding.LAYERED and both[0] != both[1]}
    assert found
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.slow
def test_a_rehearsal_takes_what_drafts_and_ways_of_sampling_take_at_most_and_the_plan_counts_it(
    on_card, tmp_path: Path
) -> None:
    on_card.run("widest", "found.json", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"0", "12", "96", "top_p"}
    for rows, (planned, rehearsed, taken) in found.items():
        assert rehearsed == pytest.approx(taken, rel=0.01), (rows, found)
        assert taken <= planned <= 1.35 * taken, (rows, found)
    assert found["96"][1] > 3 * found["0"][1]
    assert found["top_p"][1] > 1.4 * found["0"][1]
