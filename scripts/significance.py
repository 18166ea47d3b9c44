"""Intervals of a mean that was measured with a few seeds, by Student's t.

The values are taken as independent draws from a normal distribution, which five seeds can hardly show. With so few of
them only large differences are found: an interval that holds 0 does not mean "equal".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache


def two_sided_p(t: float, dof: int) -> float:
    """The probability that Student's t with `dof` degrees of freedom is at least as far from 0 as `t`, to rounding.

    P(|T| >= |t|) = I_x(dof / 2, 1 / 2) with x = dof / (dof + t^2): Abramowitz and Stegun, 26.7.1 with 26.5.2.
    """
    from mpmath import betainc

    if math.isinf(t):
        return 0.0
    return float(betainc(dof / 2, 0.5, 0, dof / (dof + t * t), regularized=True))


@cache
def t_quantile(share: float, dof: int) -> float:
    """The value that Student's t with `dof` degrees of freedom stays below with this probability, 0.5 to 1."""
    low, high = 0.0, 1.0
    while two_sided_p(high, dof) > 2 * (1 - share):
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if two_sided_p(middle, dof) > 2 * (1 - share) else (low, middle)
    return high


def half_interval(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half the width of the interval around the mean of the values that holds the true mean with this probability.

    Student's t with n - 1 degrees of freedom; None of a single value, which says nothing of how values vary.
    """
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return t_quantile((1 + confidence) / 2, len(values) - 1) * error
