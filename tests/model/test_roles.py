from __future__ import annotations

import json
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import save_file

from rlft.generation.adapter_files import AdapterFiles
from rlft.model.backbone import Backbone, load_backbone
from rlft.model.config import LoraSettings, Old
from rlft.model.forward import packed_forward
from rlft.model.roles import Roles
from rlft.types import UserError

POLICY, REFERENCE = "policy", "reference"


@pytest.fixture
def batch(make_batch):
    return make_batch([(0, [5, 6, 7], [20, 21]), (0, [5, 6, 7], [22]), (1, [9, 8], [23, 24, 25]), (1, [9, 8], [26])])


@pytest.fixture
def nobody():
    return torch.zeros(4, dtype=torch.bool)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def differ(a, b):
    return a.keys() == b.keys() and all(not torch.equal(a[name], b[name]) for name in a)


def gradients(roles, batch):
    """The policy's gradients of the summed log-probs, by name."""
    roles.outputs(batch, False).logprobs.sum().backward()
    roles.check_gradients()
    found = {name: p.grad.clone() for name, p in roles.named_parameters()}
    roles.model.zero_grad(set_to_none=True)
    return found


def policy_logprobs(roles, batch):
    with torch.no_grad():
        return roles.outputs(batch, False).logprobs


def nudge(roles, by=0.01):
    """Stands for an update."""
    for _, parameter in roles.named_parameters():
        parameter.data += by


# -- the policy ------------------------------------------------------------------------------------------------------
def test_only_the_policys_parameters_train(make_roles):
    roles = make_roles(reference="copy")
    roles.load_sampler(roles.publish(0))
    trainable = [name for name, p in roles.model.named_parameters() if p.requires_grad]
    assert trainable == [name for name, _ in roles.named_parameters()]
    # 7 linear layers in each of 4 blocks, two matrices each; the head is not among them.
    assert len(trainable) == 7 * 4 * 2
    assert not any("lm_head" in name for name in trainable)


def test_a_fresh_policy_is_the_base(make_roles, backbone, batch):
    with torch.no_grad():
        base = packed_forward(backbone.model, batch, 1.0, False).logprobs
        assert torch.equal(make_roles().outputs(batch, False).logprobs, base)


def test_lora_initialisation_depends_on_the_seed_alone(make_roles):
    drawn = []
    for seed, global_seed, keys in ((3, 0, {}), (3, 1, {"reference": "copy", "dropout": 0.1}), (4, 0, {})):
        torch.manual_seed(global_seed)
        roles = make_roles(seed=seed, **keys)
        drawn.append(roles.weights(POLICY))
    assert same(drawn[0], drawn[1])
    inputs = [{name: w for name, w in weights.items() if "lora_A" in name} for weights in drawn]
    assert differ(inputs[0], inputs[2])


def test_building_a_policy_does_not_touch_the_global_random_numbers(make_roles):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    make_roles()
    assert torch.equal(torch.rand(1), expected)


def test_every_roles_logits_are_divided_by_the_temperature(make_roles, backbone, batch, nobody):
    roles = make_roles(temperature=0.5, reference="copy")
    with torch.no_grad():
        expected = packed_forward(backbone.model, batch, 0.5, False).logprobs
    annotated = roles.annotate(batch, nobody, needs_old=True)
    for logprobs in (policy_logprobs(roles, batch), annotated.old_logprobs, annotated.reference_logprobs):
        assert torch.equal(logprobs, expected)


def test_dropout_acts_in_training_only(make_roles, batch, nobody):
    roles = make_roles(noise=0.05, dropout=0.5)
    calm = policy_logprobs(roles, batch)
    assert torch.equal(policy_logprobs(roles, batch), calm)
    roles.load_sampler(roles.publish(1))
    with torch.no_grad(), roles.using("sampler"):
        assert torch.equal(roles.forward(batch, 1.0).logprobs, calm)
    with roles.training():
        assert not torch.equal(policy_logprobs(roles, batch), calm)
    assert torch.equal(policy_logprobs(roles, batch), calm)
    assert torch.equal(roles.annotate(batch, nobody, needs_old=True).old_logprobs, calm)


