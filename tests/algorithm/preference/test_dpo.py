"""DPO by hand: arXiv 2305.18290, equation 7."""

from __future__ import annotations

import math

import pytest

from rlft.algorithm.preference.dpo import Dpo

LOG3 = math.log(3)


def made(beta: float = 0.5, label_smoothing: float = 0.0, per_token: bool = False, sft_coef: float = 0.0) -> Dpo:
    return Dpo(beta=beta, label_smoothing=label_smoothing, per_token=per_token, sft_coef=sft_coef)


def test_loss_and_gradient_of_a_pair_by_hand(compute) -> None:
    # Log-ratios log 3 and -log 3, rewards with beta = 1/2 half of them, margin log 3: loss -log sigmoid(log 3) =
    # log 4/3, whose slope by the margin is 3/4 - 1, and by a log-prob beta times that: -1/8 and 1/8.
    loss, gradient, metrics = compute(made(), [LOG3 - 4, -LOG3 - 5], [3, 2], [-4.0, -5.0])
    assert loss == pytest.approx(math.log(4 / 3), abs=1e-12)
    assert gradient == pytest.approx([-1 / 8, 1 / 8], abs=1e-12)
    assert metrics["pairs/margin"] == pytest.approx(LOG3, abs=1e-12)
    assert metrics["pairs/chosen_reward"] == pytest.approx(LOG3 / 2, abs=1e-12)
    assert metrics["pairs/rejected_reward"] == pytest.approx(-LOG3 / 2, abs=1e-12)
    assert metrics["pairs/chosen_logprob"] == pytest.approx((LOG3 - 4) / 3, abs=1e-12)
    assert metrics["pairs/rejected_logprob"] == pytest.approx((-LOG3 - 5) / 2, abs=1e-12)
    assert metrics["accuracy/pairs"] == 1.0


def test_a_policy_that_is_its_reference_loses_log_2_and_is_right_by_half(compute) -> None:
    # The slope of the margin is -1/2: the gradient is beta / 2 each way, whatever the completions.
    loss, gradient, metrics = compute(made(beta=0.1), [-7.0, -1.0], [3, 9], [-7.0, -1.0])
    assert loss == pytest.approx(math.log(2), abs=1e-12)
    assert gradient == pytest.approx([-0.05, 0.05], abs=1e-12)
    assert metrics["accuracy/pairs"] == 0.5


def test_label_smoothing_takes_pairs_the_other_way_round(compute) -> None:
    # At a margin of log 3 the smoothed loss with e = 1/4 is at its least: no gradient.
    loss, gradient, _ = compute(made(label_smoothing=0.25), [LOG3 - 4, -LOG3 - 5], [3, 2], [-4.0, -5.0])
    assert loss == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4), abs=1e-12)
    assert gradient == pytest.approx([0.0, 0.0], abs=1e-12)


def test_per_token_the_log_ratio_is_a_mean_over_the_completions_tokens(compute) -> None:
    # Log-ratios 4 log 3 over 4 tokens and 0: margin 1/2 x (log 3 - 0). sigmoid = sqrt 3 / (1 + sqrt 3); the slope by
    # a log-prob is beta / length times sigmoid - 1.
    slope = -1 / (1 + math.sqrt(3))
    loss, gradient, _ = compute(made(per_token=True), [4 * LOG3 - 9, -2.0], [4, 2], [-9.0, -2.0])
    assert loss == pytest.approx(math.log(1 + 1 / math.sqrt(3)), abs=1e-12)
    assert gradient == pytest.approx([0.5 / 4 * slope, -0.5 / 2 * slope], abs=1e-12)
