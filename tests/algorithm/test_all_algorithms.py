"""What holds for all algorithms, of every module: as their YAMLs have them, and with every term of the loss at work."""

from dataclasses import fields, replace

import pytest
import torch
from in_one_test import each
from slow_cases import slow_but

import rlft
from rlft.config import catalog
from rlft.types import Batch, LossScale, Outputs, UserError
from tests.algorithm.algorithm_steps import close, full_step, hand_batch, loss_of, make, rows_of, scale_of

nan, inf = float("nan"), float("inf")

NAMES = catalog.choices("algorithm")
EXTRAS = {"": {}, "all terms": {"kl_coef": 0.1, "entropy_coef": 0.02, "mismatch": "token_mask"}}
OF_COMPLETIONS = {name: {"mismatch": "sequence_mask", "mismatch_low": 0.8} for name in ("gspo", "gmpo")}
"""Instead of the weights of single tokens, which these refuse."""

# Together these use every switch of GRPO at least once, and the pairs that touch each other.
VARIANTS = {
    "paper": {"kl_coef": 0.04},
    "token_mean": {"aggregate": "token_mean", "clip_high": 0.28},
    "token_sum": {"aggregate": "sequence_mean_token_sum", "std": "population", "dual_clip": 1.5},
    "constant": {"aggregate": "constant", "std": "none", "kl_coef": 0.1, "kl_estimator": "k2"},
    "sequence": {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.06, "mismatch": "sequence_mask"},
    "sequence_token": {"ratio": "sequence_token", "mismatch": "token_mask", "kl_coef": 0.1, "kl_estimator": "k1"},
    "unbiased": {"kl_coef": 0.1, "kl_estimator": "k3_unbiased", "mismatch": "token_truncate", "mismatch_high": 1.2},
    "reward": {"kl_coef": 0.1, "kl_in": "reward", "std": "batch", "mismatch": "sequence_truncate"},
    "entropy": {"entropy_coef": 0.01, "aggregate": "token_mean"},
}
CASES = [(name, extra) for name in NAMES for extra in EXTRAS] + [("grpo", variant) for variant in VARIANTS]
algorithms = each(("name", "extra"), CASES)
INPUTS = ("sampled_logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs", "old_values")


def made(name, extra):
    if extra in VARIANTS:
        return make(name, **VARIANTS[extra])
    # Kimi refuses the weights of single tokens: its squared log-ratio is of a whole completion.
    keys = {key: value for key, value in EXTRAS[extra].items() if (name, key) != ("kimi", "mismatch")}
    return make(name, **keys | (OF_COMPLETIONS.get(name, {}) if extra else {}))


GROUP_RELATIVE = ("grpo", "grpo_process", "dr_grpo", "gspo", "gspo_token", "dapo", "cispo", "sapo", "gmpo", "gdpo")


def test_all_nineteen_are_there():
    with_a_critic = {"a2c", "ppo", "ppo_penalty", "ppo_ptx"}
    assert set(NAMES) == {*GROUP_RELATIVE} | with_a_critic | {"reinforce", "rloo", "reinforce_pp", "kimi", "opd"}


PENALTY = {"kl_to": "old", "kl_in": "loss", "kl_coef": 1.0, "kl_controller": "adaptive", "kl_target": 0.01}


