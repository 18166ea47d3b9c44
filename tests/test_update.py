from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig

import rlft
from rlft.collate import select
from rlft.model import attention
from rlft.model.backbone import Backbone
from rlft.model.forward import Forward, padded_forward
from rlft.train import loss_scale, minibatches, update
from rlft.trainer.optimizer import NonFiniteGradientError, Optimizer
from rlft.types import LossScale

BUDGETS = [10**6, 40, 20, 12, 1]
NOBODY = torch.zeros(9, dtype=torch.bool)


class Recorder:
    """In the optimizer's place: keeps every gradient and changes nothing."""

    def __init__(self, roles):
        self.roles, self.gradients, self.rates = roles, [], []

    def update(self, rate):
        gradients = {name: p.grad for name, p in self.roles.named_parameters() if p.grad is not None}
        self.gradients.append({name: g.clone() for name, g in gradients.items()})
        self.rates.append(rate)
        self.roles.model.zero_grad(set_to_none=True)
        return 1.0


@pytest.fixture
def config(run_config):
    return run_config("prompts_per_step=3", "group_size=3", "generation.max_tokens=9", "trainer.lr=0.01")


@pytest.fixture
def session(config):
    """Builds what `update` needs of a session; `keys` change the config."""

    def build(roles, algorithm, optimizer=None, **keys):
        return SimpleNamespace(
            config=replace(config, **keys), roles=roles, algorithm=algorithm, optimizer=optimizer or Recorder(roles)
        )

    return build


@pytest.fixture
def batch(make_batch):
    """Three groups of three; the middle one has equal rewards, so nothing can be learnt from it."""
    one, two, three = [5, 6, 7, 8], [9, 10], [11, 12, 13]
    rows = [
        (0, one, [20, 21, 2]), (0, one, [22, -23, 24, 25]), (0, one, [26, 2]),
        (1, two, [30, 31]), (1, two, [32, 33, 34, 2]), (1, two, [35]),
        (2, three, [40, 41, 42, 43, 44, 45, 2]), (2, three, [46, 2]), (2, three, []),
    ]  # fmt: skip
    return make_batch(rows, rewards=[1, 0, 0.5, 2, 2, 2, 0, 0, 1])


