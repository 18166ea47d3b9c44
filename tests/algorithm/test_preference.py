"""Losses of pairs and of rankings, of completions with log-probs by hand, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlft.algorithm.preference import (
    BradleyTerry,
    Dpo,
    Ipo,
    Orpo,
    PreferenceLoss,
    RankedValues,
    RankingLoss,
    SimPo,
    accuracy,
    bradley_terry,
    log_odds,
    logistic,
    pairs_of_ranking,
)
from rlft.config import catalog
from rlft.config.compose import compose
from rlft.config.instantiate import instantiate

LOG3 = math.log(3)

Computed = tuple[float, list[float], dict[str, float]]
"""(loss, its gradient by the log-probs, metrics)."""


def ranked(
    logprobs: Tensor | Sequence[float], lengths: Sequence[int], reference: Sequence[float] | None
) -> RankedValues:
    """Of completions with these log-probs in nats, summed over their tokens."""
    double = torch.float64
    return RankedValues(
        values=torch.as_tensor(logprobs, dtype=double),
        lengths=torch.tensor(lengths, dtype=double),
        reference=None if reference is None else torch.tensor(reference, dtype=double),
    )


@pytest.fixture
def compute() -> Callable[..., Computed]:
    """Computes a loss: `compute(loss, logprobs, lengths, reference, ranks)`."""

    def computed(
        loss: RankingLoss,
        logprobs: Sequence[float],
        lengths: Sequence[int],
        reference: Sequence[float] | None,
        ranks: Sequence[float] = (1.0, 0.0),
    ) -> Computed:
        leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
        total, metrics = loss(ranked(leaf, lengths, reference), ranks)
        (gradient,) = torch.autograd.grad(total, leaf)
        return total.item(), gradient.tolist(), {name: value.item() for name, value in metrics.items()}

    return computed


def scores(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradients(chosen, rejected, margin=None):
    loss = bradley_terry(chosen, rejected, margin)
    ours, theirs = torch.autograd.grad(loss, (chosen, rejected))
    return loss.item(), ours.tolist(), theirs.tolist()


def test_loss_and_gradient_by_hand():
    # sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4, sigmoid(0) = 1/2: the mean of log 4/3, log 4, log 2 is log(32/3) / 3.
    # -log sigmoid(x) has the slope sigmoid(x) - 1: -1/4, -3/4, -1/2, over 3 pairs.
    loss, ours, theirs = gradients(scores(5 + LOG3, -2.0, 7.0), scores(5.0, LOG3 - 2, 7.0))
    assert loss == pytest.approx(math.log(32 / 3) / 3, abs=1e-12)
    assert ours == pytest.approx([-1 / 12, -1 / 4, -1 / 6], abs=1e-12)
    assert theirs == pytest.approx([1 / 12, 1 / 4, 1 / 6], abs=1e-12)


def test_the_margin_is_what_the_chosen_score_must_win_by():
    # A lead of log 3 with a margin of log 3 is a tie: log 2, slope -1/2; with 2 log 3 a loss: log 4, slope -3/4.
    margin = torch.tensor([LOG3, 2 * LOG3], dtype=torch.float64)
    loss, ours, _ = gradients(scores(LOG3, LOG3), scores(0.0, 0.0), margin)
    assert loss == pytest.approx((math.log(2) + math.log(4)) / 2, abs=1e-12)
    assert ours == pytest.approx([-1 / 4, -3 / 8], abs=1e-12)


def test_a_difference_of_1000_has_a_finite_loss_and_gradient():
    # -log sigmoid(-1000) = 1000 + log(1 + e^-1000) = 1000, slope -1; at +1000: e^-1000 = 0, slope 0.
    assert gradients(scores(-500.0), scores(500.0)) == (1000.0, [-1.0], [1.0])
    assert gradients(scores(500.0), scores(-500.0)) == (0.0, [0.0], [0.0])


def test_a_well_separated_pair_keeps_its_small_loss():
    # log(1 + e^-40) = e^-40 to 17 digits, where -log of a sigmoid rounded to 1 would be 0.
    loss, ours, _ = gradients(scores(40.0), scores(0.0))
    assert loss == pytest.approx(math.exp(-40), rel=1e-12)
    assert ours == pytest.approx([-math.exp(-40)], rel=1e-12)


def test_without_pairs_loss_and_accuracy_are_0_not_nan():
    nothing = scores()
    assert gradients(nothing, nothing + 0) == (0.0, [], [])
    assert accuracy(nothing, nothing).item() == 0


# -- margins ---------------------------------------------------------------------------------------------------------


def test_label_smoothing_takes_a_share_of_the_pairs_the_other_way_round():
    # 3/4 log 4/3 + 1/4 log 4 at m = log 3, where sigmoid(m) = 1 - 1/4: the slope sigmoid(m) - (1 - e) is 0, and at
    # m = 0 it is 1/2 - 3/4.
    margins = scores(math.log(3), 0.0)
    loss = logistic(margins, 0.25)
    assert loss.tolist() == pytest.approx([0.75 * math.log(4 / 3) + 0.25 * math.log(4), math.log(2)], abs=1e-12)
    assert torch.autograd.grad(loss.sum(), margins)[0].tolist() == pytest.approx([0.0, -1 / 4], abs=1e-12)


def test_a_margin_of_1000_has_a_finite_loss_with_smoothing_too():
    # -0.75 log sigmoid(1000) - 0.25 log sigmoid(-1000) = 0 + 250, slope 1 - 0.75.
    margins = scores(1000.0)
    loss = logistic(margins, 0.25)
    assert loss.tolist() == [250.0]
    assert torch.autograd.grad(loss.sum(), margins)[0].tolist() == [0.25]


def test_the_log_odds_of_certainty_are_finite_and_have_no_slope():
    # lp = 0 counts as -eps, whose odds are 1 / eps to first order.
    mean_logprobs = scores(0.0)
    found = log_odds(mean_logprobs)
    assert found.item() == pytest.approx(-math.log(torch.finfo(torch.float64).eps), abs=1e-12)
    assert torch.autograd.grad(found.sum(), mean_logprobs)[0].tolist() == [0.0]


# -- rankings --------------------------------------------------------------------------------------------------------
def test_k_different_ranks_are_k_times_k_minus_1_over_2_pairs():
    assert pairs_of_ranking([1.0, 0.0]) == ([0], [1])
    assert pairs_of_ranking([0.0, 1.0]) == ([1], [0])  # in any order: a higher rank is better
    assert pairs_of_ranking([3.0, 2.0, 1.0]) == ([0, 0, 1], [1, 2, 2])
    for k in range(1, 8):
        better, worse = pairs_of_ranking([-0.5 * i for i in range(k)])
        assert len(set(zip(better, worse, strict=True))) == len(better) == k * (k - 1) // 2


def test_equal_ranks_are_no_pair():
    # Of 4 x 3 / 2 = 6 pairs, (0, 1) and (2, 3) are ties.
    assert pairs_of_ranking([1.0, 1.0, 0.0, 0.0]) == ([0, 0, 1, 1], [2, 3, 2, 3])
    assert pairs_of_ranking([1.0, 1.0]) == ([], [])


LOSSES = catalog.choices("loss")


def chosen(name: str, **keys: Any) -> PreferenceLoss:
    plain = compose(["preferences.path=unread", f"loss={name}"], command="dpo")["loss"]
    return instantiate({**plain, **keys}, "loss")


def test_a_ranking_is_the_mean_over_its_pairs(compute) -> None:
    # Rewards 2 log 3, log 3, 0: margins log 3, 2 log 3, log 3, -log sigmoid of which are log 4/3, log 10/9, log 4/3.
    # The slopes sigmoid - 1 are -1/4, -1/10, -1/4: first (-1/4 - 1/10) / 3, last the opposite, the middle none.
    loss_of = Dpo(beta=1.0, label_smoothing=0.0, per_token=False, sft_coef=0.0)
    loss, gradient, metrics = compute(loss_of, [2 * LOG3, LOG3, 0.0], [1, 2, 4], [0.0] * 3, [2.0, 1.0, 0.5])
    assert loss == pytest.approx(math.log(160 / 81) / 3, abs=1e-12)
    assert gradient == pytest.approx([-0.35 / 3, 0.0, 0.35 / 3], abs=1e-12)
    # Better ones: the first twice, the second; worse ones: the second, the last twice.
    assert metrics["pairs/chosen_reward"] == pytest.approx(5 * LOG3 / 3, abs=1e-12)
    assert metrics["pairs/rejected_reward"] == pytest.approx(LOG3 / 3, abs=1e-12)
    assert metrics["pairs/margin"] == pytest.approx(4 * LOG3 / 3, abs=1e-12)


def test_imitation_is_of_the_best_completions_and_by_their_tokens(compute) -> None:
    # Two of rank 1 with 6 nats over 3 tokens and 2 over 4: (2 + 0.5) / 2 = 1.25, of weight 1/2; slopes -1/2 / 2 / 3
    # and / 4. Equal rewards: log 2 of every pair, whose slopes of 1/2 each are halved for the best and add up below.
    loss_of = Dpo(beta=1.0, label_smoothing=0.0, per_token=False, sft_coef=0.5)
    loss, gradient, metrics = compute(loss_of, [-6.0, -2.0, -9.0], [3, 4, 5], [-6.0, -2.0, -9.0], [1.0, 1.0, 0.0])
    assert loss == pytest.approx(math.log(2) + 0.5 * 1.25, abs=1e-12)
    assert gradient == pytest.approx([-1 / 4 - 1 / 12, -1 / 4 - 1 / 16, 1 / 2], abs=1e-12)
    assert metrics["loss/sft"] == pytest.approx(1.25, abs=1e-12)
    assert metrics["loss/preference"] == pytest.approx(math.log(2), abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_order_of_ranks_counts(name: str, compute) -> None:
    loss_of = chosen(name)
    reference = [-3.0, -4.0, -3.0] if loss_of.needs_reference else None
    given = ([-3.1, -4.7, -2.2], [4, 3, 5], reference)
    assert compute(loss_of, *given, [9.0, 0.5, -7.0]) == compute(loss_of, *given, [2.0, 1.0, 0.0])


@pytest.mark.parametrize("name", LOSSES)
def test_a_better_completion_that_becomes_more_likely_lowers_the_loss(name: str, compute) -> None:
    loss_of = chosen(name)
    reference = [-3.0, -4.0] if loss_of.needs_reference else None
    _, gradient, _ = compute(loss_of, [-3.0, -4.0], [4, 3], reference)
    assert gradient[0] < 0 < gradient[1]


def test_metrics_carry_no_gradient() -> None:
    logprobs = torch.tensor([-3.0, -4.0], requires_grad=True)
    lengths = torch.tensor([2.0, 3.0])
    total, metrics = chosen("orpo")(RankedValues(values=logprobs, lengths=lengths, reference=None), [1.0, 0.0])
    assert total.requires_grad
    assert not any(value.requires_grad for value in metrics.values())


# -- Bradley and Terry's ---------------------------------------------------------------------------------------------
def scored(values):
    return RankedValues(values=values, lengths=torch.ones_like(values), reference=None)


def ranking_loss(values, ranks, margin):
    return BradleyTerry(margin=margin)(scored(values), ranks)[0]


def test_the_margin_is_asked_for_per_unit_of_the_difference_of_ranks():
    # Ranks 2 and 0, margin log(3) / 2: the better one should lead by log 3. Level: a lead of -log 3, -log sigmoid of
    # which is log(1 + 3) = log 4; leading by just log 3: log 2.
    assert ranking_loss(scores(5.0, 5.0), [2.0, 0.0], margin=LOG3 / 2).item() == pytest.approx(math.log(4), abs=1e-12)
    assert ranking_loss(scores(LOG3, 0.0), [2.0, 0.0], margin=LOG3 / 2).item() == pytest.approx(math.log(2), abs=1e-12)


def test_ranks_only_order_and_their_size_counts_by_the_margin_alone():
    given = scores(0.3, -0.2, 0.9)
    assert torch.equal(ranking_loss(given, [9.0, 5.0, -7.0], 0.0), ranking_loss(given, [2.0, 1.0, 0.0], 0.0))
    assert not torch.equal(ranking_loss(given, [9.0, 5.0, -7.0], 0.1), ranking_loss(given, [2.0, 1.0, 0.0], 0.1))


def test_a_ranking_without_a_difference_costs_nothing():
    given = scores(1.0, 2.0)
    loss = ranking_loss(given, [1.0, 1.0], margin=1.0)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, given)[0].tolist() == [0.0, 0.0]


def test_accuracy_is_a_share_of_the_pairs_and_a_tie_counts_half():
    # First over second is a tie, first over third won, second over third won: 2.5 of 3. Then two pairs: won, lost.
    for given, ranks, expected in (([1.0, 1.0, 0.5], [2, 1, 0], 2.5 / 3), ([1.0, 0.0, 0.5], [1, 1, 0], 1 / 2)):
        metrics = BradleyTerry(margin=0.0)(scored(scores(*given)), ranks)[1]
        assert metrics["accuracy/pairs"].item() == pytest.approx(expected, abs=1e-12)


def test_an_evaluation_has_no_margin_and_tells_the_scores_of_both_ends():
    values = scored(scores(3.0, 1.0, -2.0))
    found = BradleyTerry(margin=5.0).evaluated(values, [2, 1, 0])
    assert found["loss"] == ranking_loss(values.values, [2, 1, 0], 0.0)
    assert (found["score_best"], found["score_worst"]) == (3.0, -2.0)


# -- those of rlft dpo -------------------------------------------------------------------------------------------------
def made(beta: float = 0.5, label_smoothing: float = 0.0, per_token: bool = False, sft_coef: float = 0.0) -> Dpo:
    return Dpo(beta=beta, label_smoothing=label_smoothing, per_token=per_token, sft_coef=sft_coef)


def test_loss_and_gradient_of_a_pair_by_hand_dpo(compute) -> None:
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


def test_per_token_the_log_ratio_is_a_mean_over_the_completions_tokens(compute) -> None:
    # Log-ratios 4 log 3 over 4 tokens and 0: margin 1/2 x (log 3 - 0). sigmoid = sqrt 3 / (1 + sqrt 3); the slope by
    # a log-prob is beta / length times sigmoid - 1.
    slope = -1 / (1 + math.sqrt(3))
    loss, gradient, _ = compute(made(per_token=True), [4 * LOG3 - 9, -2.0], [4, 2], [-9.0, -2.0])
    assert loss == pytest.approx(math.log(1 + 1 / math.sqrt(3)), abs=1e-12)
    assert gradient == pytest.approx([0.5 / 4 * slope, -0.5 / 2 * slope], abs=1e-12)


IPO = {"beta": 0.25, "sft_coef": 0.0}


def test_loss_and_gradient_of_a_pair_by_hand_ipo(compute) -> None:
    # tau = 1/4: the log-ratios 3 and -0.5 differ by h = 3.5, and should by 1 / (2 tau) = 2: (3.5 - 2)^2, slope 2 x 1.5.
    loss, gradient, metrics = compute(Ipo(**IPO, per_token=False), [-1.0, -5.5], [2, 4], [-4.0, -5.0])
    assert loss == pytest.approx(2.25, abs=1e-12)
    assert gradient == pytest.approx([3.0, -3.0], abs=1e-12)
    assert metrics["pairs/margin"] == pytest.approx(0.25 * 3.5, abs=1e-12)  # in units of reward, as DPO's


def test_per_token_the_log_ratios_are_means(compute) -> None:
    # 3 over 2 tokens and -0.5 over 4: h = 1.5 + 0.125, less 2 is -0.375; slopes 2 x -0.375 / 2 and / 4.
    loss, gradient, _ = compute(Ipo(**IPO, per_token=True), [-1.0, -5.5], [2, 4], [-4.0, -5.0])
    assert loss == pytest.approx(0.375**2, abs=1e-12)
    assert gradient == pytest.approx([-0.375, 0.1875], abs=1e-12)


def test_by_default_ipo_takes_means_over_tokens_and_dpo_sums() -> None:
    words = ["preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64"]
    chosen = {loss: compose([*words, f"loss={loss}"], command="dpo")["loss"]["per_token"] for loss in ("ipo", "dpo")}
    assert chosen == {"ipo": True, "dpo": False}


def test_loss_and_gradient_of_a_pair_by_hand_orpo(compute) -> None:
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


def test_loss_and_gradient_of_a_pair_by_hand_simpo(compute) -> None:
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


def test_label_smoothing_turns_the_margin_less_gamma_round(compute) -> None:
    # Margin 2 log 3 less gamma = log 3 is log 3: 3/4 log(1 + 1/3) + 1/4 log(1 + 3); the margin alone, or gamma with the
    # other sign in the second term, would give 3/4 log(10/9) + 1/4 log(10) and 3/4 log(4/3) + 1/4 log(28).
    loss_of = SimPo(beta=1.0, gamma=LOG3, label_smoothing=0.25, sft_coef=0.0)
    loss, gradient, _ = compute(loss_of, [-2.0, -2 - 2 * LOG3], [1, 1], None)
    assert loss == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4), abs=1e-12)
    # d / d margin = -3/4 sigmoid(-log 3) + 1/4 sigmoid(log 3) = -3/16 + 3/16
    assert gradient == pytest.approx([0.0, 0.0], abs=1e-12)
