import math

import pytest
import torch

from rlft.algorithm.ops.aggregate import negative_log_likelihood


def test_it_is_the_mean_over_masked_tokens_of_minus_their_logprob():
    # Two rows with 2 and 1 learned tokens: (log 2 + log 8 + log 4) / 3 = 6 log 2 / 3. The rest counts nothing.
    logprobs = torch.tensor([[-9.0, -math.log(2), -math.log(8)], [-5.0, -math.log(4), -7.0]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    assert negative_log_likelihood(logprobs, mask, 3).item() == pytest.approx(2 * math.log(2), abs=1e-12)


def test_what_lies_under_the_padding_never_matters():
    logprobs = torch.tensor([[-1.0, math.nan, -math.inf]], dtype=torch.float64, requires_grad=True)
    loss = negative_log_likelihood(logprobs, torch.tensor([[True, False, False]]), 1)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == 1.0
    assert gradient.tolist() == [[-1.0, 0.0, 0.0]]


def test_micro_batches_add_up_to_the_mean_over_the_whole_batch():
    # 3 tokens in one part, 1 in the other: a mean of the parts' means would weigh the lone token three times as much.
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-10.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    parts = [negative_log_likelihood(logprobs[b : b + 1], mask[b : b + 1], 4) for b in range(2)]
    assert [part.item() for part in parts] == [6 / 4, 10 / 4]
    assert negative_log_likelihood(logprobs, mask, 4).item() == 4.0


def test_the_gradient_is_one_over_the_number_of_tokens_on_each():
    logprobs = torch.full((2, 2), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True], [False, True]])
    (gradient,) = torch.autograd.grad(negative_log_likelihood(logprobs, mask, 3), logprobs)
    assert gradient.flatten().tolist() == pytest.approx([-1 / 3, -1 / 3, 0.0, -1 / 3], abs=1e-15)


def test_without_tokens_it_is_0():
    assert negative_log_likelihood(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool), 0).item() == 0
