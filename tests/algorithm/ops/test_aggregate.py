"""Sums and means over tokens, and pass@k against all subsets of the samples."""

import itertools
import math
import random

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.aggregate import (
    Aggregate,
    aggregate,
    keep,
    majority,
    max_abs,
    negative_log_likelihood,
    pass_at,
    pass_sizes,
    row_mean,
    row_sum,
)
from rlft.types import LossScale

nan, inf = float("nan"), float("inf")
SOME = torch.tensor([[False, True, True], [True, False, False], [False, False, False]])
JUNKED = torch.tensor([[nan, 2.0, -4.0], [7.0, inf, -inf], [nan, inf, nan]], dtype=torch.float64)


def test_keep_zeroes_value_and_gradient_outside_the_mask_even_of_nan_and_inf():
    values = JUNKED.clone().requires_grad_()
    kept = keep(values, SOME)
    assert kept.tolist() == [[0, 2, -4], [7, 0, 0], [0, 0, 0]]
    kept.square().sum().backward()
    assert values.grad.tolist() == [[0, 4, -8], [14, 0, 0], [0, 0, 0]]


def test_row_reductions_see_masked_tokens_only_and_give_0_for_an_empty_row():
    assert row_sum(JUNKED, SOME).tolist() == [-2, 7, 0]
    assert row_mean(JUNKED, SOME).tolist() == [-1, 7, 0]


def test_max_abs_is_0_when_nothing_is_masked_or_there_are_no_rows():
    assert max_abs(JUNKED, SOME) == 7
    assert max_abs(JUNKED[:1], SOME[:1]) == 4
    assert max_abs(JUNKED, torch.zeros_like(SOME)) == 0
    assert max_abs(JUNKED[:0], SOME[:0]) == 0


def test_reductions_keep_the_dtype():
    assert row_mean(JUNKED, SOME).dtype == torch.float64
    assert row_mean(JUNKED.float(), SOME).dtype == torch.float32


# Rows of 3, 1 and 0 tokens; the optimizer batch has one more row of 4 tokens elsewhere. Junk outside the mask.
VALUES = torch.tensor([[nan, 1.0, 2.0, 6.0], [nan, 5.0, nan, nan], [nan, nan, nan, nan]], dtype=torch.float64)
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
SCALE = LossScale(num_tokens=8, num_sequences=4, max_completion_tokens=10)


@each(("how", "expected"), [
    (Aggregate.token_mean, 14 / 8),
    (Aggregate.sequence_mean_token_mean, (9 / 3 + 5) / 4),
    (Aggregate.sequence_mean_token_sum, 14 / 4),
    (Aggregate.constant, 14 / (4 * 10)),
])  # fmt: skip
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


def test_the_likelihood_of_text_is_a_mean_over_masked_tokens_and_what_lies_elsewhere_never_matters():
    # Two rows with 2 and 1 learned tokens: (log 2 + log 8 + log 4) / 3 = 6 log 2 / 3. The rest counts nothing.
    values = [[nan, -math.log(2), -math.log(8)], [-5.0, -math.log(4), -inf]]
    logprobs = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss = negative_log_likelihood(logprobs, torch.tensor([[False, True, True], [False, True, False]]), 3)
    assert loss.item() == pytest.approx(2 * math.log(2), abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.flatten().tolist() == pytest.approx([0.0, -1 / 3, -1 / 3, 0.0, -1 / 3, 0.0], abs=1e-15)
    assert negative_log_likelihood(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool), 0).item() == 0


def test_micro_batches_add_up_to_the_mean_over_the_whole_batch():
    # 3 tokens in one part, 1 in the other: a mean of the parts' means would weigh the lone token three times as much.
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-10.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    parts = [negative_log_likelihood(logprobs[b : b + 1], mask[b : b + 1], 4) for b in range(2)]
    assert [part.item() for part in parts] == [6 / 4, 10 / 4]
    assert negative_log_likelihood(logprobs, mask, 4).item() == 4.0


@each(("k", "sizes"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_pass_at_is_given_for_powers_of_two_and_for_all_samples(k, sizes):
    assert pass_sizes(k) == sizes


def test_the_majority_is_the_mean_over_all_draws_among_the_most_frequent_answers():
    rng = random.Random(52)
    for _ in range(500):
        answers = [rng.choice(["18", "17", "16", None]) for _ in range(rng.randint(1, 7))]
        right = [answer == "18" for answer in answers]
        given = sorted({answer for answer in answers if answer is not None})
        most = max((answers.count(answer) for answer in given), default=0)
        winners = [answer for answer in given if answers.count(answer) == most]
        expected = winners.count("18") / len(winners) if winners else 0.0
        assert majority(answers, right) == pytest.approx(expected, abs=1e-12)


def test_pass_at_is_the_share_of_subsets_with_a_right_sample():
    for n, right, size in itertools.product(range(1, 7), range(7), range(1, 7)):
        if right <= n and size <= n:
            subsets = list(itertools.combinations(range(n), size))
            share = sum(min(subset) < right for subset in subsets) / len(subsets)
            assert pass_at(size, n, right) == pytest.approx(share, abs=1e-12)