@pytest.fixture
def double(backbone):
    """A random model that computes in float64 throughout (GPT-2 has nothing that transformers does in float32)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = GPT2Config(
            vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
            attn_pdrop=0, resid_pdrop=0, embd_pdrop=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(sizes, dtype=torch.float64).eval().requires_grad_(False)
    attention.install(model)
    return Backbone(model=model, tokenizer=backbone.tokenizer, device=torch.device("cpu"), path="none")


def double_batch(batch):
    generator = torch.Generator().manual_seed(0)
    sampled = -1 + 0.1 * torch.randn(batch.loss_mask.shape, generator=generator, dtype=torch.float64)
    return replace(batch, sampled_logprobs=sampled, old_logprobs=sampled + 0.05, rewards=batch.rewards.double())


def close(gradients, expected, tolerance):
    assert gradients.keys() == expected.keys()
    scale = max(g.abs().max() for g in expected.values())
    assert scale > 0
    for name, g in gradients.items():
        torch.testing.assert_close(g / scale, expected[name] / scale, rtol=tolerance, atol=tolerance)


# -- one gradient, however it is computed ------------------------------------------------------------------------------
VARIANTS = {
    "paper": {"kl_coef": 0.1},
    "token_mean": {"aggregate": "token_mean", "entropy_coef": 0.1},
    "token_sum": {"aggregate": "sequence_mean_token_sum", "mismatch": "token_truncate"},
    "constant": {"aggregate": "constant", "ratio": "sequence"},
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_token_budget_gives_the_gradient_and_the_loss_of_the_whole_batch(
    variant, session, make_roles, double, batch
):
    algorithm = rlft.load_algorithm("grpo", **VARIANTS[variant])
    roles = make_roles(noise=0.05, backbone=double, reference="base", temperature=0.8)
    assert roles.forward.packed
    batch = algorithm.credit(roles.annotate(double_batch(batch), NOBODY, needs_old=False))
    scale = LossScale(num_tokens=24, num_sequences=9, max_completion_tokens=9)
    outputs = padded_forward(double.model, batch, 0.8, algorithm.needs_entropy)
    loss = algorithm.loss(outputs, batch, scale)
    expected = dict(
        zip(
            [name for name, _ in roles.named_parameters()],
            torch.autograd.grad(loss.total, [p for _, p in roles.named_parameters()]),
            strict=True,
        )
    )
    for budget in BUDGETS:
        run = session(roles, algorithm, token_budget=budget)
        metrics = update(run, batch, algorithm.inert(batch), 0)
        (gradients,) = run.optimizer.gradients
        close(gradients, expected, 1e-9)
        assert metrics["loss/total"] == pytest.approx(loss.total.item(), rel=1e-9)


def test_every_token_budget_gives_the_same_gradient_and_metrics_in_float32(session, make_roles, batch):
    algorithm = rlft.load_algorithm("grpo", kl_coef=0.1)
    roles = make_roles(noise=0.02, reference="base")
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
    found = []
    for budget in BUDGETS:
        run = session(roles, algorithm, token_budget=budget)
        metrics = update(run, batch, NOBODY, 0)
        # Prompts repeated in several micro-batches are trained tokens of their own: those two say what was computed.
        found.append((run.optimizer.gradients[0], {k: v for k, v in metrics.items() if k != "tokens/trained"}))
    for gradients, metrics in found[1:]:
        close(gradients, found[0][0], 1e-5)
        assert metrics == pytest.approx(found[0][1], rel=1e-5, abs=1e-6)


def test_rows_that_teach_nothing_never_enter_a_forward_and_the_gradient_is_as_if_they_had(
    session, make_roles, batch, monkeypatch
):
    algorithm, roles = rlft.load_algorithm("grpo", aggregate="token_mean"), make_roles(noise=0.02)
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
    inert = algorithm.inert(batch)
    assert inert.tolist() == [False] * 3 + [True] * 3 + [False] * 3
    forwarded, call = [], Forward.__call__

    def spy(self, part, *args):
        forwarded.extend(part.group_ids.tolist())
        return call(self, part, *args)

    monkeypatch.setattr(Forward, "__call__", spy)
    results = []
    for rows in (inert, NOBODY):
        forwarded.clear()
        run = session(roles, algorithm, token_budget=30)
        metrics = update(run, batch, rows, 0)
        results.append((run.optimizer.gradients[0], metrics, sorted(forwarded)))
    (without, metrics, seen), (with_them, all_metrics, all_seen) = results
    assert (seen, all_seen) == ([0, 0, 0, 2, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2])
    close(without, with_them, 1e-6)
    assert metrics["loss/total"] == pytest.approx(all_metrics["loss/total"], abs=1e-7)


def test_what_metrics_say_of_tokens_is_of_the_forwarded_tokens(session, make_roles, batch):
    # The sampled log-probs are -1, old those of the policy: the mean gap over groups 0 and 2 is what must come out.
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles(noise=0.02)
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
    inert = algorithm.inert(batch)
    gap = (batch.old_logprobs + 1).abs()[~inert][batch.loss_mask[~inert]]
    metrics = update(session(roles, algorithm), batch, inert, 0)
    assert metrics["sampler/logprob_gap_mean"] == pytest.approx(gap.mean().item(), rel=1e-5)
    assert metrics["sampler/logprob_gap_max"] == pytest.approx(gap.max().item(), rel=1e-5)


def test_a_step_that_teaches_nothing_still_counts_as_its_updates(session, make_roles, batch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles()
    batch = algorithm.credit(batch)
    before = roles.weights("policy")
    run = session(roles, algorithm, epochs=2)
    run.optimizer = Optimizer(roles.named_parameters(), run.config.trainer)
    metrics = update(run, batch, ~NOBODY, 0)
    assert (metrics["loss/total"], metrics["policy/grad_norm"], metrics["tokens/trained"]) == (0, 0, 0)
    assert metrics["waste/padding_fraction"] == 0
    assert all(torch.equal(w, before[n]) for n, w in roles.weights("policy").items())
    assert int(run.optimizer.state()[f"step/{run.optimizer.names[0]}"]) == 2


# -- epochs, minibatches, rates ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("epochs", "num_minibatches"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_there_are_epochs_times_minibatches_updates_each_at_its_rate(
    epochs, num_minibatches, session, make_roles, batch, config
):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles()
    trainer = replace(config.trainer, schedule=type(config.trainer.schedule)("linear"))
    keys = {"epochs": epochs, "minibatches": num_minibatches, "trainer": trainer, "steps": 10}
    run = session(roles, algorithm, **keys)
    batch = algorithm.credit(batch)
    metrics = update(run, batch, NOBODY, 4)
    updates = epochs * num_minibatches
    # Linear down to 0 over 10 steps: the updates of the turn that begins after 4 are 4 * updates, + 1, ..
    expected = [0.01 * (1 - (4 * updates + i) / (10 * updates)) for i in range(updates)]
    assert run.optimizer.rates == pytest.approx(expected)
    assert metrics["policy/lr"] == pytest.approx(sum(expected) / updates)
    assert metrics["policy/grad_norm"] == 1.0


@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 6])
def test_every_epoch_deals_each_group_whole_to_exactly_one_minibatch(num_minibatches, make_batch):
    batch = make_batch([(group, [3], [4]) for group in (4, 4, 7, 7, 1, 1, 0, 0, 9, 9, 5, 5)])
    dealt = minibatches(batch, 3, num_minibatches, seed=0)
    assert len(dealt) == 3 * num_minibatches
    for epoch in range(3):
        parts = dealt[epoch * num_minibatches : (epoch + 1) * num_minibatches]
        assert sorted(torch.cat(parts).tolist()) == list(range(12))
        groups = [set(batch.group_ids[rows].tolist()) for rows in parts]
        assert sum(map(len, groups)) == 6
        assert {len(rows) for rows in parts} == {12 // num_minibatches}


def test_the_deal_depends_on_the_seed_alone_and_differs_between_epochs(make_batch):
    batch = make_batch([(b // 2, [3], [4]) for b in range(40)])

    def deal(seed):
        torch.manual_seed(torch.seed())
        return [rows.tolist() for rows in minibatches(batch, 2, 4, seed)]

    assert deal(0) == deal(0)
    assert deal(0) != deal(1)
    assert deal(0)[:4] != deal(0)[4:]


def test_each_update_is_divided_by_the_sizes_of_its_own_minibatch(session, make_roles, batch, monkeypatch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles()
    batch = algorithm.credit(batch)
    scales, loss = [], type(algorithm).loss

    def spy(self, outputs, part, scale):
        scales.append((part.group_ids.unique().tolist(), scale))
        return loss(self, outputs, part, scale)

    monkeypatch.setattr(type(algorithm), "loss", spy)
    update(session(roles, algorithm, minibatches=3), batch, NOBODY, 0)
    tokens = {0: 3 + 3 + 2, 1: 2 + 4 + 1, 2: 7 + 2 + 0}
    assert sorted(groups for groups, _ in scales) == [[0], [1], [2]]
    for (group,), scale in scales:
        assert scale == LossScale(num_tokens=tokens[group], num_sequences=3, max_completion_tokens=9)


def test_the_scale_counts_rows_that_are_never_forwarded(batch):
    assert loss_scale(batch, 9) == LossScale(num_tokens=24, num_sequences=9, max_completion_tokens=9)
    part = select(batch, torch.tensor([3, 4, 5]))
    assert loss_scale(part, 100) == LossScale(num_tokens=7, num_sequences=3, max_completion_tokens=100)


# -- what may and may not change ---------------------------------------------------------------------------------------
def test_an_update_moves_the_policy_and_nothing_else(session, make_roles, batch, backbone):
    algorithm = rlft.load_algorithm("grpo", kl_coef=0.01)
    roles = make_roles(noise=0.02, reference="copy")
    roles.load_sampler(roles.publish(0))
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
    run = session(roles, algorithm)
    run.optimizer = Optimizer(roles.named_parameters(), run.config.trainer)
    before = {name: p.clone() for name, p in roles.model.named_parameters()}
    metrics = update(run, batch, NOBODY, 0)
    mine = {name for name, _ in roles.named_parameters()}
    for name, parameter in roles.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in mine)
        assert parameter.grad is None
    assert math.isfinite(metrics["policy/grad_norm"])
    assert metrics["policy/grad_norm"] > 0


def test_a_gradient_that_is_not_a_number_stops_before_it_reaches_weights_or_moments(session, make_roles, batch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles(noise=0.02)
    batch = algorithm.credit(batch)
    run = session(roles, algorithm)
    run.optimizer = Optimizer(roles.named_parameters(), run.config.trainer)
    update(run, batch, NOBODY, 0)
    weights, moments = roles.weights("policy"), run.optimizer.state()
    poisoned = batch.advantages.clone()
    poisoned[0, 4] = math.nan
    with pytest.raises(NonFiniteGradientError, match="policy/grad_norm is nan"):
        update(run, replace(batch, advantages=poisoned), NOBODY, 1)
    assert all(torch.equal(w, weights[n]) for n, w in roles.weights("policy").items())
    assert all(torch.equal(m, moments[n]) for n, m in run.optimizer.state().items())


def test_gradients_are_looked_after_in_every_micro_batch(session, make_roles, batch, monkeypatch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles()
    calls = []
    check = roles.check_gradients
    monkeypatch.setattr(roles, "check_gradients", lambda: calls.append(check()))
    update(session(roles, algorithm, token_budget=1), algorithm.credit(batch), NOBODY, 0)
    assert len(calls) == 9


def test_a_forward_that_lost_the_policy_is_noticed(session, make_roles, batch, monkeypatch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles(noise=0.02, reference="copy")
    batch = algorithm.credit(batch)
    outputs = roles.outputs

    def with_the_wrong_adapter(*args):
        roles.tuner.set_adapter("reference")
        return outputs(*args)

    monkeypatch.setattr(roles, "outputs", with_the_wrong_adapter)
    with pytest.raises(AssertionError, match="no gradient reached"):
        update(session(roles, algorithm), batch, NOBODY, 0)


def test_dropout_and_order_are_functions_of_seed_and_step(session, make_roles, batch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles(noise=0.02, dropout=0.3)
    batch = algorithm.credit(batch)

    def gradients(step, seed=0, num_minibatches=3):
        torch.manual_seed(torch.seed())
        run = session(roles, algorithm, minibatches=num_minibatches, seed=seed)
        update(run, batch, NOBODY, step)
        return run.optimizer.gradients

    def equal(a, b):
        return all(torch.equal(g, y[n]) for x, y in zip(a, b, strict=True) for n, g in x.items())

    first = gradients(5)
    assert equal(gradients(5), first)
    assert not equal(gradients(6), first)
    assert not equal(gradients(5, seed=1), first)
    assert not equal(gradients(5, num_minibatches=1), gradients(6, num_minibatches=1))  # dropout alone
    assert not any(module.training for module in roles.model.modules())


# -- the ledger --------------------------------------------------------------------------------------------------------
def test_packed_rows_waste_nothing_and_train_each_prompt_once(session, make_roles, batch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles()
    metrics = update(session(roles, algorithm), algorithm.credit(batch), algorithm.inert(batch), 0)
    # Groups 0 and 2: prompts 4 + 3, completions 3 + 4 + 2 and 7 + 2 + 0. (A masked token is in the network too.)
    assert metrics["tokens/trained"] == 7 + 9 + 9
    assert metrics["waste/padding_fraction"] == 0


def test_padded_rows_own_up_to_their_padding(session, make_roles, batch, backbone):
    sizes = MistralConfig(
        vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(sizes).eval().requires_grad_(False)
    windowed = Backbone(model=model, tokenizer=backbone.tokenizer, device=torch.device("cpu"), path="none")
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles(backbone=windowed)
    assert not roles.forward.packed
    batch = algorithm.credit(batch)
    metrics = update(session(roles, algorithm), batch, NOBODY, 0)
    # Rows of 7, 8, 6, 4, 6, 3, 10, 5 and 3 tokens, 52 in all, in one rectangle of 9 x 10.
    assert metrics["tokens/trained"] == 52
    assert metrics["waste/padding_fraction"] == pytest.approx(1 - 52 / 90)
