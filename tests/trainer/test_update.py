"""A step's updates: one gradient however it is computed, whom it moves, its lanes, and what it counts."""

import json
import math
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path

import half_model
import pytest
import torch
from in_one_test import each
from met_ranks import together
from slow_cases import slow_but
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, MistralConfig

import rlft
from rlft.config.compose import compose
from rlft.config.model import CriticKind
from rlft.config.resolved import resolve
from rlft.loop.parts import Engines
from rlft.loop.session import open_session
from rlft.model.backbone import Backbone
from rlft.model.critic import CRITIC
from rlft.model.forward import Forward, padded_forward
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.model.roles import POLICY
from rlft.train import train
from rlft.trainer import update
from rlft.trainer.local import LocalTrainer
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.ranks import LaneShare
from rlft.trainer.update import (
    Costs,
    LaneGradients,
    assign,
    backward,
    balance,
    costs_of,
    divide,
    loss_scale,
    minibatches,
)
from rlft.types import LossScale

model_config, backbone = half_model.model_config, half_model.backbone

BUDGETS = [10**6, 40, 20, 12, 1]
NOBODY = torch.zeros(9, dtype=torch.bool)


class Recorder(Optimizer):
    """Keeps every gradient and changes nothing."""

    def __init__(self, parameters, config, role=POLICY):
        super().__init__(parameters, config, role)
        self.gradients, self.rates = [], []

    def update(self, lr):
        named = zip(self.names, self.parameters, strict=True)
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        self.rates.append(lr)
        self.discard()
        return 1.0


class Bench(LocalTrainer):
    """A trainer with the settings of a config and one optimizer a role that learns, which updates by one algorithm."""

    def __init__(self, config, roles, algorithm, optimizer, text=None, share=None):
        rates = {POLICY: config.trainer.lr, CRITIC: config.critic.lr}
        optimizers = {
            role: optimizer(roles.named_parameters(role), replace(config.trainer, lr=rates[role]), role)
            for role in roles.learning_roles
        }
        super().__init__(roles, optimizers, config, needs_old=False, text=None if text is None else text.batch)
        self.share = share or LaneShare()
        roles.token_budget, self.algorithm, self.optimizer = config.token_budget, algorithm, optimizers[POLICY]

    def learn(self, batch, zero_rows, step):
        return self.update(self.algorithm, batch, zero_rows, step)


class Text:
    """The same pretraining text in every update; asked: (seed, step, update) of each."""

    def __init__(self, text):
        self.text, self.asked = text, []

    def batch(self, seed, step, update):
        self.asked.append((seed, step, update))
        return self.text


@pytest.fixture
def config(run_config):
    return run_config("prompts_per_step=3", "group_size=3", "generation.max_tokens=9", "trainer.lr=0.01")


@pytest.fixture
def session(config):
    """Builds a trainer; `keys` change the config."""

    def build(roles, algorithm, optimizer=Recorder, text=None, share=None, **keys):
        return Bench(replace(config, **keys), roles, algorithm, optimizer, text, share)

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
def double(make_double):
    return make_double()


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
    gradients = torch.autograd.grad(loss.total, [p for _, p in roles.named_parameters()])
    expected = by_name(roles, POLICY, gradients)
    for budget in BUDGETS:
        run = session(roles, algorithm, token_budget=budget)
        metrics = run.learn(batch, algorithm.zero_gradient_rows(batch), 0)
        (gradients,) = run.optimizer.gradients
        close(gradients, expected, 1e-9)
        assert metrics["loss/total"] == pytest.approx(loss.total.item(), rel=1e-9)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_rows_that_teach_nothing_never_enter_a_forward_and_the_gradient_is_as_if_they_had(
    session, make_roles, double, batch, monkeypatch
):
    algorithm = rlft.load_algorithm("grpo", aggregate="token_mean")
    roles = make_roles(noise=0.02, backbone=double)
    batch = algorithm.credit(roles.annotate(double_batch(batch), NOBODY, needs_old=True))
    zero_rows = algorithm.zero_gradient_rows(batch)
    assert zero_rows.tolist() == [False] * 3 + [True] * 3 + [False] * 3
    forwarded, call = [], Forward.__call__

    def spy(self, part, *args, **kwargs):
        forwarded.extend(part.group_ids.tolist())
        return call(self, part, *args, **kwargs)

    monkeypatch.setattr(Forward, "__call__", spy)
    results = []
    for rows in (zero_rows, NOBODY):
        forwarded.clear()
        run = session(roles, algorithm, token_budget=30)
        metrics = run.learn(batch, rows, 0)
        results.append((run.optimizer.gradients[0], metrics, sorted(forwarded)))
    (without, metrics, seen), (with_them, all_metrics, all_seen) = results
    assert (seen, all_seen) == ([0, 0, 0, 2, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2])
    close(without, with_them, 1e-9)
    # Of two sums in float32, whose order the processor's vector width decides: a few roundings (6e-8) apart.
    assert metrics["loss/total"] == pytest.approx(all_metrics["loss/total"], rel=1e-6)


