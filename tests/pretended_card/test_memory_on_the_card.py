"""The memory that a plan counts for updates is what is alive on the pretended card at most; launches are few, and as
many as the model of a step adds up (rlft/plan/roofline.py)."""

import pytest
import roofline
from card_peaks import CASES, QUICK
from slow_cases import slow

from rlft.plan.roofline import Work, layer

ALLOWED = 0.05


@pytest.mark.parametrize(
    ("kind", "names"),
    [("cuda", QUICK), slow("cuda", [name for name in CASES if name not in QUICK]), ("xpu", ["bfloat16"]),
     slow("xpu", ["checkpointing", "demonstrations"]), slow("rocm", ["bfloat16", "checkpointing", "demonstrations"])],
    ids=["quick", "all others", "xpu", "more of xpu", "rocm"],
)  # fmt: skip
def test_the_planned_bytes_are_those_that_are_counted(on_card, kind, names):
    """On cards without kernels norms and branches are computed step by step, which keeps more for the backward."""
    found = on_card.found("card_peaks:main", *names, RLFT_CARD=kind)
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
def test_the_planned_bytes_with_images_are_those_that_are_counted(on_card, kind):
    found = on_card.found("card_peaks:images", kind)
    planned, counted = found["reading"]
    assert planned["an image in the tower"] > 2 * ALLOWED * counted
    assert sum(planned.values()) == pytest.approx(counted, rel=ALLOWED), planned
    if kind == "qwen2_5_vl":
        planned, counted = found["update"]
        # Vectors of 256 numbers of 2 bytes for each of the 36 tokens of 8 images, twice.
        assert planned["vectors of images"] == 256 * 2 * 36 * 8 * 2
        assert sum(planned.values()) == pytest.approx(counted, rel=ALLOWED), planned


MOST_OF_A_MICRO_BATCH = 100
"""Launches of a layer, forward and backward."""


def test_a_layer_takes_few_launches(on_card):
    found = on_card.found("card_peaks:launches")
    assert 0 < found["update"] <= MOST_OF_A_MICRO_BATCH, found["lines"]
    work, network = Work(prompts=2, group=4, prompt=16, completion=8, budget=96), roofline.MODELS["0.5B"]
    assert found["update"] == sum(kernel.number for kernel in layer(network, network.layers[0], work))


MOST_OF_TRL = 0.5


@pytest.mark.slow
def test_an_update_takes_at_most_half_of_the_bytes_and_launches_of_trls(on_card):
    found = on_card.found("card_trl:main", "bfloat16", "49k tokens")
    assert len(found) == 2
    for name, ((own_bytes, own_launches), (its_bytes, its_launches)) in found.items():
        assert 0 < own_bytes <= MOST_OF_TRL * its_bytes, name
        assert 0 < own_launches <= MOST_OF_TRL * its_launches, name