def test_training_mode_ends_with_an_exception(make_roles):
    roles = make_roles(dropout=0.5)
    with pytest.raises(KeyError), roles.training():
        raise KeyError
    assert not any(module.training for module in roles.model.modules())


# -- gradients -------------------------------------------------------------------------------------------------------
def test_no_gradient_is_lost_by_the_passes_of_other_roles_before(make_roles, batch, nobody):
    roles = make_roles(noise=0.05)
    alone = gradients(roles, batch)
    roles = make_roles(noise=0.05, reference="copy", old=Old.recompute)
    roles.load_sampler(roles.publish(1))
    with torch.no_grad(), roles.using("sampler"), roles.using(None):
        pass
    roles.annotate(batch, nobody, needs_old=True)
    assert same(gradients(roles, batch), alone)
    assert all(g.abs().max() > 0 for g in alone.values())


def test_switching_roles_inside_a_policy_forward_is_refused(make_roles, batch):
    roles = make_roles(reference="base")
    for role in (None, POLICY):
        with pytest.raises(AssertionError, match="would lose its gradients"), roles.using(role):
            pass
    assert roles.tuner.active_adapters == [POLICY]
    gradients(roles, batch)


def test_a_lost_gradient_is_noticed(make_roles, batch):
    roles = make_roles()
    roles.outputs(batch, False).logprobs.sum().backward()
    name, parameter = roles.named_parameters()[3]
    parameter.grad = None
    with pytest.raises(AssertionError, match=f"no gradient reached 1 policy parameters, e.g. {name}"):
        roles.check_gradients()


def test_gradient_checkpointing_gives_the_same_gradients_and_leaves_no_hook(make_roles, model_config, batch):
    expected = gradients(make_roles(noise=0.05), batch)
    other = load_backbone.__wrapped__(model_config(gradient_checkpointing=True))
    for _ in range(2):
        roles, calls = make_roles(noise=0.05, backbone=other), []
        layer = other.model.get_submodule("model.layers.0.self_attn")
        hook = layer.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        with roles.training():
            found = gradients(roles, batch)
        hook.remove()
        assert len(calls) == 2  # once forward, once again in backward
        assert all(torch.allclose(found[name], g, rtol=1e-5, atol=1e-6) for name, g in expected.items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.model.modules())


# -- other roles -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", [None, "reference", "sampler"])
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


def test_the_policy_is_back_after_an_exception(make_roles, batch):
    roles = make_roles(noise=0.05)
    expected = policy_logprobs(roles, batch)
    with pytest.raises(KeyError), torch.no_grad(), roles.using(None):
        raise KeyError
    assert torch.equal(policy_logprobs(roles, batch), expected)
    gradients(roles, batch)


def test_annotate_adds_what_the_snapshot_config_says(make_roles, batch, nobody):
    roles = make_roles(noise=0.05)
    policy = policy_logprobs(roles, batch)
    assert roles.annotate(batch, nobody, needs_old=False) is batch
    annotated = roles.annotate(batch, nobody, needs_old=True)
    assert torch.equal(annotated.old_logprobs, policy)
    assert annotated.reference_logprobs is None

    roles = make_roles(noise=0.05, old=Old.sampled, reference="base")
    annotated = roles.annotate(batch, nobody, needs_old=True)
    assert annotated.old_logprobs is batch.sampled_logprobs
    with torch.no_grad(), roles.model.disable_adapter():
        assert torch.equal(annotated.reference_logprobs, roles.forward(batch, 1.0).logprobs)

    annotated = make_roles(noise=0.05, old=Old.recompute).annotate(batch, nobody, needs_old=False)
    assert torch.equal(annotated.old_logprobs, policy)
    assert not annotated.old_logprobs.requires_grad


