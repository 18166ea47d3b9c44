"""Losses of pairs and of rankings, of completions with log-probs by hand, in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from in_one_test import each

from rlft.algorithm.preference import (
    BradleyTerry,
    Dpo,
    Ipo,
    Orpo,
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

LOG3, SQRT3 = math.log(3), math.sqrt(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A ranking, and what its loss is: log-probs in nats, summed over the tokens of each completion, or its scores."""

    loss: RankingLoss
    values: Sequence[float]
    lengths: Sequence[int] = (1, 1)
    reference: Sequence[float] | None = None
    ranks: Sequence[float] = (1.0, 0.0)
    expected: float
    gradient: Sequence[float]
    metrics: dict[str, float] = field(default_factory=dict)
    atol: float = 1e-12


def computed(loss, values, lengths=(1, 1), reference=None, ranks=(1.0, 0.0)):
    """(loss, its gradient by the values, metrics)."""
    leaf, others = scores(*values), [None if x is None else scores(*x).detach() for x in (lengths, reference)]
    total, metrics = loss(RankedValues(values=leaf, lengths=others[0], reference=others[1]), ranks)
    (gradient,) = torch.autograd.grad(total, leaf)
    assert not any(value.requires_grad for value in metrics.values())
    return total.item(), gradient.tolist(), {name: value.item() for name, value in metrics.items()}


