import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import half_model
import peft
import pytest
import torch
from in_one_test import each
from safetensors.torch import save_file
from slow_cases import slow_but

from rlft.config.model import CriticKind, LoraSettings, Old
from rlft.model import forward, roles as roles_module
from rlft.model.backbone import load_backbone
from rlft.model.critic import CRITIC
from rlft.model.forward import packed_forward
from rlft.model.roles import policy_alone
from rlft.types import UserError

model_config, backbone = half_model.model_config, half_model.backbone

POLICY, REFERENCE, OLD = "policy", "reference", "old"
CRITICS = [CriticKind.adapter, CriticKind.shared]


@pytest.fixture
def batch(make_batch):
    return make_batch([(0, [5, 6, 7], [20, 21]), (0, [5, 6, 7], [22]), (1, [9, 8], [23, 24, 25]), (1, [9, 8], [26])])


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def differ(a, b):
    return a.keys() == b.keys() and all(not torch.equal(a[name], b[name]) for name in a)


def gradients(roles, batch, role=POLICY):
    """The gradients of a role's parameters, by name: of the summed log-probs, or of the critic's squared values."""
    if role == POLICY:
        roles.outputs(batch, False).logprobs.sum().backward()
    else:
        with roles.learning(roles.critic.role):
            roles.values(batch).square().sum().backward()
    roles.check_gradients(role)
    found = {name: p.grad.clone() for name, p in roles.named_parameters(role)}
    for _, parameter in roles.named_parameters(role):
        parameter.grad = None
    return found


def test_each_publish_has_the_policy_as_it_is_and_the_model_is_searched_once(make_roles, monkeypatch):
    """PEFT's search takes a tenth of a second for 30 layers."""
    roles, searched = make_roles(), []
    real = roles_module.own_tensors
    monkeypatch.setattr(roles_module, "own_tensors", lambda *a: searched.append(a) or real(*a))
    versions = []
    for version in range(3):
        adapter = roles.publish(version)
        roles.load_sampler(adapter)
        held, wrong = roles.sampler_tensors()
        assert not wrong
        assert same(adapter.weights, real(roles.model, POLICY))
        assert held.keys() == adapter.weights.keys()
        versions.append(adapter.weights)
        nudge(roles)
    assert differ(versions[0], versions[1])
    assert differ(versions[1], versions[2])
    assert len(searched) <= 2  # for the policy, unless its names were known before, and for the sampler


def policy_logprobs(roles, batch):
    with torch.no_grad():
        return roles.outputs(batch, False).logprobs


def nudge(roles, by=0.01, role=POLICY):
    """Stands for an update."""
    for _, parameter in roles.named_parameters(role):
        parameter.data += by


def stir(roles, role=CRITIC, by=0.05):
    """Gives a role weights that say something: a fresh critic says 0."""
    generator = torch.Generator().manual_seed(2)
    for _, parameter in roles.named_parameters(role):
        parameter.data += by * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def critic_values(roles, batch):
    with torch.no_grad(), roles.using(roles.critic.role):
        return roles.values(batch)


# -- the policy ------------------------------------------------------------------------------------------------------
def test_an_adapters_initialisation_is_its_own_and_depends_on_the_seed_alone(make_roles):
    drawn = []
    critic = {"kind": CriticKind.adapter, "dropout": 0.1}
    for seed, global_seed, keys in ((3, 0, {}), (3, 1, critic | {"reference": "copy"}), (3, 2, critic), (4, 2, critic)):
        torch.manual_seed(global_seed)
        expected = torch.get_rng_state()
        roles = make_roles(seed=seed, **keys)
        assert torch.equal(torch.get_rng_state(), expected) or "reference" in keys
        drawn.append([roles.weights(role) for role in (POLICY, CRITIC)])
    inputs = [[{name: w for name, w in weights.items() if "lora_A" in name} for weights in both] for both in drawn]
    assert same(drawn[0][0], drawn[1][0])
    assert same(drawn[1][1], drawn[2][1])
    assert differ(inputs[2][0], inputs[3][0])
    assert differ(inputs[2][1], inputs[3][1])
    assert differ(*inputs[2])


@each("temperature", [1.0, 0.5])
def test_every_role_of_a_fresh_policy_is_the_base_at_its_temperature(temperature, make_roles, backbone, batch, nobody):
    roles = make_roles(temperature=temperature, reference="copy")
    with torch.no_grad():
        expected = packed_forward(backbone.model, batch, temperature, False).logprobs
    annotated = roles.annotate(batch, nobody, needs_old=True)
    for logprobs in (policy_logprobs(roles, batch), annotated.old_logprobs, annotated.reference_logprobs):
        assert torch.equal(logprobs, expected)


