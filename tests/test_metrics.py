from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from rlft import metrics
from rlft.collate import collate
from rlft.metrics import Clock, UpdateMetrics, peak_memory_bytes, rollout_metrics
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, Scores


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
    return groups, Scores(total=by_reward["math"] + 2 * by_reward["format"], by_reward=by_reward)


def test_a_steps_rewards_lengths_and_tokens_are_the_numbers_one_gets_by_hand(step):
    # Totals 1, 0, 3, 3: mean 7/4, mean square 19/4, variance 19/4 - 49/16 = 27/16. 8 completion tokens, log-prob -1/4.
    groups, scores = step
    inert = torch.tensor([False, False, True, True])
    assert rollout_metrics(groups, scores, collate(groups, scores), inert) == pytest.approx(
        {
            "reward/mean": 7 / 4,
            "reward/std": math.sqrt(27) / 4,
            "reward/math": 3 / 4,
            "reward/format": 1 / 2,
            "length/mean": 2.0,
            "length/truncated_fraction": 1 / 4,
            "tokens/prompt": 5,
            "tokens/completion": 8,
            "waste/zero_advantage_fraction": 1 / 2,
            "policy/entropy": 0.25,
        }
    )


def test_the_entropy_estimate_is_over_tokens_not_rows(step):
    groups, scores = step
    batch = collate(groups, scores)
    batch = replace(batch, sampled_logprobs=batch.sampled_logprobs * torch.tensor([4.0, 1.0, 1.0, 1.0])[:, None])
    # One token at -1 and seven at -1/4: (1 + 7/4) / 8.
    found = rollout_metrics(groups, scores, batch, torch.zeros(4, dtype=torch.bool))
    assert found["policy/entropy"] == pytest.approx(2.75 / 8)


def numbers(**values):
    return {name.replace("__", "/"): torch.tensor(value) for name, value in values.items()}


def test_metrics_add_up_over_micro_batches_and_average_over_updates():
    found = UpdateMetrics()
    found.add(numbers(loss__total=1.0, kl__old=0.25), share=1.0)
    found.add(numbers(loss__total=2.0, kl__old=0.5), share=1.0)
    found.add_update(policy__grad_norm=4.0)
    found.add(numbers(loss__total=-1.0, kl__old=0.25), share=1.0)
    found.add_update(policy__grad_norm=2.0)
    assert found.mean() == {"loss/total": 1.0, "loss/policy": 0.0, "kl/old": 0.5, "policy/grad_norm": 3.0}


def test_maxima_are_combined_by_maximum():
    found = UpdateMetrics()
    for value in (0.5, 2.0, 1.0):
        found.add(numbers(sampler__logprob_gap_max=value), share=0.5)
        found.add_update()
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
    found.add_update()
    assert found.mean() == pytest.approx(
        {"loss/total": 0.0, "loss/policy": 0.1, "ratio/clip_high_fraction": 0.2, "sampler/logprob_gap_max": 0.3}
    )


def test_an_update_in_which_nothing_was_forwarded_has_loss_0():
    found = UpdateMetrics()
    found.add_update(policy__grad_norm=0.0, policy__lr=0.1)
    assert found.mean() == {"loss/total": 0.0, "loss/policy": 0.0, "policy/grad_norm": 0.0, "policy/lr": 0.1}


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
