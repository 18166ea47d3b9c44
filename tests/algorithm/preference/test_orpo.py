"""ORPO by hand: arXiv 2403.07691, equations 4, 6 and 7."""

from __future__ import annotations

import math

import pytest

from rlft.algorithm.preference.orpo import Orpo


def test_loss_and_gradient_of_a_pair_by_hand(compute) -> None:
    # Over 2 tokens p = 3/4, odds 3; over 4 tokens p = 1/2, odds 1: the log odds ratio is log 3, -log sigmoid of it
    # log 4/3 with slope -1/4. By a log-prob: 1 / (1 - p) / length = 4/2 and 2/4. beta = 1/2: -1/2 x 1/4 x 2 and
    # 1/2 x 1/4 x 1/2. Imitation adds -log 3/4 = log 4/3, slope -1/2 by the better one's log-prob.
    logprobs = [2 * math.log(3 / 4), 4 * math.log(1 / 2)]
    loss, gradient, metrics = compute(Orpo(beta=0.5, sft_coef=1.0), logprobs, [2, 4], None)
    assert loss == pytest.approx(1.5 * math.log(4 / 3), abs=1e-12)
    assert gradient == pytest.approx([-1 / 4 - 1 / 2, 1 / 16], abs=1e-12)
    assert metrics["loss/sft"] == pytest.approx(math.log(4 / 3), abs=1e-12)
    assert metrics["loss/preference"] == pytest.approx(math.log(4 / 3) / 2, abs=1e-12)
    assert metrics["pairs/margin"] == pytest.approx(math.log(3), abs=1e-12)
