"""SimPO by hand: arXiv 2405.14734, equation 6."""

from __future__ import annotations

import math

import pytest

from rlft.algorithm.preference.simpo import SimPo

LOG3 = math.log(3)


def test_loss_and_gradient_of_a_pair_by_hand(compute) -> None:
    # beta = 2: rewards 2 x -4 / 4 = -2 and 2 x (-2 - log 3) / 2 = -2 - log 3, margin log 3: log 4/3, whose slope is
    # -1/4 by the margin, and by the log-probs 2/4 and -2/2 times that.
    loss, gradient, metrics = compute(
        SimPo(beta=2.0, gamma=0.0, label_smoothing=0.0, sft_coef=0.0), [-4.0, -2 - LOG3], [4, 2], None
    )
    assert loss == pytest.approx(math.log(4 / 3), abs=1e-12)
    assert gradient == pytest.approx([-1 / 8, 1 / 4], abs=1e-12)
    assert metrics["pairs/chosen_reward"] == -2.0
    assert metrics["pairs/rejected_reward"] == pytest.approx(-2 - LOG3, abs=1e-12)


def test_gamma_is_what_the_better_one_should_win_by(compute) -> None:
    # A margin of 2 log 3 less gamma = log 3 is log 3 again; the accuracy is that of the margin without gamma.
    loss_of = SimPo(beta=1.0, gamma=LOG3, label_smoothing=0.0, sft_coef=0.0)
    loss, gradient, _ = compute(loss_of, [-2.0, -2 - 2 * LOG3], [1, 1], None)
    assert loss == pytest.approx(math.log(4 / 3), abs=1e-12)
    assert gradient == pytest.approx([-1 / 4, 1 / 4], abs=1e-12)
    assert compute(loss_of, [-2.0, -2 - LOG3 / 2], [1, 1], None)[2]["accuracy/pairs"] == 1.0


def test_label_smoothing_takes_pairs_the_other_way_round(compute) -> None:
    loss_of = SimPo(beta=1.0, gamma=0.0, label_smoothing=0.25, sft_coef=0.0)
    loss, gradient, _ = compute(loss_of, [-2.0, -2 - LOG3], [1, 1], None)
    assert loss == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4), abs=1e-12)
    assert gradient == pytest.approx([0.0, 0.0], abs=1e-12)


def test_label_smoothing_turns_the_margin_less_gamma_round(compute) -> None:
    # Margin 2 log 3 less gamma = log 3 is log 3: 3/4 log(1 + 1/3) + 1/4 log(1 + 3); the margin alone, or gamma with the
    # other sign in the second term, would give 3/4 log(10/9) + 1/4 log(10) and 3/4 log(4/3) + 1/4 log(28).
    loss_of = SimPo(beta=1.0, gamma=LOG3, label_smoothing=0.25, sft_coef=0.0)
    loss, gradient, _ = compute(loss_of, [-2.0, -2 - 2 * LOG3], [1, 1], None)
    assert loss == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4), abs=1e-12)
    # d / d margin = -3/4 sigmoid(-log 3) + 1/4 sigmoid(log 3) = -3/16 + 3/16
    assert gradient == pytest.approx([0.0, 0.0], abs=1e-12)
