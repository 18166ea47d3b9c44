"""The memory that a plan counts for updates is what is alive on the pretended card at most; launches are few, and as
many as the model of a step adds up (rlft/plan/roofline.py)."""

from __future__ import annotations

import json
from pathlib import Path

import card_peaks
import pytest
import roofline
from slow_cases import slow

from rlft.plan.roofline import Work, layer

ALLOWED = 0.05


@pytest.mark.parametrize(
    "names",
    [card_peaks.QUICK, pytest.param([*card_peaks.CASES.keys() - card_peaks.QUICK], marks=pytest.mark.slow)],
    ids=["quick", "all others"],
)
def test_the_planned_bytes_are_those_that_are_counted(on_card, tmp_path: Path, names: list[str]) -> None:
    on_card.run("peaks", "found.json", *names, cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == set(names)
    assert all(counted > planned["base"] > 0 for planned, counted in found.values())
    wrong = {
        name: (sum(planned.values()) / counted, planned)
        for name, (planned, counted) in found.items()
        if abs(sum(planned.values()) / counted - 1) > ALLOWED
    }
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma4", "qwen2_5_vl", "qwen3_vl"])
def test_the_planned_bytes_of_an_image_in_the_tower_are_those_that_are_counted(
    on_card, tmp_path: Path, kind: str
) -> None:
    planned, counted = with_images(on_card, tmp_path, kind)["reading"]
    assert planned["an image in the tower"] > 2 * ALLOWED * counted
    assert sum(planned.values()) == pytest.approx(counted, rel=ALLOWED), planned


@pytest.mark.slow
def test_the_planned_bytes_of_an_update_with_images_are_those_that_are_counted(on_card, tmp_path: Path) -> None:
    planned, counted = with_images(on_card, tmp_path, "qwen2_5_vl")["update"]
    # Vectors of 256 numbers of 2 bytes for each of the 36 tokens of 8 images, twice.
    assert planned["vectors of images"] == 256 * 2 * 36 * 8 * 2
    assert sum(planned.values()) == pytest.approx(counted, rel=ALLOWED), planned


def with_images(on_card, folder: Path, kind: str) -> dict[str, tuple[dict[str, int], int]]:
    on_card.run("images", "found.json", kind, cwd=folder)
    return json.loads((folder / "found.json").read_text())


MOST_OF_A_MICRO_BATCH = 100
"""Launches of a layer, forward and backward."""


def test_a_layer_takes_few_launches(on_card, tmp_path: Path) -> None:
    on_card.run("launches", "found.json", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert 0 < found["update"] <= MOST_OF_A_MICRO_BATCH, found["lines"]
    work, network = Work(prompts=2, group=4, prompt=16, completion=8, budget=96), roofline.MODELS["0.5B"]
    assert found["update"] == sum(kernel.number for kernel in layer(network, network.layers[0], work))


MOST_OF_TRL = 0.5


@pytest.mark.slow
def test_an_update_takes_at_most_half_of_the_bytes_and_launches_of_trls(on_card, tmp_path: Path) -> None:
    on_card.run("trl", "found.json", "bfloat16", "49k tokens", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    print(found)
    assert len(found) == 2
    for name, ((own_bytes, own_launches), (its_bytes, its_launches)) in found.items():
        assert 0 < own_bytes <= MOST_OF_TRL * its_bytes, name
        assert 0 < own_launches <= MOST_OF_TRL * its_launches, name


@pytest.mark.parametrize(
    ("kind", "names"),
    [("xpu", ["bfloat16"]), slow("xpu", ["checkpointing", "demonstrations"]),
     slow("rocm", ["bfloat16", "checkpointing", "demonstrations"])],
)  # fmt: skip
def test_the_planned_bytes_of_cards_without_kernels_are_those_that_are_counted(
    on_card, tmp_path: Path, kind: str, names: list[str]
) -> None:
    """Norms and branches are computed there step by step, which keeps more for the backward."""
    on_card.run("peaks", "found.json", *names, cwd=tmp_path, RLFT_CARD=kind)
    found = json.loads((tmp_path / "found.json").read_text())
    shares = {name: sum(planned.values()) / counted for name, (planned, counted) in found.items()}
    assert shares.keys() == set(names)
    assert not {name: share for name, share in shares.items() if abs(share - 1) > ALLOWED}
