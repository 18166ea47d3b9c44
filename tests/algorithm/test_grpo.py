from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.advantage import Std
from rlft.algorithm.ops.aggregate import Aggregate
from rlft.algorithm.ops.kl import KLEstimator, KLPlace
from rlft.algorithm.ops.surrogate import Mismatch, RatioLevel
from rlft.batch import collate
from rlft.reward.workers.scorer import mixed
from rlft.types import Completion, FinishReason, Group, Outputs, Prompt, Rollout, UserError

nan, inf = float("nan"), float("inf")


# --- credit ---------------------------------------------------------------------------------------------------------


def steps_of(batch, steps):
    """The batch with steps scored: for each row {token of the completion, from 0: score}."""
    scores, ends = torch.zeros_like(batch.old_logprobs), torch.zeros_like(batch.loss_mask)
    for row, scored in enumerate(steps):
        for token, score in scored.items():
            scores[row, 1 + token], ends[row, 1 + token] = score, True
    return replace(batch, token_rewards=scores, step_ends=ends)


def test_the_same_steps_in_another_order_are_no_difference(make, hand_batch):
    # In float32 0.1 + 0.1 + 0.5 and 0.5 + 0.1 + 0.1 differ in the last bit; nothing may be divided by that.
    batch = steps_of(hand_batch([3, 3], [0, 0], [0, 0]), [{0: 0.1, 1: 0.1, 2: 0.5}, {0: 0.5, 1: 0.1, 2: 0.1}])
    one, other = batch.token_rewards.float().sum(-1)
    assert one != other
    batch = replace(batch, token_rewards=batch.token_rewards.float(), sampled_logprobs=batch.sampled_logprobs.float())
    algorithm = make("grpo", eps=0.0)
    assert (algorithm.credit(batch).advantages == 0).all()
    assert algorithm.zero_gradient_rows(batch).all()


def test_process_rows_have_zero_gradient_where_neither_steps_nor_outcomes_differ(make, hand_batch):
    algorithm = make("grpo_process")
    alike = steps_of(hand_batch([2, 2], [1, 1], [0, 0]), [{0: 1, 1: 1}, {1: 1}])  # more steps, but none better
    assert algorithm.zero_gradient_rows(alike).all()
    assert (algorithm.credit(alike).advantages == 0).all()
    assert not algorithm.zero_gradient_rows(replace(alike, rewards=torch.tensor([1.0, 2.0]))).any()
    assert not algorithm.zero_gradient_rows(steps_of(alike, [{0: 1, 1: 2}, {1: 1}])).any()
    assert not make("grpo_process", kl_coef=0.1).zero_gradient_rows(alike).any()


# --- metrics by hand -------------------------------------------------------------------------------------------------


def test_metrics_of_kl_are_k3_whatever_the_loss_takes(make, hand_batch, scale_of, close):
    batch = hand_batch([2], [0], [0], advantages=[0])
    outputs = Outputs(logprobs=(batch.old_logprobs + math.log(2)).requires_grad_())
    metrics = make("grpo", kl_coef=0.5, kl_estimator="k1").loss(outputs, batch, scale_of(batch)).metrics
    close(metrics["loss/kl"], 0.5 * math.log(2))
    close(metrics["kl/reference"], math.log(2) - 0.5)
    # KL(old || current) at lp_old - lp = -log 2: exp(log 2) - 1 - log 2.
    close(metrics["kl/old"], 1 - math.log(2))


@each(
    ("mode", "dropped", "capped"),
    # Trainer over generator: 4 and 1 on row 0 (geometric mean 2), 0.25 on row 1; gaps |log 4|, 0, |log 0.25|.
    [("off", 0, None), ("token_truncate", 0, 1 / 3), ("token_mask", 2 / 3, None), ("sequence_mask", 1 / 3, None)],
)
def test_metrics_of_the_mismatch_are_shares_of_tokens_and_gaps_in_nats(
    make, hand_batch, scale_of, close, mode, dropped, capped
):
    batch = hand_batch([2, 1], [0, 0], [0, 0], advantages=[1, -2])
    w = torch.tensor([[1, 4, 1, 1], [1, 0.25, 1, 1]], dtype=torch.float64)
    batch = replace(batch, sampled_logprobs=batch.old_logprobs - w.log())
    algorithm = make("grpo", mismatch=mode, mismatch_high=3.0)
    assert algorithm.corrects_mismatch is (mode != "off")
    metrics = algorithm.loss(Outputs(logprobs=batch.old_logprobs.clone()), batch, scale_of(batch)).metrics
    close(metrics["waste/importance_dropped_fraction"], dropped)
    assert metrics.get("sampler/importance_capped_fraction") == (None if capped is None else pytest.approx(capped))
    close(metrics["sampler/logprob_gap_mean"], 2 * math.log(4) / 3)
    close(metrics["sampler/logprob_gap_max"], math.log(4))