def test_dropout_acts_in_updates_of_the_learning_role_alone(make_roles, batch, nobody):
    roles = make_roles(noise=0.05, kind=CriticKind.adapter, dropout=0.5)
    stir(roles)
    calm, values = policy_logprobs(roles, batch), critic_values(roles, batch)
    roles.load_sampler(roles.publish(1))
    with torch.no_grad(), roles.using("sampler"):
        assert torch.equal(roles.forward(batch, 1.0).logprobs, calm)
    with roles.training():
        assert not torch.equal(policy_logprobs(roles, batch), calm)
        with roles.learning(CRITIC):
            assert not torch.equal(roles.values(batch), values)
    assert torch.equal(policy_logprobs(roles, batch), calm)
    assert torch.equal(critic_values(roles, batch), values)
    annotated = roles.annotate(batch, nobody, needs_old=True)
    assert torch.equal(annotated.old_logprobs, calm)
    assert torch.equal(annotated.old_values, values)


# -- gradients -------------------------------------------------------------------------------------------------------
def test_switching_roles_inside_a_policy_forward_is_refused(make_roles, batch):
    roles = make_roles(reference="base")
    for role in (None, POLICY):
        with pytest.raises(AssertionError, match="would lose its gradients"), roles.using(role):
            pass
    assert roles.tuner.active_adapters == [POLICY]
    gradients(roles, batch)


def test_gradient_checkpointing_gives_the_same_gradients_and_leaves_no_hook(make_roles, model_config, batch):
    expected = gradients(make_roles(noise=0.05), batch)
    other = load_backbone.__wrapped__(model_config(gradient_checkpointing=True))
    for _ in range(2):
        roles = make_roles(noise=0.05, backbone=other)
        calls, layer = [], other.model.get_submodule("model.layers.0")
        hook = layer.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        with roles.training():
            found = gradients(roles, batch)
        hook.remove()
        assert len(calls) > 1, "forward, and again in backward"
        assert all(torch.allclose(found[name], g, rtol=1e-5, atol=1e-6) for name, g in expected.items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.model.modules())


# -- other roles -----------------------------------------------------------------------------------------------------
@each("role", [None, "reference", "sampler"])
def test_a_role_acts_inside_its_context_and_the_policy_after_it(role, make_roles, backbone, batch):
    roles = make_roles(noise=0.05, reference="copy")
    roles.load_sampler(replace(roles.publish(1), weights={n: w * 0.5 for n, w in roles.weights(POLICY).items()}))
    with torch.no_grad():
        policy = roles.outputs(batch, False).logprobs
        with roles.using(role):
            other = roles.forward(batch, 1.0).logprobs
            # Whoever is active, only the policy ever asks for gradients.
            assert not any(p.requires_grad for n, p in roles.model.named_parameters() if ".policy." not in n)
        with roles.model.disable_adapter():
            base = roles.forward(batch, 1.0).logprobs
        assert torch.equal(roles.outputs(batch, False).logprobs, policy)
    assert not torch.allclose(other, policy, atol=1e-3)
    # The reference was taken before the noise: B = 0, which is the base.
    assert torch.equal(other, base) == (role != "sampler")


