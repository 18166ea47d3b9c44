from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from rlft import metrics
from rlft.collate import collate
from rlft.metrics import Clock, UpdateMetrics, explained_variance, peak_memory_bytes, rollout_metrics
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, Rollouts, Scores


@pytest.fixture
def step():
    """Two prompts of 2 and 3 tokens with two completions each, of 1, 3, 2 and 2 tokens."""
    groups = []
    for prompt_ids, completions in (((5, 6), [(1, "stop"), (3, "length")]), ((4, 4, 4), [(2, "stop"), (2, "stop")])):
        prompt = Prompt(id="p", messages=(), answer="", token_ids=prompt_ids)
        rollouts = [
            Rollout(
                prompt=prompt,
                completion=Completion(
                    text="", token_ids=(7,) * size, logprobs=(-0.25,) * size, finish_reason=FinishReason(reason)
                ),
                policy_version=0,
            )
            for size, reason in completions
        ]
        groups.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
    by_reward = {"math": torch.tensor([[1.0, 0.0], [1.0, 1.0]]), "format": torch.tensor([[0, 0], [1, 1]])}
    scores = Scores(total=by_reward["math"] + 2 * by_reward["format"], by_reward=by_reward)
    return Rollouts(groups=groups, scores=scores, num_sampled=10)


def batch_of(rollouts):
    return collate(rollouts.groups, rollouts.scores, no_text)


def no_text(token_ids):
    raise AssertionError("no reward scores steps, so nothing is decoded")


def test_a_steps_rewards_lengths_and_tokens_are_the_numbers_one_gets_by_hand(step):
    # Totals 1, 0, 3, 3: mean 7/4, mean square 19/4, variance 19/4 - 49/16 = 27/16. 8 completion tokens, log-prob -1/4.
    # 10 completions were sampled and 4 are trained on.
    inert = torch.tensor([False, False, True, True])
    assert rollout_metrics(step, batch_of(step), inert) == pytest.approx(
        {
            "reward/mean": 7 / 4,
            "reward/std": math.sqrt(27) / 4,
            "reward/math": 3 / 4,
            "reward/format": 1 / 2,
            "length/mean": 2.0,
            "length/truncated_fraction": 1 / 4,
            "tokens/prompt": 5,
            "tokens/completion": 8,
            "sampled/completions": 10,
            "waste/resampled_fraction": 6 / 10,
            "waste/zero_advantage_fraction": 1 / 2,
            "policy/entropy": 0.25,
        }
    )


def test_the_entropy_estimate_is_over_tokens_not_rows(step):
    batch = batch_of(step)
    batch = replace(batch, sampled_logprobs=batch.sampled_logprobs * torch.tensor([4.0, 1.0, 1.0, 1.0])[:, None])
    # One token at -1 and seven at -1/4: (1 + 7/4) / 8.
    found = rollout_metrics(step, batch, torch.zeros(4, dtype=torch.bool))
    assert found["policy/entropy"] == pytest.approx(2.75 / 8)


# -- the critic --------------------------------------------------------------------------------------------------------
def test_the_explained_variance_is_the_number_one_gets_by_hand():
    # Returns 1, 2, 6: mean 3, squared deviations 4 + 1 + 9 = 14. Errors 1, 0, 2: mean 1, deviations 0 + 1 + 1 = 2.
    returns = torch.tensor([[1.0, math.nan, 2.0], [6.0, 100.0, -100.0]])
    values = torch.tensor([[0.0, 50.0, 2.0], [4.0, math.inf, 7.0]])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    assert explained_variance(values, returns, mask) == pytest.approx(1 - 2 / 14, abs=1e-15)


