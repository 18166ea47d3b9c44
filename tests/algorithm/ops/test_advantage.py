import math

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.advantage import (
    Std,
    decoupled_zscore,
    gae,
    group_is_equal,
    group_mean,
    group_std,
    group_zscore,
    leave_one_out,
    n_step,
    place_at_last_token,
    process_advantages,
    reward_to_go,
    steps_are_equal,
    whiten,
)

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


@each("std", Std)
@each("dtype", [torch.float32, torch.float64])
def test_equal_groups_and_singletons_get_exactly_0_even_with_eps_0(std, dtype):
    # Three times 0.1 sums to 0.30000000000000004: centred naively, z-scores of rounding noise would come out.
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0], dtype=dtype)
    ids = torch.tensor([0, 0, 0, 1])
    assert group_zscore(rewards, ids, std, 0.0).tolist() == [0, 0, 0, 0]
    assert leave_one_out(rewards, ids).tolist() == [0, 0, 0, 0]


@each("std", Std)
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


nan, inf = float("nan"), float("inf")


def table(rows):
    return torch.tensor(rows, dtype=torch.float64)


# Row 0: three tokens with a gap (a tool's answer) after the first. Row 1: one token. Row 2: none. Junk elsewhere.
MASK = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
TOKEN_REWARDS = table([[nan, 1, inf, 2, 4, nan], [inf, nan, 2, nan, -inf, nan], [nan] * 6])
VALUES = table([[inf, 3, nan, 5, 7, nan], [nan, -inf, 8, inf, nan, nan], [inf] * 6])
STOPPED = torch.tensor([False, False, False])
TRUNCATED = torch.tensor([True, True, True])