def test_a_step_that_teaches_nothing_still_counts_as_its_updates(session, make_roles, batch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles()
    batch = algorithm.credit(batch)
    before = roles.weights("policy")
    run = session(roles, algorithm, Optimizer, epochs=2)
    metrics = run.learn(batch, ~NOBODY, 0)
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
    metrics = run.learn(batch, NOBODY, 4)
    updates = epochs * num_minibatches
    # Linear down to 0 over 10 steps: the updates of the turn that begins after 4 are 4 * updates, + 1, ..
    expected = [0.01 * (1 - (4 * updates + i) / (10 * updates)) for i in range(updates)]
    assert run.optimizer.rates == pytest.approx(expected)
    assert metrics["policy/lr"] == pytest.approx(sum(expected) / updates)
    assert metrics["policy/grad_norm"] == 1.0


@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 6])
def test_every_epoch_deals_each_group_whole_to_exactly_one_minibatch(num_minibatches, make_batch):
    batch = make_batch([(group, [3], [4]) for group in (4, 4, 7, 7, 1, 1, 0, 0, 9, 9, 5, 5)])
    dealt, others = (minibatches(batch, 3, num_minibatches, seed) for seed in (0, 1))
    assert len(dealt) == 3 * num_minibatches
    if num_minibatches > 1:
        first, second, other = (torch.cat(parts[:1]).tolist() for parts in (dealt, dealt[num_minibatches:], others))
        assert first != second, "epochs differ"
        assert first != other, "seeds differ"
    for epoch in range(3):
        parts = dealt[epoch * num_minibatches : (epoch + 1) * num_minibatches]
        assert sorted(torch.cat(parts).tolist()) == list(range(12))
        groups = [set(batch.group_ids[rows].tolist()) for rows in parts]
        assert sum(map(len, groups)) == 6
        assert {len(rows) for rows in parts} == {12 // num_minibatches}


def test_each_update_is_divided_by_the_sizes_of_its_own_minibatch(session, make_roles, batch, monkeypatch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles()
    scales, loss = {}, type(algorithm).loss

    def spy(self, outputs, part, scale):
        scales[tuple(part.group_ids.unique().tolist())] = scale
        return loss(self, outputs, part, scale)

    monkeypatch.setattr(type(algorithm), "loss", spy)
    session(roles, algorithm, minibatches=3).learn(algorithm.credit(batch), NOBODY, 0)
    tokens = {(0,): 3 + 3 + 2, (1,): 2 + 4 + 1, (2,): 7 + 2 + 0}
    assert {group: scale.num_tokens for group, scale in scales.items()} == tokens
    assert {(scale.num_sequences, scale.max_completion_tokens) for scale in scales.values()} == {(3, 9)}


# -- what may and may not change ---------------------------------------------------------------------------------------
def test_gradients_are_looked_after_in_every_micro_batch(session, make_roles, batch, monkeypatch):
    algorithm, roles, calls = rlft.load_algorithm("grpo"), make_roles(), []
    check = roles.check_gradients
    monkeypatch.setattr(roles, "check_gradients", lambda: calls.append(check()))
    session(roles, algorithm, token_budget=1).learn(algorithm.credit(batch), NOBODY, 0)
    assert len(calls) == 9


def test_dropout_and_order_are_functions_of_seed_and_step(session, make_roles, batch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles(noise=0.02, dropout=0.3)
    batch = algorithm.credit(batch)

    def gradients(step, seed=0, num_minibatches=3):
        torch.manual_seed(torch.seed())
        run = session(roles, algorithm, minibatches=num_minibatches, seed=seed)
        run.learn(batch, NOBODY, step)
        return run.optimizer.gradients

    def equal(a, b):
        return all(torch.equal(g, y[n]) for x, y in zip(a, b, strict=True) for n, g in x.items())

    first = gradients(5)
    assert equal(gradients(5), first)
    assert not equal(gradients(6), first)
    assert not equal(gradients(5, seed=1), first)
    assert not equal(gradients(5, num_minibatches=1), gradients(6, num_minibatches=1))  # dropout alone
    assert not any(module.training for module in roles.model.modules())


# -- the critic --------------------------------------------------------------------------------------------------------
KINDS = [CriticKind.adapter, CriticKind.shared]


def stir(roles):
    """Gives the critic weights that say something: a fresh one says 0."""
    generator = torch.Generator().manual_seed(2)
    for _, parameter in roles.named_parameters(CRITIC):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def with_critic(make_roles, **keys):
    roles = make_roles(noise=0.02, **keys)
    stir(roles)
    return roles


def by_name(roles, role, gradients):
    return {name: g for (name, _), g in zip(roles.named_parameters(role), gradients, strict=True)}


def weights_of(roles):
    return {role: {n: p.detach().clone() for n, p in roles.named_parameters(role)} for role in roles.learning_roles}


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("role", "forward"), [(POLICY, "outputs"), (CRITIC, "values")])
def test_a_forward_by_the_wrong_adapter_is_noticed(role, forward, session, make_roles, batch, monkeypatch):
    algorithm, roles = rlft.load_algorithm("ppo"), with_critic(make_roles, kind=CriticKind.adapter)
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
    right = getattr(roles, forward)

    def wrong(*args, **keys):
        roles.tuner.set_adapter(CRITIC if role == POLICY else POLICY)
        return right(*args, **keys)

    monkeypatch.setattr(roles, forward, wrong)
    with pytest.raises(AssertionError, match=f"no gradient reached 28 parameters of {role}"):
        session(roles, algorithm).learn(batch, NOBODY, 0)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("normalize", [False, True])
def test_policy_and_critic_get_the_gradients_that_each_has_alone_on_a_base_of_its_own(
    normalize, session, make_roles, make_double, batch
):
    algorithm = rlft.load_algorithm("ppo", entropy_coef=0.1)
    keys = {"kind": CriticKind.adapter, "normalize_values": normalize, "temperature": 0.8}
    first = with_critic(make_roles, backbone=make_double(), **keys)
    batch = algorithm.credit(first.annotate(double_batch(batch), NOBODY, needs_old=False))
    assert (batch.old_values[batch.loss_mask] != 0).all()
    scale = LossScale(num_tokens=24, num_sequences=9, max_completion_tokens=9)
    # The critic alone: its adapter is the active one all along, and no policy is ever forwarded.
    first.critic.observe(batch.returns, batch.loss_mask)
    assert (first.critic.value_scale != 1) == normalize
    scale = replace(scale, value_scale=first.critic.value_scale)
    first.tuner.set_adapter(CRITIC)
    padded = Forward(model=first.backbone.model, packed=False, reason="")
    values = first.critic.values(padded.values(batch, first.critic.head), batch.loss_mask)
    value_loss = algorithm.value_loss(values, batch, scale)
    critic_parameters = [p for _, p in first.named_parameters(CRITIC)]
    expected = {CRITIC: by_name(first, CRITIC, torch.autograd.grad(value_loss, critic_parameters))}
    # The policy alone: there is no critic; values are numbers.
    second = make_roles(noise=0.02, backbone=make_double(), temperature=0.8)
    outputs = padded_forward(second.backbone.model, batch, 0.8, True)
    loss = algorithm.loss(replace(outputs, values=values.detach()), batch, scale)
    policy_parameters = [p for _, p in second.named_parameters(POLICY)]
    expected[POLICY] = by_name(second, POLICY, torch.autograd.grad(loss.total, policy_parameters))
    for budget in BUDGETS:
        roles = with_critic(make_roles, backbone=make_double(), **keys)
        run = session(roles, algorithm, token_budget=budget)
        metrics = run.learn(batch, NOBODY, 0)
        for role in (POLICY, CRITIC):
            (gradients,) = run.optimizers[role].gradients
            close(gradients, expected[role], 1e-9)
        assert metrics["loss/value"] == pytest.approx(value_loss.item(), rel=1e-9)
        assert metrics["loss/total"] == pytest.approx(loss.total.item(), rel=1e-9)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("normalize", [False, True])
def test_a_shared_critics_value_gradient_is_part_of_the_policys(normalize, session, make_roles, make_double, batch):
    algorithm = rlft.load_algorithm("ppo")
    keys = {"kind": CriticKind.shared, "normalize_values": normalize, "temperature": 0.8}
    roles = with_critic(make_roles, backbone=make_double(), **keys)
    batch = algorithm.credit(roles.annotate(double_batch(batch), NOBODY, needs_old=False))
    roles.critic.observe(batch.returns, batch.loss_mask)
    scale = LossScale(num_tokens=24, num_sequences=9, max_completion_tokens=9, value_scale=roles.critic.value_scale)
    outputs = padded_forward(roles.backbone.model, batch, 0.8, False, roles.critic.head)
    values = roles.critic.values(outputs.values, batch.loss_mask)
    loss = algorithm.loss(replace(outputs, values=values), batch, scale)
    parameters = {role: [p for _, p in roles.named_parameters(role)] for role in (POLICY, CRITIC)}
    expected = {
        role: by_name(roles, role, torch.autograd.grad(loss.total, ps, retain_graph=True))
        for role, ps in parameters.items()
    }
    of_values = torch.autograd.grad(algorithm.value_loss(values, batch, scale), parameters[POLICY])
    assert all(g.abs().max() > 0 for g in of_values)
    for budget in BUDGETS:
        roles = with_critic(make_roles, backbone=make_double(), **keys)
        run = session(roles, algorithm, token_budget=budget)
        run.learn(batch, NOBODY, 0)
        for role in (POLICY, CRITIC):
            (gradients,) = run.optimizers[role].gradients
            close(gradients, expected[role], 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_first_steps_only_the_critic_learns(kind, session, make_roles, batch, config):
    algorithm = rlft.load_algorithm("ppo")
    roles = with_critic(make_roles, kind=kind, reference="copy")
    critic = replace(config.critic, kind=kind, lr=0.02, warmup_steps=2)
    run = session(roles, algorithm, Optimizer, critic=critic, epochs=2)
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
    others = {n: p.clone() for n, p in roles.model.named_parameters() if ".policy." not in n and ".critic." not in n}
    for step in range(4):
        before = weights_of(roles)
        metrics = run.learn(batch, NOBODY, step)
        after, learns = weights_of(roles), step >= 2
        assert all(torch.equal(w, before[POLICY][n]) != learns for n, w in after[POLICY].items())
        assert not any(torch.equal(w, before[CRITIC][n]) for n, w in after[CRITIC].items())
        assert (metrics["policy/lr"], metrics["critic/lr"]) == (0.01 if learns else 0.0, 0.02)
        assert (metrics["policy/grad_norm"] > 0) == learns
        assert metrics["critic/grad_norm"] > 0
        assert (run.optimizers[POLICY].state() == {}) == (not learns)  # Adam's averages begin with its first update
        assert all(p.grad is None for p in roles.model.parameters())
    assert equal(others, dict(roles.model.named_parameters()))


def test_a_resting_policy_is_forwarded_without_a_graph_and_its_loss_is_still_told(session, make_roles, batch, config):
    algorithm, roles = rlft.load_algorithm("ppo"), with_critic(make_roles, kind=CriticKind.adapter)
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
    critic = replace(config.critic, kind=CriticKind.adapter, warmup_steps=1)
    told, graphs, outputs = [], [], roles.outputs

    def spy(*args, **keys):
        found = outputs(*args, **keys)
        graphs.append(found.logprobs.requires_grad)
        return found

    roles.outputs = spy
    for step in (0, 1):
        metrics = session(roles, algorithm, critic=critic).learn(batch, NOBODY, step)
        told.append((metrics["loss/policy"], metrics["loss/value"], metrics["loss/total"]))
    assert graphs == [False, True]
    assert told[0] == pytest.approx(told[1], rel=1e-6)
    assert told[0][1] > 0


def test_a_resting_policy_reads_no_pretraining_text(session, make_roles, batch, config):
    algorithm, roles = rlft.load_algorithm("ppo_ptx"), with_critic(make_roles, kind=CriticKind.adapter)
    assert algorithm.needs_text
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
    text, critic = Text(batch), replace(config.critic, kind=CriticKind.adapter, warmup_steps=1)
    run = session(roles, algorithm, text=text, critic=critic, epochs=2, seed=7)
    run.learn(batch, NOBODY, 0)
    assert text.asked == []
    run.learn(batch, NOBODY, 1)
    assert text.asked == [(7, 1, 0), (7, 1, 1)]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_pretraining_text_adds_its_gradient_to_the_policys_whatever_the_token_budget(
    session, make_roles, make_double, batch
):
    # 3 texts: at temperature 1 (the run's is 0.8), divided by their tokens.
    algorithm = rlft.load_algorithm("ppo_ptx", ptx_coef=0.5)
    keys = {"kind": CriticKind.adapter, "temperature": 0.8}
    roles = with_critic(make_roles, backbone=make_double(), **keys)
    step = algorithm.credit(roles.annotate(double_batch(batch), NOBODY, needs_old=False))
    text = replace(batch.select(torch.tensor([0, 4, 6])), group_ids=torch.arange(3))
    logprobs = padded_forward(roles.backbone.model, text, 1.0, False).logprobs
    parameters = [p for _, p in roles.named_parameters()]
    added = torch.autograd.grad(-0.5 * logprobs.sum() / text.loss_mask.sum(), parameters)
    for budget in (10**6, 12):
        gradients = []
        for name in ("ppo", "ppo_ptx"):
            roles = with_critic(make_roles, backbone=make_double(), **keys)
            subject = algorithm if name == "ppo_ptx" else replace(algorithm, ptx_coef=0.0)
            run = session(roles, subject, text=Text(text), token_budget=budget)
            run.learn(step, NOBODY, 0)
            gradients.append(run.optimizer.gradients[0])
        without, with_text = gradients
        close({n: g - without[n] for n, g in with_text.items()}, by_name(roles, POLICY, added), 1e-9)


def test_moments_are_forgotten_before_the_first_update_of_every_so_many_steps(session, make_roles, batch, config):
    algorithm = rlft.load_algorithm("ppo")
    # Two updates a step. Adam counts its updates since the last reset, which is due before steps 0 and 3 begin.
    for every, counts in ((0, [2, 4, 6, 8]), (1, [2] * 4), (3, [2, 4, 6, 2])):
        roles = with_critic(make_roles, kind=CriticKind.adapter)
        credited = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
        trainer = replace(config.trainer, reset_every=every)
        run = session(roles, algorithm, Optimizer, trainer=trainer, epochs=2, token_budget=10**6)
        for step, count in enumerate(counts):
            run.learn(credited, NOBODY, step)
            for optimizer in run.optimizers.values():
                assert {int(t) for name, t in optimizer.state().items() if name.startswith("step/")} == {count}


SMALL = ("model.device=cpu", "eval.every=0", "console=null", "scoring.workers=0")


def trained(folder, *words):
    """What trains in a run with these words."""
    plan = resolve(compose([*SMALL, *words])).plan()
    (folder / "config.yaml").touch()
    with Engines() as engines, open_session(plan, folder, engines, lambda text: None) as session:
        return train(session)


def test_a_controller_of_the_kl_coefficient_rests_while_the_policy_does(tmp_path):
    # A resting policy has KL 0, which would halve the coefficient in each of its steps. The target is out of reach, so
    # of three steps, two of them the critic's, one halves it: 8 to 4, not to 1.
    words = [
        "algorithm=ppo_penalty", "algorithm.kl_coef=8", "algorithm.kl_target=1e6", "epochs=2", "critic.kind=adapter",
        "critic.warmup_steps=2", "steps=3", "prompts_per_step=2", "group_size=2", "generation=scripted",
        "generation.scripted.answers={*: [yes, no]}", "model.dtype=float32", "lora.rank=2",
    ]  # fmt: skip
    assert trained(tmp_path, *words).algorithm.state() == {"kl_coef": 4.0}


def test_the_first_update_of_a_step_is_on_the_samplers_sums_and_the_second_is_not(tmp_path, monkeypatch):
    borrowed, plain, step = [set()], LoraLinear.operands, Optimizer.update

    def seen(self, x):
        found = plain(self, x)
        if found is not None and torch.is_grad_enabled():
            borrowed[-1].add(found[0].total is not None)
        return found

    monkeypatch.setattr(LoraLinear, "operands", seen)
    monkeypatch.setattr(Optimizer, "update", lambda self, lr: (borrowed.append(set()), step(self, lr))[1])
    small = ["steps=2", "minibatches=2", "prompts_per_step=4", "group_size=4", "data.size=16"]
    trained(tmp_path, "+recipe=grpo_arithmetic", "generation=transformers", *small)
    # The second set begins after the first optimizer step, the third after the publish that follows the second.
    assert borrowed[:4] == [{True}, {False}, {True}, {False}]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_normalised_by_the_steps_returns_before_its_first_update_and_stay_what_they_were(
    kind, session, make_roles, batch, monkeypatch
):
    # Rewards on the last tokens, gamma = lambda = 1 and values of 0: a row's returns are its reward, token by token.
    # Rows of 3, 3, 2 (rewards 1, 0, 1/2), 2, 4, 1 (2) and 7, 2 tokens (0; the ninth, of 1, is empty): over 24 tokens
    # mean (3 + 1 + 14) / 24 = 3/4, mean square (3 + 1/2 + 28) / 24 = 21/16, variance 21/16 - 9/16 = 3/4.
    algorithm = rlft.load_algorithm("ppo", lam=1.0)
    roles = make_roles(noise=0.02, kind=kind, normalize_values=True)
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))
    stir(roles)
    with torch.no_grad(), roles.using(roles.critic.role):
        before = roles.values(batch)
    scales, loss = [], type(algorithm).loss

    def spy(self, outputs, part, scale):
        if not scales:
            torch.testing.assert_close(outputs.values.detach(), before, rtol=1e-6, atol=1e-6)
        scales.append(scale.value_scale)
        return loss(self, outputs, part, scale)

    monkeypatch.setattr(type(algorithm), "loss", spy)
    run = session(roles, algorithm, Optimizer, epochs=2)
    run.learn(batch, NOBODY, 0)
    assert scales == pytest.approx([math.sqrt(3 / 4)] * 2, rel=1e-6)
    assert (roles.critic.statistics.mean, roles.critic.statistics.num_steps) == (pytest.approx(3 / 4, rel=1e-6), 1)
    run.learn(batch, NOBODY, 1)
    assert roles.critic.statistics.num_steps == 2


# -- lanes -------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("num_lanes", slow_but(3, (2, 3, 16)))
@pytest.mark.parametrize("kind", [CriticKind.none, *KINDS])
def test_lanes_give_the_gradients_and_metrics_of_the_whole_batch(
    kind, num_lanes, session, make_roles, make_double, batch
):
    algorithm = rlft.load_algorithm("grpo" if kind is CriticKind.none else "ppo")
    roles = make_roles(noise=0.05, backbone=make_double(), reference="base", kind=kind)
    batch = algorithm.credit(roles.annotate(double_batch(batch), NOBODY, needs_old=False))
    whole = session(roles, algorithm, token_budget=64)
    apart = session(roles, algorithm, token_budget=64, share=LaneShare(lanes=num_lanes))
    expected, found = whole.learn(batch, NOBODY, 0), apart.learn(batch, NOBODY, 0)
    for role, recorder in whole.optimizers.items():
        close(apart.optimizers[role].gradients[0], recorder.gradients[0], 1e-12)
    # A prompt whose rows are in several lanes is trained tokens of each.
    fields = expected.keys() - {"tokens/trained"}
    assert {k: found[k] for k in fields} == pytest.approx({k: expected[k] for k in fields}, rel=1e-6, abs=1e-9)
    assert found.keys() - expected.keys() == {"lanes/balance"}
    assert found["tokens/trained"] >= expected["tokens/trained"]


def test_dropout_of_rows_is_the_same_wherever_they_are_computed(session, make_roles, batch):
    """Rank 1 of two, by itself, has the passes that one process has in the same lanes."""
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles(noise=0.05, dropout=0.5)
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))

    def passes(seed, step=3, **share):
        torch.manual_seed(seed)
        [record] = session(roles, algorithm, share=LaneShare(lanes=4, **share)).update_lanes(
            algorithm, batch, NOBODY, step
        )
        return dict(record.passes)

    whole = passes(1)
    assert passes(2, rank=1, ranks=2) == {lane: whole[lane] for lane in (2, 3)}
    assert passes(1, step=4) != whole


