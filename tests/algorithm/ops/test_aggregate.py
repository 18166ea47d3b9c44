import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.aggregate import Aggregate, aggregate
from rlft.types import LossScale

# Rows of 3, 1 and 0 tokens; the optimizer batch has one more row of 4 tokens elsewhere. Junk outside the mask.
nan = float("nan")
VALUES = torch.tensor([[nan, 1.0, 2.0, 6.0], [nan, 5.0, nan, nan], [nan, nan, nan, nan]], dtype=torch.float64)
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
SCALE = LossScale(num_tokens=8, num_sequences=4, max_completion_tokens=10)


@each(
    ("how", "expected"),
    [
        (Aggregate.token_mean, 14 / 8),
        (Aggregate.sequence_mean_token_mean, (9 / 3 + 5) / 4),
        (Aggregate.sequence_mean_token_sum, 14 / 4),
        (Aggregate.constant, 14 / (4 * 10)),
    ],
)
def test_aggregate_divides_by_the_whole_optimizer_batch(how, expected):
    assert aggregate(VALUES, MASK, SCALE, how).item() == pytest.approx(expected, abs=1e-12)


@each("how", Aggregate)
def test_gradient_is_finite_and_0_on_padding_and_on_empty_rows(how):
    values = VALUES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(aggregate(values, MASK, SCALE, how), values)
    assert (gradient[~MASK] == 0).all()
    assert (gradient[MASK] > 0).all()


@each("how", Aggregate)
def test_an_optimizer_batch_without_tokens_gives_0_not_nan(how):
    empty = LossScale(num_tokens=0, num_sequences=0, max_completion_tokens=0)
    assert aggregate(VALUES, torch.zeros_like(MASK), empty, how).item() == 0
