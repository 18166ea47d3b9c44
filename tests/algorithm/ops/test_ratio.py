"""Ratios, and weights for the mismatch of engine and trainer."""

from __future__ import annotations

import math

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.ratio import (
    Mismatch,
    RatioLevel,
    far_off_policy,
    mismatch_correction,
    ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)

LOG2, LOG8 = math.log(2), math.log(8)
OLD = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
NEW = OLD + torch.tensor([[LOG2, LOG8, 50.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False]])


def close(value, expected):
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_token_ratio_is_the_exponential_of_the_difference():
    close(token_ratio(NEW, OLD)[:, :2], [[2.0, 8.0]])


def test_token_ratio_is_finite_with_finite_gradient_at_any_distance():
    new = (OLD + torch.tensor([[100.0, -100.0, 0.0]], dtype=torch.float64)).requires_grad_()
    r = token_ratio(new, OLD)
    close(r.detach(), [[math.exp(20), math.exp(-20), 1.0]])
    r.sum().backward()
    assert new.grad is not None
    assert new.grad.isfinite().all()


def test_sequence_ratio_is_the_geometric_mean_of_the_masked_token_ratios():
    # sqrt(2 * 8) = 4; the third token, 50 nats away, is not in the mask.
    close(sequence_ratio(NEW, OLD, MASK), [[4.0]])


@pytest.mark.parametrize("length", [1, 10, 10_000])
def test_sequence_ratio_does_not_depend_on_the_length_when_every_token_moved_alike(length):
    old = torch.full((1, length), -2.0, dtype=torch.float64)
    # A sum would give 2^length.
    close(sequence_ratio(old + LOG2, old, torch.ones(1, length, dtype=torch.bool)), [[2.0]])


def test_sequence_ratio_of_an_empty_row_is_1():
    close(sequence_ratio(NEW, OLD, torch.zeros_like(MASK)), [[1.0]])


def test_sequence_token_ratio_has_the_sequence_value_but_each_tokens_own_gradient():
    new = NEW.clone().requires_grad_()
    r = sequence_token_ratio(new, OLD, MASK)
    close(r.detach(), [[4.0, 4.0, 4.0]])
    r[0, 0].backward()
    # d/dlp_0 of 4 * exp(lp_0 - sg[lp_0]) = 4, and nothing on the others.
    assert new.grad is not None
    close(new.grad, [[4.0, 0.0, 0.0]])


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


def test_the_product_is_the_ratio_of_whole_completions_and_their_mean_is_not():
    # Row 1: 1.25 * 1.2 * 0.8 = 1.2, geometric mean 1.0627; row 2: 1.5 * 1.5 = 2.25, geometric mean 1.5; row 3 is empty.
    ratios = torch.tensor([[1.25, 1.2, 0.8], [1.5, 1.5, 99.0], [7.0, 7.0, 7.0]], dtype=torch.float64)
    sampled = torch.full((3, 3), -2.0, dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])

    def first_weights(mode):
        return correct(mode, sampled + ratios.log(), sampled, mask).weight[:, 0].tolist()

    assert first_weights(Mismatch.sequence_product_truncate) == pytest.approx([1.2, 2.0, 1.0], abs=1e-12)
    assert first_weights(Mismatch.sequence_product_mask) == pytest.approx([1.2, 0.0, 1.0], abs=1e-12)
    assert first_weights(Mismatch.sequence_truncate) == pytest.approx([1.2 ** (1 / 3), 1.5, 1.0], abs=1e-12)


def test_with_the_gaps_of_bfloat16_the_product_of_a_long_completion_leaves_the_bounds_and_the_mean_does_not():
    # 0.05 nats on each of 400 tokens, of either sign: the sum has a standard deviation of 1, and ln 2 is 0.69.
    gaps = 0.05 * torch.randn(1000, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampled, mask = torch.full_like(gaps, -1.0), torch.ones_like(gaps, dtype=torch.bool)
    dropped = {
        mode: correct(mode, sampled + gaps, sampled, mask).dropped[:, 0].double().mean().item()
        for mode in (Mismatch.sequence_mask, Mismatch.sequence_product_mask)
    }
    assert dropped[Mismatch.sequence_mask] == 0
    outside = math.erfc(math.log(2) / math.sqrt(2))  # of a normal distribution
    assert dropped[Mismatch.sequence_product_mask] == pytest.approx(outside, abs=4 * (0.25 / 1000) ** 0.5)


def test_a_product_of_any_length_stays_a_number():
    for sign in (1, -1):
        sampled = torch.full((1, 5000), -1.0)
        mask = torch.ones_like(sampled, dtype=torch.bool)
        for mode in (Mismatch.sequence_product_truncate, Mismatch.sequence_product_mask):
            assert correct(mode, sampled + sign, sampled, mask).weight.isfinite().all()


def test_a_kept_weight_inside_the_bounds_is_not_rounded_to_1():
    old = SAMPLED + math.log(1.5)
    for mode in (Mismatch.token_mask, Mismatch.sequence_mask, Mismatch.token_truncate, Mismatch.sequence_truncate):
        assert mode.is_on
        assert correct(mode, old=old).weight[SAMPLED_MASK].tolist() == pytest.approx([1.5] * 5, abs=1e-12)


def test_a_long_row_with_a_small_gap_on_every_token_is_not_dropped_by_the_sequence_modes():
    # 0.01 nat on each of 1000 tokens: the product is e^10 = 22026, the geometric mean e^0.01 = 1.01005.
    sampled = torch.full((1, 1000), -1.0, dtype=torch.float64)
    correction = correct(Mismatch.sequence_mask, sampled + 0.01, sampled, torch.ones(1, 1000, dtype=torch.bool))
    assert not correction.dropped.any()
    assert correction.weight[0, 0].item() == pytest.approx(math.exp(0.01), abs=1e-12)


@each("mode", Mismatch)
def test_no_gradient_flows_through_the_weight(mode):
    assert not correct(mode, old=TRAINER.clone().requires_grad_()).weight.requires_grad


def test_the_off_policy_mask_by_hand():
    # Mean of lp_sampled - lp, in nats per token: 0.3 (of 0.5, 0.4, 0), 0.2 (of 0.4, 0), 0.3; junk outside the mask.
    sampled = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, 9.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    policy = torch.tensor([[-1.5, -2.4, -3.0], [-1.4, -2.0, -1e9], [-1.3, -1.3, -1.3]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    advantages = torch.tensor([[-1.0, 1.0, -0.5], [-1.0, -1.0, -1.0], [0.0, 2.0, 0.0]], dtype=torch.float64)
    far = far_off_policy(policy, sampled, advantages, mask, 0.25)
    assert far.tolist() == [[True, False, True], [False, False, False], [False, False, False]]
    far = far_off_policy(policy, sampled, advantages, mask, 0.15)
    assert far.tolist() == [[True, False, True], [True, True, False], [False, False, False]]
    assert not far_off_policy(policy, sampled, advantages, mask, 0.31).any()