def scores(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def dpo(beta=0.5, *, per_token=False, sft_coef=0.0):
    return Dpo(beta=beta, label_smoothing=0.0, per_token=per_token, sft_coef=sft_coef)


def simpo(beta, gamma=0.0, label_smoothing=0.0):
    return SimPo(beta=beta, gamma=gamma, label_smoothing=label_smoothing, sft_coef=0.0)


def ipo(*, per_token):
    return Ipo(beta=0.25, sft_coef=0.0, per_token=per_token)


CASES = {
    # sigmoid(log 3) = 3/4: -log of it is log 4/3, with the slope sigmoid - 1 by the margin.
    "a reward model's pair": Case(
        loss=BradleyTerry(margin=0.0), values=[5 + LOG3, 5.0], expected=math.log(4 / 3), gradient=[-1 / 4, 1 / 4]
    ),
    # -log sigmoid(-1000) = 1000 + log(1 + e^-1000) = 1000, slope -1; at +1000: e^-1000 = 0, slope 0.
    "a pair that is wrong by 1000": Case(
        loss=BradleyTerry(margin=0.0), values=[-500.0, 500.0], expected=1000.0, gradient=[-1.0, 1.0]
    ),
    "a pair that is right by 1000": Case(
        loss=BradleyTerry(margin=0.0), values=[500.0, -500.0], expected=0.0, gradient=[0.0, 0.0]
    ),
    # log(1 + e^-40) = e^-40 to 17 digits, where -log of a sigmoid rounded to 1 would be 0.
    "a well-separated pair": Case(
        loss=BradleyTerry(margin=0.0), values=[40.0, 0.0], expected=math.exp(-40),
        gradient=[-math.exp(-40), math.exp(-40)], atol=1e-30,
    ),
    # Ranks 2 and 0, margin log(3) / 2: the better one should lead by log 3. Level: a lead of -log 3, -log sigmoid of
    # which is log(1 + 3) = log 4; leading by just log 3: log 2.
    "level, with a margin by the ranks": Case(
        loss=BradleyTerry(margin=LOG3 / 2), values=[5.0, 5.0], ranks=[2.0, 0.0],
        expected=math.log(4), gradient=[-3 / 4, 3 / 4],
    ),
    "ahead by a margin by the ranks": Case(
        loss=BradleyTerry(margin=LOG3 / 2), values=[LOG3, 0.0], ranks=[2.0, 0.0],
        expected=math.log(2), gradient=[-1 / 2, 1 / 2],
    ),
    "no difference of ranks": Case(
        loss=BradleyTerry(margin=1.0), values=[1.0, 2.0], ranks=[1.0, 1.0], expected=0.0, gradient=[0.0, 0.0]
    ),
    # Rewards 2 log 3, log 3, 0: margins log 3, 2 log 3, log 3, -log sigmoid of which are log 4/3, log 10/9, log 4/3.
    # The slopes sigmoid - 1 are -1/4, -1/10, -1/4: first (-1/4 - 1/10) / 3, last the opposite, the middle none.
    # Better ones: the first twice, the second; worse ones: the second, the last twice.
    "a ranking is the mean over its pairs": Case(
        loss=dpo(1.0), values=[2 * LOG3, LOG3, 0.0], lengths=[1, 2, 4], reference=[0.0] * 3, ranks=[2.0, 1.0, 0.5],
        expected=math.log(160 / 81) / 3, gradient=[-0.35 / 3, 0.0, 0.35 / 3],
        metrics={"pairs/chosen_reward": 5 * LOG3 / 3, "pairs/rejected_reward": LOG3 / 3, "pairs/margin": 4 * LOG3 / 3},
    ),
    # Two of rank 1 with 6 nats over 3 tokens and 2 over 4: (2 + 0.5) / 2 = 1.25, of weight 1/2; slopes -1/2 / 2 / 3
    # and / 4. Equal rewards: log 2 of every pair, whose slopes of 1/2 each are halved for the best and add up below.
    "imitation is of the best and by their tokens": Case(
        loss=dpo(1.0, sft_coef=0.5), values=[-6.0, -2.0, -9.0], lengths=[3, 4, 5], reference=[-6.0, -2.0, -9.0],
        ranks=[1.0, 1.0, 0.0],
        expected=math.log(2) + 0.5 * 1.25, gradient=[-1 / 4 - 1 / 12, -1 / 4 - 1 / 16, 1 / 2],
        metrics={"loss/sft": 1.25, "loss/preference": math.log(2)},
    ),
    # Log-ratios log 3 and -log 3, rewards with beta = 1/2 half of them, margin log 3: loss -log sigmoid(log 3) =
    # log 4/3, whose slope by the margin is 3/4 - 1, and by a log-prob beta times that: -1/8 and 1/8.
    "dpo": Case(
        loss=dpo(), values=[LOG3 - 4, -LOG3 - 5], lengths=[3, 2], reference=[-4.0, -5.0],
        expected=math.log(4 / 3), gradient=[-1 / 8, 1 / 8],
        metrics={"pairs/margin": LOG3, "pairs/chosen_reward": LOG3 / 2, "pairs/rejected_reward": -LOG3 / 2,
                 "pairs/chosen_logprob": (LOG3 - 4) / 3, "pairs/rejected_logprob": (-LOG3 - 5) / 2,
                 "accuracy/pairs": 1.0},
    ),
    # Log-ratios 4 log 3 over 4 tokens and 0: margin 1/2 x (log 3 - 0). sigmoid = sqrt 3 / (1 + sqrt 3); the slope by
    # a log-prob is beta / length times sigmoid - 1.
    "dpo per token": Case(
        loss=dpo(per_token=True), values=[4 * LOG3 - 9, -2.0], lengths=[4, 2], reference=[-9.0, -2.0],
        expected=math.log(1 + 1 / SQRT3), gradient=[-0.5 / 4 / (1 + SQRT3), 0.5 / 2 / (1 + SQRT3)],
    ),
    # tau = 1/4: the log-ratios 3 and -0.5 differ by h = 3.5, and should by 1 / (2 tau) = 2: (3.5 - 2)^2, slope 2 x 1.5.
    "ipo": Case(
        loss=ipo(per_token=False), values=[-1.0, -5.5], lengths=[2, 4], reference=[-4.0, -5.0],
        expected=2.25, gradient=[3.0, -3.0], metrics={"pairs/margin": 0.25 * 3.5},  # in units of reward, as DPO's
    ),
    # 3 over 2 tokens and -0.5 over 4: h = 1.5 + 0.125, less 2 is -0.375; slopes 2 x -0.375 / 2 and / 4.
    "ipo per token": Case(
        loss=ipo(per_token=True), values=[-1.0, -5.5], lengths=[2, 4], reference=[-4.0, -5.0],
        expected=0.375**2, gradient=[-0.375, 0.1875],
    ),
    # Over 2 tokens p = 3/4, odds 3; over 4 tokens p = 1/2, odds 1: the log odds ratio is log 3, -log sigmoid of it
    # log 4/3 with slope -1/4. By a log-prob: 1 / (1 - p) / length = 4/2 and 2/4. beta = 1/2: -1/2 x 1/4 x 2 and
    # 1/2 x 1/4 x 1/2. Imitation adds -log 3/4 = log 4/3, slope -1/2 by the better one's log-prob.
    "orpo": Case(
        loss=Orpo(beta=0.5, sft_coef=1.0), values=[2 * math.log(3 / 4), 4 * math.log(1 / 2)], lengths=[2, 4],
        expected=1.5 * math.log(4 / 3), gradient=[-1 / 4 - 1 / 2, 1 / 16],
        metrics={"loss/sft": math.log(4 / 3), "loss/preference": math.log(4 / 3) / 2, "pairs/margin": LOG3},
    ),
    # beta = 2: rewards 2 x -4 / 4 = -2 and 2 x (-2 - log 3) / 2 = -2 - log 3, margin log 3: log 4/3, whose slope is
    # -1/4 by the margin, and by the log-probs 2/4 and -2/2 times that.
    "simpo": Case(
        loss=simpo(2.0), values=[-4.0, -2 - LOG3], lengths=[4, 2],
        expected=math.log(4 / 3), gradient=[-1 / 8, 1 / 4],
        metrics={"pairs/chosen_reward": -2.0, "pairs/rejected_reward": -2 - LOG3},
    ),
    # A margin of 2 log 3 less gamma = log 3 is log 3 again.
    "simpo: gamma is what the better one should win by": Case(
        loss=simpo(1.0, LOG3), values=[-2.0, -2 - 2 * LOG3], expected=math.log(4 / 3), gradient=[-1 / 4, 1 / 4]
    ),
    # log 3 / 2 less gamma is below 0; the accuracy is that of the margin without gamma.
    "simpo: the accuracy knows no gamma": Case(
        loss=simpo(1.0, LOG3), values=[-2.0, -2 - LOG3 / 2], expected=math.log1p(SQRT3),
        gradient=[-SQRT3 / (1 + SQRT3), SQRT3 / (1 + SQRT3)], metrics={"accuracy/pairs": 1.0},
    ),
    # Margin 2 log 3 less gamma = log 3 is log 3: 3/4 log(1 + 1/3) + 1/4 log(1 + 3); the margin alone, or gamma with the
    # other sign in the second term, would give 3/4 log(10/9) + 1/4 log(10) and 3/4 log(4/3) + 1/4 log(28).
    # d / d margin = -3/4 sigmoid(-log 3) + 1/4 sigmoid(log 3) = -3/16 + 3/16
    "simpo: label smoothing turns the margin less gamma round": Case(
        loss=simpo(1.0, LOG3, 0.25), values=[-2.0, -2 - 2 * LOG3],
        expected=0.75 * math.log(4 / 3) + 0.25 * math.log(4), gradient=[0.0, 0.0],
    ),
}  # fmt: skip


@each("name", CASES)
def test_loss_gradient_and_metrics_by_hand(name):
    case = CASES[name]
    total, gradient, metrics = computed(case.loss, case.values, case.lengths, case.reference, case.ranks)
    assert total == pytest.approx(case.expected, rel=1e-12, abs=case.atol)
    assert gradient == pytest.approx(list(case.gradient), rel=1e-12, abs=case.atol)
    assert {key: metrics[key] for key in case.metrics} == pytest.approx(case.metrics, rel=1e-12)


# -- margins ---------------------------------------------------------------------------------------------------------
def test_pairs_have_a_mean_and_without_any_loss_and_accuracy_are_0_not_nan():
    # Leads of log 3 with margins of log 3 and 2 log 3: a tie, log 2, and a loss, log 4.
    loss = bradley_terry(scores(LOG3, LOG3), scores(0.0, 0.0), scores(LOG3, 2 * LOG3).detach())
    assert loss.item() == pytest.approx((math.log(2) + math.log(4)) / 2, abs=1e-12)
    nothing = scores()
    assert bradley_terry(nothing, nothing + 0).item() == accuracy(nothing, nothing).item() == 0


# A share of the pairs is taken the other way round: 3/4 log 4/3 + 1/4 log 4 at m = log 3, where sigmoid(m) = 1 - 1/4:
# the slope sigmoid(m) - (1 - e) is 0; at m = 0 it is 1/2 - 3/4. -0.75 log sigmoid(1000) - 0.25 log sigmoid(-1000) is
# 0 + 250, slope 1 - 0.75.
@each(
    ("margin", "loss", "slope"),
    [(LOG3, 0.75 * math.log(4 / 3) + 0.25 * math.log(4), 0.0), (0.0, math.log(2), -1 / 4), (1000.0, 250.0, 0.25)],
)
def test_label_smoothing_takes_a_share_of_the_pairs_the_other_way_round(margin, loss, slope):
    margins = scores(margin)
    found, roundings = logistic(margins, 0.25), 1e-12 * (margin < 1000)
    assert found.item() == pytest.approx(loss, abs=roundings)
    assert torch.autograd.grad(found.sum(), margins)[0].item() == pytest.approx(slope, abs=roundings)


def test_the_log_odds_of_certainty_are_finite_and_have_no_slope():
    # lp = 0 counts as -eps, whose odds are 1 / eps to first order.
    mean_logprobs = scores(0.0)
    found = log_odds(mean_logprobs)
    assert found.item() == pytest.approx(-math.log(torch.finfo(torch.float64).eps), abs=1e-12)
    assert torch.autograd.grad(found.sum(), mean_logprobs)[0].tolist() == [0.0]


# -- rankings --------------------------------------------------------------------------------------------------------
def test_k_different_ranks_are_k_times_k_minus_1_over_2_pairs_and_equal_ones_none():
    assert pairs_of_ranking([0.0, 1.0]) == ([1], [0])  # in any order: a higher rank is better
    assert pairs_of_ranking([3.0, 2.0, 1.0]) == ([0, 0, 1], [1, 2, 2])
    for k in range(1, 8):
        better, worse = pairs_of_ranking([-0.5 * i for i in range(k)])
        assert len(set(zip(better, worse, strict=True))) == len(better) == k * (k - 1) // 2
    # Of 4 x 3 / 2 = 6 pairs, (0, 1) and (2, 3) are ties.
    assert pairs_of_ranking([1.0, 1.0, 0.0, 0.0]) == ([0, 0, 1, 1], [2, 3, 2, 3])
    assert pairs_of_ranking([1.0, 1.0]) == ([], [])


def chosen(name):
    return instantiate(compose(["preferences.path=unread", f"loss={name}"], command="dpo")["loss"], "loss")


@each("name", catalog.choices("loss"))
def test_only_the_order_of_ranks_counts_and_a_better_completion_that_becomes_more_likely_lowers_the_loss(name):
    loss = chosen(name)
    given = [-3.1, -4.7, -2.2], [4, 3, 5], [-3.0, -4.0, -3.0] if loss.needs_reference else None
    assert computed(loss, *given, [9.0, 0.5, -7.0]) == computed(loss, *given, [2.0, 1.0, 0.0])
    _, gradient, _ = computed(loss, [-3.0, -4.0], [4, 3], [-3.0, -4.0] if loss.needs_reference else None)
    assert gradient[0] < 0 < gradient[1]


def test_ranks_only_order_scores_and_their_size_counts_by_the_margin_alone():
    for margin, same in ((0.0, True), (0.1, False)):
        wide, narrow = (
            computed(BradleyTerry(margin=margin), (0.3, -0.2, 0.9), (1, 1, 1), None, ranks)
            for ranks in ([9.0, 5.0, -7.0], [2.0, 1.0, 0.0])
        )
        assert (wide == narrow) == same


def test_accuracy_is_a_share_of_the_pairs_and_a_tie_counts_half():
    # First over second is a tie, first over third won, second over third won: 2.5 of 3. Then two pairs: won, lost.
    for given, ranks, expected in (([1.0, 1.0, 0.5], [2, 1, 0], 2.5 / 3), ([1.0, 0.0, 0.5], [1, 1, 0], 1 / 2)):
        metrics = computed(BradleyTerry(margin=0.0), given, (1, 1, 1), None, ranks)[2]
        assert metrics["accuracy/pairs"] == pytest.approx(expected, abs=1e-12)


def test_an_evaluation_has_no_margin_and_tells_the_scores_of_both_ends():
    values = RankedValues(values=scores(3.0, 1.0, -2.0), lengths=torch.ones(3), reference=None)
    found = BradleyTerry(margin=5.0).evaluated(values, [2, 1, 0])
    assert found["loss"] == BradleyTerry(margin=0.0)(values, [2, 1, 0])[0]
    assert (found["score_best"], found["score_worst"]) == (3.0, -2.0)


def test_by_default_ipo_takes_means_over_tokens_and_dpo_sums():
    assert {name: chosen(name).per_token for name in ("ipo", "dpo")} == {"ipo": True, "dpo": False}
