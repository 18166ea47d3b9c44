import math

import pytest
import torch

from rlft.algorithm.ops.preference import accuracy, bradley_terry, log_odds, logistic, pairs_of_ranking


def scores(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradients(chosen, rejected, margin=None):
    loss = bradley_terry(chosen, rejected, margin)
    ours, theirs = torch.autograd.grad(loss, (chosen, rejected))
    return loss.item(), ours.tolist(), theirs.tolist()


def test_loss_and_gradient_by_hand():
    # sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4, sigmoid(0) = 1/2: the mean of log 4/3, log 4, log 2 is log(32/3) / 3.
    # -log sigmoid(x) has the slope sigmoid(x) - 1: -1/4, -3/4, -1/2, over 3 pairs.
    log3 = math.log(3)
    loss, ours, theirs = gradients(scores(5 + log3, -2.0, 7.0), scores(5.0, log3 - 2, 7.0))
    assert loss == pytest.approx(math.log(32 / 3) / 3, abs=1e-12)
    assert ours == pytest.approx([-1 / 12, -1 / 4, -1 / 6], abs=1e-12)
    assert theirs == pytest.approx([1 / 12, 1 / 4, 1 / 6], abs=1e-12)


def test_the_margin_is_what_the_chosen_score_must_win_by():
    # A lead of log 3 with a margin of log 3 is a tie: log 2, slope -1/2; with 2 log 3 a loss: log 4, slope -3/4.
    log3 = math.log(3)
    margin = torch.tensor([log3, 2 * log3], dtype=torch.float64)
    loss, ours, _ = gradients(scores(log3, log3), scores(0.0, 0.0), margin)
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


def test_gradient_agrees_with_central_differences():
    chosen, rejected, margin = scores(0.3, -1.2, 2.0), scores(0.1, 0.4, -0.5), scores(0.2, 0.0, 1.0).detach()
    _, ours, theirs = gradients(chosen, rejected, margin)
    h = 1e-5  # the error of the difference is h^2 / 6 times the third derivative, at most 1/8: 2e-12, rounding 1e-11
    for i in range(3):
        step = h * torch.eye(3, dtype=torch.float64)[i]
        by_chosen = [bradley_terry(chosen + s, rejected, margin) for s in (step, -step)]
        by_rejected = [bradley_terry(chosen, rejected + s, margin) for s in (step, -step)]
        assert ((by_chosen[0] - by_chosen[1]) / (2 * h)).item() == pytest.approx(ours[i], abs=1e-10)
        assert ((by_rejected[0] - by_rejected[1]) / (2 * h)).item() == pytest.approx(theirs[i], abs=1e-10)


def test_only_differences_of_scores_count():
    chosen, rejected = scores(0.25, -1.5), scores(1.0, 0.5)
    assert torch.equal(bradley_terry(chosen + 8, rejected + 8), bradley_terry(chosen, rejected))


def test_accuracy_is_the_share_of_pairs_won_and_a_tie_counts_half():
    # Won, lost, tied, won by the smallest step: 2.5 of 4.
    chosen = torch.tensor([2.0, -1.0, 0.5, math.nextafter(3.0, 4)], dtype=torch.float64)
    assert accuracy(chosen, torch.tensor([1.0, 0.0, 0.5, 3.0], dtype=torch.float64)).item() == 2.5 / 4


def test_without_pairs_loss_and_accuracy_are_0_not_nan():
    nothing = scores()
    assert gradients(nothing, nothing + 0) == (0.0, [], [])
    assert accuracy(nothing, nothing).item() == 0


# -- margins ---------------------------------------------------------------------------------------------------------
def test_the_logistic_loss_of_each_margin_and_its_slope_by_hand():
    # sigmoid(log 3) = 3/4 and sigmoid(-log 3) = 1/4: -log sigmoid are log 4/3 and log 4, with slopes -1/4 and -3/4.
    margins = scores(math.log(3), -math.log(3))
    loss = logistic(margins)
    assert loss.tolist() == pytest.approx([math.log(4 / 3), math.log(4)], abs=1e-12)
    assert torch.autograd.grad(loss.sum(), margins)[0].tolist() == pytest.approx([-1 / 4, -3 / 4], abs=1e-12)


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


def test_log_odds_and_their_slope_by_hand():
    # p = 3/4: log 3, and d/dlp log(p / (1 - p)) = 1 / (1 - p) = 4. p = 1/2: 0 and 2. p = e^-50: -50 to 21 digits, 1.
    mean_logprobs = scores(math.log(3 / 4), math.log(1 / 2), -50.0)
    found = log_odds(mean_logprobs)
    assert found.tolist() == pytest.approx([math.log(3), 0.0, -50.0], abs=1e-12)
    assert torch.autograd.grad(found.sum(), mean_logprobs)[0].tolist() == pytest.approx([4.0, 2.0, 1.0], abs=1e-12)


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
