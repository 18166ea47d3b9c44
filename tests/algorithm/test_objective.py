"""What all algorithms have from one class: a KL coefficient that moves, and what has no effect or teaches nothing."""

import functools
import itertools
import random
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
import torch
from in_one_test import each
from pydantic import ValidationError
from slow_cases import slow

from rlft.algorithm.ops.surrogate import Mismatch
from rlft.commands.sweep.driver import InThisProcess, Run
from rlft.config import catalog
from rlft.config.keys import fields_of, options
from rlft.logger.alarms import Hints
from rlft.loop.parts import Engines
from rlft.runs.lines import METRICS, StepRecord, read_lines, silent
from rlft.types import Outputs, UserError
from tests.algorithm.algorithm_steps import close, full_step, hand_batch, make, scale_of


# --- KL to the old policy -------------------------------------------------------------------------------------------
def test_its_expectation_over_old_samples_is_the_kl_with_the_kls_own_gradient():
    # One row for each word of a vocabulary of 4, weighed by its old probability: sum_v old_v (r_v - 1 - log r_v).
    logits = torch.tensor([0.3, -1.0, 0.7, 2.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([1.0, 0.2, -0.5, 0.1], dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    algorithm = make("grpo", kl_coef=1.0, kl_to="old")
    estimate = 0.0
    for v in range(4):
        batch = hand_batch([1], [0], [0], advantages=[0], padding=0)
        batch = replace(batch, old_logprobs=torch.stack([old[v], old[v]])[None])
        loss = algorithm.loss(Outputs(logprobs=torch.stack([new[v], new[v]])[None]), batch, scale_of(batch))
        estimate = estimate + old[v].exp() * loss.total
    exact = (old.exp() * (old - new)).sum()
    close(estimate.detach(), exact.detach())
    (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    close(gradient, torch.autograd.grad(exact, logits)[0])


def test_at_the_first_update_the_policy_has_no_distance_from_itself():
    outputs, batch = full_step()
    algorithm = make("ppo_penalty")
    batch = replace(algorithm.credit(batch), old_logprobs=None)
    assert algorithm.loss(outputs, batch, scale_of(batch)).metrics["loss/kl"] == 0


# --- the coefficient that moves -------------------------------------------------------------------------------------


# Target 0.03, whose half more is 0.045; 1 + 0.1 * (0.033 / 0.03 - 1).
@each(("controller", "kl", "coef"), [("adaptive", 0.046, 2.0), ("proportional", 0.033, 1.01), ("fixed", 3.0, 1.0)])
def test_the_controller_moves_the_coefficient_after_a_step(controller, kl, coef):
    algorithm = make("grpo", kl_coef=1.0, kl_controller=controller, kl_target=0.03)
    assert algorithm.adapt({"kl/reference": kl, "kl/old_last": 0.03}).kl_coef == pytest.approx(coef, rel=1e-12)
    algorithm = make("ppo_penalty", kl_controller=controller, kl_target=0.03)
    moved = algorithm.adapt({"kl/reference": 0.03, "kl/old_last": kl})
    assert moved.kl_coef == pytest.approx(coef, rel=1e-12)
    assert moved == replace(algorithm, kl_coef=moved.kl_coef)


def test_the_coefficient_can_always_come_back():
    start = make("ppo_penalty")
    for kl, end in ((0.0, 1e-12), (1.0, 1e12)):
        algorithm = start
        for _ in range(1200):  # 2^-1200 is 0 and 2^1200 is inf
            algorithm = algorithm.adapt({"kl/old_last": kl})
        assert algorithm.kl_coef == end


def test_what_has_moved_is_saved_and_restored():
    algorithm = make("ppo_penalty").adapt({"kl/old_last": 1.0})
    assert algorithm.state() == {"kl_coef": 2.0}
    assert make("ppo_penalty").restored(algorithm.state()) == algorithm
    fixed = make("grpo", kl_coef=0.04)
    assert fixed.adapt({}) is fixed  # it looks at nothing
    assert fixed.state() == {}
    assert fixed.restored({}) == fixed


# --- scores ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["reinforce", "ppo"])
def test_rewards_of_tokens_add_up_to_the_scores_of_completions(name):
    _, batch = full_step()
    algorithm = make(name, kl_coef=0.3)
    tokens_B, scores_B = algorithm.token_scores(batch).sum(-1), algorithm.completion_scores(batch)
    some = batch.loss_mask.any(-1)  # an empty completion has no token to hold its reward
    close(tokens_B[some], scores_B[some])
    assert tokens_B[~some].tolist() == [0]
    assert scores_B[~some].tolist() == [2]


@each("name", ["grpo_process", "ppo", "a2c"])
def test_a_completion_of_one_turn_is_credited_alike_bit_for_bit(name):
    _, batch = full_step()
    for turn_ends in (None, torch.zeros_like(batch.loss_mask)):
        single = replace(batch, turn_ends=turn_ends)
        turn, trajectory = (make(name, credit_span=span).credit(single) for span in ("turn", "trajectory"))
        assert torch.equal(turn.advantages, trajectory.advantages)
    assert not torch.equal(make(name, credit_span="turn").credit(batch).advantages, trajectory.advantages)


# --- what is refused, and what is warned of -------------------------------------------------------------------------
def test_k1_as_a_loss_is_warned_of():
    (told,) = make("grpo", kl_coef=0.1, kl_estimator="k1").warnings
    assert told.startswith("algorithm.kl_estimator: k1 has zero expected gradient as a loss, got k1; use")
    assert make("grpo", kl_coef=0.1, kl_estimator="k1", kl_in="reward").warnings == ()
    assert make("kimi", kl_coef=0.1, kl_estimator="k1").warnings == (told,)


def test_without_a_critic_or_text_their_terms_are_0():
    outputs, batch = full_step()
    for name in ("grpo", "reinforce", "kimi"):
        algorithm = make(name)
        assert not algorithm.needs_values
        assert not algorithm.needs_text
        assert algorithm.value_loss(outputs.values, batch, scale_of(batch)) == 0
        assert algorithm.text_loss(outputs.logprobs, batch.loss_mask, 5) == 0


# --- keys that say when they act (`Key.acts`): those that `without_effect` names change nothing -----------------------
NAMES = catalog.choices("algorithm")
FAMILIES = ("grpo", "reinforce", "ppo", "kimi", "opd")
NUMBERS: dict[str, tuple[Any, ...]] = {
    "clip_low": (0.02, 0.3), "clip_high": (0.0, 0.6), "dual_clip": (None, 1.7), "kl_tolerance": (1.1, 1.5),
    "kl_target": (None, 0.002, 0.0128, 0.05), "kl_coef": (0.0, 0.3), "gamma": (0.5, 1.0), "lam": (0.5, 0.95),
    "value_lam": (None, 0.4, 1.0), "n_steps": (None, 1, 2), "value_clip": (None, 0.05),
    "off_policy_limit": (None, 0.02), "mismatch_low": (0.05, 0.6), "mismatch_high": (1.2, 4.0),
    "reward_coef": (0.0, 0.5),
}  # fmt: skip
"""Values of keys that are neither words nor switches; of others the value and half of it."""
ELSEWHERE = {"ptx_coef", "top_k"}
"""Keys of what is no part of this loss: pretraining text, and how many of the teacher's tokens are asked for."""


def values_of(field, value):
    kinds = [kind for kind in options(field.hint) if isinstance(kind, type)]
    words = [kind for kind in kinds if issubclass(kind, Enum)]
    if words:  # auto is another of the words, chosen when a run is planned
        return tuple(word for word in words[0] if word != Mismatch.auto)
    if bool in kinds:
        return False, True
    return NUMBERS.get(field.name) or (value, value / 2 if value else 0.1)


def built(name, keys):
    try:
        return make(name, **keys)
    except (UserError, ValidationError):
        return None


def random_algorithms(name, number):
    """The algorithm as it is, then with random values of all of its keys."""
    draws, algorithm = random.Random(name), make(name)
    yield algorithm
    while number:
        choices = {f.name: values_of(f, getattr(algorithm, f.name)) for f in fields_of(type(algorithm))}
        choices["kl_estimator"] = [word for word in choices["kl_estimator"] if word != "exact"]  # only perturbed to
        drawn = {name: draws.choice(values) for name, values in choices.items()}
        if (other := built(name, drawn)) is not None:
            number -= 1
            yield other


@functools.cache
def outputs_and_batch(seed, moved):
    """The same ones for every algorithm: of a policy that has moved away, or not."""
    outputs, batch = full_step(seed)
    gap = batch.sampled_logprobs - batch.old_logprobs  # from too small for any limit to too large
    batch = replace(batch, sampled_logprobs=batch.old_logprobs + (1.0, 8.0)[seed // 4] * gap)
    distance = (-2.0, 2.0, -0.2, 0.2)[seed % 4] if moved else 0.0
    logprobs = batch.old_logprobs + distance * (outputs.logprobs.detach() - batch.old_logprobs)
    values = batch.old_values + distance * (outputs.values.detach() - batch.old_values)
    batch = replace(batch, reference_kl=(batch.old_logprobs - batch.reference_logprobs).square())
    return replace(outputs, logprobs=logprobs.requires_grad_(), values=values.requires_grad_()), batch


def gradients(algorithm, moved):
    """The gradients of a step's loss and of the next one's, whose KL coefficient may have changed, batch by batch."""
    for seed in range(8):
        outputs, batch = outputs_and_batch(seed, moved)
        other = batch.old_logprobs if algorithm.kl_to == "old" else batch.reference_logprobs
        outputs = replace(outputs, kl=0.7 * (outputs.logprobs - other).square())  # like a KL 0 where both are equal
        inputs = outputs.logprobs, outputs.entropy, outputs.values, outputs.top_k_logprobs
        measured = [{"kl/old_last": kl if moved else 0.0, "kl/reference": kl} for kl in (0.0026, 0.0166, 0.065)]
        following = [algorithm, *map(algorithm.adapt, measured)]
        of_each = {}
        for one in set(following):
            total = one.loss(outputs, one.credit(batch), scale_of(batch)).total
            keys = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
            of_each[one] = torch.autograd.grad(total, inputs, **keys)
        yield from (gradient for one in following for gradient in of_each[one])


@pytest.mark.parametrize("draws", [1, slow(4)])
@pytest.mark.parametrize("moved", [False, True], ids=["one update", "several updates"])
@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_keys_without_effect_change_no_gradient(name, moved, draws):
    for algorithm in random_algorithms(name, draws):
        keys = {f.name: getattr(algorithm, f.name) for f in fields_of(type(algorithm))}
        before, silent = list(gradients(algorithm, moved)), set(algorithm.without_effect(moved=moved))
        for field in fields_of(type(algorithm)):
            others = [value for value in values_of(field, keys[field.name]) if value != keys[field.name]]
            perturbed = [one for value in others if (one := built(name, {**keys, field.name: value})) is not None]
            are_off = all(not one.mismatch.is_on for one in (algorithm, *perturbed))
            if field.name in ELSEWHERE or not perturbed or (field.name == "mismatch" and are_off):
                continue
            acts = any(
                not torch.allclose(new, old, rtol=1e-9, atol=1e-12)
                for one in perturbed
                for new, old in zip(gradients(one, moved), before, strict=True)
            )
            assert acts == (field.name not in silent), f"{field.name} {others} {keys}"


@pytest.mark.parametrize("name", NAMES)
def test_conditions_ask_for_what_is_known(name):
    assert {"clip_low", "tau"} & set(make(name).without_effect(moved=False))


# --- completions that the rewards teach nothing, over algorithms, terms of the loss and patterns of rewards -----------
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
def noisy():
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
def test_the_share_without_a_signal_is_of_rewards_alone_whatever_else_is_in_the_loss(name, noisy):
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


def test_a_run_whose_reward_tells_no_completions_apart_says_so(tmp_path):
    same = ["algorithm.kl_coef=0.01", "snapshot.reference=base", "generation=scripted"]
    same += ["generation.scripted.answers={*: [no]}"]
    run = Run(number=0, name="", words=[*SMALL, *same], folder=tmp_path)
    with Engines() as engines:
        InThisProcess("train", None, engines, silent, prunes=False)._do(run, lambda: False)
    lines = read_lines(tmp_path / METRICS)
    assert [line["waste/zero_advantage_fraction"] for line in lines] == [1.0] * 3
    assert [line.get("alarm/no_signal") for line in lines] == [None, None, 1.0]
