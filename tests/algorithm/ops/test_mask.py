import torch

from rlft.algorithm.ops.aggregate import keep, max_abs, row_mean, row_sum

nan, inf = float("nan"), float("inf")
MASK = torch.tensor([[False, True, True], [True, False, False], [False, False, False]])
VALUES = torch.tensor([[nan, 2.0, -4.0], [7.0, inf, -inf], [nan, inf, nan]], dtype=torch.float64)


def test_keep_zeroes_value_and_gradient_outside_the_mask_even_of_nan_and_inf():
    values = VALUES.clone().requires_grad_()
    kept = keep(values, MASK)
    assert kept.tolist() == [[0, 2, -4], [7, 0, 0], [0, 0, 0]]
    kept.square().sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0, 4, -8], [14, 0, 0], [0, 0, 0]]


def test_row_reductions_see_masked_tokens_only_and_give_0_for_an_empty_row():
    assert row_sum(VALUES, MASK).tolist() == [-2, 7, 0]
    assert row_mean(VALUES, MASK).tolist() == [-1, 7, 0]


def test_max_abs_is_0_when_nothing_is_masked_or_there_are_no_rows():
    assert max_abs(VALUES, MASK) == 7
    assert max_abs(VALUES[:1], MASK[:1]) == 4
    assert max_abs(VALUES, torch.zeros_like(MASK)) == 0
    assert max_abs(VALUES[:0], MASK[:0]) == 0


def test_reductions_keep_the_dtype():
    assert row_mean(VALUES, MASK).dtype == torch.float64
    assert row_mean(VALUES.float(), MASK).dtype == torch.float32
