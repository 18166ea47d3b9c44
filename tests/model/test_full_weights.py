"""Roles where the model's own weights are the policy: frozen copies, their passes, and what an engine is proven by."""

from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.config.model import CriticKind, Old
from rlft.generation.loaded_adapter import difference
from rlft.generation.transformers import TransformersGenerator
from rlft.model.adapter_folder import OLD, POLICY, REFERENCE
from rlft.model.full_weights import WholeModel, copied_roles
from rlft.model.networks import NO_CRITIC, NO_SNAPSHOTS

ROWS = [(0, [5, 6, 7], [20, 21, 2]), (1, [9, 10], [22, 23, 24, 25])]


@pytest.fixture
def make_whole(make_double):
    """Builds the roles of a model of float64, whose snapshots have these keys."""

    def make(critic=NO_CRITIC, **keys):
        snapshot = replace(NO_SNAPSHOTS, **keys)
        return WholeModel(make_double(), snapshot, critic, token_budget=10**6)

    return make


@torch.no_grad()
def shifted(whole, by):
    """What an update might do: every weight moves."""
    for _, parameter in whole.named_parameters():
        parameter.add_(by)


def annotated(whole, batch):
    return whole.annotate(batch, torch.zeros(len(ROWS), dtype=torch.bool), needs_old=False)


def logprobs_of(make_double, batch, by):
    """Of a model whose weights are the first ones moved by `by`, without roles."""
    whole = WholeModel(make_double())
    shifted(whole, by)
    with torch.no_grad():
        return whole.forward.logprobs(batch, 10**6)


def test_a_base_reference_is_the_model_as_the_run_found_it(make_whole, make_double, make_batch):
    batch, whole = make_batch(ROWS, dtype=torch.float64), make_whole(reference="base")
    shifted(whole, 0.01)
    before = {name: tensor.clone() for name, tensor in whole.tensors(POLICY).items()}
    reference = annotated(whole, batch).reference_logprobs
    assert torch.equal(reference, logprobs_of(make_double, batch, 0.0))
    assert not torch.allclose(reference, logprobs_of(make_double, batch, 0.01), atol=1e-3)
    assert whole.refresh(1) == ()
    after = whole.tensors(POLICY)
    assert all(torch.equal(before[name], after[name]) for name in before), "the policy is back in its place"


def test_a_kl_over_the_vocabulary_is_to_the_copys_own_head_and_has_the_gradient_of_all_weights(make_whole, make_batch):
    batch, whole = make_batch(ROWS, dtype=torch.float64), make_whole(reference="base")
    with torch.no_grad():
        for _, parameter in whole.named_parameters():
            parameter.mul_(1.3)
    found = whole.outputs(batch, False, anchor=whole.anchor(batch, None)).kl
    expected = []
    for ids, real, sampled in zip(batch.token_ids, batch.attention_mask, batch.loss_mask, strict=True):
        logp = whole.model(input_ids=ids[real][None]).logits[0, :-1].log_softmax(-1)
        with torch.no_grad(), whole.using(None):
            logq = whole.model(input_ids=ids[real][None]).logits[0, :-1].log_softmax(-1)
        expected.append((logp.exp() * (logp - logq)).sum(-1)[sampled[real][1:]])
    torch.testing.assert_close(found[batch.loss_mask], torch.cat(expected), rtol=1e-9, atol=1e-12)
    assert found[batch.loss_mask].min() > 1e-3
    parameters = [parameter for _, parameter in whole.named_parameters()]
    gradients = [torch.autograd.grad(kl.sum(), parameters) for kl in (found, torch.cat(expected))]
    for mine, its in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9 * float(its.abs().max()))