def random_rows(seed):
    """Rewards, values, a mask with gaps, an empty row, one of a single token and a full one, and who was cut off."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 9, generator=generator) < 0.6
    mask[0] = False
    mask[1] = torch.arange(9) == 4
    mask[2] = True
    rewards, values = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64).unbind()
    return rewards, values, mask, torch.tensor([True, False, True, False, True, True])


def test_a_reward_of_the_whole_completion_stands_on_its_last_token_and_nowhere_for_an_empty_row():
    placed = place_at_last_token(torch.tensor([1.5, -2.0, nan], dtype=torch.float64), MASK)
    assert placed.tolist() == [[0, 0, 0, 0, 1.5, 0], [0, 0, -2, 0, 0, 0], [0] * 6]


def test_reward_to_go_by_hand_discounts_tokens_not_the_gap_between_them():
    # gamma = 1/2. Row 0: 4; 2 + 4/2 = 4; 1 + 4/2 = 3 (a discounted gap would give 1 + 4/4 = 2). Row 1: 2.
    assert reward_to_go(TOKEN_REWARDS, MASK, 0.5).tolist() == [[0, 3, 0, 4, 4, 0], [0, 0, 2, 0, 0, 0], [0] * 6]
    # gamma = 1: 4, 6, 7. gamma = 0: the rewards themselves.
    assert reward_to_go(TOKEN_REWARDS, MASK, 1.0).tolist() == [[0, 7, 0, 6, 4, 0], [0, 0, 2, 0, 0, 0], [0] * 6]
    assert reward_to_go(TOKEN_REWARDS, MASK, 0.0).tolist() == [[0, 1, 0, 2, 4, 0], [0, 0, 2, 0, 0, 0], [0] * 6]


def test_gae_by_hand_where_the_model_stopped():
    # gamma = lam = 1/2. d: 4 + 0 - 7 = -3; 2 + 7/2 - 5 = 1/2; 1 + 5/2 - 3 = 1/2 (V_{t+1} is 5, over the gap).
    # A: -3; 1/2 - 3/4 = -1/4; 1/2 - 1/16 = 7/16. Returns A + V: 4; 19/4; 55/16. Row 1: A = 2 - 8 = -6, return 2.
    advantages, returns = gae(TOKEN_REWARDS, VALUES, MASK, gamma=0.5, lam=0.5, truncated=STOPPED, bootstrap=True)
    assert advantages.tolist() == [[0, 7 / 16, 0, -1 / 4, -3, 0], [0, 0, -6, 0, 0, 0], [0] * 6]
    assert returns.tolist() == [[0, 55 / 16, 0, 19 / 4, 4, 0], [0, 0, 2, 0, 0, 0], [0] * 6]


def test_gae_by_hand_where_the_length_limit_cut_the_completion_off():
    # V past the end is 7, that of the last token: d = 4 + 7/2 - 7 = 1/2, then 1/2 and 1/2 as above.
    # A: 1/2; 1/2 + 1/8 = 5/8; 1/2 + 5/32 = 21/32. Row 1: 2 + 8/2 - 8 = -2.
    advantages, returns = gae(TOKEN_REWARDS, VALUES, MASK, gamma=0.5, lam=0.5, truncated=TRUNCATED, bootstrap=True)
    assert advantages.tolist() == [[0, 21 / 32, 0, 5 / 8, 1 / 2, 0], [0, 0, -2, 0, 0, 0], [0] * 6]
    assert returns.tolist() == [[0, 3 + 21 / 32, 0, 5 + 5 / 8, 7.5, 0], [0, 0, 6, 0, 0, 0], [0] * 6]


def test_n_step_by_hand():
    # gamma = 1/2, n = 2. Stopped: 4 - 7 = -3; 2 + 4/2 - 5 = -1; 1 + 2/2 + 7/4 - 3 = 3/4. Row 1: 2 - 8 = -6.
    # Cut off: 4 + 7/2 - 7 = 1/2; 2 + 4/2 + 7/4 - 5 = 3/4; the first as before. Row 1: 2 + 8/2 - 8 = -2.
    stopped, returns = n_step(TOKEN_REWARDS, VALUES, MASK, gamma=0.5, n=2, truncated=STOPPED, bootstrap=True)
    cut_off, _ = n_step(TOKEN_REWARDS, VALUES, MASK, gamma=0.5, n=2, truncated=TRUNCATED, bootstrap=True)
    assert stopped.tolist() == [[0, 3 / 4, 0, -1, -3, 0], [0, 0, -6, 0, 0, 0], [0] * 6]
    assert cut_off.tolist() == [[0, 3 / 4, 0, 3 / 4, 1 / 2, 0], [0, 0, -2, 0, 0, 0], [0] * 6]
    assert returns.tolist() == [[0, 3.75, 0, 4, 4, 0], [0, 0, 2, 0, 0, 0], [0] * 6]


ESTIMATORS = [
    lambda *rows, **keys: gae(*rows, gamma=0.9, lam=0.8, **keys),
    lambda *rows, **keys: n_step(*rows, gamma=0.9, n=2, **keys),
]


@pytest.mark.parametrize("estimate", ESTIMATORS, ids=["gae", "n_step"])
def test_without_bootstrap_and_without_truncation_the_value_past_the_end_is_0(estimate):
    rewards, values, mask, truncated = random_rows(0)
    stopped = estimate(rewards, values, mask, truncated=None, bootstrap=True)
    for truncated_, bootstrap in [(truncated, False), (None, False), (torch.zeros_like(truncated), True)]:
        for got, expected in zip(
            estimate(rewards, values, mask, truncated=truncated_, bootstrap=bootstrap), stopped, strict=True
        ):
            assert torch.equal(got, expected)
    cut_off, _ = estimate(rewards, values, mask, truncated=truncated, bootstrap=True)
    differs = (cut_off != stopped[0]).any(-1)
    assert differs.tolist() == (truncated & mask.any(-1)).tolist()


@each("estimate", ESTIMATORS, ids=["gae", "n_step"])
@each("junk", [nan, inf, -inf, 1e300])
def test_what_lies_outside_the_mask_has_no_influence_on_credit(estimate, junk):
    rewards, values, mask, truncated = random_rows(1)
    expected = estimate(rewards, values, mask, truncated=truncated, bootstrap=True)
    rewards, values = rewards.masked_fill(~mask, junk), values.masked_fill(~mask, junk)
    got = estimate(rewards, values, mask, truncated=truncated, bootstrap=True)
    for value, wanted in zip(got, expected, strict=True):
        assert torch.equal(value, wanted)
        assert (value[~mask] == 0).all()


def defined(rewards, values, past, t, gamma, lam, n):
    """(GAE, n-step advantage) of token t of a row without gaps, as the sums that define them."""
    after = [*values[1:], past]
    errors = [r + gamma * v - w for r, v, w in zip(rewards, after, values, strict=True)]
    left = min(n, len(rewards) - t)
    return (
        sum((gamma * lam) ** k * d for k, d in enumerate(errors[t:])),
        sum(gamma**k * rewards[t + k] for k in range(left)) + gamma**left * after[t + left - 1] - values[t],
    )


@each("n", [1, 2, 3, 8, 9, 10**9])
@each("gamma", [0.0, 0.7, 1.0])
def test_gae_and_n_step_are_the_sums_that_define_them(gamma, n):
    rewards, values, mask, truncated = random_rows(3)
    by_gae, _ = gae(rewards, values, mask, gamma=gamma, lam=0.6, truncated=truncated, bootstrap=True)
    by_steps, _ = n_step(rewards, values, mask, gamma=gamma, n=n, truncated=truncated, bootstrap=True)
    for b in range(len(mask)):
        r, v = rewards[b, mask[b]].tolist(), values[b, mask[b]].tolist()
        past = v[-1] if v and truncated[b] else 0.0
        expected = [defined(r, v, past, t, gamma, 0.6, n) for t in range(len(r))]
        close(by_gae[b, mask[b]], [e[0] for e in expected])
        close(by_steps[b, mask[b]], [e[1] for e in expected])


def test_whitened_tokens_have_mean_0_and_std_1_by_hand():
    # Tokens 1, 2, 4 and 2: mean 9/4, squares 25/16 + 1/16 + 49/16 + 1/16 = 76/16, sample variance 19/12.
    std = math.sqrt(19 / 12) + 0.5
    expected = [[0, -1.25 / std, 0, -0.25 / std, 1.75 / std, 0], [0, 0, -0.25 / std, 0, 0, 0], [0.0] * 6]
    close(whiten(TOKEN_REWARDS, MASK, eps=0.5), expected)
    tokens = whiten(random_rows(7)[0], random_rows(7)[2])[random_rows(7)[2]]
    close(tokens.mean(), 0.0)
    assert tokens.std().item() == pytest.approx(1, abs=1e-7)  # 1 / (1 + eps / std) with eps = 1e-8


def test_whitening_does_not_depend_on_how_the_tokens_stand_in_rows():
    values, _, mask, _ = random_rows(8)
    expected = whiten(values, mask)
    tokens = values[mask]
    close(whiten(tokens[None], torch.ones(1, len(tokens), dtype=torch.bool))[0], expected[mask].tolist())
    wider = torch.full((8, 12), nan, dtype=torch.float64)
    wider[:6, :9] = values
    wider_mask = torch.zeros(8, 12, dtype=torch.bool)
    wider_mask[:6, :9] = mask
    close(whiten(wider, wider_mask)[:6, :9], expected.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_tokens_one_token_and_no_token_whiten_to_exactly_0(dtype):
    # Seven times 0.1 does not sum to 0.7: the rounding noise over its own std would be of order 1.
    equal = torch.full((1, 7), 0.1, dtype=dtype)
    every = torch.ones_like(equal, dtype=torch.bool)
    assert whiten(equal, every, eps=0.0).tolist() == [[0] * 7]
    assert whiten(TOKEN_REWARDS[1:].to(dtype), MASK[1:], eps=0.0).tolist() == [[0] * 6] * 2
    assert whiten(TOKEN_REWARDS[2:].to(dtype), MASK[2:], eps=0.0).tolist() == [[0] * 6]


# Group 5: rows 0 (steps of score 1 and 2; its fourth place is a gap) and 2 (a step of 6). Mean 3, squares 14.
# Group 1: row 1 (two steps of 0.1) and row 3 (one more; no other). Row 4, group 8: no step.
STEP_MASK = torch.tensor(
    [[0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]
).bool()
STEP_ENDS = torch.tensor(
    [[0, 0, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0], [0] * 6]
).bool()
STEP_SCORES = table(
    [[nan, nan, 1, nan, 2, 9], [9, 0.1, 0.1, 9, nan, nan], [9, 9, 9, 6, inf, 9], [9, 9, 0.1, 9, 9, 9], [9] * 6]
)
STEP_IDS = torch.tensor([5, 1, 5, 1, 8])


@each(
    ("std", "divisor"),
    [
        (Std.sample, math.sqrt(14 / 2) + 0.5),
        (Std.population, math.sqrt(14 / 3) + 0.5),
        (Std.none, 1.0),
        # All six scores: sum 9.3, mean 1.55, squares 1 + 4 + 36 + 0.03 - 6 * 2.4025 = 26.615, over 5.
        (Std.batch, math.sqrt(26.615 / 5) + 0.5),
    ],
)
def test_process_advantages_sum_the_normalised_scores_of_the_steps_that_still_end(std, divisor):
    # Centred: row 0 has -2 and -1, row 2 has 3. Summed from the right: -3 up to the first end, -1 up to the second, 0.
    got = process_advantages(STEP_SCORES, STEP_ENDS, STEP_MASK, STEP_IDS, std, 0.5)
    close(got[0], [0.0, -3 / divisor, -3 / divisor, 0.0, -1 / divisor, 0.0])
    close(got[2], [0.0, 3 / divisor, 3 / divisor, 3 / divisor, 0.0, 0.0])
    # Ends outside the mask are none.
    everywhere = process_advantages(STEP_SCORES, STEP_ENDS | ~STEP_MASK, STEP_MASK, STEP_IDS, std, 0.5)
    assert torch.equal(everywhere, got)


@each("std", Std)
def test_groups_of_equal_step_scores_or_of_none_get_exactly_0_from_process_rewards(std):
    got = process_advantages(STEP_SCORES, STEP_ENDS, STEP_MASK, STEP_IDS, std, 0.0)
    assert got[[1, 3, 4]].tolist() == [[0] * 6] * 3


def test_steps_are_equal_says_which_rows_process_rewards_teach_nothing():
    assert steps_are_equal(STEP_SCORES, STEP_ENDS, STEP_IDS).tolist() == [False, True, False, True, True]
    nowhere = torch.zeros_like(STEP_ENDS)
    assert steps_are_equal(STEP_SCORES, nowhere, STEP_IDS).tolist() == [True] * 5
    # Exactly: one unit in the last place is a difference.
    other = STEP_SCORES.clone()
    other[3, 2] = math.nextafter(0.1, 1)
    assert steps_are_equal(other, STEP_ENDS, STEP_IDS).tolist() == [False, False, False, False, True]


def test_one_step_a_completion_at_its_last_token_is_the_z_score_of_the_completions():
    lengths = torch.tensor([3, 1, 4, 2, 5])
    mask = torch.arange(6) < lengths[:, None]
    ends = torch.arange(6) == lengths[:, None] - 1
    got = process_advantages(place_at_last_token(REWARDS, mask), ends, mask, IDS, Std.sample, 1e-6)
    close(got, (group_zscore(REWARDS, IDS, Std.sample, 1e-6)[:, None] * mask).tolist())


def test_no_rows_and_no_columns_give_no_credit():
    for shape in ((0, 5), (3, 0)):
        nothing, mask = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
        truncated, ids = torch.ones(shape[0], dtype=torch.bool), torch.zeros(shape[0], dtype=torch.int64)
        keys = {"gamma": 0.9, "truncated": truncated, "bootstrap": True}
        assert gae(nothing, nothing, mask, lam=0.9, **keys)[1].shape == shape
        assert n_step(nothing, nothing, mask, n=3, **keys)[1].shape == shape
        assert whiten(nothing, mask).shape == shape
        assert place_at_last_token(nothing.sum(-1), mask).shape == shape
        assert process_advantages(nothing, mask, mask, ids, Std.sample, 1e-6).shape == shape
        assert steps_are_equal(nothing, mask, ids).tolist() == [True] * shape[0]


# Two siblings with different values have the z-scores -s and s, s = 1 / sqrt(2), whatever the values (eps = 0): half
# the difference over a sample std of the difference over sqrt(2). Groups 4, 1, 6 of two; the second reward counts half.
TWO_IDS = torch.tensor([4, 4, 1, 1, 6, 6])
TWO_REWARDS = torch.tensor([[0, 5], [1, 1], [2, 0], [2, 10], [1, 0], [3, 1]], dtype=torch.float64)
HALF = torch.tensor([[1.0, 0.5]], dtype=torch.float64).expand(6, 2)


def test_decoupled_zscore_normalises_each_reward_alone_adds_them_by_weight_and_scales_the_sum():
    # Sums: (-s + s/2, s - s/2), (0 - s/2, 0 + s/2), (-s - s/2, s + s/2). Their mean is 0, the sum of squares
    # s^2 * 2 * (1/4 + 1/4 + 9/4) = 2.75, the sample variance over six 0.55.
    s, std = 1 / math.sqrt(2), math.sqrt(0.55)
    close(
        decoupled_zscore(TWO_REWARDS, HALF, TWO_IDS, Std.sample, 0.0),
        [-s / 2 / std, s / 2 / std, -s / 2 / std, s / 2 / std, -1.5 * s / std, 1.5 * s / std],
    )


def test_decoupled_zscore_adds_eps_to_both_standard_deviations():
    # One reward, siblings 2 apart: -1 and 1 over sqrt(2) + 0.5, then over its own std sqrt(2) / (sqrt(2) + 0.5) + 0.5.
    z = 1 / (math.sqrt(2) + 0.5)
    rewards, ids = torch.tensor([[1.0], [3.0]], dtype=torch.float64), torch.tensor([0, 0])
    end = z / (math.sqrt(2) * z + 0.5)
    close(decoupled_zscore(rewards, torch.ones_like(rewards), ids, Std.sample, 0.5), [-end, end])


def test_decoupled_zscore_is_0_where_no_reward_differs_in_any_group_and_eps_is_0():
    equal = torch.full_like(TWO_REWARDS, 0.5)
    assert decoupled_zscore(equal, HALF, TWO_IDS, Std.sample, 0.0).tolist() == [0.0] * len(equal)


def test_decoupled_zscore_is_exactly_0_where_no_reward_differs_and_without_rewards():
    rewards = torch.tensor([[0.1, 3], [0.1, 3], [0.1, 3], [0, 1], [1, 1], [5, 5]], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    scores = decoupled_zscore(rewards, torch.ones_like(rewards), ids, Std.sample, 1e-6)
    assert (scores == 0).tolist() == [True, True, True, False, False, True]
    equal = torch.ones(4, 2, dtype=torch.float64)
    assert (decoupled_zscore(equal, equal, torch.tensor([0, 0, 1, 1]), Std.sample, 1e-6) == 0).all()
    assert decoupled_zscore(torch.ones(3, 0), torch.ones(3, 0), torch.zeros(3), Std.sample, 1e-6).tolist() == [0, 0, 0]
