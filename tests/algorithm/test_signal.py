"""Which completions the rewards teach nothing, over all algorithms, terms of the loss and patterns of rewards."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.commands.sweep.driver import InThisProcess, Run
from rlft.config import catalog
from rlft.logger.alarms import Hints
from rlft.loop.parts import Engines
from rlft.runs.lines import METRICS, StepRecord, read_lines, silent
from rlft.types import UserError

NAMES = catalog.choices("algorithm")
OF_THE_STEP = {"a2c", "ppo", "ppo_penalty", "ppo_ptx", "reinforce", "reinforce_pp"}
"""These compare a completion with a critic or with the whole step, the others with its siblings."""
TERMS = {
    "kl_coef": (0.0, 0.01), "kl_in": ("loss", "reward"), "entropy_coef": (0.0, 0.02),
    "kl_controller": ("fixed", "adaptive"),
}  # fmt: skip
OWN = {
    "reinforce": {"baseline": ("none", "batch", "group", "leave_one_out"), "reward_to_go": (False, True),
                  "gamma": (1.0, 0.9), "whiten": (False, True)},
    "opd": {"reward_coef": (0.0, 1.0)},
    "kimi": {"tau": (0.0, 0.5)},
    "ppo": {"gamma": (1.0, 0.9)},
}  # fmt: skip
MOST = 12
"""Combinations of an algorithm that are tried, of up to 128."""
PATTERNS = ("equal everywhere", "equal in groups", "one group differs", "two groups differ")


def variants(name):
    """The words of an algorithm with every combination of terms, and of its own keys."""
    keys = {**TERMS, **OWN.get(name, {})}
    for values in itertools.product(*keys.values()):
        changed = dict(zip(keys, values, strict=True))
        if changed["kl_controller"] != "fixed":
            changed["kl_target"] = 0.01
        yield changed


def rewards_of(pattern, random_numbers):
    """(rewards of three groups of four, how many of these groups differ)."""
    values = random_numbers.sample([0.1, 0.2, 0.3, 0.45, 0.7, 1.0], 3)
    if pattern == "equal everywhere":
        values = values[:1] * 3
    rewards = [[value] * 4 for value in values]
    differ = {"one group differs": 1, "two groups differ": 2}.get(pattern, 0)
    for group in random_numbers.sample(range(3), differ):
        rewards[group][random_numbers.randrange(4)] += random_numbers.uniform(0.1, 1.0)
    return rewards, differ


def fraction_of(name, changed, pattern, differ):
    if name == "opd" and changed["reward_coef"] == 0:
        return 0.0  # the teacher is the only signal, and rewards are left out
    of_the_step = name in OF_THE_STEP
    if name == "reinforce":
        of_the_step = changed["baseline"] in ("none", "batch")
    if of_the_step:
        return float(pattern == "equal everywhere")
    return (3 - differ) / 3


SMALL = (
    "steps=3", "prompts_per_step=2", "group_size=2", "lora.rank=2", "eval.every=0", "generation.max_tokens=4",
    "model.device=cpu", "data.size=16", "data.held_out_size=4", "scoring.workers=0", "console=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def noisy(hand_batch):
    """Three groups of four completions, with log-probs of all roles that differ, so that a KL is never 0."""
    generator = torch.Generator().manual_seed(5)
    groups = [0] * 4 + [1] * 4 + [2] * 4
    batch = hand_batch([3, 1, 4, 2] * 3, [0.0] * 12, groups)
    noise = {
        name: -1.0 - torch.rand(batch.loss_mask.shape, generator=generator, dtype=torch.float64)
        for name in ("old_logprobs", "reference_logprobs", "teacher_logprobs", "old_values")
    }
    steps = torch.zeros_like(batch.loss_mask)
    return replace(batch, **noise, token_rewards=torch.zeros_like(noise["old_values"]), step_ends=steps)


@each("name", NAMES)
def test_the_share_without_a_signal_is_of_rewards_alone_whatever_else_is_in_the_loss(name, make, noisy):
    random_numbers, tried = random.Random(name), 0
    every = list(variants(name))
    for changed in random_numbers.sample(every, min(MOST, len(every))):
        try:
            algorithm = make(name, **changed)
        except (UserError, ValueError):  # terms that this algorithm refuses together
            continue
        for pattern in (*PATTERNS[:2], *random_numbers.sample(PATTERNS[2:], 1)):
            rewards, differ = rewards_of(pattern, random_numbers)
            flat = torch.tensor(rewards, dtype=torch.float64).flatten()
            batch = replace(noisy, rewards=flat, each_reward=flat[:, None])
            share = algorithm.rows_without_signal(algorithm.credit(batch)).double().mean().item()
            assert share == pytest.approx(fraction_of(name, changed, pattern, differ)), (changed, pattern)
            hints, metrics = Hints(), {"waste/zero_advantage_fraction": share, "loss/total": 0.3}
            heard = [hint.alarm for step in (1, 2, 3) for hint in hints.check(record(step, rewards, metrics))]
            assert heard == ["no_signal"] * (share == 1), (changed, pattern)
            tried += 1
    assert tried >= 9


def record(step, rewards, metrics):
    return StepRecord(
        step=step, metrics=metrics, groups=(), rewards={"r": rewards}, total_rewards=rewards, advantages=rewards
    )


@each("words", [("algorithm.kl_coef=0.01",), ("algorithm.kl_coef=0.01", "algorithm.kl_in=reward")])
def test_a_run_whose_reward_tells_no_completions_apart_says_so(words, tmp_path):
    folder = tmp_path / str(len(words))
    same = [*words, "snapshot.reference=base", "generation=scripted", "generation.scripted.answers={*: [no]}"]
    run = Run(number=0, name="", words=[*SMALL, *same], folder=folder)
    with Engines() as engines:
        InThisProcess("train", None, engines, silent, prunes=False)._do(run, lambda: False)
    lines = read_lines(folder / METRICS)
    assert [line["waste/zero_advantage_fraction"] for line in lines] == [1.0] * 3
    assert [line.get("alarm/no_signal") for line in lines] == [None, None, 1.0]
