import math
from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.algorithm.ops.advantage import Std
from rlft.algorithm.ops.aggregate import Aggregate
from rlft.algorithm.ops.kl import KLEstimator, KLPlace
from rlft.algorithm.ops.surrogate import Mismatch, RatioLevel
from rlft.types import Outputs, UserError

nan, inf = float("nan"), float("inf")


def close(value, expected, tol=1e-12):
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=torch.float64), rtol=tol, atol=tol)


def loss_of(algorithm, outputs, batch, scale):
    """Loss, and its gradients in the log-probs and in the entropy (0 where it isn't used)."""
    loss = algorithm.loss(outputs, batch, scale)
    inputs = [outputs.logprobs] + ([] if outputs.entropy is None else [outputs.entropy])
    gradients = torch.autograd.grad(loss.total, inputs, allow_unused=True, materialize_grads=True)
    return loss, gradients


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


def test_process_supervision_asks_for_steps_and_has_no_place_for_a_kl_in_the_reward(make, hand_batch):
    assert make("grpo_process").needs_steps
    assert not make("grpo").needs_steps
    with pytest.raises(ValueError, match="token_rewards is None, but supervision=process"):
        make("grpo_process").credit(hand_batch([1, 1], [0, 1], [0, 0]))
    with pytest.raises(UserError, match=r"^algorithm\.kl_in: .*, got reward; use algorithm\.kl_in=loss"):
        make("grpo_process", kl_coef=0.1, kl_in="reward")
    assert make("grpo_process", kl_coef=0.0, kl_in="reward").needs_steps


# --- metrics by hand -------------------------------------------------------------------------------------------------


def test_metrics_of_kl_are_k3_whatever_the_loss_takes(make, hand_batch, scale_of):
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
    make, hand_batch, scale_of, mode, dropped, capped
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


def test_entropy_bonus_lowers_the_loss(make, hand_batch, scale_of):
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


@each(
    ("overrides", "reference", "entropy", "old_in_credit"),
    [
        ({}, False, False, False),
        ({"kl_coef": 0.1}, True, False, False),
        ({"kl_coef": 0.1, "kl_in": "reward"}, True, False, True),
        ({"kl_in": "reward", "entropy_coef": 0.1}, False, True, False),
    ],
)
def test_it_asks_only_for_what_its_coefficients_use(make, overrides, reference, entropy, old_in_credit):
    algorithm = make("grpo", **overrides)
    assert algorithm.needs_reference is reference
    assert algorithm.needs_entropy is entropy
    assert algorithm.needs_old_in_credit is old_in_credit
    assert algorithm.needs_values is False
    assert algorithm.min_group_size == 2


def test_a_missing_tensor_is_named(make, random_step, scale_of):
    outputs, batch = random_step()
    scale = scale_of(batch)
    with pytest.raises(ValueError, match="advantages is None"):
        make("grpo").loss(outputs, batch, scale)
    without = replace(make("grpo").credit(batch), reference_logprobs=None)
    with pytest.raises(ValueError, match="reference_logprobs is None"):
        make("grpo", kl_coef=0.1).loss(outputs, without, scale)
    with pytest.raises(ValueError, match="entropy is None"):
        make("grpo", entropy_coef=0.1).loss(Outputs(logprobs=outputs.logprobs), without, scale)
    with pytest.raises(ValueError, match="old_logprobs is None"):
        make("grpo", kl_coef=0.1, kl_in="reward").credit(replace(batch, old_logprobs=None))


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
