from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from rlft.batch import collate
from rlft.loop.metrics import Clock, explained_variance, peak_memory_bytes, rollout_metrics
from rlft.system import memory
from rlft.types import Branch, Completion, FinishReason, Group, Prompt, Rollout, Rollouts, Scores, ToolCall, Turn


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
    zero_rows = torch.tensor([False, False, True, True])
    assert rollout_metrics(step, batch_of(step), zero_rows) == pytest.approx(
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


def test_what_a_policy_only_read_has_metrics_of_its_own_and_is_no_length(step):
    calls = (
        ToolCall(name="add", arguments="{}", answer="3"),
        ToolCall(name="?", arguments="", answer="?", failed=True, cause="malformed"),
    )
    spoken = Completion(
        text="",
        token_ids=(7,) * 6,
        logprobs=(-0.5, -0.5, 0.0, 0.0, 0.0, -1.0),
        finish_reason=FinishReason.turns,
        mask=(True, True, False, False, False, True),
        turns=(Turn(end=2, calls=calls), Turn(end=6)),
        branches=(Branch(start=2, after=0),),
    )
    groups = step.groups
    first = replace(groups[0], rollouts=(replace(groups[0].rollouts[0], completion=spoken), groups[0].rollouts[1]))
    step = replace(step, groups=[first, groups[1]])
    found = rollout_metrics(step, batch_of(step), torch.zeros(4, dtype=torch.bool))
    shown = ("length/mean", "tokens/completion", "policy/entropy", "tokens/environment", "turns/", "calls/", "finish/")
    # Sampled: 3 + 3 + 2 + 2 tokens, of which 7 at -1/4 and 3 at -2 in all; turns 2 + 1 + 1 + 1.
    assert {name: value for name, value in found.items() if name.startswith(shown)} == {
        "length/mean": 10 / 4,
        "tokens/completion": 10,
        "policy/entropy": pytest.approx((7 / 4 + 2) / 10),
        "tokens/environment": 3,
        "turns/branches": 1 / 4,
        "turns/mean": 5 / 4,
        "turns/calls": 2 / 4,
        "turns/failed_calls_fraction": 1 / 2,
        **{f"calls/{cause}_fraction": 0.0 for cause in ("raised", "time", "died")},
        "calls/malformed_fraction": 1 / 2,
        **dict.fromkeys(("finish/calls", "finish/time"), 0.0),
        "finish/turns": 1 / 4,
        "finish/stop": found["finish/stop"],
        "finish/length": 3 / 4 - found["finish/stop"],
    }


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

    def refused(*args):
        raise FileNotFoundError

    monkeypatch.setattr(memory.Path, "read_text", refused)  # a system without /proc
    assert peak_memory_bytes() == pytest.approx(peak, rel=0.1)
    monkeypatch.setattr(memory.sys, "platform", "darwin")  # which counts in bytes where Linux counts in KiB
    assert peak_memory_bytes() == pytest.approx(peak / 1024, rel=0.1)
