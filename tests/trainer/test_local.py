"""The trainer behind the loop's seam: what it keeps, what it gives away, and that it needs no run around it."""

from dataclasses import replace

import pytest
import torch
from reward_groups import group_of

import rlft
from rlft.config.model import CriticKind, Old, RewardModelConfig
from rlft.model.critic import CRITIC
from rlft.model.reward_model import open_learned, reward_role
from rlft.model.roles import OLD, POLICY, REFERENCE
from rlft.trainer.local import LocalTrainer, open_optimizers
from rlft.trainer.reward_training import RewardRefresh
from rlft.types import Prompt, Rollouts, Scores

LENGTHS = 10 / 4  # tokens of a completion of the batch, in the mean
NOBODY = torch.zeros(4, dtype=torch.bool)
REWARDS = RewardModelConfig(
    refresh_every=2, labels="math", pairs=8, pairs_per_group=4, replay=0.5, capacity=8, epochs=1, pairs_per_update=2,
    lr=1e-2,
)  # fmt: skip


@pytest.fixture
def config(run_config):
    return run_config("prompts_per_step=2", "group_size=2", "generation.max_tokens=4", "trainer.lr=0.01", "epochs=2")


@pytest.fixture
def batch(make_batch):
    rows = [(0, [5, 6, 7], [20, 21, 2]), (0, [5, 6, 7], [22, 23]), (1, [9, 10], [30, 31]), (1, [9, 10], [32, 33, 34])]
    return make_batch(rows, rewards=[1, 0, 0.5, 2])


@pytest.fixture
def open_trainer(config, make_roles):
    """Builds a trainer with every part that moves, on roles of its own; those built before are closed."""

    def build(needs_old=False):
        roles = make_roles(noise=0.02, reference="ema", ema_decay=0.5, kind=CriticKind.adapter, normalize_values=True)
        open_learned("taste", None, roles, token_budget=99, center=0.0, scale=1.0, learns=True)
        training = RewardRefresh(REWARDS, roles, reward_role("taste"), config.trainer, config.seed)
        optimizers = open_optimizers(roles, config.trainer, critic_lr=0.02)
        return LocalTrainer(roles, optimizers, config, needs_old=needs_old, reward_training=training)

    return build


def rollouts():
    """One prompt with a right and a wrong completion: a pair for the learned reward."""
    group = group_of(Prompt(id="p", messages=(), answer="", token_ids=(5, 6, 7)), [(20, 2), (22, 2)])
    right = torch.tensor([[1.0, 0.0]])
    return Rollouts(groups=[group], scores=Scores(total=right, by_reward={"math": right}), num_sampled=2)


def turn(trainer, batch, step):
    """A step, as the loop makes it, without sampling and scoring."""
    algorithm = rlft.load_algorithm("ppo")
    credited = algorithm.credit(trainer.annotate(batch, NOBODY))
    return trainer.update(algorithm, credited, NOBODY, step) | trainer.refresh(step + 1, rollouts())


def flat(state):
    kinds = {"adapter": state.adapters, "head": state.heads, "optimizer": {"all": state.optimizer}}
    return {f"{k}/{r}/{n}": t for k, roles in kinds.items() for r, named in roles.items() for n, t in named.items()}


def test_a_trainer_that_is_restored_goes_on_to_the_same_bits(open_trainer, batch):
    first = open_trainer()
    for step in range(3):
        turn(first, batch, step)
    kept, kept_tensors = first.state(), flat(first.state())
    expected_metrics = turn(first, batch, 3)
    expected, critic = flat(first.state()), first.state().critic
    assert expected_metrics.keys() >= {"policy/lr", "critic/lr", "reward_model/loss"}
    assert not any(torch.equal(kept_tensors[n], t) for n, t in expected.items() if n.startswith("adapter/policy"))
    assert not any(torch.equal(kept_tensors[n], t) for n, t in expected.items() if n.startswith("adapter/reference"))
    second = open_trainer()
    second.restore(kept)
    assert turn(second, batch, 3) == expected_metrics
    found = flat(second.state())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert second.state().critic == critic != kept.critic


def test_the_state_is_a_copy_of_all_that_moves(open_trainer, batch):
    trainer = open_trainer()
    turn(trainer, batch, 0)
    state, before = trainer.state(), {n: t.clone() for n, t in flat(trainer.state()).items()}
    assert set(state.adapters) == {POLICY, REFERENCE, CRITIC, "reward_taste"}
    assert set(state.heads) == {CRITIC, "reward_taste"}
    turn(trainer, batch, 1)
    assert all(torch.equal(t, before[name]) for name, t in flat(state).items())


def test_the_kl_of_the_last_update_is_the_policys_before_its_gradient_step(config, make_roles, batch):
    measured, moved, algorithm = [], [], rlft.load_algorithm("grpo")
    for epochs in (1, 2):
        roles = make_roles(noise=0.02)
        optimizers = open_optimizers(roles, config.trainer, critic_lr=1.0)
        trainer = LocalTrainer(roles, optimizers, replace(config, epochs=epochs), needs_old=True)
        credited = algorithm.credit(trainer.annotate(batch, NOBODY))
        measured.append(trainer.update(algorithm, credited, NOBODY, 0)["kl/old_last"])
        d = (roles.logprobs(batch, POLICY) - credited.old_logprobs)[batch.loss_mask].double()
        moved.append((d.expm1() - d).mean().item())
    assert measured == pytest.approx([0.0, moved[0]], rel=1e-3, abs=1e-8)
    assert moved[1] > 1.5 * moved[0] > 1e-4


