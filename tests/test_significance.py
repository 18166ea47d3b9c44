"""Student's t, the paired test and Holm's correction against tables, closed forms and worked examples."""

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


def test_the_paired_test_is_that_of_students_own_example() -> None:
    # Student (1908): hours of sleep gained with two drugs by ten patients: t = 4.0621 with 9 degrees of freedom.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    differences = [b - a for a, b in zip(first, second, strict=True)]
    assert significance.paired_p(differences) == pytest.approx(0.002833, abs=5e-7)
    assert significance.paired_p([-value for value in differences]) == significance.paired_p(differences)


def test_differences_without_spread_prove_nothing() -> None:
    # Accuracies are multiples of 1 / 1024, so that two seeds may well have the same difference by chance.
    assert significance.paired_p([0.0, 0.0, 0.0]) == 1.0
    assert significance.paired_p([0.25, 0.25]) == 1.0
    assert significance.paired_p([0.3 - 0.1, 0.4 - 0.2, 0.2]) == 1.0, "they differ in their last bits alone"


def test_holm_multiplies_by_the_tests_that_are_left_and_keeps_the_order() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04: x4 = 0.02, x3 = 0.03, x2 = 0.06, x1 = 0.04, which stays at the 0.06 before it.
    assert significance.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], abs=1e-12)
    assert significance.holm([0.9, 0.6]) == [1.0, 1.0]
    assert significance.holm([]) == []


def test_pairs_are_compared_over_the_seeds_that_both_have() -> None:
    values = {
        "a": {0: 0.50, 1: 0.60, 2: 0.70},
        "b": {0: 0.40, 1: 0.55, 2: 0.55, 3: 0.9},
        "c": {0: 0.40, 7: 0.20},
    }
    (pair,) = significance.all_differences(values)  # c has one seed in common with each: no spread
    # Differences 0.10, 0.05, 0.15: mean 0.1, standard deviation 0.05, error 0.05 / sqrt(3) = 0.0288675, t = sqrt(12)
    # with 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2) = 1 - sqrt(12 / 14); half 4.302653 x 0.0288675 = 0.1242069.
    assert (pair.first, pair.second, pair.seeds) == ("a", "b", 3)
    assert pair.mean == pytest.approx(0.1, abs=1e-12)
    assert pair.half == pytest.approx(0.1242069, abs=1e-6)
    assert pair.p == pair.corrected == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-9)
    assert not pair.is_significant
    del values["a"][2]
    assert [pair.seeds for pair in significance.all_differences(values)] == [2]


def pair(first: str, second: str, mean: float, corrected: float) -> significance.Difference:
    return significance.Difference(
        first=first, second=second, seeds=5, mean=mean, half=0.02, p=corrected / 3, corrected=corrected
    )


def test_the_report_compares_each_method_with_the_reference_and_counts_all_pairs() -> None:
    pairs = [pair("dapo", "grpo", 0.05, 0.006), pair("dapo", "kimi", -0.01, 1.0), pair("grpo", "kimi", -0.06, 0.00003)]
    # p is a third of what is corrected over all three pairs: 0.002 and 0.00001. Of the two against grpo the smaller is
    # doubled, the larger stays.
    assert significance.report(pairs, "grpo").splitlines() == [
        "| against `grpo` | difference | 95 % interval | p | p after Holm |  |",
        "|---|---|---|---|---|---|",
        "| `kimi` | +0.060 | +0.040 to +0.080 | <0.0001 | <0.0001 | significant |",
        "| `dapo` | +0.050 | +0.030 to +0.070 | 0.0020 | 0.0020 | significant |",
        "",
        significance.method_text(pairs, 2),
    ]
    text = significance.method_text(pairs, 2)
    assert "over 5 seeds" in text
    assert "correction over the 2 comparisons of the table" in text
    assert "Of all 3 pairs 2 differ significantly" in text
