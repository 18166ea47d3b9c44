import math

import pytest
import torch

from rlft.ops.advantage import Std, group_is_equal, group_mean, group_std, group_zscore, leave_one_out

# Mixed up. Group 7: rewards 1, 2, 6, mean 3, deviations -2, -1, 3, squares 14. Group -3: 0, 4, mean 2, squares 8.
IDS = torch.tensor([7, -3, 7, -3, 7])
REWARDS = torch.tensor([1.0, 0.0, 2.0, 4.0, 6.0], dtype=torch.float64)


def close(value, expected):
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_group_statistics_follow_the_ids_wherever_the_rows_stand():
    close(group_mean(REWARDS, IDS), [3.0, 2.0, 3.0, 2.0, 3.0])
    close(group_std(REWARDS, IDS, correction=1)[:2], [math.sqrt(14 / 2), math.sqrt(8 / 1)])
    close(group_std(REWARDS, IDS, correction=0)[:2], [math.sqrt(14 / 3), math.sqrt(8 / 2)])


def test_zscore_divides_by_the_chosen_std_plus_eps():
    eps = 0.5
    seven, three = math.sqrt(7), math.sqrt(8)
    close(
        group_zscore(REWARDS, IDS, Std.sample, eps),
        [-2 / (seven + eps), -2 / (three + eps), -1 / (seven + eps), 2 / (three + eps), 3 / (seven + eps)],
    )
    seven, three = math.sqrt(14 / 3), 2.0
    close(
        group_zscore(REWARDS, IDS, Std.population, eps),
        [-2 / (seven + eps), -2 / (three + eps), -1 / (seven + eps), 2 / (three + eps), 3 / (seven + eps)],
    )


def test_zscore_with_std_none_only_centres():
    close(group_zscore(REWARDS, IDS, Std.none, 0.5), [-2.0, -2.0, -1.0, 2.0, 3.0])


def test_zscore_with_std_batch_centres_in_the_group_and_divides_by_the_std_of_all_rewards():
    # All rewards 1 0 2 4 6: sum 13, mean 2.6, sum of squares 57 - 5 * 6.76 = 23.2, sample variance 5.8.
    std = math.sqrt(5.8) + 0.5
    close(group_zscore(REWARDS, IDS, Std.batch, 0.5), [-2 / std, -2 / std, -1 / std, 2 / std, 3 / std])


@pytest.mark.parametrize("std", Std)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_groups_and_singletons_get_exactly_0_even_with_eps_0(std, dtype):
    # Three times 0.1 sums to 0.30000000000000004: centred naively, z-scores of rounding noise would come out.
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0], dtype=dtype)
    ids = torch.tensor([0, 0, 0, 1])
    assert group_zscore(rewards, ids, std, 0.0).tolist() == [0, 0, 0, 0]
    assert leave_one_out(rewards, ids).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("std", Std)
def test_one_row_alone_in_the_batch_gets_0_not_nan(std):
    assert group_zscore(torch.tensor([3.0]), torch.tensor([9]), std, 1e-6).tolist() == [0]


def test_leave_one_out_subtracts_the_mean_of_the_siblings():
    # 1 - (2 + 6)/2, 0 - 4, 2 - (1 + 6)/2, 4 - 0, 6 - (1 + 2)/2
    close(leave_one_out(REWARDS, IDS), [-3.0, -4.0, -1.5, 4.0, 4.5])


def test_group_is_equal_compares_exactly():
    rewards = torch.tensor([0.1, 1.0, 0.1, 1.0 + 1e-15, 8.0], dtype=torch.float64)
    assert group_is_equal(rewards, torch.tensor([1, 2, 1, 2, 3])).tolist() == [True, False, True, False, True]


def test_no_rows_give_no_advantages():
    nothing, ids = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    assert group_zscore(nothing, ids, Std.sample, 1e-6).shape == (0,)
    assert group_is_equal(nothing, ids).shape == (0,)
