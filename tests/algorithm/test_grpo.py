import math
from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.batch import collate
from rlft.reward.workers.scorer import mixed
from rlft.types import Completion, FinishReason, Group, Outputs, Prompt, Rollout, UserError
from tests.algorithm.algorithm_steps import close, hand_batch, make, random_step, scale_of

nan, inf = float("nan"), float("inf")


# --- credit ---------------------------------------------------------------------------------------------------------
def steps_of(batch, steps):
    """The batch with steps scored: for each row {token of the completion, from 0: score}."""
    scores, ends = torch.zeros_like(batch.old_logprobs), torch.zeros_like(batch.loss_mask)
    for row, scored in enumerate(steps):
        for token, score in scored.items():
            scores[row, 1 + token], ends[row, 1 + token] = score, True
    return replace(batch, token_rewards=scores, step_ends=ends)


def test_the_same_steps_in_another_order_are_no_difference():
    # In float32 0.1 + 0.1 + 0.5 and 0.5 + 0.1 + 0.1 differ in the last bit; nothing may be divided by that.
    batch = steps_of(hand_batch([3, 3], [0, 0], [0, 0]), [{0: 0.1, 1: 0.1, 2: 0.5}, {0: 0.5, 1: 0.1, 2: 0.1}])
    one, other = batch.token_rewards.float().sum(-1)
    assert one != other
    batch = replace(batch, token_rewards=batch.token_rewards.float(), sampled_logprobs=batch.sampled_logprobs.float())
    algorithm = make("grpo", eps=0.0)
    assert (algorithm.credit(batch).advantages == 0).all()
    assert algorithm.zero_gradient_rows(batch).all()


def test_process_rows_have_zero_gradient_where_neither_steps_nor_outcomes_differ():
    algorithm = make("grpo_process")
    alike = steps_of(hand_batch([2, 2], [1, 1], [0, 0]), [{0: 1, 1: 1}, {1: 1}])  # more steps, but none better
    assert algorithm.zero_gradient_rows(alike).all()
    assert (algorithm.credit(alike).advantages == 0).all()
    assert not algorithm.zero_gradient_rows(replace(alike, rewards=torch.tensor([1.0, 2.0]))).any()
    assert not algorithm.zero_gradient_rows(steps_of(alike, [{0: 1, 1: 2}, {1: 1}])).any()
    assert not make("grpo_process", kl_coef=0.1).zero_gradient_rows(alike).any()


# --- metrics by hand -------------------------------------------------------------------------------------------------
def test_metrics_of_kl_are_k3_whatever_the_loss_takes():
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
def test_metrics_of_the_mismatch_are_shares_of_tokens_and_gaps_in_nats(mode, dropped, capped):
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


def test_the_policys_entropy_is_told_per_token():
    batch = hand_batch([2, 1], [0, 0], [0, 0], advantages=[0, 0])
    entropy = torch.tensor([[nan, 1, 3, nan], [inf, 5, nan, nan]], dtype=torch.float64)
    outputs = Outputs(logprobs=batch.old_logprobs, entropy=entropy)
    metrics = make("grpo", entropy_coef=0.1).loss(outputs, batch, scale_of(batch)).metrics
    # Mean over 2 sequences of (1 + 3)/2 and 5: 3.5; over 3 tokens: 3.
    close(metrics["loss/entropy"], -0.35)
    close(metrics["policy/entropy"], 3.0)


# --- what it reports and asks for -----------------------------------------------------------------------------------
def test_metrics_of_what_is_not_there_are_absent():
    outputs, batch = random_step()
    algorithm = make("grpo")
    batch = replace(algorithm.credit(batch), reference_logprobs=None, teacher_logprobs=None)
    metrics = algorithm.loss(Outputs(logprobs=outputs.logprobs), batch, scale_of(batch)).metrics
    assert set(metrics) == {
        "loss/total", "loss/policy", "ratio/clip_low_fraction", "ratio/clip_high_fraction", "kl/old",
        "sampler/logprob_gap_mean", "sampler/logprob_gap_max", "waste/importance_dropped_fraction",
    }  # fmt: skip


