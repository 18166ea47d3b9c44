"""Whether a held-out curve has gone flat: by hand, and on the curves in recipes/chains.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from in_one_test import each

from rlft.logger.forecast import newly_flat, trend_of

CHAINS = Path(__file__).parents[2] / "recipes" / "chains.json"
NOISE = (0.5, 0.51, 0.49, 0.5, 0.51, 0.49)


def curve(values: tuple[float, ...] | list[float], error: float = 0.05, every: int = 20) -> list[dict[str, Any]]:
    return [{"step": every * i, "accuracy": value, "accuracy_se": error} for i, value in enumerate(values)]


def losses(values: tuple[float, ...]) -> list[dict[str, Any]]:
    return [{"step": 20 * i, "accuracy": None, "eval/loss": value} for i, value in enumerate(values)]


def test_the_slope_its_error_and_the_bound_are_those_of_the_line() -> None:
    # Steps 0, 10, .. 50, values 0 1 1 2 2 3 (tenths): the sum of (x - 25)(y - 1.5) is 95 tenths, that of (x - 25)**2 is
    # 1750, so the slope is 95/1750 tenths. About that line the squares sum up to 5.5 - 95**2/1750 (tenths**2).
    trend = trend_of(curve([0.0, 0.1, 0.1, 0.2, 0.2, 0.3], every=10))
    assert trend is not None
    assert trend.slope == pytest.approx(0.1 * 95 / 1750, rel=1e-12)
    assert trend.error == pytest.approx(0.1 * math.sqrt((5.5 - 95**2 / 1750) / 4 / 1750), rel=1e-9)
    assert trend.most == pytest.approx(50 * (trend.slope + 2.132 * trend.error), rel=1e-12)  # t of 6 - 2, at 95 %
    assert (trend.first, trend.last, trend.matters, trend.is_flat) == (0, 50, 0.05, False)


@each(
    ("lines", "expected"),
    [
        (curve(NOISE), True),
        (curve(NOISE, error=0.01), False),  # so small a gain would matter, and cannot be excluded
        (curve(NOISE[:5]), None),
        (curve((1.0,) * 6, error=0.0), True),  # solved
        (curve([0.5 + 0.02 * i for i in range(6)]), False),
        (curve([0.5 - 0.02 * i for i in range(6)]), True),  # it falls: more steps bring nothing
        (curve([0.1, 0.2, 0.3, 0.4, 0.45, 0.5, *NOISE]), True),  # the newest half counts
        (curve([0.1, 0.2, 0.3, 0.4, 0.45, 0.5, *NOISE[:4]]), False),
        (losses((1.0,) * 6), True),
        (losses((1.0, 0.99, 0.98, 0.97, 0.96, 0.95)), False),
        (losses((1.0, 1.01, 1.02, 1.03, 1.04, 1.05)), True),
        ([{"step": step} for step in range(9)], None),
    ],
)
def test_flat_is_what_brings_less_than_matters(lines: list[dict[str, Any]], expected: bool | None) -> None:
    trend = trend_of(lines)
    assert (None if trend is None else trend.is_flat) is expected


def test_it_is_said_once() -> None:
    lines = curve((*NOISE, 0.5, 0.51))
    assert [number for number in range(len(lines) + 1) if newly_flat(lines[:number])] == [6]
    # By hand: the sum of (x - 50)(y - 0.5) is -0.4, that of (x - 50)**2 is 7000, that of (y - 0.5)**2 is 0.0004.
    told = "held-out accuracy has been flat since step 0: -0.0057 +- 0.0116 in 100 steps; 100 more steps would improve "
    assert str(newly_flat(lines[:6])) == f"{told}it by at most 0.0190, and less than 0.0500 does not matter"


def test_of_the_recorded_curves_only_those_that_never_rise_again_are_flat() -> None:
    flat = []
    for run in json.loads(CHAINS.read_text())["runs"]:
        errors = [math.sqrt(value * (1 - value) / 256) for value in run["accuracy"]]
        lines = [
            {"step": step, "accuracy": value, "accuracy_se": error}
            for step, value, error in zip(run["evaluated_at"], run["accuracy"], errors, strict=True)
        ]
        numbers = [n for n in range(len(lines)) if (trend := trend_of(lines[:n])) and trend.is_flat]
        for number in numbers[:1]:
            flat.append(run["name"])
            assert max(run["accuracy"][number:]) < run["accuracy"][number - 1] + 0.03
    assert set(flat) == {"a2c", "ppo_ptx"}, "their policies collapsed"
    assert len(flat) == 8


def test_a_slow_rise_is_seldom_taken_for_flat_and_a_plateau_is_found() -> None:
    random = Random(0)

    def share(rise: float) -> float:
        """Of 1,000 curves of 20 evaluations: noise of 0.012, standard errors of 0.03, so much more at each."""
        curves = ([0.3 + rise * i + random.gauss(0, 0.012) for i in range(20)] for _ in range(1000))
        return sum(bool((trend := trend_of(curve(values, 0.03))) and trend.is_flat) for values in curves) / 1000

    assert share(0.005) <= 0.05  # nine evaluations more bring 0.045, more than matters
    assert share(0.0) >= 0.6
