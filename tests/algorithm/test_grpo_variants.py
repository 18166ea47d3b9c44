"""The algorithms that are GRPO with other keys, each by the hand-computed numbers of its paper's formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.batch import collate
from rlft.reward.workers.scorer import mixed
from rlft.types import Completion, FinishReason, Group, Outputs, Prompt, Rollout, UserError


@each(
    ("name", "base", "keys"),
    [
        ("grpo_process", "grpo", {"supervision": "process"}),
        ("dapo", "grpo", {"clip_high": 0.28, "aggregate": "token_mean"}),
        ("dr_grpo", "grpo", {"std": "none", "aggregate": "constant"}),
        ("gspo", "grpo", {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
        ("gspo_token", "gspo", {"ratio": "sequence_token"}),
        ("cispo", "grpo", {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregate": "token_mean"}),
        ("sapo", "grpo", {"surrogate": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}),
        ("gmpo", "grpo", {"surrogate": "gmpo", "clip_low": 0.4, "clip_high": 0.4}),
        ("gdpo", "grpo", {"reward_aggregation": "normalize_then_sum"}),
    ],
)
def test_each_differs_from_its_base_in_these_keys_only(make, name, base, keys):
    assert make(name) == make(base, **keys)


@pytest.fixture
def at(make, scale_of):
    """(loss, its gradient) of an algorithm where the log-probs are `moved` away from the old ones."""

    def computed(algorithm, batch, moved):
        moved = torch.as_tensor(moved, dtype=torch.float64)
        outputs = Outputs(logprobs=(batch.old_logprobs + moved).requires_grad_())
        algorithm = make(algorithm) if isinstance(algorithm, str) else algorithm
        loss = algorithm.loss(outputs, batch, scale_of(batch))
        return loss, torch.autograd.grad(loss.total, outputs.logprobs)[0]

    return computed


def test_gspo_clips_whole_sequences_at_its_own_small_range(hand_batch, at):
    # Row 0: mean log-ratio 5e-4, A > 0: s = 1.0005 > 1.0004, clipped, though one of its tokens did not move at all.
    # Row 1: mean -4e-4, A < 0: s = 0.9996 < 0.9997, clipped. Row 2: mean 5e-4, A < 0: not clipped.
    batch = hand_batch([2, 2, 1], [0, 0, 0], [0, 0, 0], advantages=[1, -1, -1])
    moved = [[0, 0, 1e-3, 0], [0, -4e-4, -4e-4, 0], [0, 5e-4, 0, 0]]
    loss, gradient = at("gspo", batch, moved)
    assert abs(loss.total.item() - (-1.0004 + 0.9997 + math.exp(5e-4)) / 3) < 1e-12
    assert (gradient[:2] == 0).all()
    assert abs(gradient[2, 1].item() - math.exp(5e-4) / 3) < 1e-12
    assert abs(loss.metrics["ratio/clip_high_fraction"].item() - 2 / 5) < 1e-12
    assert abs(loss.metrics["ratio/clip_low_fraction"].item() - 2 / 5) < 1e-12


@pytest.mark.parametrize("aggregate", ["sequence_mean_token_mean", "token_mean"])
def test_the_ratio_of_whole_completions_is_that_of_their_probabilities(make, random_step, scale_of, aggregate):
    """Values and gradient of -A min(r, clip(r)) with r = pi(o|q) / pi_old(o|q), by hand for each completion."""
    outputs, batch = random_step(3)
    algorithm = make("gspo", ratio="sequence_product", aggregate=aggregate, clip_low=0.2, clip_high=0.3)
    batch = algorithm.credit(batch)
    found = algorithm.loss(outputs, batch, scale_of(batch)).total
    (gradient,) = torch.autograd.grad(found, outputs.logprobs)
    logprobs = outputs.logprobs.detach().clone().requires_grad_()
    rows, tokens = len(batch.loss_mask), int(batch.loss_mask.sum())  # an empty completion counts
    expected = torch.zeros((), dtype=torch.float64)
    ratios = []
    for row in range(len(batch.loss_mask)):
        places = [place for place, counts in enumerate(batch.loss_mask[row].tolist()) if counts]
        if not places:
            continue
        probability = sum(logprobs[row, place] for place in places)
        ratio = torch.exp(probability - sum(batch.old_logprobs[row, place] for place in places))
        ratios.append(float(ratio.detach()))
        clipped = ratio.clamp(0.8, 1.3)
        for place in places:
            advantage = batch.advantages[row, place]
            share = len(places) * rows if aggregate == "sequence_mean_token_mean" else tokens
            expected = expected - torch.minimum(ratio * advantage, clipped * advantage) / share
    (by_hand,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, by_hand, rtol=0, atol=1e-12)
    assert any(ratio > 1.3 for ratio in ratios) or any(ratio < 0.8 for ratio in ratios)


def test_a_clip_of_grpos_size_is_warned_of(make):
    assert make("gspo").warnings == make("grpo").warnings == ()
    assert make("grpo", ratio="sequence").warnings == (
        "algorithm.clip_low: 0.2 never binds with algorithm.ratio=sequence, whose ratio is normalised by length; "
        "the paper's are clip_low=3e-4 clip_high=4e-4",
        "algorithm.clip_high: 0.2 never binds with algorithm.ratio=sequence, whose ratio is normalised by length; "
        "the paper's are clip_low=3e-4 clip_high=4e-4",
    )
    (only,) = make("gspo_token", clip_high=0.28).warnings
    assert only.startswith("algorithm.clip_high: 0.28 never binds with algorithm.ratio=sequence_token")
    assert make("grpo", ratio="sequence", surrogate="importance").warnings == ()  # which has no clip


def test_gmpos_loss_is_minus_the_mean_over_completions_of_advantage_times_geometric_mean(hand_batch, close, at):
    # A = 2, log-ratios 1 (clipped to 0.4) and -0.2: s = exp(0.1). A = -1, -2 (clipped to -0.4), 0.1, 0.9: s = exp(0.2).
    # Loss (-2 exp(0.1) + exp(0.2)) / 2; a token's gradient is -A s / (2 |o|), 0 where it is clipped.
    batch = hand_batch([2, 3], [0, 0], [0, 0], advantages=[2, -1])
    moved = torch.tensor([[9, 1, -0.2, 9, 9], [9, -2, 0.1, 0.9, 9]], dtype=torch.float64)
    loss, gradient = at("gmpo", batch, moved)
    good, bad = math.exp(0.1), math.exp(0.2)
    close(loss.total.detach(), (-2 * good + bad) / 2)
    close(gradient, [[0, 0, -2 * good / 4, 0, 0], [0, 0, bad / 6, bad / 6, 0]])
    close(loss.metrics["ratio/clip_high_fraction"], 1 / 5)
    close(loss.metrics["ratio/clip_low_fraction"], 1 / 5)


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_a_ratio_of_completions_is_refused_as_gmpo_makes_its_own(make, level):
    with pytest.raises(UserError, match=rf"^algorithm\.ratio: .*mean itself, got {level}; use algorithm\.ratio=token"):
        make("gmpo", ratio=level)


@pytest.fixture
def two_rewards(hand_batch):
    """Two groups of two; rewards 0, 1 and 5, 1 in the first, 2, 2 and 0, 10 in the second; the second counts half."""
    batch = hand_batch([2, 1, 0, 2], [0, 0, 0, 0], [4, 4, 1, 1])
    rewards = torch.tensor([[0, 5], [1, 1], [2, 0], [2, 10]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64).expand(4, 2)
    return replace(batch, each_reward=rewards, each_weight=weights)


def test_gdpos_rows_have_zero_gradient_where_no_reward_differs_though_sums_may_be_equal(make, two_rewards):
    # The first group's rewards add up to the same sum and still differ; the second's are the same.
    rewards = torch.tensor([[0, 2], [1, 0], [3, 3], [3, 3]], dtype=torch.float64)
    batch = replace(two_rewards, each_reward=rewards, rewards=(rewards * two_rewards.each_weight).sum(-1))
    assert make("gdpo").zero_gradient_rows(batch).tolist() == [False, False, True, True]
    assert make("grpo").zero_gradient_rows(batch).all()


def test_gdpo_without_rewards_by_themselves_says_what_it_lacks(make, two_rewards):
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
def test_gdpo_refuses_what_has_no_rewards_of_whole_completions(make, keys, message):
    with pytest.raises(UserError, match=f"^{message}"):
        make("gdpo", **keys)


def test_gdpo_credits_what_a_run_scores(make, close):
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
