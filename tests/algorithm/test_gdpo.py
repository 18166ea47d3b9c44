import math
from dataclasses import replace

import pytest
import torch

from rlft.batch import collate
from rlft.reward.workers.scorer import mixed
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, UserError


@pytest.fixture
def two_rewards(hand_batch):
    """Two groups of two; rewards 0, 1 and 5, 1 in the first, 2, 2 and 0, 10 in the second; the second counts half."""
    batch = hand_batch([2, 1, 0, 2], [0, 0, 0, 0], [4, 4, 1, 1])
    rewards = torch.tensor([[0, 5], [1, 1], [2, 0], [2, 10]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64).expand(4, 2)
    return replace(batch, each_reward=rewards, each_weight=weights)


def test_an_advantage_is_the_sum_of_the_rewards_own_zscores_over_its_std_in_the_step(make, two_rewards, close):
    # With eps = 0 the z-scores of two are -s and s, s = 1 / sqrt(2): sums -s/2, s/2, -s/2, s/2, whose sample variance
    # is 4 * s^2 / 4 / 3 = 1/6. So all are s / 2 * sqrt(6) = sqrt(3) / 2, on every token of a completion.
    a = math.sqrt(3) / 2
    advantages = make("gdpo", eps=0.0).credit(two_rewards).advantages
    close(advantages, [[0, -a, -a, 0], [0, a, 0, 0], [0, 0, 0, 0], [0, a, a, 0]])


def test_rows_have_zero_gradient_where_no_reward_differs_though_sums_may_be_equal(make, two_rewards):
    # The first group's rewards add up to the same sum and still differ; the second's are the same.
    rewards = torch.tensor([[0, 2], [1, 0], [3, 3], [3, 3]], dtype=torch.float64)
    batch = replace(two_rewards, each_reward=rewards, rewards=(rewards * two_rewards.each_weight).sum(-1))
    assert make("gdpo").zero_gradient_rows(batch).tolist() == [False, False, True, True]
    assert make("grpo").zero_gradient_rows(batch).all()


def test_one_reward_alone_is_grpos_zscore_over_its_std_in_the_step(make, random_step, close):
    _, batch = random_step()
    eps = 1e-6
    scores = make("grpo").credit(batch).advantages
    first = batch.loss_mask.double().argmax(-1, keepdim=True)
    of_rows = scores.gather(1, first).squeeze(-1)
    # Row 6 has no token to stand on: of group 9, whose rewards 2, 0, -1 lie 5/3, -1/3, -4/3 from their mean 1/3.
    of_rows[6] = (5 / 3) / (math.sqrt((25 + 1 + 16) / 9 / 2) + eps)
    close(make("gdpo").credit(batch).advantages, (scores / (of_rows.std() + eps)).tolist())


def test_without_rewards_by_themselves_it_says_what_it_lacks(make, two_rewards):
    batch = replace(two_rewards, each_reward=None)
    for ask in (make("gdpo").credit, make("gdpo").zero_gradient_rows):
        with pytest.raises(
            ValueError, match=r"each_reward is None, but reward_aggregation=normalize_then_sum needs it"
        ):
            ask(batch)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"supervision": "process"},
            r"algorithm\.supervision: .* whole completions, got process; use algorithm\.super",
        ),
        (
            {"kl_coef": 0.1, "kl_in": "reward"},
            r"algorithm\.kl_in: .* no one score .*, got reward; use algorithm\.kl_in=l",
        ),
    ],
)
def test_what_has_no_rewards_of_whole_completions_is_refused(make, keys, message):
    with pytest.raises(UserError, match=f"^{message}"):
        make("gdpo", **keys)


def test_gdpo_differs_from_grpo_in_one_key_only(make):
    assert make("gdpo") == make("grpo", reward_aggregation="normalize_then_sum")


def test_it_credits_what_a_run_scores(make, close):
    # The rewards 1, 0 and 0.5, 1 of two siblings, weights 1 and 0.2, as the scorer mixes them: z-scores s, -s and -s,
    # s, sums 0.8 s and -0.8 s, s = 1 / sqrt(2). Over their sample std 0.8 s sqrt(2) that is s and -s.
    completions = [
        Completion(text="", token_ids=(7, 8), logprobs=(-1.0, -1.0), finish_reason=FinishReason.stop) for _ in range(2)
    ]
    prompt = Prompt(id="p", messages=(), answer="", token_ids=(5,))
    group = Group(
        prompt=prompt, rollouts=tuple(Rollout(prompt=prompt, completion=c, policy_version=1) for c in completions)
    )
    scores = mixed({"right": [[1.0, 0.0]], "format": [[0.5, 1.0]]}, {"right": 1.0, "format": 0.2}, process=())
    batch = collate([group], scores, decode=str)
    s = 1 / math.sqrt(2)
    advantages = make("gdpo", eps=0.0).credit(batch).advantages
    close(advantages.double(), [[0, s, s], [0, -s, -s]], tol=1e-6)