def test_a_critic_that_is_off_by_a_constant_explains_all_and_a_constant_critic_explains_nothing():
    returns, mask = torch.tensor([[1.0, 2.0, 6.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(returns - 5, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 9.0), returns, mask) == pytest.approx(0.0, abs=1e-15)
    # Errors of twice the deviation, with the other sign: 1 - 4.
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0, abs=1e-12)


def test_returns_that_do_not_vary_leave_nothing_to_explain():
    returns, mask = torch.tensor([[0.5, 0.5]]), torch.ones(1, 2, dtype=torch.bool)
    assert explained_variance(torch.tensor([[0.0, 1.0]]), returns, mask) == 0.0


def test_a_step_with_a_critic_tells_its_explained_variance_and_others_do_not(step):
    batch, nobody = batch_of(step), torch.zeros(4, dtype=torch.bool)
    returns = torch.arange(4.0)[:, None].expand(batch.loss_mask.shape)
    with_values = replace(batch, returns=returns, old_values=0.5 * returns)
    # Errors are half the returns: a quarter of their variance.
    assert rollout_metrics(step, with_values, nobody)["value/explained_variance"] == pytest.approx(3 / 4, abs=1e-12)
    assert "value/explained_variance" not in rollout_metrics(step, replace(batch, returns=returns), nobody)


# -- updates -----------------------------------------------------------------------------------------------------------
def numbers(**values):
    return {name.replace("__", "/"): torch.tensor(value) for name, value in values.items()}


def means(found):
    """Without what is counted in tokens, or told of the last update alone."""
    others = ("kl/old_last", "tokens/trained", "waste/padding_fraction")
    return {name: value for name, value in found.mean().items() if name not in others}


def test_metrics_add_up_over_micro_batches_and_average_over_updates():
    found = UpdateMetrics()
    found.add(numbers(loss__total=1.0, kl__old=0.25), share=1.0)
    found.add(numbers(loss__total=2.0, kl__old=0.5), share=1.0)
    found.add_update({"policy/grad_norm": 4.0, "critic/lr": 0.5})
    found.add(numbers(loss__total=-1.0, kl__old=0.25), share=1.0)
    found.add_update({"policy/grad_norm": 2.0, "critic/lr": 0.25})
    assert means(found) == {"loss/total": 1.0, "loss/policy": 0.0, "kl/old": 0.5, "policy/grad_norm": 3.0} | {
        "critic/lr": 0.375
    }


def test_maxima_are_combined_by_maximum():
    found = UpdateMetrics()
    for value in (0.5, 2.0, 1.0):
        found.add(numbers(sampler__logprob_gap_max=value), share=0.5)
        found.add_update({})
    assert found.mean()["sampler/logprob_gap_max"] == 2.0


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_does_not_swallow_nan(values):
    found = UpdateMetrics()
    for value in values:
        found.add(numbers(sampler__logprob_gap_max=value), share=1.0)
    assert math.isnan(found.mean()["sampler/logprob_gap_max"])


def test_what_is_said_of_tokens_is_of_the_forwarded_ones_and_losses_are_of_the_whole_batch():
    # A quarter of the tokens is forwarded; the algorithm divides by all of them.
    found = UpdateMetrics()
    found.add(numbers(loss__policy=0.1, ratio__clip_high_fraction=0.05, sampler__logprob_gap_max=0.3), share=0.25)
    found.add_update({})
    assert means(found) == pytest.approx(
        {"loss/total": 0.0, "loss/policy": 0.1, "ratio/clip_high_fraction": 0.2, "sampler/logprob_gap_max": 0.3}
    )


def test_an_update_in_which_nothing_was_forwarded_has_loss_0():
    found = UpdateMetrics()
    found.add_update({"policy/grad_norm": 0.0, "policy/lr": 0.1})
    assert means(found) == {"loss/total": 0.0, "loss/policy": 0.0, "policy/grad_norm": 0.0, "policy/lr": 0.1}
    assert (found.mean()["tokens/trained"], found.mean()["waste/padding_fraction"]) == (0, 0.0)


def test_how_far_the_step_has_moved_the_policy_is_the_kl_of_the_last_update_alone():
    # Updates of 0 + 0, 0.25 + 0.5 and 1 + 0.25: their mean is (0 + 0.75 + 1.25) / 3, the last one 1.25.
    found = UpdateMetrics()
    assert found.mean()["kl/old_last"] == 0.0
    for parts in ((0.0, 0.0), (0.25, 0.5), (1.0, 0.25)):
        for part in parts:
            found.add(numbers(kl__old=part), share=1.0)
        found.add_update({"policy/lr": 0.1})
        assert found.mean()["kl/old_last"] == sum(parts)
    assert found.mean()["kl/old"] == pytest.approx(2 / 3, abs=1e-15)


def test_the_kl_of_the_last_update_is_of_the_forwarded_tokens_like_every_other():
    found = UpdateMetrics()
    found.add(numbers(kl__old=0.125), share=0.5)  # half of the tokens is forwarded
    found.add_update({})
    assert found.mean()["kl/old_last"] == 0.25
    found.add_update({})  # nothing was forwarded
    assert found.mean()["kl/old_last"] == 0.0


def test_tokens_add_up_over_all_micro_batches_of_all_updates_and_padding_is_their_share():
    # 30 and 20 tokens in rectangles of 40 and 24: 14 of 64 are padding. They are sums, not means over updates.
    found = UpdateMetrics()
    for real, network in ((30, 40), (20, 24)):
        found.add_tokens(real, network)
        found.add_update({})
    assert (found.mean()["tokens/trained"], found.mean()["waste/padding_fraction"]) == (50, 14 / 64)


def test_the_clock_tells_stages_and_adds_up_their_seconds(monkeypatch):
    now, told = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(told.append)
    for stage, seconds in (("sample", 2.0), ("score", 1.0), ("sample", 0.5)):
        with clock(stage):
            now[0] += seconds
    now[0] += 0.25
    assert told == ["sample", "score", "sample"]
    assert clock.metrics() == {"time/sample": 2.5, "time/score": 1.0, "time/step": 3.75}


def test_peak_memory_is_in_bytes(monkeypatch):
    peak = peak_memory_bytes()
    assert 50e6 < peak < 100e9  # this process has torch loaded
    monkeypatch.setattr(metrics.sys, "platform", "darwin")  # which counts in bytes where Linux counts in KiB
    assert peak_memory_bytes() == pytest.approx(peak / 1024, rel=0.1)
