import math
from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.types import Outputs

# --- KL to the old policy -------------------------------------------------------------------------------------------


def test_kl_to_the_old_policy_by_hand(make, hand_batch, scale_of, close):
    # r = 2: r - 1 - log r, gradient r - 1 in lp; beta 1/2, one token. The reference has no say.
    batch = hand_batch([1], [0], [0], advantages=[0])
    outputs = Outputs(logprobs=(batch.old_logprobs + math.log(2)).requires_grad_())
    algorithm = make("grpo", kl_coef=0.5, kl_to="old")
    loss = algorithm.loss(outputs, replace(batch, reference_logprobs=None), scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    close(loss.metrics["loss/kl"], 0.5 * (1 - math.log(2)))
    close(loss.total.detach(), 0.5 * (1 - math.log(2)))
    close(gradient, [[0, 0.5, 0]])
    assert not algorithm.needs_reference
    assert not algorithm.needs_old_in_credit
    assert not algorithm.zero_gradient_rows(batch).any()


def test_its_expectation_over_old_samples_is_the_kl_with_the_kls_own_gradient(make, hand_batch, scale_of, close):
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


def test_at_the_first_update_the_policy_has_no_distance_from_itself(make, full_step, scale_of):
    outputs, batch = full_step()
    algorithm = make("ppo_penalty")
    batch = replace(algorithm.credit(batch), old_logprobs=None)
    assert algorithm.loss(outputs, batch, scale_of(batch)).metrics["loss/kl"] == 0


# --- a KL over the whole vocabulary ---------------------------------------------------------------------------------


@each("to", ["reference", "old"])
def test_an_exact_kl_in_the_loss_is_the_mean_of_what_the_head_computed(make, hand_batch, scale_of, close, to):
    batch = hand_batch([2, 1], [0, 0], [0, 0], advantages=[0, 0])
    inside = torch.tensor([[0, 0.1, 0.2, 0], [0, 0.6, 0, 0]], dtype=torch.float64)
    kl_BT = inside.where(batch.loss_mask, math.nan).requires_grad_()
    outputs = Outputs(logprobs=batch.old_logprobs, kl=kl_BT)
    algorithm = make("grpo", kl_coef=0.5, kl_to=to, kl_estimator="exact", aggregate="token_mean")
    assert (algorithm.exact_kl_to, algorithm.reference_field) == (
        to,
        None if to == "reference" else "reference_logprobs",
    )
    loss = algorithm.loss(outputs, batch, scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, kl_BT)
    close(loss.metrics["loss/kl"], 0.5 * 0.3)
    close(loss.metrics[f"kl/{to}"], 0.3)
    close(gradient, 0.5 / 3 * batch.loss_mask.double())
    with pytest.raises(ValueError, match="kl is None, but kl_estimator=exact needs it"):
        algorithm.loss(replace(outputs, kl=None), batch, scale_of(batch))


def test_an_exact_kl_in_the_reward_is_taken_from_it(make, hand_batch, scale_of, close):
    batch = hand_batch([2, 1], [1, 0], [0, 0])
    kl_BT = torch.tensor([[9, 0.1, 0.2, 9], [9, 0.6, 9, 9]], dtype=torch.float64)
    batch = replace(batch, reference_kl=kl_BT, reference_logprobs=None)
    algorithm = make("reinforce", kl_coef=0.5, kl_in="reward", kl_estimator="exact")
    assert (algorithm.exact_kl_to, algorithm.reference_field) == (None, "reference_kl")
    close(algorithm.completion_scores(batch), [1 - 0.5 * 0.3, -0.5 * 0.6])
    close(algorithm.token_scores(batch), [[0, -0.05, 0.9, 0], [0, -0.3, 0, 0]])
    outputs = Outputs(logprobs=batch.old_logprobs)
    close(algorithm.loss(outputs, algorithm.credit(batch), scale_of(batch)).metrics["kl/reference"], 0.3)


def test_without_a_coefficient_nothing_is_exact(make):
    algorithm = make("grpo", kl_estimator="exact")
    assert (algorithm.exact_kl_to, algorithm.reference_field) == (None, "reference_logprobs")


# --- the coefficient that moves -------------------------------------------------------------------------------------


@each(
    ("controller", "kl", "coef"),
    [
        # Target 0.03: 0.02 and 0.045 are target / 1.5 and 1.5 target, the ends that do not move it yet.
        ("adaptive", 0.019, 0.5),
        ("adaptive", 0.0200001, 1.0),
        ("adaptive", 0.0449999, 1.0),
        ("adaptive", 0.046, 2.0),
        # 1 + 0.1 * (0.033 / 0.03 - 1); beyond +-0.2 no further.
        ("proportional", 0.033, 1.01),
        ("proportional", 3.0, 1.02),
        ("proportional", 0.0, 0.98),
        ("fixed", 3.0, 1.0),
    ],
)
def test_the_controller_moves_the_coefficient_after_a_step(make, close, controller, kl, coef):
    algorithm = make("grpo", kl_coef=1.0, kl_controller=controller, kl_target=0.03)
    assert algorithm.adapt({"kl/reference": kl, "kl/old_last": 0.03}).kl_coef == pytest.approx(coef, rel=1e-12)
    algorithm = make("ppo_penalty", kl_controller=controller, kl_target=0.03)
    moved = algorithm.adapt({"kl/reference": 0.03, "kl/old_last": kl})
    assert moved.kl_coef == pytest.approx(coef, rel=1e-12)
    assert moved == replace(algorithm, kl_coef=moved.kl_coef)


def test_the_coefficient_can_always_come_back(make):
    start = make("ppo_penalty")
    for kl, end in ((0.0, 1e-12), (1.0, 1e12)):
        algorithm = start
        for _ in range(1200):  # 2^-1200 is 0 and 2^1200 is inf
            algorithm = algorithm.adapt({"kl/old_last": kl})
        assert algorithm.kl_coef == end


def test_what_has_moved_is_saved_and_restored(make):
    algorithm = make("ppo_penalty").adapt({"kl/old_last": 1.0})
    assert algorithm.state() == {"kl_coef": 2.0}
    assert make("ppo_penalty").restored(algorithm.state()) == algorithm
    fixed = make("grpo", kl_coef=0.04)
    assert fixed.adapt({}) is fixed  # it looks at nothing
    assert fixed.state() == {}
    assert fixed.restored({}) == fixed


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reinforce", "ppo"])
def test_rewards_of_tokens_add_up_to_the_scores_of_completions(make, full_step, close, name):
    _, batch = full_step()
    algorithm = make(name, kl_coef=0.3)
    tokens_B, scores_B = algorithm.token_scores(batch).sum(-1), algorithm.completion_scores(batch)
    some = batch.loss_mask.any(-1)  # an empty completion has no token to hold its reward
    close(tokens_B[some], scores_B[some])
    assert tokens_B[~some].tolist() == [0]
    assert scores_B[~some].tolist() == [2]


@each("name", ["grpo_process", "ppo", "a2c"])
def test_a_completion_of_one_turn_is_credited_alike_bit_for_bit(make, full_step, name):
    _, batch = full_step()
    for turn_ends in (None, torch.zeros_like(batch.loss_mask)):
        single = replace(batch, turn_ends=turn_ends)
        turn, trajectory = (make(name, credit_span=span).credit(single) for span in ("turn", "trajectory"))
        assert torch.equal(turn.advantages, trajectory.advantages)
    assert not torch.equal(make(name, credit_span="turn").credit(batch).advantages, trajectory.advantages)


# --- what is refused, and what is warned of -------------------------------------------------------------------------


def test_k1_as_a_loss_is_warned_of(make):
    (told,) = make("grpo", kl_coef=0.1, kl_estimator="k1").warnings
    assert told.startswith("algorithm.kl_estimator: k1 has zero expected gradient as a loss, got k1; use")
    assert make("grpo", kl_coef=0.1, kl_estimator="k1", kl_in="reward").warnings == ()
    assert make("kimi", kl_coef=0.1, kl_estimator="k1").warnings == (told,)


def test_without_a_critic_or_text_their_terms_are_0(make, full_step, scale_of):
    outputs, batch = full_step()
    for name in ("grpo", "reinforce", "kimi"):
        algorithm = make(name)
        assert not algorithm.needs_values
        assert not algorithm.needs_text
        assert algorithm.value_loss(outputs.values, batch, scale_of(batch)) == 0
        assert algorithm.text_loss(outputs.logprobs, batch.loss_mask, 5) == 0