def test_inert_rows_enter_no_forward_and_keep_0(make_roles, batch, backbone):
    roles = make_roles(noise=0.05, reference="base")
    policy = policy_logprobs(roles, batch)
    seen = []
    hook = backbone.model.get_input_embeddings().register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    annotated = roles.annotate(batch, torch.tensor([False, False, True, True]), needs_old=True)
    everything_inert = roles.annotate(batch, torch.ones(4, dtype=torch.bool), needs_old=True)
    hook.remove()
    assert seen == [6, 6]  # the first group, once for old and once for the reference: prompt 3, completions 2 + 1
    assert torch.allclose(annotated.old_logprobs[:2], policy[:2], atol=1e-5)
    for logprobs in (annotated.old_logprobs[2:], annotated.reference_logprobs[2:], everything_inert.old_logprobs):
        assert (logprobs == 0).all()


@pytest.mark.parametrize("token_budget", [1, 7, 12])
def test_annotate_keeps_to_the_token_budget_and_to_its_numbers(token_budget, make_roles, batch, nobody, backbone):
    whole = make_roles(noise=0.05).annotate(batch, nobody, needs_old=True).old_logprobs
    roles = make_roles(noise=0.05, token_budget=token_budget)
    seen = []
    hook = backbone.model.get_input_embeddings().register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    split = roles.annotate(batch, nobody, needs_old=True).old_logprobs
    hook.remove()
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)
    # Rows of 5, 4, 5 and 3 tokens; groups of 3 + 2 + 1 = 6 and 2 + 3 + 1 = 6.
    assert seen == {1: [5, 4, 5, 3], 7: [6, 6], 12: [12]}[token_budget]


# -- snapshots in time -----------------------------------------------------------------------------------------------
def test_the_reference_is_refreshed_every_so_many_steps(make_roles):
    # MATHS 8 with two steps an outer iteration: reference <- policy; sample, update; sample, update; reference <- ...
    roles = make_roles(reference="copy", refresh_every=2)
    versions = {0: roles.weights(POLICY)}
    events = []
    for step in range(1, 6):
        nudge(roles)
        versions[step] = roles.weights(POLICY)
        refreshed = roles.refresh(step)
        held = [v for v, weights in versions.items() if same(weights, roles.weights(REFERENCE))]
        events.append((step, refreshed, held))
    assert events == [(1, False, [0]), (2, True, [2]), (3, False, [2]), (4, True, [4]), (5, False, [4])]


@pytest.mark.parametrize(("reference", "refresh_every"), [("copy", 0), ("base", 0), ("none", 0)])
def test_a_reference_that_does_not_move_is_never_refreshed(reference, refresh_every, make_roles):
    roles = make_roles(reference=reference, refresh_every=refresh_every)
    assert not any(roles.refresh(step) for step in range(5))


def test_a_refresh_keeps_a_copy_that_later_updates_do_not_reach(make_roles):
    roles = make_roles(reference="copy", refresh_every=1)
    nudge(roles)
    roles.refresh(1)
    held = roles.weights(REFERENCE)
    nudge(roles)
    assert same(roles.weights(REFERENCE), held)
    assert differ(roles.weights(POLICY), held)


def test_every_moving_role_goes_into_the_checkpoint_and_comes_back_exactly(make_roles, batch, nobody):
    roles = make_roles(noise=0.05, reference="copy", refresh_every=1)
    roles.refresh(1)
    nudge(roles)
    saved = {role: roles.weights(role) for role in roles.moving}
    expected = roles.annotate(batch, nobody, needs_old=True)
    roles = make_roles(seed=9, reference="copy", refresh_every=1)
    roles.restore(saved)
    assert all(same(roles.weights(role), saved[role]) for role in (POLICY, REFERENCE))
    again = roles.annotate(batch, nobody, needs_old=True)
    assert torch.equal(again.old_logprobs, expected.old_logprobs)
    assert torch.equal(again.reference_logprobs, expected.reference_logprobs)
    assert make_roles(reference="base").moving == (POLICY,)


