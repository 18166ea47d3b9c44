"""Ratios, and weights for the mismatch of engine and trainer."""

from __future__ import annotations

import math

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.surrogate import (
    Mismatch,
    RatioLevel,
    mismatch_correction,
    ratio,
    sequence_ratio,
    token_ratio,
)

LOG2, LOG8 = math.log(2), math.log(8)
OLD = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
NEW = OLD + torch.tensor([[LOG2, LOG8, 50.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False]])


def close(value, expected):
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_token_ratio_is_finite_with_finite_gradient_at_any_distance():
    new = (OLD + torch.tensor([[100.0, -100.0, 0.0]], dtype=torch.float64)).requires_grad_()
    r = token_ratio(new, OLD)
    close(r.detach(), [[math.exp(20), math.exp(-20), 1.0]])
    r.sum().backward()
    assert new.grad is not None
    assert new.grad.isfinite().all()


def test_sequence_ratio_of_an_empty_row_is_1():
    close(sequence_ratio(NEW, OLD, torch.zeros_like(MASK)), [[1.0]])


@pytest.mark.parametrize("level", RatioLevel)
def test_every_level_gives_one_value_a_token_and_1_at_the_old_policy(level):
    assert torch.equal(ratio(OLD, OLD, MASK, level), torch.ones_like(OLD))


# The trainer finds the sampled tokens 4, 1 and 0.25 times as likely as the generator did (geometric mean 1), and in the
# second row 4, 4 times (geometric mean 4). Junk outside the mask.
SAMPLED = torch.tensor([[-3.0, -3.0, -3.0], [-3.0, -3.0, 9.0]], dtype=torch.float64)
TRAINER = SAMPLED + torch.tensor([[4.0, 1.0, 0.25], [4.0, 4.0, 1e6]], dtype=torch.float64).log()
SAMPLED_MASK = torch.tensor([[True, True, True], [True, True, False]])


def correct(mode, old=TRAINER, sampled=SAMPLED, mask=SAMPLED_MASK):
    return mismatch_correction(old, sampled, mask, mode, low=0.5, high=2.0)


@each(
    ("mode", "weight", "dropped", "capped"),
    [
        (Mismatch.off, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        (Mismatch.auto, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        (Mismatch.token_truncate, [2, 1, 0.25, 2, 2], [0, 0, 0, 0, 0], [1, 0, 0, 1, 1]),
        (Mismatch.token_mask, [0, 1, 0, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]),
        (Mismatch.sequence_truncate, [1, 1, 1, 2, 2], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]),
        (Mismatch.sequence_mask, [1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]),
        # products: 4 * 1 * 0.25 = 1, and 4 * 4 = 16
        (Mismatch.sequence_product_truncate, [1, 1, 1, 2, 2], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]),
        (Mismatch.sequence_product_mask, [1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]),
    ],
)
def test_weights_by_hand(mode, weight, dropped, capped):
    correction = correct(mode)
    assert correction.weight[SAMPLED_MASK].tolist() == pytest.approx(weight, abs=1e-12)
    assert correction.dropped[SAMPLED_MASK].tolist() == dropped
    assert correction.capped[SAMPLED_MASK].tolist() == capped
    assert not correction.dropped[~SAMPLED_MASK].any()
    assert not correction.capped[~SAMPLED_MASK].any()


def test_a_product_of_any_length_stays_a_number():
    for sign in (1, -1):
        sampled = torch.full((1, 5000), -1.0)
        mask = torch.ones_like(sampled, dtype=torch.bool)
        for mode in (Mismatch.sequence_product_truncate, Mismatch.sequence_product_mask):
            assert correct(mode, sampled + sign, sampled, mask).weight.isfinite().all()


@each("mode", Mismatch)
def test_no_gradient_flows_through_the_weight(mode):
    assert not correct(mode, old=TRAINER.clone().requires_grad_()).weight.requires_grad