def test_copies_move_as_the_snapshots_say(make_whole, make_double, make_batch):
    """With weights moved by 0.01 in each of two steps: a copy is at 0 after one, and at 0.02 after two; an EMA with
    0.75 is at 0.25 x 0.01 = 0.0025, then 0.75 x 0.0025 + 0.25 x 0.02 = 0.006875; the old policy follows at once."""
    batch = make_batch(ROWS, dtype=torch.float64)
    expected = {"copy": (0.0, 0.02), "ema": (0.0025, 0.006875)}
    for kind, moved_by in expected.items():
        keys = {"refresh_every": 2} if kind == "copy" else {"ema_decay": 0.75}
        whole = make_whole(reference=kind, old=Old.copy, **keys)
        for step, by in enumerate(moved_by, start=1):
            shifted(whole, 0.01)
            old = annotated(whole, batch).old_logprobs
            torch.testing.assert_close(old, logprobs_of(make_double, batch, 0.01 * (step - 1)), rtol=0, atol=1e-9)
            whole.refresh(step)
            found = annotated(whole, batch)
            reference = found.reference_logprobs
            torch.testing.assert_close(reference, logprobs_of(make_double, batch, by), rtol=0, atol=1e-9)
            moved = logprobs_of(make_double, batch, 0.01 * step)
            torch.testing.assert_close(found.old_logprobs, moved, rtol=0, atol=1e-9)


@each(("keys", "roles"), [
    ({}, []), ({"old": Old.recompute}, []), ({"old": Old.sampled}, []), ({"reference": "base"}, [None]),
    ({"teacher": "base", "reference": "base"}, [None]), ({"reference": "copy", "old": Old.copy}, [REFERENCE, OLD]),
    ({"teacher": "base", "reference": "ema"}, [None, REFERENCE]),
])  # fmt: skip
def test_no_copy_is_held_that_no_role_needs(keys, roles):
    assert copied_roles(replace(NO_SNAPSHOTS, **keys)) == roles


def test_a_checkpoint_restores_the_policy_and_what_moves_beside_it(make_whole, tmp_path):
    keys = {"reference": "ema", "ema_decay": 0.5, "old": Old.copy}
    first, second = make_whole(**keys), make_whole(**keys)
    shifted(first, 0.01)
    first.refresh(1)
    adapters, folders = first.kept(first.moving)
    assert adapters == {}
    assert sorted(folders) == ["model", "reference"], "the old policy is the policy between two steps"
    for name, write in folders.items():
        write(tmp_path / name)
    second.restore({}, {}, tmp_path)
    for role in (POLICY, REFERENCE, OLD):
        mine, theirs = first.tensors(role), second.tensors(role)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), role
    pairs = zip(first.tensors(POLICY).values(), first.tensors(REFERENCE).values(), strict=True)
    assert all(not torch.equal(policy, reference) for policy, reference in pairs)


def test_an_engine_on_the_weights_is_stale_once_any_of_them_was_written(make_whole):
    whole = make_whole(reference="base")
    engine = TransformersGenerator(whole, whole.backbone.tokenizer, torch.device("cpu"), 8)
    adapter = whole.publish(3)
    engine.load(adapter)

    def problem():
        return difference(3, engine.loaded_adapter(), {}, {})

    assert problem() is None
    with torch.no_grad(), whole.using(None):
        pass
    assert problem() is None, "another role's pass leaves no trace"
    name, parameter = whole.named_parameters()[-1]
    with torch.no_grad():
        parameter[0].add_(0)
    assert problem() == f"policy version 3: 1 weight such as {name} changed since then"
    engine.load(whole.publish(4))
    assert problem() is None
    parameter.data = parameter.data.clone()
    assert problem() is not None, "its address is another"


def test_a_critics_head_on_the_policy_learns_beside_all_weights(make_whole, make_batch):
    whole = make_whole(critic=replace(NO_CRITIC, kind=CriticKind.shared))
    outputs = whole.outputs(make_batch(ROWS, dtype=torch.float64), entropy=True)
    (outputs.values.sum() + outputs.entropy.sum() + outputs.logprobs.sum()).backward()
    whole.check_gradients()
    whole.check_gradients("critic")
    assert whole.learning_roles == ("policy", "critic")
    assert [name for name, _ in whole.named_parameters("critic")] == ["critic.head.weight", "critic.head.bias"]