@pytest.mark.parametrize("token_budget", slow_but(7, [1, 7, 12]))
def test_annotate_keeps_to_the_token_budget_and_to_its_numbers(
    token_budget, make_roles, batch, nobody, backbone, entering
):
    """Rows with zero gradient enter no forward, and keep 0."""
    for kind in CRITICS:
        whole = make_roles(noise=0.05, kind=kind)
        stir(whole)
        expected = policy_logprobs(whole, batch), critic_values(whole, batch)
        roles = make_roles(noise=0.05, kind=kind, token_budget=token_budget)
        stir(roles)
        with entering(backbone.model) as seen:
            annotated = roles.annotate(batch, nobody, needs_old=True)
        # Rows of 5, 4, 5 and 3 tokens; groups of 3 + 2 + 1 = 6 and 2 + 3 + 1 = 6. An own critic has a pass more.
        parts = {1: [5, 4, 5, 3], 7: [6, 6], 12: [12]}[token_budget]
        passes = 2 if kind is CriticKind.adapter else 1
        assert sorted(width for _, width in seen) == sorted(parts * passes)
        if passes == 1:
            assert [width for _, width in seen] == parts
        with entering(backbone.model) as seen:
            some = roles.annotate(batch, torch.tensor([False, False, True, True]), needs_old=True)
        assert sorted(width for _, width in seen) == sorted({1: [5, 4], 7: [6], 12: [6]}[token_budget] * passes)
        with entering(backbone.model) as seen:
            none = roles.annotate(batch, torch.ones(4, dtype=torch.bool), needs_old=True)
        assert not seen
        for name, whole_batch in zip(("old_logprobs", "old_values"), expected, strict=True):
            torch.testing.assert_close(getattr(annotated, name), whole_batch, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(getattr(some, name)[:2], whole_batch[:2], rtol=1e-5, atol=1e-5)
            assert (getattr(some, name)[2:] == 0).all()
            assert (getattr(none, name) == 0).all()


# One pass a role: (settings, needs_old) -> (forwards of the network, of the LM head), and what is added.
PASSES = [
    ({}, False, (0, 0), ""),
    ({}, True, (1, 1), "old"),
    ({"old": Old.recompute, "reference": "base"}, False, (2, 2), "old reference"),
    ({"old": Old.sampled, "reference": "copy"}, False, (1, 1), "old reference"),
    ({"kind": CriticKind.adapter}, False, (1, 0), "values"),
    ({"kind": CriticKind.adapter}, True, (2, 1), "old values"),
    ({"kind": CriticKind.adapter, "old": Old.copy, "reference": "ema", "ema_decay": 0.9}, True, (3, 2),
     "old reference values"),
    ({"kind": CriticKind.shared}, False, (1, 0), "values"),
    ({"kind": CriticKind.shared}, True, (1, 1), "old values"),
    ({"kind": CriticKind.shared, "old": Old.recompute, "reference": "base"}, False, (2, 2), "old reference values"),
    ({"kind": CriticKind.shared, "old": Old.copy}, False, (2, 1), "old values"),
    ({"kind": CriticKind.shared, "old": Old.sampled}, True, (1, 0), "old values"),
]  # fmt: skip


@each(("keys", "needs_old", "expected", "added"), PASSES)
def test_annotate_makes_one_pass_a_role_for_all_that_it_is_asked(
    keys, needs_old, expected, added, make_roles, batch, nobody, backbone, entering, head_calls
):
    roles = make_roles(noise=0.05, **keys)
    head_calls.clear()
    with entering(backbone.model) as network:
        found = roles.annotate(batch, nobody, needs_old=needs_old)
    assert (len(network), len(head_calls)) == expected
    fields = {"old": "old_logprobs", "reference": "reference_logprobs", "values": "old_values"}
    assert [word for word, name in fields.items() if getattr(found, name) is not None] == added.split()
    assert (found is batch) == (not added)
    if keys.get("old") is Old.sampled:
        assert found.old_logprobs is batch.sampled_logprobs


@each("kind", CRITICS)
def test_passes_made_together_give_what_each_gives_alone(kind, make_roles, batch, nobody):
    fresh = make_roles(noise=0.05, kind=kind, normalize_values=True)
    assert (fresh.annotate(batch, nobody, needs_old=False).old_values == 0).all()
    roles = make_roles(noise=0.05, kind=kind, old=Old.recompute, reference="base")
    assert (critic_values(roles, batch) == 0).all(), "a fresh critic's"
    stir(roles)
    annotated = roles.annotate(batch, nobody, needs_old=False)
    assert torch.equal(annotated.old_logprobs, policy_logprobs(roles, batch))
    assert torch.equal(annotated.old_values, critic_values(roles, batch))
    assert (annotated.old_values[batch.loss_mask] != 0).all()
    assert (annotated.old_values[~batch.loss_mask] == 0).all()
    with torch.no_grad(), roles.using(None):
        assert torch.equal(annotated.reference_logprobs, roles.forward(batch, 1.0).logprobs)
    assert not annotated.old_values.requires_grad


# -- a KL over the whole vocabulary ----------------------------------------------------------------------------------
@pytest.fixture
def in_double(make_roles, make_double, make_batch):
    """Roles in float64 whose reference and old policy are others; a batch with a token that was not sampled."""
    roles = make_roles(backbone=make_double(), noise=0.1, temperature=0.7, reference="base", old=Old.copy, dropout=0.5)
    stir(roles, POLICY, by=0.1)
    rows = [(0, [5, 6, 7], [20, -21, 22]), (0, [5, 6, 7], [22]), (1, [9, 8], [23, 24, 25]), (1, [9, 8], [26])]
    return roles, make_batch(rows, dtype=torch.float64)


def dense_kl(roles, batch, first, second):
    """KL(first || second) `[B, T]` of two roles, from all logits of transformers and PEFT, row by row."""
    result = []
    for ids_T, real_T, sampled_T in zip(batch.token_ids, batch.attention_mask, batch.loss_mask, strict=True):
        both = []
        for role in (first, second):
            with torch.set_grad_enabled(role == POLICY), nullcontext() if role == POLICY else roles.using(role):
                logits = roles.model(input_ids=ids_T[real_T][None], use_cache=False).logits[0, :-1]
                both.append((logits / roles.temperature).log_softmax(-1))
        kl_T = (both[0].exp() * (both[0] - both[1])).sum(-1)
        result.append(torch.nn.functional.pad(kl_T, (1, len(ids_T) - len(kl_T) - 1)).where(sampled_T, 0))
    return torch.stack(result)


@each(("packed", "old"), [(True, False), (True, True), (False, False), (False, True)])
def test_the_kl_of_distributions_has_the_value_and_the_adapters_gradients_of_autograd(in_double, packed, old):
    roles, batch = in_double
    roles.forward = replace(roles.forward, packed=packed)
    weight = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = dense_kl(roles, batch, *((OLD, POLICY) if old else (POLICY, None)))
    [micro] = roles.forward.placed([batch])
    with roles.training(dropout=False):
        anchor = roles.anchor(micro.batch, micro.layout, old=old)
        found = roles.outputs(micro.batch, False, micro.layout, anchor=anchor).kl
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert (found[batch.loss_mask] > 1e-3).all()
    parameters = [parameter for _, parameter in roles.named_parameters()]
    gradients = [torch.autograd.grad((kl * weight).sum(), parameters) for kl in (found, expected)]
    for mine, its in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9 * float(its.abs().max()))


