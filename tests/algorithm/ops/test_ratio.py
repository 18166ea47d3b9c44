import math

import pytest
import torch

from rlft.algorithm.ops.ratio import RatioLevel, ratio, sequence_ratio, sequence_token_ratio, token_ratio

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
