import math

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.ratio import Mismatch, far_off_policy, mismatch_correction

# The trainer finds the sampled tokens 4, 1 and 0.25 times as likely as the generator did (geometric mean 1), and in the
# second row 4, 4 times (geometric mean 4). Junk outside the mask.
SAMPLED = torch.tensor([[-3.0, -3.0, -3.0], [-3.0, -3.0, 9.0]], dtype=torch.float64)
OLD = SAMPLED + torch.tensor([[4.0, 1.0, 0.25], [4.0, 4.0, 1e6]], dtype=torch.float64).log()
MASK = torch.tensor([[True, True, True], [True, True, False]])


def correct(mode, old=OLD, sampled=SAMPLED, mask=MASK):
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
    assert correction.weight[MASK].tolist() == pytest.approx(weight, abs=1e-12)
    assert correction.dropped[MASK].tolist() == dropped
    assert correction.capped[MASK].tolist() == capped
    assert not correction.dropped[~MASK].any()
    assert not correction.capped[~MASK].any()


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
        assert correct(mode, old=old).weight[MASK].tolist() == pytest.approx([1.5] * 5, abs=1e-12)


def test_a_long_row_with_a_small_gap_on_every_token_is_not_dropped_by_the_sequence_modes():
    # 0.01 nat on each of 1000 tokens: the product is e^10 = 22026, the geometric mean e^0.01 = 1.01005.
    sampled = torch.full((1, 1000), -1.0, dtype=torch.float64)
    correction = correct(Mismatch.sequence_mask, sampled + 0.01, sampled, torch.ones(1, 1000, dtype=torch.bool))
    assert not correction.dropped.any()
    assert correction.weight[0, 0].item() == pytest.approx(math.exp(0.01), abs=1e-12)


@each("mode", Mismatch)
def test_no_gradient_flows_through_the_weight(mode):
    assert not correct(mode, old=OLD.clone().requires_grad_()).weight.requires_grad


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
