"""What all losses of preferences do: rankings of several completions, the term of imitation, metrics, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlft.algorithm.preference.dpo import Dpo
from rlft.algorithm.preference.preference_loss import PreferenceLoss, RankedValues
from rlft.config import catalog
from rlft.config.compose import compose
from rlft.config.instantiate import instantiate

LOG3 = math.log(3)
LOSSES = catalog.choices("loss")


def chosen(name: str, **keys: Any) -> PreferenceLoss:
    plain = compose(["preferences.path=unread", f"loss={name}"], verb="dpo")["loss"]
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
def test_gradients_agree_with_central_differences(name: str, compute) -> None:
    logprobs, lengths, ranks = [-3.1, -4.7, -2.2, -6.0], [4, 3, 5, 6], [2.0, 2.0, 1.0, 0.0]
    loss_of = chosen(name, sft_coef=0.3)
    reference = [-3.0, -4.0, -3.0, -5.0] if loss_of.needs_reference else None
    _, gradient, _ = compute(loss_of, logprobs, lengths, reference, ranks)
    h = 1e-5  # third derivatives are below 100: an error of h^2 / 6 of that, 2e-9, and 1e-11 by rounding
    for i in range(4):
        more, less = ([x + sign * h * (k == i) for k, x in enumerate(logprobs)] for sign in (1, -1))
        ends = [compute(loss_of, moved, lengths, reference, ranks)[0] for moved in (more, less)]
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(gradient[i], abs=1e-8)


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
