"""Student's t against tables and closed forms."""

from __future__ import annotations

import math

import pytest
import significance
from in_one_test import each


@each(
    ("share", "dof", "quantile"),
    [
        # Tables of Student's t (Abramowitz and Stegun, table 26.10).
        (0.975, 1, 12.706205),
        (0.975, 2, 4.302653),
        (0.975, 4, 2.776445),
        (0.975, 30, 2.042272),
        (0.95, 9, 1.833113),
        (0.995, 4, 4.604095),
    ],
)
def test_quantiles_are_those_of_the_tables(share: float, dof: int, quantile: float) -> None:
    assert significance.t_quantile(share, dof) == pytest.approx(quantile, abs=1e-6)


@each("t", [0.0, 0.3, -1.0, 2.776445, 40.0])
def test_p_values_are_those_of_the_closed_forms(t: float) -> None:
    # 1 degree of freedom is Cauchy's distribution: P(|T| >= t) = 1 - 2 atan(t) / pi.
    assert significance.two_sided_p(t, 1) == pytest.approx(1 - 2 * math.atan(abs(t)) / math.pi, abs=1e-12)
    # 2: P(|T| < t) = t / sqrt(2 + t^2). 4: with s = t / sqrt(4 + t^2), P(|T| < t) = s (1 + (1 - s^2) / 2).
    assert significance.two_sided_p(t, 2) == pytest.approx(1 - abs(t) / math.sqrt(2 + t * t), abs=1e-12)
    s = abs(t) / math.sqrt(4 + t * t)
    assert significance.two_sided_p(t, 4) == pytest.approx(1 - s * (1 + (1 - s * s) / 2), abs=1e-12)


def test_an_interval_is_the_quantile_times_the_standard_error() -> None:
    # 1 .. 5: standard deviation sqrt(10 / 4) = 1.581139, error / sqrt(5) = 0.707107; 2.776445 x 0.707107 = 1.963243.
    assert significance.half_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.963243, abs=1e-6)
    # Two values: 12.706205 x (1 / sqrt(2)) / sqrt(2).
    assert significance.half_interval([0.0, 1.0]) == pytest.approx(6.353102, abs=1e-6)
    assert significance.half_interval([0.25]) is None
