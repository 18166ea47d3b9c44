"""IPO by hand: arXiv 2310.12036, equation 17."""

from __future__ import annotations

import pytest

from rlft.algorithm.preference.ipo import Ipo
from rlft.config.compose import compose


def test_loss_and_gradient_of_a_pair_by_hand(compute) -> None:
    # tau = 1/4: the log-ratios 3 and -0.5 differ by h = 3.5, and should by 1 / (2 tau) = 2: (3.5 - 2)^2, slope 2 x 1.5.
    loss, gradient, metrics = compute(Ipo(beta=0.25, per_token=False, sft_coef=0.0), [-1.0, -5.5], [2, 4], [-4.0, -5.0])
    assert loss == pytest.approx(2.25, abs=1e-12)
    assert gradient == pytest.approx([3.0, -3.0], abs=1e-12)
    assert metrics["pairs/margin"] == pytest.approx(0.25 * 3.5, abs=1e-12)  # in units of reward, as DPO's


def test_at_the_margin_that_is_asked_for_nothing_is_learned(compute) -> None:
    loss, gradient, _ = compute(Ipo(beta=0.25, per_token=False, sft_coef=0.0), [-3.0, -6.0], [2, 4], [-4.0, -5.0])
    assert (loss, gradient) == (0.0, [0.0, -0.0])


def test_per_token_the_log_ratios_are_means(compute) -> None:
    # 3 over 2 tokens and -0.5 over 4: h = 1.5 + 0.125, less 2 is -0.375; slopes 2 x -0.375 / 2 and / 4.
    loss, gradient, _ = compute(Ipo(beta=0.25, per_token=True, sft_coef=0.0), [-1.0, -5.5], [2, 4], [-4.0, -5.0])
    assert loss == pytest.approx(0.375**2, abs=1e-12)
    assert gradient == pytest.approx([-0.375, 0.1875], abs=1e-12)


def test_by_default_ipo_takes_means_over_tokens_and_dpo_sums() -> None:
    words = ["preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64"]
    chosen = {loss: compose([*words, f"loss={loss}"], verb="dpo")["loss"]["per_token"] for loss in ("ipo", "dpo")}
    assert chosen == {"ipo": True, "dpo": False}
