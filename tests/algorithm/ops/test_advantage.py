import math

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.advantage import (
    Std,
    decoupled_zscore,
    gae,
    group_is_equal,
    group_zscore,
    leave_one_out,
    place_at_last_token,
    process_advantages,
    steps_are_equal,
    whiten,
)
from tests.algorithm.algorithm_steps import close


@each("std", Std)
@each("dtype", [torch.float32, torch.float64])
def test_equal_groups_and_singletons_get_exactly_0_even_with_eps_0(std, dtype):
    # Three times 0.1 sums to 0.30000000000000004: centred naively, z-scores of rounding noise would come out.
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0], dtype=dtype)
    ids = torch.tensor([0, 0, 0, 1])
    assert group_zscore(rewards, ids, std, 0.0).tolist() == [0, 0, 0, 0]
    assert leave_one_out(rewards, ids).tolist() == [0, 0, 0, 0]
    assert group_zscore(rewards[3:], ids[3:], std, 1e-6).tolist() == [0], "a row alone in the batch"


def test_group_is_equal_compares_exactly():
    rewards = torch.tensor([0.1, 1.0, 0.1, 1.0 + 1e-15, 8.0], dtype=torch.float64)
    assert group_is_equal(rewards, torch.tensor([1, 2, 1, 2, 3])).tolist() == [True, False, True, False, True]


nan, inf = float("nan"), float("inf")


def table(rows):
    return torch.tensor(rows, dtype=torch.float64)


# Row 0: three tokens with a gap (a tool's answer) after the first. Row 1: one token. Row 2: none. Junk elsewhere.
MASK = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
TOKEN_REWARDS = table([[nan, 1, inf, 2, 4, nan], [inf, nan, 2, nan, -inf, nan], [nan] * 6])


def random_rows(seed):
    """Rewards, values, a mask with gaps, an empty row, one of a single token and a full one, and who was cut off."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 9, generator=generator) < 0.6
    mask[0] = False
    mask[1] = torch.arange(9) == 4
    mask[2] = True
    rewards, values = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64).unbind()
    return rewards, values, mask, torch.tensor([True, False, True, False, True, True])


ESTIMATORS = [
    lambda *rows, **keys: gae(*rows, gamma=0.9, lam=0.8, **keys),
    lambda *rows, **keys: gae(*rows, gamma=0.9, lam=1.0, n=2, value_lam=0.5, **keys),
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
    """(GAE of n terms, n-step advantage, rewards to go) of token t of a row without gaps, as sums."""
    after = [*values[1:], past]
    errors = [r + gamma * v - w for r, v, w in zip(rewards, after, values, strict=True)]
    left, end = min(n, len(rewards) - t), len(rewards) - t
    return (
        sum((gamma * lam) ** k * d for k, d in enumerate(errors[t:][:n])),
        sum(gamma**k * rewards[t + k] for k in range(left)) + gamma**left * after[t + left - 1] - values[t],
        sum(gamma**k * rewards[t + k] for k in range(end)) + gamma**end * past,
    )


@each("n", [1, 2, 3, 8, 9, 10**9])
@each("gamma", [0.0, 0.7, 1.0])
def test_gae_and_n_step_are_the_sums_that_define_them_and_the_critic_learns_what_was_earned(gamma, n):
    rewards, values, mask, truncated = random_rows(3)
    keys = {"gamma": gamma, "truncated": truncated, "bootstrap": True}
    by_gae, targets = gae(rewards, values, mask, lam=0.6, n=n, **keys)
    by_steps, earned = gae(rewards, values, mask, lam=1.0, n=n, value_lam=1.0, **keys)
    assert torch.equal(targets, by_gae + torch.where(mask, values, 0.0))
    to_the_end = gae(rewards, values, mask, lam=0.6, **keys)[0]
    torch.testing.assert_close(to_the_end, gae(rewards, values, mask, lam=0.6, n=10**9, **keys)[0])
    for b in range(len(mask)):
        r, v = rewards[b, mask[b]].tolist(), values[b, mask[b]].tolist()
        past = v[-1] if v and truncated[b] else 0.0
        expected = [defined(r, v, past, t, gamma, 0.6, n) for t in range(len(r))]
        close(by_gae[b, mask[b]], [e[0] for e in expected])
        close(by_steps[b, mask[b]], [e[1] for e in expected])
        close(earned[b, mask[b]], [e[2] for e in expected])


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


def test_no_rows_and_no_columns_give_no_credit():
    for shape in ((0, 5), (3, 0)):
        nothing, mask = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
        truncated, ids = torch.ones(shape[0], dtype=torch.bool), torch.zeros(shape[0], dtype=torch.int64)
        keys = {"gamma": 0.9, "truncated": truncated, "bootstrap": True}
        assert gae(nothing, nothing, mask, lam=0.9, **keys)[1].shape == shape
        assert gae(nothing, nothing, mask, lam=1.0, n=3, value_lam=1.0, **keys)[1].shape == shape
        assert whiten(nothing, mask).shape == shape
        assert place_at_last_token(nothing.sum(-1), mask).shape == shape
        assert process_advantages(nothing, mask, mask, ids, Std.sample, 1e-6).shape == shape
        assert group_zscore(nothing.sum(-1), ids, Std.sample, 1e-6).shape == group_is_equal(ids, ids).shape == ids.shape
        assert steps_are_equal(nothing, mask, ids).tolist() == [True] * shape[0]


def test_decoupled_zscore_is_exactly_0_where_no_reward_differs_and_without_rewards():
    rewards = torch.tensor([[0.1, 3], [0.1, 3], [0.1, 3], [0, 1], [1, 1], [5, 5]], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    scores = decoupled_zscore(rewards, torch.ones_like(rewards), ids, Std.sample, 1e-6)
    assert (scores == 0).tolist() == [True, True, True, False, False, True]
    equal = torch.ones(4, 2, dtype=torch.float64)
    assert (decoupled_zscore(equal, equal, torch.tensor([0, 0, 1, 1]), Std.sample, 0.0) == 0).all()
    assert decoupled_zscore(torch.ones(3, 0), torch.ones(3, 0), torch.zeros(3), Std.sample, 1e-6).tolist() == [0, 0, 0]