# -- adapters on disk ------------------------------------------------------------------------------------------------
@pytest.fixture
def adapter(make_roles, tmp_path):
    """An adapter folder as another run leaves it, its weights, and the log-probs they give."""
    roles = make_roles(noise=0.05, seed=5)
    published = roles.publish(3)
    roles.close()
    files = AdapterFiles(tmp_path)
    yield files.write(published), dict(published.weights)
    files.close()


def test_the_policy_starts_from_the_adapter_at_lora_path(adapter, make_roles):
    folder, weights = adapter
    assert same(make_roles(path=str(folder)).weights(POLICY), weights)


def test_a_copied_reference_starts_as_the_warm_started_policy(adapter, make_roles):
    folder, weights = adapter
    assert same(make_roles(path=str(folder), reference="copy").weights(REFERENCE), weights)


def test_an_adapter_of_its_own_rank_can_be_the_reference(adapter, make_roles, batch, nobody):
    folder, _ = adapter
    expected = policy_logprobs(make_roles(path=str(folder)), batch)
    roles = make_roles(rank=2, reference=str(folder))
    annotated = roles.annotate(batch, nobody, needs_old=True)
    torch.testing.assert_close(annotated.reference_logprobs, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(annotated.reference_logprobs, annotated.old_logprobs, atol=1e-3)
    assert roles.moving == (POLICY,)
    gradients(roles, batch)


def test_an_adapter_that_peft_wrote_is_read(make_roles, backbone, tmp_path):
    roles = make_roles(noise=0.05)
    roles.model.save_pretrained(tmp_path, selected_adapters=[POLICY])
    weights = roles.weights(POLICY)
    assert same(make_roles(path=str(tmp_path / POLICY)).weights(POLICY), weights)


@pytest.mark.parametrize("keys", [{"rank": 8}, {"target_modules": ("q_proj",)}])
def test_a_warm_start_that_does_not_fit_is_refused_and_leaves_the_base_clean(keys, adapter, make_roles, backbone):
    folder, _ = adapter
    with pytest.raises(UserError, match=r"^lora\.path: \d+ of its tensors do not fit lora\.rank and lora\.target_modu"):
        make_roles(path=str(folder), **keys)
    assert not any("lora" in name for name, _ in backbone.model.named_parameters())
    assert not hasattr(backbone.model, "peft_config")


def test_an_adapter_that_cannot_be_read_is_refused(make_roles, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x00" * 20)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"^lora\.path: the adapter cannot be read"):
            make_roles(path=str(folder))


def test_target_modules_may_be_names_or_a_pattern(make_roles):
    for names, count in ((("q_proj", "mlp.up_proj"), 8), (r".*layers\.0\..*_proj", 7)):
        roles = make_roles(target_modules=names)
        assert len(roles.weights(POLICY)) == 2 * count


# -- publishing ------------------------------------------------------------------------------------------------------
def test_what_was_published_does_not_change_with_later_training(make_roles):
    roles = make_roles(noise=0.05)
    adapter = roles.publish(4)
    before = {name: w.clone() for name, w in adapter.weights.items()}
    nudge(roles)
    assert adapter.version == 4
    assert same(dict(adapter.weights), before)
    assert not any(w.requires_grad for w in adapter.weights.values())


def test_a_published_adapter_is_what_peft_itself_reads(make_roles, backbone, batch, tmp_path):
    roles = make_roles(noise=0.05)
    expected = policy_logprobs(roles, batch)
    files = AdapterFiles(tmp_path)
    folder = files.write(roles.publish(1))
    roles.close()
    model = peft.PeftModel.from_pretrained(backbone.model, str(folder))
    files.close()
    with torch.no_grad():
        found = packed_forward(backbone.model, batch, 1.0, False).logprobs
    model.unload()
    assert torch.equal(found, expected)


def test_the_sampler_keeps_what_was_published_while_the_policy_moves_on(make_roles, batch):
    roles = make_roles(noise=0.05)
    expected = policy_logprobs(roles, batch)
    roles.load_sampler(roles.publish(1))
    nudge(roles, 0.05)
    with torch.no_grad(), roles.using("sampler"):
        held = roles.forward(batch, 1.0).logprobs
    assert torch.equal(held, expected)
    assert not torch.allclose(policy_logprobs(roles, batch), expected, atol=1e-3)


def test_publishing_asks_nobody_about_the_base(make_roles, monkeypatch):
    roles = make_roles()
    roles.model.peft_config[POLICY].base_model_name_or_path = "org/model-on-the-hub"

    def called(*args):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(peft.utils.save_and_load, "check_file_exists_on_hf_hub", called)
    roles.publish(1)


def test_the_adapter_config_names_the_base_and_can_be_written_as_json(make_roles):
    config = make_roles().adapter_config()
    assert config["base_model_name_or_path"] == "embedded:tiny-arithmetic"
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert config["inference_mode"] is True
    assert {"q_proj", "o_proj", "gate_proj", "down_proj"} < set(config["target_modules"])
    assert json.loads(json.dumps(config, default=str))["target_modules"] == sorted(config["target_modules"])


# -- the base --------------------------------------------------------------------------------------------------------
def test_closing_leaves_the_base_exactly_as_it_was(make_roles, backbone, batch, nobody):
    def state():
        modules = {n: (id(m), m.training, len(m._forward_hooks)) for n, m in backbone.model.named_modules()}
        parameters = {n: (id(p), p.requires_grad, p.grad) for n, p in backbone.model.named_parameters()}
        return modules, parameters, set(vars(backbone.model)), backbone.model.config._attn_implementation

    before, weights = state(), {n: p.clone() for n, p in backbone.model.state_dict().items()}
    roles = make_roles(noise=0.05, reference="copy", refresh_every=1, dropout=0.1, old=Old.recompute)
    roles.load_sampler(roles.publish(1))
    roles.annotate(batch, nobody, needs_old=True)
    with roles.training():
        gradients(roles, batch)
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
    roles = make_roles()
    with pytest.raises(AssertionError, match="close the roles that are on this base first"):
        Roles(
            backbone,
            LoraSettings(rank=1, alpha=1, dropout=0.0, target_modules="all-linear", path=None),
            roles.snapshot,
            temperature=1.0,
            token_budget=1,
            seed=0,
        )


def test_scores_are_the_policys_logprobs_at_temperature_1_of_all_tokens_but_the_first(make_roles, backbone):
    roles = make_roles(noise=0.05, temperature=0.5)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = backbone.model(input_ids=ids).logits[0, :3].log_softmax(-1)[range(3), ids[0, 1:]]
    torch.testing.assert_close(torch.tensor(roles.score([[5, 6, 7, 8]])[0]), expected, rtol=1e-6, atol=1e-6)


def test_16_bit_bases_keep_float32_master_weights(model_config, make_roles, batch):
    base = load_backbone.__wrapped__(model_config(dtype="bfloat16"))
    assert isinstance(base, Backbone)
    roles = make_roles(noise=0.05, backbone=base)
    roles.load_sampler(roles.publish(1))
    assert {p.dtype for n, p in roles.model.named_parameters() if "lora" in n} == {torch.float32}
    assert {w.dtype for w in roles.publish(1).weights.values()} == {torch.float32}
    assert roles.outputs(batch, True).logprobs.dtype == torch.float32
    roles.outputs(batch, True).logprobs.sum().backward()
    roles.check_gradients()


def test_a_broken_safetensors_file_is_never_unpickled(tmp_path, make_roles):
    torch.save({"x": torch.zeros(1)}, tmp_path / "adapter_model.bin")
    with pytest.raises(UserError, match=r"^lora\.path: the adapter cannot be read"):
        make_roles(path=str(tmp_path))
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"^lora\.path: 57 of its tensors do not fit"):
        make_roles(path=str(tmp_path))