@each(("name", "base", "keys"), [
    ("grpo_process", "grpo", {"supervision": "process"}),
    ("dapo", "grpo", {"clip_high": 0.28, "aggregate": "token_mean"}),
    ("dr_grpo", "grpo", {"std": "none", "aggregate": "constant"}),
    ("gspo", "grpo", {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
    ("gspo_token", "gspo", {"ratio": "sequence_token"}),
    ("cispo", "grpo", {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregate": "token_mean"}),
    ("sapo", "grpo", {"surrogate": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}),
    ("gmpo", "grpo", {"surrogate": "gmpo", "clip_low": 0.4, "clip_high": 0.4}),
    ("gdpo", "grpo", {"reward_aggregation": "normalize_then_sum"}),
    ("rloo", "reinforce", {"reward_to_go": False, "baseline": "leave_one_out"}),
    ("reinforce_pp", "reinforce", {"whiten": True, "surrogate": "clipped", "aggregate": "token_mean"}),
    ("ppo_penalty", "ppo", {"surrogate": "importance", **PENALTY}),
    ("ppo_ptx", "ppo", {"ptx_coef": 1.0}),
    ("a2c", "ppo", {"entropy_coef": 0.01, "estimator": "n_step", "surrogate": "importance", "value_clip": None}),
])  # fmt: skip
def test_each_differs_from_its_base_in_these_keys_only(name, base, keys):
    assert make(name) == make(base, **keys)


IN_REWARD, BY_STEPS = {"kl_coef": 0.1, "kl_in": "reward"}, {"supervision": "process"}
EXACT = {"kl_coef": 0.1, "kl_estimator": "exact"}


@each(("name", "keys", "said"), [
    ("grpo", {}, {"needs_reference": False, "needs_entropy": False, "needs_steps": False}),
    ("grpo", {}, {"needs_old_in_credit": False}),
    ("grpo", {"kl_coef": 0.1}, {"needs_reference": True, "needs_entropy": False, "needs_old_in_credit": False}),
    ("grpo", IN_REWARD, {"needs_reference": True, "needs_entropy": False, "needs_old_in_credit": True}),
    ("grpo", {"kl_in": "reward", "entropy_coef": 0.1}, {"needs_reference": False, "needs_entropy": True}),
    ("grpo", {"kl_in": "reward"}, {"needs_old_in_credit": False, "needs_values": False, "min_group_size": 2}),
    ("grpo_process", {"kl_coef": 0.0, "kl_in": "reward"}, {"needs_steps": True}),
    *((name, {"kl_coef": 0.1, "kl_in": place}, {"needs_reference": True, "needs_old_in_credit": place == "reward"})
      for name in ("reinforce", "rloo", "reinforce_pp") for place in ("reward", "loss")),
    *(("reinforce", {"baseline": baseline}, {"min_group_size": size})
      for baseline, size in (("none", 1), ("batch", 1), ("group", 2), ("leave_one_out", 2))),
    *((name, {}, {"min_group_size": size})
      for name, size in (("rloo", 2), ("reinforce_pp", 1), ("kimi", 2), ("ppo", 1), ("opd", 1))),
    ("opd", {"teacher_in": "loss", "top_k": 5}, {"teacher_top_k": 5, "needs_old_in_credit": False}),
    ("opd", {"reward_coef": 0.1}, {"min_group_size": 2}),
    ("grpo", {"kl_coef": 0.5, "kl_to": "old"}, {"needs_reference": False, "needs_old_in_credit": False}),
    ("grpo", {"kl_estimator": "exact"}, {"exact_kl_to": None, "reference_field": "reference_logprobs"}),
    ("grpo", EXACT, {"exact_kl_to": "reference", "reference_field": None}),
    ("grpo", EXACT | {"kl_to": "old"}, {"exact_kl_to": "old", "reference_field": "reference_logprobs"}),
    ("grpo", EXACT | {"kl_in": "reward"}, {"exact_kl_to": None, "reference_field": "reference_kl"}),
    ("opd", BY_STEPS, {"needs_steps": False}),
    ("opd", BY_STEPS | {"reward_coef": 1.0}, {"needs_steps": True}),
])  # fmt: skip
def test_it_asks_only_for_what_its_keys_use(name, keys, said):
    algorithm = make(name, **keys)
    assert {what: getattr(algorithm, what) for what in said} == said


@each(("name", "keys", "ask", "lacking", "said"), [
    ("grpo", {}, "loss", "advantages", "advantages is None"),
    ("grpo", {"kl_coef": 0.1}, "loss", "reference_logprobs", "reference_logprobs is None"),
    ("grpo", {"entropy_coef": 0.1}, "loss", "entropy", "entropy is None"),
    ("grpo", EXACT, "loss", "kl", "kl is None, but kl_estimator=exact needs it"),
    ("grpo", IN_REWARD, "credit", "old_logprobs", "old_logprobs is None"),
    ("grpo_process", {}, "credit", "token_rewards", "token_rewards is None, but supervision=process"),
    *(("gdpo", {}, ask, "each_reward", "each_reward is None, but reward_aggregation=normalize_then_sum needs it")
      for ask in ("credit", "zero_gradient_rows")),
    ("ppo", {}, "credit", "old_values", "old_values is None"),
    ("ppo", {}, "loss", "values", "values is None, but the critic's loss"),
    ("ppo", {}, "value_loss", "returns", "returns is None"),
])  # fmt: skip
def test_a_missing_tensor_is_named(name, keys, ask, lacking, said):
    algorithm, (outputs, batch) = make(name, **keys), full_step()
    if ask in ("loss", "value_loss"):
        batch = algorithm.credit(batch)
    if hasattr(batch, lacking):
        batch = replace(batch, **{lacking: None})
    else:
        outputs = replace(outputs, **{lacking: None})
    arguments = {"loss": (outputs, batch, scale_of(batch)), "value_loss": (outputs.values, batch, scale_of(batch))}
    with pytest.raises(ValueError, match=said):
        getattr(algorithm, ask)(*arguments.get(ask, (batch,)))


@each(("name", "keys", "key", "said"), [
    ("grpo", {"kl_to": "old", "kl_in": "reward"}, "kl_in", r".*, got reward; use algorithm\.kl_in=loss"),
    ("grpo", {"kl_to": "old", "kl_estimator": "k2"}, "kl_estimator", r".*, got k2; use .*=auto"),
    ("grpo", {"kl_coef": 0.1, "kl_controller": "adaptive"}, "kl_target", r".*adaptive.*; set"),
    ("grpo", {"kl_controller": "proportional", "kl_target": 0.1}, "kl_coef", r".*, got 0\.0; start"),

    ("cispo", {"dual_clip": 7.0}, "dual_clip", r".*surrogate=cispo.*, got 7\.0; use .*null"),
    ("sapo", {"dual_clip": 7.0}, "dual_clip", r".*surrogate=sapo.*, got 7\.0; use .*null"),
    ("ppo", {"dual_clip": 1.1}, "dual_clip", r".* = 1\.2, got 1\.1; use 3"),
    ("kimi", {"mismatch_low": 1.5}, "mismatch_low", r".*, got 1\.5 \.\. 2; use"),
    ("kimi", {"mismatch": "token_mask"}, "mismatch", ".* whole completion"),
    ("kimi", {"baseline": "soft", "tau": 0.0}, "tau", r".*, got 0\.0; use"),
    ("grpo", {"credit_span": "turn"}, "credit_span", r".*outcome has one score.*; use algorithm\.supervision=process"),
    ("grpo", {"mismatch_high": 0.9}, "mismatch_low", r".*, got 0\.5 \.\. 0\.9; use"),
    ("grpo_process", IN_REWARD, "kl_in", r".*, got reward; use algorithm\.kl_in=loss"),
    *(("gmpo", {"ratio": level}, "ratio", rf".*mean itself, got {level}; use algorithm\.ratio=token")
      for level in ("sequence", "sequence_token")),
    ("gdpo", BY_STEPS, "supervision", r".* whole completions, got process; use algorithm\.super"),
    ("gdpo", IN_REWARD, "kl_in", r".* no one score .*, got reward; use algorithm\.kl_in=l"),
    ("opd", {"divergence": "forward"}, "divergence", ".*only the reverse KL can be estimated"),
    ("opd", {"teacher_in": "loss", "divergence": "jensen_shannon", "jsd_beta": 0.0}, "jsd_beta",
     ".*the divergence is 0 there"),
    ("opd", {"teacher_in": "loss", "off_policy_limit": 0.1}, "off_policy_limit", ".*teacher_in=loss has no advantage"),
    ("opd", IN_REWARD, "kl_in", r".*algorithm\.reward_coef=0 leaves out"),
])  # fmt: skip
def test_contradictions_that_are_not_in_the_table_of_refusals_are_refused(name, keys, key, said):
    with pytest.raises(UserError, match=rf"^algorithm\.{key}: {said}"):
        make(name, **keys)


def test_no_yaml_has_a_warning_and_load_algorithm_builds_one_with_overrides():
    assert [n for n in NAMES if make(n).warnings or make(n, entropy_coef=0.5).warnings] == []
    for name in ("gspo_token", "ppo_ptx"):
        assert rlft.load_algorithm(name, entropy_coef=0.5) == make(name, entropy_coef=0.5) != make(name)


def test_together_they_reach_every_branch_that_the_properties_below_are_about():
    outputs, batch = full_step()
    seen = {}
    for name in NAMES:
        for extra in EXTRAS:
            algorithm = made(name, extra)
            metrics = algorithm.loss(outputs, algorithm.credit(batch), scale_of(batch)).metrics
            seen |= {f"{name} {metric}": value.item() for metric, value in metrics.items()}
    for variant in VARIANTS:
        algorithm = made("grpo", variant)
        metrics = algorithm.loss(outputs, algorithm.credit(batch), scale_of(batch)).metrics
        seen |= {f"{variant} {metric}": value.item() for metric, value in metrics.items()}
    assert seen["token_sum ratio/dual_clip_fraction"] > 0
    assert seen["unbiased sampler/importance_capped_fraction"] > 0
    assert seen["sequence_token waste/importance_dropped_fraction"] > 0
    for name in ("ppo", "grpo", "gspo", "gspo_token", "reinforce_pp", "dapo", "gmpo"):
        assert seen[f"{name} ratio/clip_low_fraction"] > 0
        assert seen[f"{name} ratio/clip_high_fraction"] > 0
    for name in NAMES:
        assert (seen[f"{name} waste/importance_dropped_fraction"] > 0) == (name != "kimi")
    assert seen["ppo value/clip_fraction"] > 0
    assert seen["ppo_penalty loss/kl"] > 0
    assert made("ppo", "").credit(batch).returns is not None


@each("name", NAMES)
def test_at_the_old_policy_it_has_the_policy_gradient(name):
    outputs, batch = full_step()
    algorithm = make(name)
    batch = algorithm.credit(replace(batch, old_logprobs=outputs.logprobs.detach()))
    scale = scale_of(batch)
    _, (gradient, *_) = loss_of(algorithm, outputs, batch, scale)

    n = batch.loss_mask.sum(-1, keepdim=True).clamp(min=1).double()
    weight = {
        "token_mean": 1 / scale.num_tokens,
        "sequence_mean_token_mean": 1 / (n * scale.num_sequences),
        "sequence_mean_token_sum": 1 / scale.num_sequences,
        "constant": 1 / (scale.num_sequences * scale.max_completion_tokens),
    }[algorithm.aggregate]
    assert (batch.advantages != 0).any()
    close(gradient, -batch.advantages * weight)


@algorithms
@pytest.mark.parametrize("seed", slow_but(0, range(3)))
def test_any_split_into_micro_batches_leaves_loss_gradient_and_metrics_unchanged(name, extra, seed):
    outputs, batch = full_step()
    algorithm = made(name, extra)
    batch = algorithm.credit(batch)
    scale = replace(scale_of(batch), value_scale=1.5)
    whole, gradients = loss_of(algorithm, outputs, batch, scale)
    whole_value = algorithm.value_loss(outputs.values, batch, scale).item() if algorithm.needs_values else 0.0

    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    sizes = ([1] * 10, [3, 1, 6], [4, 0, 6])[seed]  # a micro-batch of no rows does no harm either
    total, value, pieces, metrics = 0.0, 0.0, [torch.zeros_like(g) for g in gradients], {}
    for index in order.split(sizes):
        some, micro = rows_of(outputs, index), rows_of(batch, index)
        part, part_gradients = loss_of(algorithm, some, micro, scale)
        total += part.total.item()
        value += algorithm.value_loss(some.values, micro, scale).item()
        for piece, gradient in zip(pieces, part_gradients, strict=True):
            piece[index] += gradient
        for metric, number in part.metrics.items():
            before = metrics.get(metric, 0.0)
            metrics[metric] = max(before, number.item()) if metric.endswith("_max") else before + number.item()

    assert total == pytest.approx(whole.total.item(), abs=1e-9)
    assert value == pytest.approx(whole_value, abs=1e-9)
    for piece, gradient in zip(pieces, gradients, strict=True):
        close(piece, gradient, tol=1e-9)
    assert metrics == pytest.approx({metric: number.item() for metric, number in whole.metrics.items()}, abs=1e-9)


@algorithms
def test_leaving_out_rows_with_zero_gradient_leaves_loss_and_gradient_unchanged(name, extra):
    outputs, batch = full_step()
    algorithm = made(name, extra)
    zero_rows = algorithm.zero_gradient_rows(
        replace(batch, old_logprobs=None, reference_logprobs=None, old_values=None)
    )
    batch = algorithm.credit(batch)
    whole, gradients = loss_of(algorithm, outputs, batch, scale_of(batch))
    live = (~zero_rows).nonzero().squeeze(-1)
    part, part_gradients = loss_of(algorithm, rows_of(outputs, live), rows_of(batch, live), scale_of(batch))
    close(part.total.detach(), whole.total.detach())
    for some, every in zip(part_gradients, gradients, strict=True):
        close(some, every[live])
        assert (every[zero_rows] == 0).all()


def test_who_leaves_out_equal_groups_and_who_cannot():
    _, batch = full_step()
    equal_or_alone = [False, False, False, True, True, True, False, False, False, True]
    zero_rows = {name: make(name).zero_gradient_rows(batch).tolist() for name in NAMES}
    for name in GROUP_RELATIVE:
        assert zero_rows[name] == equal_or_alone, name
    assert zero_rows["rloo"] == [alike or row == 6 for row, alike in enumerate(equal_or_alone)]  # row 6 has no tokens
    for name in ("a2c", "ppo", "ppo_penalty", "ppo_ptx", "kimi", "opd"):
        assert not any(zero_rows[name]), name
    for name in NAMES:
        assert not made(name, "all terms").zero_gradient_rows(batch).any(), name


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@algorithms
def test_what_lies_outside_the_completions_does_not_matter(name, extra):
    outputs, batch = full_step()
    algorithm = made(name, extra)
    outside = ~batch.loss_mask
    clean, clean_gradients = loss_of(algorithm, outputs, algorithm.credit(batch), scale_of(batch))

    def dirty(tensor):
        junk = torch.tensor([nan, inf, -inf, 1e308, -7.0], dtype=torch.float64)
        tensor = tensor.detach().clone()
        tensor[outside] = junk[torch.arange(int(outside.sum())) % 5]
        return tensor

    names = (*INPUTS, "token_rewards")
    soiled = replace(batch, **{name: dirty(getattr(batch, name)) for name in names})
    zero_rows, credited = algorithm.zero_gradient_rows(soiled), algorithm.credit(soiled)
    assert torch.equal(zero_rows, algorithm.zero_gradient_rows(batch))
    assert torch.equal(credited.advantages, algorithm.credit(batch).advantages)
    assert (credited.advantages[outside] == 0).all()
    soiled = replace(credited, advantages=dirty(credited.advantages))
    if soiled.returns is not None:
        soiled = replace(soiled, returns=dirty(soiled.returns))
    outputs = Outputs(
        **{name: dirty(getattr(outputs, name)).requires_grad_() for name in ("logprobs", "entropy", "values")}
    )
    with torch.autograd.detect_anomaly():  # not even inside the backward pass does a NaN appear
        loss, gradients = loss_of(algorithm, outputs, soiled, scale_of(batch))
    assert torch.equal(loss.total, clean.total)
    assert {k: v.item() for k, v in loss.metrics.items()} == {k: v.item() for k, v in clean.metrics.items()}
    for gradient, wanted in zip(gradients, clean_gradients, strict=True):
        assert torch.equal(gradient, wanted)
        assert (gradient[outside] == 0).all()


@algorithms
def test_without_old_logprobs_the_current_policy_stands_in_detached(name, extra):
    outputs, batch = full_step()
    algorithm = made(name, extra)
    batch = algorithm.credit(batch)
    given, wanted = loss_of(algorithm, outputs, replace(batch, old_logprobs=outputs.logprobs.detach()), scale_of(batch))
    absent, gradients = loss_of(algorithm, outputs, replace(batch, old_logprobs=None), scale_of(batch))
    assert torch.equal(absent.total, given.total)
    assert all(map(torch.equal, gradients, wanted))
    assert {k: v.item() for k, v in absent.metrics.items()} == {k: v.item() for k, v in given.metrics.items()}


@algorithms
def test_no_gradient_flows_into_the_batch(name, extra):
    outputs, batch = full_step()
    algorithm = made(name, extra)
    data = {field: getattr(batch, field).clone().requires_grad_() for field in (*INPUTS, "token_rewards", "rewards")}
    batch = algorithm.credit(replace(batch, **data))
    assert not batch.advantages.requires_grad
    total = algorithm.loss(outputs, batch, scale_of(batch)).total
    assert all(gradient is None for gradient in torch.autograd.grad(total, list(data.values()), allow_unused=True))


@algorithms
def test_log_probs_and_values_100_apart_give_no_nan_and_no_inf(name, extra):
    _, batch = full_step()
    far = 100.0 * (torch.arange(batch.loss_mask.numel()) % 2 * 2 - 1).reshape(batch.loss_mask.shape).double()
    algorithm = made(name, extra)
    for sign in (1, -1):
        batch = replace(batch, reference_logprobs=batch.old_logprobs + sign * far)
        outputs = Outputs(
            logprobs=(batch.old_logprobs - sign * far).requires_grad_(),
            entropy=torch.zeros_like(far, requires_grad=True),
            values=(batch.old_values - sign * far).requires_grad_(),
        )
        loss, gradients = loss_of(algorithm, outputs, algorithm.credit(batch), scale_of(batch))
        assert loss.total.isfinite()
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert all(value.isfinite() for value in loss.metrics.values())


@each("name", NAMES)
def test_kl_in_the_loss_is_never_negative_and_pulls_with_a_finite_gradient(name):
    # d = 100 and -100: k3 is 99 + e^-100 and, clamped at -20, e^20 - 21. Both finite, and so is their gradient.
    batch = hand_batch([1, 1], [0, 0], [0, 0], advantages=[0, 0])
    values = torch.zeros_like(batch.old_logprobs)
    batch = replace(batch, returns=values, old_values=values)
    moved = torch.tensor([[100.0], [-100.0]], dtype=torch.float64)
    outputs = Outputs(logprobs=(batch.old_logprobs + moved).requires_grad_(), entropy=values, values=values)
    loss = make(name, kl_coef=1.0, kl_in="loss").loss(outputs, batch, scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    assert 0 < loss.metrics["loss/kl"] < inf
    assert gradient.isfinite().all()


@each(("name", "extra"), [case for case in CASES if case[1] != "all terms"])
def test_where_siblings_are_compared_groups_without_a_difference_give_exactly_0(name, extra):
    algorithm = made(name, extra)
    if algorithm.min_group_size < 2:
        return
    for batch in (
        hand_batch([2, 3, 1], [0.1, 0.1, 0.1], [0, 0, 0]),  # equal rewards
        hand_batch([2], [5.0], [3]),  # a row alone
        hand_batch([0, 0], [0, 1], [0, 0]),  # no tokens
    ):
        zero = torch.zeros_like(batch.old_logprobs, requires_grad=True)
        batch = algorithm.credit(replace(batch, token_rewards=zero.detach(), step_ends=batch.loss_mask))
        assert (batch.advantages == 0).all()
        # Kimi's tau (log-ratio)^2 and a KL act without an advantage, unless all log-probs agree.
        moved = batch.old_logprobs + (0.0 if name == "kimi" or algorithm.kl_coef > 0 else 0.3)
        scale = LossScale(num_tokens=6, num_sequences=3, max_completion_tokens=4)
        outputs = Outputs(logprobs=moved.clone().requires_grad_(), entropy=zero)
        loss, (gradient, _) = loss_of(algorithm, outputs, batch, scale)
        assert loss.total == 0
        if algorithm.kl_estimator != "k1":  # k1's gradient in a token's log-prob is 1 everywhere
            assert (gradient == 0).all()
        assert not any(value.isnan() for value in loss.metrics.values())


@each("name", [*GROUP_RELATIVE, "rloo", "kimi"])
def test_a_small_difference_of_large_rewards_is_an_advantage(name):
    # In float32 1e8 + 1 = 1e8. The sums 0.1 + 0.2 and 0.3 differ in the last bit of float64 only, and are equal.
    for rewards, differ in (([1e8, 1e8 + 1], True), ([1e12, 1e12 + 1], True), ([0.1 + 0.2, 0.3], False)):
        batch = hand_batch([1, 1], rewards, [0, 0])
        batch = replace(batch, **{field: getattr(batch, field).float() for field in INPUTS[:-1]})
        steps = {"token_rewards": torch.zeros_like(batch.rewards[:, None] * batch.loss_mask)}
        batch = replace(batch, **steps, step_ends=batch.loss_mask)
        low, high = make(name).credit(batch).advantages[batch.loss_mask].tolist()
        assert (low == -high < 0) if differ else (low == high == 0)
        assert make(name).credit(batch).advantages.dtype == torch.float32
        if not make(name)._acts_without_advantage and name != "kimi":
            assert make(name).zero_gradient_rows(batch).tolist() == [not differ] * 2


@each("name", NAMES)
def test_completions_without_a_token_give_exactly_0(name):
    algorithm = make(name, kl_coef=0.1, entropy_coef=0.1)
    batch = hand_batch([0, 0], [0, 1], [0, 0])
    ones = torch.ones_like(batch.old_logprobs)
    steps = {"token_rewards": torch.zeros_like(ones), "step_ends": batch.loss_mask, "old_values": ones}
    batch = algorithm.credit(replace(batch, **steps))
    outputs = Outputs(logprobs=ones.clone().requires_grad_(), entropy=ones, values=ones)
    loss = algorithm.loss(outputs, batch, LossScale(num_tokens=0, num_sequences=2, max_completion_tokens=4))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    assert loss.total == 0
    assert (gradient == 0).all()
    assert all(value == 0 for value in loss.metrics.values())


@algorithms
def test_float32_works_and_stays_float32(name, extra):
    outputs, batch = full_step()
    algorithm = made(name, extra)
    exact = algorithm.loss(outputs, algorithm.credit(batch), scale_of(batch)).total.item()
    single = {field: getattr(batch, field).float() for field in (*INPUTS, "token_rewards", "rewards")}
    credited = algorithm.credit(replace(batch, **single))
    outputs = Outputs(logprobs=outputs.logprobs.float(), entropy=outputs.entropy.float(), values=outputs.values.float())
    loss = algorithm.loss(outputs, credited, scale_of(batch))
    assert credited.advantages.dtype == loss.total.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in loss.metrics.values())
    assert loss.total.item() == pytest.approx(exact, abs=2e-5)


@algorithms
def test_loss_metrics_are_the_terms_of_the_total_and_carry_no_gradient(name, extra):
    outputs, batch = full_step()
    algorithm = made(name, extra)
    loss = algorithm.loss(outputs, algorithm.credit(batch), scale_of(batch))
    terms = [value for metric, value in loss.metrics.items() if metric.startswith("loss/") and metric != "loss/total"]
    close(sum(terms), loss.total.detach())
    close(loss.metrics["loss/total"], loss.total.detach())
    assert not any(value.requires_grad for value in loss.metrics.values())
    assert all(value.shape == () for value in loss.metrics.values())


@each("name", NAMES)
def test_it_reads_only_what_it_says_it_needs(name):
    outputs, batch = full_step()
    algorithm = make(name)
    bare = replace(
        batch,
        old_logprobs=batch.old_logprobs if algorithm.needs_old_in_credit else None,
        reference_logprobs=batch.reference_logprobs if algorithm.needs_reference else None,
        teacher_logprobs=batch.teacher_logprobs if algorithm.needs_teacher else None,
        teacher_top_k_logprobs=None,
        old_values=batch.old_values if algorithm.needs_values else None,
        token_rewards=batch.token_rewards if algorithm.needs_steps else None,
        step_ends=batch.step_ends if algorithm.needs_steps else None,
        truncated=None,
    )
    said = Outputs(
        logprobs=outputs.logprobs,
        entropy=outputs.entropy if algorithm.needs_entropy else None,
        values=outputs.values if algorithm.needs_values else None,
    )
    assert algorithm.loss(said, algorithm.credit(bare), scale_of(batch)).total.isfinite()
    assert algorithm.needs_values is (name in ("a2c", "ppo", "ppo_penalty", "ppo_ptx"))
    assert algorithm.needs_steps is (name == "grpo_process")
    assert algorithm.needs_text is (name == "ppo_ptx")
    assert algorithm.needs_entropy is (name == "a2c")
    assert algorithm.needs_reference is False  # whoever wants the KL says so in the recipe
    assert algorithm.needs_old_in_credit is (name == "opd")
    assert algorithm.needs_teacher is (name == "opd")
    assert algorithm.teacher_top_k == 0


# -- completions of several turns: what an environment put between the tokens is no part of any formula ----------------
def wide(values, mask, holes, junk):
    """`[B, T]` with `holes[b, t]` columns put in before token t, filled with junk; padded on the right alike."""
    width = mask.shape[1] + int(holes.sum(1).max())
    rows = torch.full((len(mask), width), junk, dtype=values.dtype)
    position = torch.arange(mask.shape[1]) + holes.cumsum(1)
    return rows.scatter(1, position, values), position


def with_holes(outputs, batch, seed):
    """The same tokens with an environment's between them; its log-probs, values and rewards are no numbers."""
    generator = torch.Generator().manual_seed(seed)
    mask = batch.loss_mask
    holes = torch.randint(0, 3, mask.shape, generator=generator) * mask.cumsum(1).bool()
    more = {}
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if value is not None and value.shape == mask.shape:
            junk = {torch.bool: False, torch.int64: 7}.get(value.dtype, nan)
            more[field.name], position = wide(value, mask, holes, junk)
    more["attention_mask"] = torch.ones_like(more["loss_mask"])
    return replace(batch, **more), position


def widened(outputs, position, width):
    """The outputs as they stand there; junk between them, which gets no gradient."""

    def put(values, junk):
        rows = torch.full((len(values), width), junk, dtype=values.dtype)
        return rows.scatter(1, position, values.detach()).requires_grad_()

    return Outputs(
        logprobs=put(outputs.logprobs, inf), entropy=put(outputs.entropy, nan), values=put(outputs.values, -inf)
    )


ALL_TERMS = {**EXTRAS["all terms"], "off_policy_limit": 0.3}
OF_TURNS = [(name, extra) for name in NAMES for extra in ({}, ALL_TERMS)]
OF_TURNS += [(name, {"credit_span": "turn"}) for name in ("grpo_process", "ppo", "a2c")]


@each(("name", "extra"), OF_TURNS)
def test_holes_change_no_advantage_no_loss_no_metric_and_no_gradient(name, extra):
    refused = ("mismatch", "off_policy_limit") if name == "kimi" else ()
    keys = {key: value for key, value in extra.items() if key not in refused}
    if extra and name in ("gspo", "gmpo"):  # which refuse the weights of single tokens
        keys["mismatch"] = "sequence_mask"
    algorithm = make(name, **keys)
    outputs, batch = full_step()
    holed, position = with_holes(outputs, batch, seed=1)
    assert (holed.loss_mask.int().diff(dim=1) == 1).sum() > len(holed.loss_mask), "some rows have several turns"
    there = widened(outputs, position, holed.loss_mask.shape[1])

    assert torch.equal(algorithm.zero_gradient_rows(holed), algorithm.zero_gradient_rows(batch))
    holed, batch = algorithm.credit(holed), algorithm.credit(batch)
    scale = scale_of(batch)
    assert scale_of(holed) == scale
    close(holed.advantages.gather(1, position)[batch.loss_mask], batch.advantages[batch.loss_mask])
    assert (holed.advantages[~holed.loss_mask] == 0).all()
    loss, gradients = loss_of(algorithm, outputs, batch, scale)
    same, there_gradients = loss_of(algorithm, there, holed, scale)
    close(same.total, loss.total)
    assert same.metrics.keys() == loss.metrics.keys()
    for metric, value in loss.metrics.items():
        close(same.metrics[metric], value.double())
    for found, gradient in zip(there_gradients, gradients, strict=True):
        close(found.gather(1, position)[batch.loss_mask], gradient[batch.loss_mask])
        assert (found[~holed.loss_mask] == 0).all(), "exactly"