def test_nothing_is_left_of_an_update_that_is_broken_off(session, make_roles, batch, monkeypatch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles(noise=0.05)
    batch = algorithm.credit(roles.annotate(batch, NOBODY, needs_old=True))

    def fail(*_):
        raise ConnectionError

    monkeypatch.setattr(LaneGradients, "add_up", fail)
    run = session(roles, algorithm, Optimizer, share=LaneShare(lanes=2))
    with pytest.raises(ConnectionError):
        run.learn(batch, NOBODY, 0)
    assert all(p.grad is None for _, p in roles.named_parameters())
    assert not roles.model.training


# -- which rows are in which lane: balanced, whole where it can be, and a function of the batch alone ------------------
RECORDED = json.loads(Path(__file__).with_name("row_lengths.json").read_text())
"""{what: [[tokens of a prompt, [tokens of each of its completions]], ..]}: steps of recipes on the embedded model, and
lengths of a log-normal distribution with a median of 245 and a longest one of 6,000 tokens."""


def recorded(name):
    """A token costs 1 here, and a pair of tokens nothing."""
    groups = RECORDED[name]
    return Costs(
        rows=[float(length) for _, lengths in groups for length in lengths],
        prompts=[float(prompt) for prompt, lengths in groups for _ in lengths],
        groups=[group for group, (_, lengths) in enumerate(groups) for _ in lengths],
    )


def cost_of(costs, rows):
    """By its meaning: each prompt once, each row once."""
    prompts = {costs.groups[row]: costs.prompts[row] for row in rows}
    return sum(prompts.values()) + sum(costs.rows[row] for row in rows)


@pytest.mark.parametrize("num_lanes", [2, 3, 4, 8])
@pytest.mark.parametrize("name", RECORDED)
def test_lanes_of_recorded_lengths_are_within_a_tenth_of_the_best(name, num_lanes):
    """No assignment is better than the mean, or than the most expensive row by itself."""
    costs = recorded(name)
    lanes, totals = assign(costs, num_lanes)
    assert sorted(row for lane in lanes for row in lane) == list(range(len(costs.rows)))
    assert totals == pytest.approx([cost_of(costs, lane) for lane in lanes])
    costliest_row = max(row + prompt for row, prompt in zip(costs.rows, costs.prompts, strict=True))
    assert max(totals) <= 1.1 * max(cost_of(costs, list(range(len(costs.rows)))) / num_lanes, costliest_row)


@each("seed", range(20))
def test_few_rows_are_within_a_tenth_of_the_best_of_all_assignments(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 30, (7,), generator=generator).tolist()
    prompts = torch.randint(0, 12, (3,), generator=generator).tolist()
    groups = [0, 0, 0, 1, 1, 2, 2]
    costs = Costs(rows=rows, prompts=[prompts[group] for group in groups], groups=groups)
    best = min(
        max(cost_of(costs, [row for row in range(7) if lanes[row] == lane]) for lane in range(3))
        for lanes in product(range(3), repeat=7)
    )
    assert max(assign(costs, 3)[1]) <= 1.1 * best


def test_lanes_of_few_groups():
    # Eight equal groups on four lanes stay whole, two each, no prompt twice: 2 x (9 + 4 x 5).
    costs = Costs(rows=[5.0] * 32, prompts=[9.0] * 32, groups=[row // 4 for row in range(32)])
    lanes, totals = assign(costs, 4)
    assert totals == [58.0] * 4
    assert all(len({costs.groups[row] for row in lane}) == 2 for lane in lanes)
    # One long group is shared out.
    lanes, totals = assign(Costs(rows=[10.0] * 8, prompts=[1.0] * 8, groups=[0] * 8), 4)
    assert ([len(lane) for lane in lanes], totals) == ([2, 2, 2, 2], [21.0] * 4)
    # There may be fewer rows than lanes.
    lanes, totals = assign(Costs(rows=[3.0, 2.0], prompts=[1.0, 1.0], groups=[0, 1]), 4)
    assert (sorted(map(len, lanes)), sorted(totals)) == ([0, 0, 1, 1], [0.0, 0.0, 3.0, 4.0])
    assert assign(Costs(rows=[], prompts=[], groups=[]), 3) == ([[], [], []], [0.0] * 3)


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_moving_rows_ends_where_none_helps(num_lanes, monkeypatch):
    searches = []
    search = update._Lanes.best_moves
    monkeypatch.setattr(update._Lanes, "best_moves", lambda lanes: searches.append(search(lanes)) or searches[-1])
    assign(Costs(rows=[9.0, 7.0, 5.0, 3.0, 2.0], prompts=[1.0] * 5, groups=[0, 0, 1, 1, 2]), num_lanes)
    assert searches.count([]) == 1, "the search that finds nothing is the last one"


@pytest.fixture
def four_rows(make_batch):
    return make_batch([(0, [5] * 4, [6] * 8), (0, [5] * 4, [6] * 2), (1, [7] * 9, [8] * 3), (1, [7] * 9, [8])])


def test_costs_are_tokens_and_the_pairs_that_attend_to_each_other(four_rows):
    costs = costs_of(four_rows, torch.tensor([0, 2]), shared_prompts=True)
    # 8 tokens, each with 4 before them and half of 8 beside them: 8 x (4 + 4) pairs; 6,144 pairs cost as a token.
    assert costs.rows == pytest.approx([8 + 64 / 6144, 3 + 3 * (9 + 1.5) / 6144])
    assert costs.prompts == pytest.approx([4 + 8 / 6144, 9 + 40.5 / 6144])
    assert costs.groups == [0, 1]
    padded = costs_of(four_rows, torch.arange(4), shared_prompts=False)
    assert padded.rows == pytest.approx([12 + 72 / 6144, 6 + 18 / 6144, 12 + 72 / 6144, 10 + 50 / 6144])
    assert padded.prompts == [0.0] * 4


def test_rows_of_a_lane_are_in_the_order_of_the_batch(four_rows):
    lanes, _ = divide(four_rows, torch.tensor([3, 1, 2]), 2, shared_prompts=True)
    assert sorted(torch.cat(lanes).tolist()) == [1, 2, 3]
    assert [rows.tolist() for rows in lanes] == [[3, 2], [1]]  # in the order in which they are given
    assert all(rows.dtype == torch.int64 for rows in lanes)


def test_the_balance_is_the_share_of_time_in_which_lanes_work():
    assert balance([[4.0, 2.0], [1.0, 3.0]]) == pytest.approx((3 + 2) / (4 + 3))
    assert balance([[0.0, 0.0]]) == 1.0


# -- the sum of lanes' gradients ---------------------------------------------------------------------------------------
LANES = 6
SHAPES = ((7, 3), (), (40,), (2, 2, 2))
SILENT = 1
"""A lane without rows."""


def gradient_of(lane):
    """Numbers of unlike sizes, of which the sum depends on the order; lane 4 has none for the third parameter. The
    columns of the first one lie one after the other, as after a transposition."""
    random = torch.Generator().manual_seed(lane)
    made = [torch.randn(shape, generator=random) * 10.0**lane for shape in SHAPES]
    made[0] = made[0].T.contiguous().T
    return [None if (lane, number) == (4, 2) else tensor for number, tensor in enumerate(made)]


def sum_of_lanes():
    """One lane after the other."""
    lanes = [gradient_of(lane) for lane in range(LANES) if lane != SILENT]
    return [reduce(torch.add, [t for t in tensors if t is not None]) for tensors in zip(*lanes, strict=True)]


def added_up(share):
    """(the sum on this rank, the tensors of its first lane)."""
    learns, own = [Parameter(torch.zeros(shape)) for shape in SHAPES], []
    lanes = LaneGradients(learns, share)
    for lane in (lane for lane in share.mine if lane != SILENT):
        for parameter, gradient in zip(learns, gradient_of(lane), strict=True):
            parameter.grad = gradient
        own = own or [parameter.grad for parameter in learns]
        lanes.set_aside(lane)
    lanes.add_up([lane for lane in range(LANES) if lane != SILENT])
    return [parameter.grad for parameter in learns if parameter.grad is not None], own


@pytest.mark.parametrize("size", [20, 52, 10**9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_the_sum_is_that_of_the_lanes_in_their_order(ranks, size, met, monkeypatch):
    """Buckets of 5 numbers, of 13, and of all 70."""
    monkeypatch.setattr(update, "BUCKET", size)
    exchanges = met(ranks) if ranks > 1 else [None]
    shares = [LaneShare(lanes=LANES, rank=rank, ranks=ranks, exchange=e) for rank, e in enumerate(exchanges)]
    for found, own in together([lambda share=share: added_up(share) for share in shares]):
        assert all(torch.equal(a, b) for a, b in zip(found, sum_of_lanes(), strict=True))
        assert [tensor.is_contiguous() for tensor in found] == [True] * len(SHAPES)
        # Where the first lane of a rank has a gradient that lies in a row, the sum takes its place.
        places = [(a.data_ptr(), b.data_ptr()) for a, b in zip(found[1:], own[1:], strict=False) if b is not None]
        assert all(a == b for a, b in places)
        assert bool(places) == bool(own)


# -- the ledger --------------------------------------------------------------------------------------------------------
def test_packed_rows_waste_nothing_and_train_each_prompt_once(session, make_roles, batch):
    algorithm, roles = rlft.load_algorithm("grpo"), make_roles()
    metrics = session(roles, algorithm).learn(algorithm.credit(batch), algorithm.zero_gradient_rows(batch), 0)
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
    metrics = session(roles, algorithm).learn(batch, NOBODY, 0)
    # Rows of 7, 8, 6, 4, 6, 3, 10, 5 and 3 tokens, 52 in all, in one rectangle of 9 x 10.
    assert metrics["tokens/trained"] == 52
    assert metrics["waste/padding_fraction"] == pytest.approx(1 - 52 / 90)


# -- several turns -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_what_stands_at_an_answers_tokens_reaches_no_gradient(packed, make_roles, make_batch):
    """On the model that ships, of all terms of a loss: log-probs and advantages there are no numbers."""
    roles = make_roles(noise=0.05)
    if not packed:
        roles.forward = replace(roles.forward, packed=False, reason="for this test")
    rows = [(0, (5, 6), (7, 8, -9, -10, 11)), (0, (5, 6), (-9, 12, 13)), (1, (3, 4), (6, -7, 8))]
    clean = make_batch(rows, rewards=[1.0, 0.0, 0.5])
    weights = torch.randn(clean.loss_mask.shape, generator=torch.Generator().manual_seed(2))
    values = {
        "sampled_logprobs": -2 + 0.1 * weights,
        "old_logprobs": -2 + 0.2 * weights,
        "reference_logprobs": -2 + 0.3 * weights,
        "advantages": weights,
    }
    junk = {name: value.where(clean.loss_mask, math.nan) for name, value in values.items()}
    algorithm = rlft.load_algorithm("grpo", kl_coef=0.1, entropy_coef=0.1, mismatch="token_truncate")

    def gradients(batch):
        for _, parameter in roles.named_parameters(POLICY):
            parameter.grad = None
        micro, scale = roles.forward.placed([batch])[0], loss_scale(batch, 9, roles)
        metrics, _ = backward(roles, algorithm, micro, scale, policy_learns=True)
        return metrics, [parameter.grad.clone() for _, parameter in roles.named_parameters(POLICY)]

    expected, found = gradients(replace(clean, **values)), gradients(replace(clean, **junk))
    assert max(gradient.abs().max() for gradient in expected[1]) > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(expected[1], found[1], strict=True))
    assert expected[0] == found[0]
