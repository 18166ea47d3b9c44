"""How far back a reward counts, by hand: to the first token of the trajectory, or of the turn that earned it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.types import Batch, UserError

nan = float("nan")

# Two siblings of two turns each: two tokens, an answer, two tokens | a token, an answer of two, two tokens. The turns
# earn 1 and 3 | 2 and 4, the completions 1 | 0. What stands in the answers is no number.
MASK = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 1]], dtype=torch.bool)
ENDS = torch.tensor([[0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 0, 1]], dtype=torch.bool)
TURN_REWARDS = [0, 1, 0, 3, 2, 0, 4]


def at_tokens(values):
    """`[B, T]` with these values of the sampled tokens, row after row."""
    return torch.full(MASK.shape, nan, dtype=torch.float64).masked_scatter(MASK, torch.tensor(values).double())


@pytest.fixture
def batch():
    minus_one = at_tokens([-1.0] * 7)
    return Batch(
        token_ids=torch.ones(MASK.shape, dtype=torch.int64),
        attention_mask=torch.ones_like(MASK),
        loss_mask=MASK,
        sampled_logprobs=minus_one,
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        group_ids=torch.tensor([3, 3]),
        old_logprobs=minus_one,
        reference_logprobs=at_tokens([-1.25] * 7),
        old_values=at_tokens([1.0] * 7),
        token_rewards=at_tokens(TURN_REWARDS),
        step_ends=ENDS,
        turn_ends=ENDS,
    )


def sampled(values):
    return values[MASK].tolist()


@pytest.mark.parametrize(
    ("span", "advantages"),
    [
        # The turns less their mean, 5/2: -3/2, 1/2 | -1/2, 3/2. The completions less theirs: 1/2 | -1/2.
        ("turn", [-1, -1, 1, 1, -1, 1, 1]),
        ("trajectory", [-0.5, -0.5, 1, 1, 0.5, 1, 1]),
    ],
)
def test_grpo_process(make, batch, span, advantages):
    credited = make("grpo_process", std="none", credit_span=span).credit(batch)
    assert sampled(credited.advantages) == advantages
    assert (credited.advantages[~MASK] == 0).all()


# gamma = lam = 1/2 and V = 1 everywhere. With `turn` the rewards are 1 + 1, 3 + 1 | 2, 4 at the ends of turns, with
# `trajectory` 1, 3 + 1 | 2, 4.
PPO = [
    # d: 0 + 1/2 - 1 = -1/2; 2 - 1 = 1; -1/2; 4 - 1 = 3 | 2 - 1 = 1; -1/2; 3. A, with 1/4 a token, within each turn.
    ({"credit_span": "turn"}, [-0.25, 1, 0.25, 3, 1, 0.25, 3]),
    # d: -1/2; 1 + 1/2 - 1 = 1/2; -1/2; 3 | 2 + 1/2 - 1 = 3/2; -1/2; 3. A: 3; 1/4; 9/16; -23/64 | 3; 1/4; 25/16.
    ({"credit_span": "trajectory"}, [-23 / 64, 9 / 16, 0.25, 3, 25 / 16, 0.25, 3]),
    # The first row was cut off: d of its last token is 4 + 1/2 - 1 = 7/2; the first turn's end stays an end.
    ({"credit_span": "turn", "bootstrap_truncated": True}, [-0.25, 1, 0.375, 3.5, 1, 0.25, 3]),
    # Two steps: 0 + 2/2 - 1 = 0; 2 - 1; 0 + 4/2 - 1 = 1; 4 - 1 | 2 - 1; 0 + 4/2 - 1; 4 - 1.
    ({"credit_span": "turn", "estimator": "n_step", "n_steps": 2}, [0, 1, 1, 3, 1, 1, 3]),
    # Two steps: 0 + 1/2 + 1/4 - 1 = -1/4; 1 + 0 + 1/4 - 1 = 1/4; 1; 3 | 2 + 0 + 1/4 - 1 = 5/4; 1; 3.
    ({"credit_span": "trajectory", "estimator": "n_step", "n_steps": 2}, [-0.25, 0.25, 1, 3, 1.25, 1, 3]),
]


@each(("keys", "advantages"), PPO)
def test_ppo(make, batch, keys, advantages):
    batch = replace(batch, truncated=torch.tensor([True, False]))
    credited = make("ppo", gamma=0.5, lam=0.5, whiten=False, **keys).credit(batch)
    assert sampled(credited.advantages) == advantages
    assert sampled(credited.returns) == [a + 1 for a in advantages]
    assert (credited.returns[~MASK] == 0).all()


def test_ppo_with_a_kl_in_the_reward_of_each_token(make, batch):
    # lp - lp_ref = 1/4 everywhere, so that each token has -1/2 x 1/4 = -1/8. gamma = lam = 1, V = 0: what is to come
    # in the turn: 2 - 2/8, 2 - 1/8; 4 - 2/8, 4 - 1/8 | 2 - 1/8; 4 - 2/8, 4 - 1/8.
    batch = replace(batch, old_values=at_tokens([0.0] * 7))
    algorithm = make("ppo", gamma=1.0, lam=1.0, whiten=False, kl_coef=0.5, kl_in="reward", credit_span="turn")
    assert sampled(algorithm.credit(batch).advantages) == [1.75, 1.875, 3.75, 3.875, 1.875, 3.75, 3.875]


@pytest.mark.parametrize(
    ("to_go", "advantages"),
    [
        (True, [1, 2, 2, 4, 3, 2, 4]),  # gamma 1/2: 4; 2; 1 + 2/2 = 2; 1 | 4; 2; 2 + 2/2 = 3
        (False, [5, 5, 5, 5, 6, 6, 6]),  # 1 + 3 + 1 | 2 + 4
    ],
)
def test_reinforce_says_it_by_reward_to_go(make, batch, to_go, advantages):
    assert sampled(make("reinforce", gamma=0.5, reward_to_go=to_go).credit(batch).advantages) == advantages


@pytest.mark.parametrize("name", ["grpo_process", "ppo", "a2c"])
def test_a_completion_of_one_turn_is_credited_alike_bit_for_bit(make, full_step, name):
    _, batch = full_step()
    for turn_ends in (None, torch.zeros_like(batch.loss_mask)):
        single = replace(batch, turn_ends=turn_ends)
        turn, trajectory = (make(name, credit_span=span).credit(single) for span in ("turn", "trajectory"))
        assert torch.equal(turn.advantages, trajectory.advantages)
    several = make(name, credit_span="turn").credit(batch)
    assert not torch.equal(several.advantages, trajectory.advantages)


def test_one_score_for_all_turns_cannot_be_credited_to_one(make):
    with pytest.raises(UserError, match=r"outcome has one score for all turns") as refusal:
        make("grpo", credit_span="turn")
    assert refusal.value.remedy == "use algorithm.supervision=process, or algorithm.credit_span=trajectory"