def test_dropout_is_the_policys_alone_and_every_module_keeps_its_mode(in_double):
    roles, batch = in_double
    expected = roles.anchor(batch, None, old=True).states
    with roles.training():
        modes = [module.training for module in roles.model.modules()]
        assert torch.equal(roles.anchor(batch, None, old=True).states, expected)
        assert [module.training for module in roles.model.modules()] == modes
        assert any(modes)
    assert [p.requires_grad for _, p in roles.named_parameters()] == [True] * len(roles.named_parameters())


@each(("old", "packed"), [(Old.auto, True), (Old.copy, True), (Old.copy, False)])
def test_a_kl_in_the_reward_is_the_old_policys_at_sampling(in_double, nobody, old, packed):
    roles, batch = in_double
    roles.snapshot, roles.forward = replace(roles.snapshot, old=old), replace(roles.forward, packed=packed)
    asked = {"needs_old": True, "reference_field": "reference_kl"}
    annotated = roles.annotate(batch, nobody, **asked)
    expected = dense_kl(roles, batch, OLD if old is Old.copy else POLICY, None)
    torch.testing.assert_close(annotated.reference_kl, expected.detach(), rtol=1e-9, atol=1e-12)
    assert not annotated.reference_kl.requires_grad
    assert annotated.reference_logprobs is None
    assert torch.equal(annotated.old_logprobs, roles.annotate(batch, nobody, needs_old=True).old_logprobs)
    assert roles.annotate(batch, nobody, needs_old=False, reference_field=None).reference_logprobs is None


# -- the critic ------------------------------------------------------------------------------------------------------
def test_what_learns_is_the_policy_and_the_critics_adapter_and_head_or_head_alone(make_roles):
    # 7 linear layers in each of 2 blocks, two matrices each; a head of weight and bias.
    names = {}
    for kind in CriticKind:
        roles = make_roles(kind=kind)
        names[kind] = {role: [n for n, _ in roles.named_parameters(role)] for role in roles.learning_roles}
    head = ["critic.head.weight", "critic.head.bias"]
    assert list(names[CriticKind.none]) == [POLICY]
    assert list(names[CriticKind.shared]) == list(names[CriticKind.adapter]) == [POLICY, CRITIC]
    assert all(len(found[POLICY]) == 28 for found in names.values())
    assert names[CriticKind.shared][CRITIC] == head
    own = names[CriticKind.adapter][CRITIC]
    assert (len(own), own[-2:]) == (30, head)
    assert [n.replace(".critic.", ".policy.") for n in own[:-2]] == names[CriticKind.none][POLICY]


def test_the_policys_logprobs_and_an_adapter_critics_values_know_nothing_of_each_other(make_roles, batch):
    roles = make_roles(noise=0.05, kind=CriticKind.adapter)
    stir(roles)
    logprobs, values = policy_logprobs(roles, batch), critic_values(roles, batch)
    nudge(roles, 0.05, CRITIC)
    assert torch.equal(policy_logprobs(roles, batch), logprobs)
    moved = critic_values(roles, batch)
    assert (moved != values)[batch.loss_mask].all()
    nudge(roles, 0.05, POLICY)
    assert torch.equal(critic_values(roles, batch), moved)
    assert (policy_logprobs(roles, batch) != logprobs)[batch.loss_mask].all()
    # And the policy's outputs have no values, whose gradient could reach it.
    assert roles.outputs(batch, False).values is None