def test_yaml_defaults_are_those_of_the_maths_page():
    grpo = make("grpo")
    expected = {
        "std": "sample", "eps": 1e-6, "ratio": "token", "aggregate": "sequence_mean_token_mean", "clip_low": 0.2,
        "clip_high": 0.2, "dual_clip": None, "kl_coef": 0.0, "kl_in": "loss", "kl_estimator": "auto",
        "mismatch": "auto",
    }  # fmt: skip
    assert {key: getattr(grpo, key) for key in expected} == expected


@each("way", ["truncate", "mask"])
def test_weights_of_single_tokens_are_refused_where_a_completion_has_one_number(way):
    for keys in ({"ratio": "sequence"}, {"surrogate": "sapo", "ratio": "sequence"}, {"surrogate": "gmpo"}):
        why = "{}={} has one number for all of a completion's tokens".format(*[*keys.items()][-1])
        with pytest.raises(
            UserError, match=rf"^algorithm\.mismatch: .*{why}.*; use algorithm\.mismatch=sequence_{way}$"
        ):
            make("grpo", mismatch=f"token_{way}", **keys)
        make("grpo", mismatch=f"sequence_{way}", **keys)
    make("grpo", mismatch=f"token_{way}", ratio="sequence_token")
    make("grpo", mismatch=f"token_{way}", ratio="sequence", surrogate="cispo")


# -- the algorithms that are GRPO with other keys ----------------------------------------------------------------------


@each(("name", "advantages", "moved"), [
    # Row 0: mean log-ratio 5e-4, A > 0: s = 1.0005 > 1.0004, clipped, though one of its tokens did not move at all.
    # Row 1: mean -4e-4, A < 0: s = 0.9996 < 0.9997, clipped. Row 2: mean 5e-4, A < 0: not clipped.
    ("gspo", [1, -1, -1], [[0, 0, 1e-3, 0], [0, -4e-4, -4e-4, 0], [0, 5e-4, 0, 0]]),
    # Single tokens above 0.4 with A > 0 and below -0.4 with A < 0.
    ("gmpo", [2, -1, -1], [[9, 0.5, 0.5, 9], [9, -2, -0.5, 9], [9, 0.5, 9, 9]]),
])  # fmt: skip
def test_clip_fractions_are_shares_of_tokens(name, advantages, moved):
    batch = hand_batch([2, 2, 1], [0, 0, 0], [0, 0, 0], advantages=advantages)
    outputs = Outputs(logprobs=batch.old_logprobs + torch.tensor(moved, dtype=torch.float64))
    metrics = make(name).loss(outputs, batch, scale_of(batch)).metrics
    close(metrics["ratio/clip_high_fraction"], 2 / 5)
    close(metrics["ratio/clip_low_fraction"], 2 / 5)


def test_a_clip_of_grpos_size_is_warned_of():
    assert make("gspo").warnings == make("grpo").warnings == ()
    assert make("grpo", ratio="sequence").warnings == tuple(
        f"algorithm.{key}: 0.2 never binds with algorithm.ratio=sequence, whose ratio is normalised by length; "
        "the paper's are clip_low=3e-4 clip_high=4e-4" for key in ("clip_low", "clip_high")
    )  # fmt: skip
    (only,) = make("gspo_token", clip_high=0.28).warnings
    assert only.startswith("algorithm.clip_high: 0.28 never binds with algorithm.ratio=sequence_token")
    assert make("grpo", ratio="sequence", surrogate="importance").warnings == ()  # which has no clip


def test_gdpos_rows_have_zero_gradient_where_no_reward_differs_though_sums_may_be_equal():
    # The first group's rewards, of which the second counts half, add up to the same sum and still differ.
    rewards = torch.tensor([[0, 2], [1, 0], [3, 3], [3, 3]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64).expand(4, 2)
    batch = hand_batch([2, 1, 0, 2], (rewards * weights).sum(-1).tolist(), [4, 4, 1, 1])
    batch = replace(batch, each_reward=rewards, each_weight=weights)
    assert make("gdpo").zero_gradient_rows(batch).tolist() == [False, False, True, True]
    assert make("grpo").zero_gradient_rows(batch).all()


def test_gdpo_credits_what_a_run_scores():
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