@pytest.mark.parametrize("to", ["reference", "old", "reward"])
def test_an_exact_kl_acts_in_the_updates_of_a_step(config, make_roles, batch, to):
    keys = {"kl_in": "reward"} if to == "reward" else {"kl_to": to, "kl_in": "loss"}
    algorithm = rlft.load_algorithm("reinforce", kl_coef=0.5, kl_estimator="exact", **keys)
    roles = make_roles(noise=0.02, reference="base", old=Old.copy)
    roles.copy(POLICY, OLD)
    config = replace(config, epochs=2 if to == "old" else 1)
    asked = {"needs_old": True, "reference_field": algorithm.reference_field}
    trainer = LocalTrainer(roles, open_optimizers(roles, config.trainer, critic_lr=1.0), config, **asked)
    credited = algorithm.credit(trainer.annotate(batch, NOBODY))
    mean = roles.outputs(batch, False, anchor=roles.anchor(batch, None)).kl[batch.loss_mask].mean().item()
    metrics = trainer.update(algorithm, credited, NOBODY, 0)
    if to == "old":  # the first update measures before the policy has moved
        assert metrics["kl/old_last"] == pytest.approx(2 * metrics["kl/old"], rel=1e-3)
        assert metrics["kl/old_last"] > 1e-5
        assert metrics["loss/kl"] == pytest.approx(0.5 * metrics["kl/old"] * LENGTHS, rel=1e-3)
    else:
        assert metrics["kl/reference"] == pytest.approx(mean, rel=1e-5)
        assert mean > 1e-5
        assert metrics.get("loss/kl") == (pytest.approx(0.5 * mean * LENGTHS, rel=1e-5) if to == "reference" else None)


def test_what_is_published_is_the_policy_after_the_last_update(open_trainer, batch):
    trainer = open_trainer()
    before = trainer.roles.publish(0).weights
    turn(trainer, batch, 0)
    adapter = trainer.roles.publish(1)
    assert adapter.version == 1
    assert all(torch.equal(adapter.weights[n], w) for n, w in trainer.state().adapters[POLICY].items())
    assert not any(torch.equal(adapter.weights[n], w) for n, w in before.items())


def test_samples_are_judged_once_a_step_before_the_policy_moves(open_trainer, batch):
    trainer, judged = open_trainer(), []

    def check(rows, gaps, step):
        judged.append((len(rows.rewards), gaps, trainer.roles.publish(0).weights))

    plain = turn(trainer, batch, 0)
    trainer.check_samples, before = check, trainer.roles.publish(0).weights
    assert turn(trainer, batch, 2).keys() == plain.keys()
    [(number, gaps, weights)] = judged
    assert (number, weights.keys()) == (4, before.keys())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())
    trainer.roles.restore_role(POLICY, before)
    expected = (trainer.roles.logprobs(batch, POLICY) - batch.sampled_logprobs)[batch.loss_mask].abs()
    assert sorted(gaps.tolist()) == pytest.approx(sorted(expected.tolist()), rel=1e-4, abs=1e-5)


def test_samples_are_judged_although_the_first_minibatch_teaches_nothing(open_trainer, batch):
    trainer, algorithm, judged = open_trainer(), rlft.load_algorithm("ppo"), []
    trainer.config = replace(trainer.config, minibatches=2)
    trainer.check_samples = lambda rows, gaps, step: judged.append((rows.group_ids.unique().tolist(), gaps is None))
    for dead in ([0], [1], [0, 1]):
        nobody = torch.isin(batch.group_ids, torch.tensor(dead))
        credited = algorithm.credit(trainer.annotate(batch, nobody))
        trainer.update(algorithm, credited, nobody, 0)
    assert sorted(judged) == [([0], judged[1][1]), ([1], judged[0][1])]
    assert {is_none for _, is_none in judged} == {False, True}


@pytest.mark.parametrize("needs_old", [False, True])
def test_the_old_policy_is_recomputed_where_the_run_needs_it(needs_old, open_trainer, batch):
    annotated = open_trainer(needs_old).annotate(batch, NOBODY)
    assert (annotated.old_logprobs is not None) == needs_old
    assert annotated.reference_logprobs is not None
    assert annotated.old_values is not None


def test_a_rehearsal_changes_nothing(open_trainer, batch):
    trainer, zeros = open_trainer(), torch.zeros_like(batch.sampled_logprobs)
    before, critic, noise = flat(trainer.state()), trainer.state().critic, torch.random.get_rng_state()
    micro = replace(batch, old_logprobs=zeros, reference_logprobs=zeros, old_values=zeros, advantages=zeros + 1)
    trainer.rehearse(rlft.load_algorithm("ppo"), replace(micro, returns=zeros))
    assert torch.equal(torch.random.get_rng_state(), noise)
    assert all(p.grad is None for p in trainer.roles.model.parameters())
    assert all(torch.equal(t, before[n]) for n, t in flat(trainer.state()).items())
    assert trainer.state().critic == critic