def test_a_shared_critic_reads_the_policys_features_and_its_gradient_reaches_the_policy(make_roles, batch):
    roles = make_roles(noise=0.05, kind=CriticKind.shared)
    stir(roles)
    values, logprobs = critic_values(roles, batch), policy_logprobs(roles, batch)
    outputs = roles.outputs(batch, False)
    assert torch.equal(outputs.values, values)
    outputs.values.square().sum().backward()
    roles.check_gradients(POLICY)
    roles.check_gradients(CRITIC)
    assert all(p.grad.abs().max() > 0 for role in (POLICY, CRITIC) for _, p in roles.named_parameters(role))
    nudge(roles, 0.05, POLICY)
    assert (critic_values(roles, batch) != values)[batch.loss_mask].all()
    nudge(roles, 0.05, CRITIC)
    nudge(roles, -0.05, POLICY)
    torch.testing.assert_close(policy_logprobs(roles, batch), logprobs, rtol=1e-5, atol=1e-5)


def test_values_are_in_units_of_reward_whatever_the_heads_unit_is(make_roles, batch, nobody):
    # The head says x; with returns of mean 3 and standard deviation 2 before it, a value is 3 + 2 x.
    for kind in (CriticKind.adapter, CriticKind.shared):
        roles = make_roles(noise=0.05, kind=kind, normalize_values=True)
        stir(roles)
        with torch.no_grad(), roles.using(roles.critic.role):
            x = roles.forward.values(batch, roles.heads[CRITIC])
        roles.critic.restore_statistics({"mean": 3.0, "variance": 4.0, "num_steps": 1})
        expected = (3 + 2 * x).where(batch.loss_mask, 0.0)
        annotated = roles.annotate(batch, nobody, needs_old=True)
        torch.testing.assert_close(annotated.old_values, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(critic_values(roles, batch), expected, rtol=1e-6, atol=1e-6)
        if kind is CriticKind.shared:
            torch.testing.assert_close(roles.outputs(batch, False).values, expected, rtol=1e-6, atol=1e-6)


def test_switching_between_policy_and_critic_loses_no_gradient(make_roles, model_config, batch, nobody):
    # Each alone, on a base of its own.
    roles = make_roles(noise=0.05, backbone=load_backbone.__wrapped__(model_config()))
    alone = gradients(roles, batch)
    roles = make_roles(noise=0.05, kind=CriticKind.adapter, backbone=load_backbone.__wrapped__(model_config()))
    stir(roles)
    critic_alone = gradients(roles, batch, CRITIC)
    assert all(g.abs().max() > 0 for g in (*alone.values(), *critic_alone.values()))

    roles = make_roles(noise=0.05, kind=CriticKind.adapter, reference="copy", old=Old.recompute)
    stir(roles)
    for _ in range(2):
        roles.annotate(batch, nobody, needs_old=True)
        with roles.training():
            with roles.learning(CRITIC):
                roles.values(batch).square().sum().backward()
            roles.outputs(batch, False).logprobs.sum().backward()
    for role, expected in ((POLICY, alone), (CRITIC, critic_alone)):
        roles.check_gradients(role)
        for name, parameter in roles.named_parameters(role):
            assert torch.equal(parameter.grad, 2 * expected[name]), name  # doubling a float is exact
    assert not any(p.grad is not None for n, p in roles.model.named_parameters() if ".reference." in n)


@each("role", [POLICY, CRITIC])
def test_a_lost_gradient_is_noticed(role, make_roles, batch):
    roles = make_roles(noise=0.05, kind=CriticKind.adapter)
    roles.outputs(batch, False).logprobs.sum().backward()
    with roles.learning(CRITIC):
        roles.values(batch).sum().backward()
    roles.check_gradients(role)
    name, parameter = roles.named_parameters(role)[3]
    parameter.grad = None
    with pytest.raises(AssertionError, match=f"no gradient reached 1 parameters of {role}, e.g. {name}"):
        roles.check_gradients(role)


@each("other", ["no role", "a critic that learns", "training"])
def test_the_policy_is_back_after_an_exception(other, make_roles, batch):
    roles = make_roles(noise=0.05, kind=CriticKind.adapter, dropout=0.5)
    expected = policy_logprobs(roles, batch)
    switch = {"no role": lambda: roles.using(None), "training": roles.training}
    switched = switch.get(other, lambda: roles.learning(CRITIC))()
    with pytest.raises(KeyError), torch.set_grad_enabled(other != "no role"), switched:
        raise KeyError
    assert torch.equal(policy_logprobs(roles, batch), expected)
    assert not any(module.training for module in roles.model.modules())
    learning = [name for name, p in roles.model.named_parameters() if p.requires_grad]
    assert learning == [name for name, _ in roles.named_parameters(POLICY)]
    gradients(roles, batch)


@each(("keys", "moving", "fields"), [
    ({"reference": "base"}, (POLICY,), ("old_logprobs",)),
    ({"reference": "copy", "refresh_every": 1}, (POLICY, REFERENCE), ("old_logprobs", "reference_logprobs")),
    ({"reference": "ema", "ema_decay": 0.5, "use_dora": True}, (POLICY, REFERENCE), ("reference_logprobs",)),
    ({"kind": CriticKind.adapter}, (POLICY, CRITIC), ("old_logprobs", "old_values")),
    ({"kind": CriticKind.shared}, (POLICY,), ("old_logprobs", "old_values")),
])  # fmt: skip
def test_all_that_moves_goes_into_the_checkpoint_and_comes_back_exactly(
    keys, moving, fields, make_roles, batch, nobody
):
    roles = make_roles(noise=0.05, **keys)
    if "kind" in keys:
        stir(roles)
    roles.refresh(1)
    nudge(roles)
    assert roles.moving == moving
    adapters = {role: roles.weights(role) for role in roles.moving}
    heads = {role: head.weights() for role, head in roles.heads.items()}
    assert list(heads) == [CRITIC] * ("kind" in keys)
    expected = roles.annotate(batch, nobody, needs_old=True)
    roles = make_roles(seed=9, **keys)
    roles.restore(adapters, heads)
    assert all(same(roles.weights(role), adapters[role]) for role in moving)
    again = roles.annotate(batch, nobody, needs_old=True)
    for field in fields:
        assert torch.equal(getattr(again, field), getattr(expected, field))


@pytest.fixture
def critic_folder(make_roles, tmp_path):
    """A critic's folder as a checkpoint leaves it, its adapter and its head."""
    roles = make_roles(seed=5, kind=CriticKind.adapter)
    stir(roles)
    adapter, head = roles.weights(CRITIC), roles.heads[CRITIC].weights()
    roles.close()
    (tmp_path / "critic").mkdir()
    save_file({n: w.contiguous() for n, w in adapter.items()}, tmp_path / "critic" / "adapter_model.safetensors")
    save_file(head, tmp_path / "critic" / "head.safetensors")
    return tmp_path / "critic", adapter, head


def test_a_critic_starts_from_the_adapter_and_the_head_of_a_folder(critic_folder, make_roles):
    folder, adapter, head = critic_folder
    roles = make_roles(kind=CriticKind.adapter, init=str(folder))
    assert same(roles.weights(CRITIC), adapter)
    assert same(roles.heads[CRITIC].weights(), head)
    assert roles.learning_roles == (POLICY, CRITIC)
    shared = make_roles(kind=CriticKind.shared, init=str(folder))
    assert same(shared.heads[CRITIC].weights(), head)


@each(("of", "lost", "keys", "said"), [
    ("critic", "head.safetensors", {}, r"critic\.init: the scalar head cannot be read"),
    ("critic", "adapter_model.safetensors", {}, r"critic\.init: the adapter cannot be read"),
    ("critic", None, {"rank": 8}, r"critic\.init: 28 of its tensors do not fit lora\.rank"),
    ("policy", "adapter_model.safetensors", {}, r"lora\.path: the adapter cannot be read"),
    ("policy", None, {"rank": 8}, r"lora\.path: 28 of its tensors do not fit lora\.rank and lora\.target_modules"),
    ("policy", None, {"target_modules": ("q_proj",)},
     r"lora\.path: \d+ of its tensors do not fit lora\.rank and lora\.target_modules"),
])  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused_and_leaves_the_base_clean(
    of, lost, keys, said, critic_folder, make_roles, backbone, tmp_path
):
    folder = shutil.copytree(critic_folder[0], tmp_path / f"{len(list(tmp_path.iterdir()))}")
    if lost is not None:
        (folder / lost).unlink()
    start = {"kind": CriticKind.adapter, "init": str(folder)} if of == "critic" else {"path": str(folder)}
    with pytest.raises(UserError, match=f"^{said}"):
        make_roles(**start, **keys)
    assert not any("lora" in name for name, _ in backbone.model.named_parameters())
    assert not hasattr(backbone.model, "peft_config")


def test_a_frozen_scalar_role_scores_and_never_learns(critic_folder, make_roles, batch):
    folder, _, _ = critic_folder
    expected = critic_values(make_roles(kind=CriticKind.adapter, init=str(folder)), batch)
    roles = make_roles(noise=0.05, kind=CriticKind.adapter)
    roles.add_scalar_role("reward", str(folder), "reward.path", learns=False)
    with torch.no_grad(), roles.using("reward"):
        assert torch.equal(roles.forward.values(batch, roles.heads["reward"]), expected)
        assert not any(p.requires_grad for n, p in roles.model.named_parameters() if ".reward." in n)
    assert roles.moving == (POLICY, CRITIC)
    assert roles.learning_roles == (POLICY, CRITIC)
    gradients(roles, batch)
    assert all(p.grad is None for _, p in roles.named_parameters("reward"))


# -- snapshots in time -----------------------------------------------------------------------------------------------
def test_an_ema_reference_follows_the_policy_by_the_share_that_it_does_not_keep(make_roles):
    # Decay 3/4, and a policy that moves by 1 each step: the reference is at 0, then at
    # 1/4 * 1 = 0.25; 3/4 * 0.25 + 1/4 * 2 = 0.6875; 3/4 * 0.6875 + 1/4 * 3 = 1.265625.
    roles = make_roles(noise=0.05, reference="ema", ema_decay=0.75)
    start = {name: w.double() for name, w in roles.weights(POLICY).items()}
    roles.copy(POLICY, REFERENCE)  # the noise came after the roles were built
    for step, distance in enumerate((0.25, 0.6875, 1.265625), start=1):
        nudge(roles, 1.0)
        assert roles.refresh(step) == (REFERENCE,)
        for name, weight in roles.weights(REFERENCE).items():
            torch.testing.assert_close(weight.double(), start[name] + distance, rtol=0, atol=1e-6)
        for name, weight in roles.weights(POLICY).items():
            torch.testing.assert_close(weight.double(), start[name] + step, rtol=0, atol=1e-6)


def test_a_copied_old_is_the_policy_of_the_steps_start_bit_for_bit(make_roles, batch, nobody):
    roles = make_roles(old=Old.copy)
    for step in range(1, 3):
        nudge(roles, 0.05)
        assert roles.refresh(step) == (OLD,)
        expected = policy_logprobs(roles, batch)
        # As long as the policy has not moved, both ways to old log-probs are the same computation.
        assert torch.equal(roles.annotate(batch, nobody, needs_old=False).old_logprobs, expected)
        nudge(roles, 0.05)
        held = roles.annotate(batch, nobody, needs_old=True).old_logprobs
        assert torch.equal(held, expected)
        assert not torch.allclose(policy_logprobs(roles, batch), expected, atol=1e-3)


def test_the_reference_is_refreshed_every_so_many_steps_and_before_the_old_policy(make_roles):
    # MATHS 8 with two steps an outer iteration: reference <- policy; sample, update; sample, update; reference <- ...
    roles = make_roles(reference="copy", refresh_every=2, old=Old.copy)
    assert roles.moving == (POLICY, REFERENCE, OLD)
    versions = {0: roles.weights(POLICY)}
    events = []
    for step in range(1, 6):
        nudge(roles)
        versions[step] = roles.weights(POLICY)
        refreshed = roles.refresh(step)
        held = [v for v, weights in versions.items() if same(weights, roles.weights(REFERENCE))]
        events.append((step, refreshed, held))
    due = (REFERENCE, OLD)
    assert events == [(1, (OLD,), [0]), (2, due, [2]), (3, (OLD,), [2]), (4, due, [4]), (5, (OLD,), [4])]
    for reference in ("copy", "base", "none"):
        roles = make_roles(reference=reference, refresh_every=0)
        assert not any(roles.refresh(step) for step in range(5))


def test_the_policy_and_its_copies_start_from_the_adapter_at_lora_path(adapter, make_roles):
    folder, weights = adapter
    for reference in ({"reference": "copy"}, {"reference": "ema", "ema_decay": 0.5}):
        roles = make_roles(path=folder, old=Old.copy, **reference)
        assert same(roles.weights(POLICY), weights)
        nudge(roles)
        assert same(roles.weights(OLD), weights)
        assert same(roles.weights(REFERENCE), weights)


# -- publishing ------------------------------------------------------------------------------------------------------
def test_publishing_asks_nobody_about_the_base(make_roles, monkeypatch):
    roles = make_roles()
    roles.model.peft_config[POLICY].base_model_name_or_path = "org/model-on-the-hub"

    def called(*args):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(peft.utils.save_and_load, "check_file_exists_on_hf_hub", called)
    roles.publish(1)


def test_the_adapter_config_names_the_base_and_can_be_written_as_json(make_roles, half_folder):
    config = make_roles().adapter_config()
    assert config["base_model_name_or_path"] == str(half_folder)
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert config["inference_mode"] is True
    layers = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert {"q_proj", "o_proj", "gate_proj", "down_proj"} < layers
    assert json.loads(json.dumps(config, default=str))["target_modules"] == sorted(config["target_modules"])


# -- the base --------------------------------------------------------------------------------------------------------
def test_closing_leaves_the_base_exactly_as_it_was(make_roles, backbone, batch, nobody):
    def state():
        modules = {n: (id(m), m.training, len(m._forward_hooks)) for n, m in backbone.model.named_modules()}
        parameters = {n: (id(p), p.requires_grad, p.grad) for n, p in backbone.model.named_parameters()}
        return modules, parameters, set(vars(backbone.model)), backbone.model.config._attn_implementation

    before, weights = state(), {n: p.clone() for n, p in backbone.model.state_dict().items()}
    for keys in ({"old": Old.recompute}, {"old": Old.copy, "kind": CriticKind.adapter}, {"kind": CriticKind.shared}):
        roles = make_roles(noise=0.05, reference="copy", refresh_every=1, dropout=0.1, **keys)
        roles.load_sampler(roles.publish(1))
        roles.annotate(batch, nobody, needs_old=True)
        with roles.training():
            gradients(roles, batch)
            if roles.critic is not None:
                gradients(roles, batch, CRITIC)
        roles.refresh(1)
        roles.close()
        roles.close()
        assert state() == before
        assert same(backbone.model.state_dict(), weights)


def test_a_job_after_another_on_one_base_gives_what_it_gives_alone(make_roles, backbone, model_config, batch, nobody):
    def job(base, **keys):
        roles = make_roles(backbone=base, reference="copy", refresh_every=2, dropout=0.1, **keys)
        optimizer = torch.optim.AdamW([p for _, p in roles.named_parameters()], lr=0.01)
        torch.manual_seed(0)
        for step in range(1, 4):
            roles.load_sampler(roles.publish(step))
            annotated = roles.annotate(batch, nobody, needs_old=True)
            with roles.training():
                difference = roles.outputs(batch, False).logprobs - annotated.reference_logprobs - 1
            difference.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            roles.refresh(step)
        weights, scores = roles.weights(POLICY), roles.score([[5, 6, 7, 8]])
        roles.close()
        return weights, scores

    fresh = load_backbone.__wrapped__(model_config())
    assert fresh.model is not backbone.model
    alone = job(fresh, seed=1)
    job(backbone, seed=2, rank=8)
    after = job(backbone, seed=1)
    assert same(after[0], alone[0])
    assert after[1] == alone[1]


def test_two_sets_of_roles_on_one_base_are_refused(make_roles, backbone):
    make_roles()
    lora = LoraSettings(rank=1, alpha=1, dropout=0.0, target_modules="all-linear", path=None)
    with pytest.raises(AssertionError, match="close the roles that are on this base first"):
        policy_alone(backbone, lora, token_budget=1, seed=0)


def test_sequences_are_scored_in_one_forward_by_the_policy_at_temperature_1(make_roles, backbone, entering):
    roles = make_roles(noise=0.05, temperature=0.5)
    sequences, expected = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]], []
    for ids in map(torch.tensor, sequences):
        with torch.no_grad():
            logprobs = backbone.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        expected.append(logprobs.gather(1, ids[1:, None])[:, 0].tolist())
    with entering(backbone.model) as passes:
        together = roles.score(sequences)
    assert len(passes) == 1
    for scores, alone in zip(together, expected, strict=True):
        assert scores == pytest.approx(alone, abs=1e-5)


