import math

import pytest
from in_one_test import each

from rlft.algorithm.ops.kl import KLController, next_coefficient

ADAPTIVE, PROPORTIONAL = KLController.adaptive, KLController.proportional


def after(controller, kl, *, coef=0.25, target=3.0, gain=0.5):
    return next_coefficient(controller, coef, kl, target=target, gain=gain)


@each("kl", [0.0, 1.0, 3.0, 1e9])
def test_a_fixed_coefficient_never_moves(kl):
    assert after(KLController.fixed, kl) == 0.25


@each(
    ("kl", "expected"),
    [
        (0.0, 0.125),
        (math.nextafter(2.0, 0), 0.125),  # below 3 / 1.5 = 2
        (2.0, 0.25),  # on the edge: strictly below is meant
        (3.0, 0.25),
        (4.5, 0.25),  # on the edge 1.5 * 3
        (math.nextafter(4.5, 5), 0.5),
        (math.inf, 0.5),
    ],
)
def test_adaptive_halves_below_the_band_and_doubles_above_it_strictly(kl, expected):
    assert after(ADAPTIVE, kl) == expected


def test_adaptive_knows_no_gain():
    assert after(ADAPTIVE, 9.0, gain=0.0) == after(ADAPTIVE, 9.0, gain=7.0) == 0.5


@each(
    ("kl", "expected"),
    [
        (3.0, 0.25),
        (3.3, 0.25 * (1 + 0.5 * 0.1)),  # 10% too large
        (2.7, 0.25 * (1 - 0.5 * 0.1)),
        (3.6, 0.25 * 1.1),  # 20% too large: the end of the range
        (30.0, 0.25 * 1.1),
        (math.inf, 0.25 * 1.1),
        (2.4, 0.25 * 0.9),
        (0.0, 0.25 * 0.9),
        (-1.0, 0.25 * 0.9),  # an estimate of the KL may be negative
    ],
)
def test_proportional_follows_the_relative_error_clipped_to_a_fifth(kl, expected):
    assert after(PROPORTIONAL, kl) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("controller", [ADAPTIVE, PROPORTIONAL])
def test_a_controlled_process_whose_kl_falls_with_the_coefficient_settles_at_its_target(controller):
    # KL = 1 / beta, target 3: beta settles where 1 / beta is within the band 2 .. 4.5, or at 1/3 exactly.
    coef = 100.0
    for _ in range(500):
        coef = after(controller, 1 / coef, coef=coef)
    if controller == ADAPTIVE:
        assert 2 <= 1 / coef <= 4.5
    else:
        # The error shrinks by the factor 1 - gain = 1/2 a step once it is below a fifth.
        assert 1 / coef == pytest.approx(3, rel=1e-12)