def test_entropy_bonus_lowers_the_loss(make, hand_batch, scale_of, loss_of, close):
    batch = hand_batch([2, 1], [0, 0], [0, 0], advantages=[0, 0])
    entropy = torch.tensor([[nan, 1, 3, nan], [inf, 5, nan, nan]], dtype=torch.float64, requires_grad=True)
    outputs = Outputs(logprobs=batch.old_logprobs.clone().requires_grad_(), entropy=entropy)
    loss, (_, gradient) = loss_of(make("grpo", entropy_coef=0.1), outputs, batch, scale_of(batch))
    # Mean over 2 sequences of (1 + 3)/2 and 5: 3.5; over 3 tokens: 3.
    close(loss.total.detach(), -0.35)
    close(loss.metrics["loss/entropy"], -0.35)
    close(loss.metrics["policy/entropy"], 3.0)
    close(gradient, [[0, -0.025, -0.025, 0], [0, -0.05, 0, 0]])


# --- what it reports and asks for -----------------------------------------------------------------------------------


def test_metrics_of_what_is_not_there_are_absent(make, random_step, scale_of):
    outputs, batch = random_step()
    algorithm = make("grpo")
    batch = replace(algorithm.credit(batch), reference_logprobs=None, teacher_logprobs=None)
    metrics = algorithm.loss(Outputs(logprobs=outputs.logprobs), batch, scale_of(batch)).metrics
    assert set(metrics) == {
        "loss/total",
        "loss/policy",
        "ratio/clip_low_fraction",
        "ratio/clip_high_fraction",
        "kl/old",
        "sampler/logprob_gap_mean",
        "sampler/logprob_gap_max",
        "waste/importance_dropped_fraction",
    }


def test_yaml_defaults_are_those_of_the_maths_page(make):
    grpo = make("grpo")
    assert (grpo.std, grpo.eps, grpo.ratio, grpo.aggregate) == (
        Std.sample,
        1e-6,
        RatioLevel.token,
        Aggregate.sequence_mean_token_mean,
    )
    assert (grpo.clip_low, grpo.clip_high, grpo.dual_clip, grpo.kl_coef) == (0.2, 0.2, None, 0.0)
    assert (grpo.kl_in, grpo.kl_estimator, grpo.mismatch) == (KLPlace.loss, KLEstimator.auto, Mismatch.auto)


@each("way", ["truncate", "mask"])
@each(
    ("keys", "joined"),
    [
        ({"ratio": "sequence"}, "ratio=sequence"),
        ({"ratio": "sequence", "surrogate": "sapo"}, "ratio=sequence"),
        ({"surrogate": "gmpo"}, "surrogate=gmpo"),
    ],
)
def test_weights_of_single_tokens_are_refused_where_a_completion_has_one_number(make, way, keys, joined):
    with pytest.raises(UserError, match=f"{joined} has one number for all of a completion's tokens") as refused:
        make("grpo", mismatch=f"token_{way}", **keys)
    assert refused.value.key == "algorithm.mismatch"
    assert refused.value.remedy == f"use algorithm.mismatch=sequence_{way}"
    make("grpo", mismatch=f"sequence_{way}", **keys)
    make("grpo", mismatch=f"token_{way}", ratio="sequence_token")
    make("grpo", mismatch=f"token_{way}", ratio="sequence", surrogate="cispo")


# -- the algorithms that are GRPO with other keys, by the hand-computed numbers of their papers' formulas --------------
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