def test_every_role_passes_over_the_same_packed_rows(make_roles, batch, nobody, monkeypatch):
    packed, plain = [], forward.pack
    monkeypatch.setattr(forward, "pack", lambda micro, **how: packed.append(len(micro.rewards)) or plain(micro, **how))
    own = {"kind": CriticKind.adapter, "old": Old.recompute, "reference": "base", "teacher": "base"}
    roles = make_roles(noise=0.05, token_budget=7, **own)
    packed.clear()
    roles.annotate(batch, nobody, needs_old=True)
    parts = roles.forward.micro_batches(batch, torch.arange(len(batch.rewards)), 7)
    assert len(parts) > 1
    assert packed == [len(part) for part in parts], "once for old, reference, teacher and values"


def test_a_model_is_walked_through_once_for_all_its_updates(make_roles, monkeypatch):
    roles, walks = make_roles(dropout=0.5), []
    named_modules = torch.nn.Module.named_modules

    def walked(module, *args, **keys):
        walks.append(module is roles.model)
        return named_modules(module, *args, **keys)

    monkeypatch.setattr(torch.nn.Module, "named_modules", walked)
    for version in (None, 0, 1):
        if version is not None:
            roles.load_sampler(roles.publish(version), weights="merged")  # the first one brings modules of its own
            roles.share_merged_weights()
        for repeated in range(3):
            walks.clear()
            with roles.training():
                in_updates = [name for name, module in named_modules(roles.model) if module.training]
            assert sum(walks) == (repeated == 0 and version != 1)
            assert not any(module.training for _, module in named_modules(roles.model))
        assert sum(name.endswith("lora_dropout.policy") for name in in_updates) > 10
        assert version is None or sum(name.endswith("lora_dropout.sampler") for name in in_updates) > 10
    walks.clear()
    assert roles.sampler_tensors()[1] == []
    assert not any(walks)
