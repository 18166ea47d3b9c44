"""The loss of a reward model, by hand."""

import math

import pytest
import torch

from rlft.algorithm.preference.bradley_terry import BradleyTerry
from rlft.algorithm.preference.preference_loss import RankedValues


def scores(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def ranked(values):
    return RankedValues(values=values, lengths=torch.ones_like(values), reference=None)


def ranking_loss(values, ranks, margin):
    return BradleyTerry(margin=margin)(ranked(values), ranks)[0]


def test_the_loss_of_a_ranking_is_the_mean_over_its_pairs():
    # Scores 2 log 3, log 3, 0 of ranks 2, 1, 0: leads of log 3, 2 log 3, log 3 whose -log sigmoid are log(1 + 1/3),
    # log(1 + 1/9), log(1 + 1/3): together log(4/3 x 10/9 x 4/3) = log(160/81), over 3 pairs.
    log3 = math.log(3)
    given = scores(2 * log3, log3, 0.0)
    loss = ranking_loss(given, [2.0, 1.0, 0.0], margin=0.0)
    assert loss.item() == pytest.approx(math.log(160 / 81) / 3, abs=1e-12)
    # The slope of a pair is sigmoid(lead) - 1: -1/4, -1/10, -1/4. First: (-1/4 - 1/10) / 3, last the opposite, and the
    # middle one loses as much by the first as it wins over the last.
    (gradient,) = torch.autograd.grad(loss, given)
    assert gradient.tolist() == pytest.approx([-0.35 / 3, 0.0, 0.35 / 3], abs=1e-12)


def test_many_ranked_completions_weigh_no_more_than_a_pair():
    # Equal scores: every pair costs log 2, and so does the mean of 1, 3 or 15 pairs.
    for k in (2, 3, 6):
        loss = ranking_loss(torch.zeros(k, dtype=torch.float64), list(range(k)), margin=0.0)
        assert loss.item() == pytest.approx(math.log(2), abs=1e-12)


def test_the_margin_is_asked_for_per_unit_of_the_difference_of_ranks():
    # Ranks 2 and 0, margin log(3) / 2: the better one should lead by log 3. Level: a lead of -log 3, -log sigmoid of
    # which is log(1 + 3) = log 4; leading by just log 3: log 2.
    log3 = math.log(3)
    assert ranking_loss(scores(5.0, 5.0), [2.0, 0.0], margin=log3 / 2).item() == pytest.approx(math.log(4), abs=1e-12)
    assert ranking_loss(scores(log3, 0.0), [2.0, 0.0], margin=log3 / 2).item() == pytest.approx(math.log(2), abs=1e-12)


def test_ranks_only_order_and_their_size_counts_by_the_margin_alone():
    given = scores(0.3, -0.2, 0.9)
    assert torch.equal(ranking_loss(given, [9.0, 5.0, -7.0], 0.0), ranking_loss(given, [2.0, 1.0, 0.0], 0.0))
    assert not torch.equal(ranking_loss(given, [9.0, 5.0, -7.0], 0.1), ranking_loss(given, [2.0, 1.0, 0.0], 0.1))


def test_a_rankings_gradient_agrees_with_central_differences():
    given, ranks = scores(0.3, -1.2, 2.0, 0.1), [3.0, 1.0, 1.0, 0.5]
    (gradient,) = torch.autograd.grad(ranking_loss(given, ranks, margin=0.4), given)
    h = 1e-5  # error: h^2 / 6 times the third derivative, at most 1/8: 2e-12, rounding 1e-11
    for i in range(4):
        step = h * torch.eye(4, dtype=torch.float64)[i]
        more, less = (ranking_loss(given.detach() + s, ranks, margin=0.4) for s in (step, -step))
        assert ((more - less) / (2 * h)).item() == pytest.approx(gradient[i].item(), abs=1e-9)


def test_a_ranking_without_a_difference_costs_nothing():
    given = scores(1.0, 2.0)
    loss = ranking_loss(given, [1.0, 1.0], margin=1.0)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, given)[0].tolist() == [0.0, 0.0]


def test_accuracy_is_a_share_of_the_pairs_and_a_tie_counts_half():
    # First over second is a tie, first over third won, second over third won: 2.5 of 3. Then two pairs: won, lost.
    for given, ranks, expected in (([1.0, 1.0, 0.5], [2, 1, 0], 2.5 / 3), ([1.0, 0.0, 0.5], [1, 1, 0], 1 / 2)):
        metrics = BradleyTerry(margin=0.0)(ranked(scores(*given)), ranks)[1]
        assert metrics["accuracy/pairs"].item() == pytest.approx(expected, abs=1e-12)


def test_an_evaluation_has_no_margin_and_tells_the_scores_of_both_ends():
    values = ranked(scores(3.0, 1.0, -2.0))
    found = BradleyTerry(margin=5.0).evaluated(values, [2, 1, 0])
    assert found["loss"] == ranking_loss(values.values, [2, 1, 0], 0.0)
    assert (found["score_best"], found["score_worst"]) == (3.0, -2.0)
