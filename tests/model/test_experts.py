"""Mixtures of experts: what is adapted in each family, and adapters of experts and routers in files and roles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mixtures import FAMILIES
from peft import PeftModel
from slow_cases import slow, slow_but

from rlft.batch import score_sequences
from rlft.config.model import LoraSettings
from rlft.generation.sending import AdapterFiles
from rlft.model.adapter_folder import adapted_modules, layers_of, switches_of
from rlft.model.backbone import Backbone
from rlft.model.experts import LoraExperts
from rlft.model.kernels import selection
from rlft.model.lora_config import lora_config
from rlft.model.roles import POLICY, REFERENCE, SAMPLER
from rlft.plan.model_rules import fresh_shapes

LORA = LoraSettings(rank=4, alpha=4.0, dropout=0.0, target_modules="all-linear", path=None)
ONCE = {"mixtral": True, "deepseek_v3": False, "gpt_oss": True, "jamba": True}
"""{type: whether its routers are adapted, too} of those that are tried in full: others differ in nothing but names."""
SEQUENCES = [[5, 9, 11, 30, 7, 8, 20, 21], [7, 8, 9, 12, 40, 41, 13, 50]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", [ONCE, slow(FAMILIES.keys() - ONCE)], ids=["four", "all others"])
def test_experts_and_routers_are_adapted_if_asked_for_and_other_layers_always(kinds: Any, random_moe) -> None:
    for kind in kinds:
        keys, others, routers = FAMILIES[kind]
        for experts, router in (
            (False, False),
            (True, True),
            *([(True, False), (False, True)] if kind in ONCE else ()),
        ):
            model = random_moe(kind, keys, "meta")
            config = lora_config(replace(LORA, experts=experts, router=router), model)
            modules = adapted_modules(fresh_shapes(model, config))
            kinds = {name.rpartition(".")[2] for name in modules if ".self_attn." not in name}
            assert any(".self_attn." in name for name in modules), kind
            assert kinds == others | ({"experts"} if experts else set()) | (routers if router else set()), kind


@pytest.fixture
def roles_on(make_roles, backbone, random_moe):
    """Builds roles on a random model of a type in FAMILIES."""

    def build(kind: str, **keys: Any) -> Any:
        model = random_moe(kind, FAMILIES[kind][0])
        kernels = selection.install(model, selection.KernelChoice.auto, own_attention=True)
        own = Backbone(model=model, tokenizer=backbone.tokenizer, device=torch.device("cpu"), path="x", kernels=kernels)
        return make_roles(backbone=own, **keys)

    return build


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.tensor(score_sequences(model, SEQUENCES, torch.device("cpu")))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", slow_but("gpt_oss", ONCE))
def test_an_adapter_is_the_same_function_as_the_policy_the_reference_the_sampler_and_in_peft(
    kind: str, roles_on, random_moe, tmp_path
) -> None:
    router = ONCE[kind]
    switches = {"experts": True, "router": router}
    roles = roles_on(kind, noise=0.1, **switches)
    expected, published = scores(roles.model), roles.publish(1)
    assert {name: switches_of(published.config)[name] for name in switches} == switches
    roles.load_sampler(published, weights="merged")
    with torch.no_grad(), roles.using(SAMPLER):
        torch.testing.assert_close(scores(roles.model), expected, rtol=0, atol=1e-5)
    with torch.no_grad(), roles.using(None):
        assert (scores(roles.model) - expected).abs().max() > 0.05, kind
    files = AdapterFiles(tmp_path)
    folder = str(files.write(published))
    again = roles_on(kind, path=folder, reference="copy", **switches)
    torch.testing.assert_close(scores(again.model), expected, rtol=0, atol=1e-5)
    assert again.publish(1).config == published.config
    # as `rlft sample adapter=` reads it, from its adapter_config.json alone
    alone = replace(LORA, target_modules=layers_of(published.config), **switches_of(published.config))
    empty = random_moe(kind, FAMILIES[kind][0], "meta")
    assert fresh_shapes(empty, lora_config(alone, empty)).keys() == published.weights.keys(), kind
    weights = again.weights(REFERENCE)
    assert all(torch.equal(tensor, published.weights[name]) for name, tensor in weights.items())
    for plain in (False, True):  # a policy without experts, or with the same
        frozen = roles_on(kind, reference=folder, **({} if plain else switches))
        with torch.no_grad(), frozen.using(REFERENCE):
            torch.testing.assert_close(scores(frozen.model), expected, rtol=0, atol=1e-5)
        assert any(isinstance(module, LoraExperts) for module in frozen.model.modules())
    theirs: Any = PeftModel.from_pretrained(random_moe(kind, FAMILIES[kind][0]), folder).eval()
    torch.testing.assert_close(scores(theirs), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(scores(theirs.merge_and_unload()), expected, rtol=0, atol=1e-4)
    files.close()


def chosen_in(roles: Any, layer: int) -> list[torch.Tensor]:
    """The experts `[N, 2]` that each later pass chooses for its tokens in this layer."""
    chosen: list[torch.Tensor] = []
    module = roles.model.get_base_model().get_submodule(f"model.layers.{layer}.mlp.experts")
    module.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1].clone()))
    return chosen


def test_every_parameter_of_experts_gets_a_gradient_though_some_get_no_token(roles_on, make_batch) -> None:
    batch = make_batch([(0, [5], [12])])  # the second token predicts nothing
    for kind in ("mixtral", "gpt_oss"):
        roles = roles_on(kind, noise=0.1, experts=True, router=True)
        chosen = chosen_in(roles, 0)
        with roles.training():
            roles.outputs(batch, False).logprobs.sum().backward()
        roles.check_gradients()
        gradient = dict(roles.named_parameters())[
            f"base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.{POLICY}.weight"
        ].grad
        per_expert = gradient.view(4, -1).abs().sum(1)
        assert (per_expert > 0).tolist() == [expert in chosen[0][0] for expert in range(4)], kind


def test_the_load_of_the_busiest_expert_is_that_of_passes_with_gradient(roles_on, make_batch) -> None:
    batch = make_batch([(0, [5, 9], [12, 13, 14])])
    for kind, experts in (("mixtral", True), ("gpt_oss", False)):
        roles = roles_on(kind, experts=experts)
        with torch.no_grad():
            roles.outputs(batch, False)
        assert roles.routing.metrics() == {}
        layers = [chosen_in(roles, layer) for layer in range(2)]
        roles.outputs(batch, False)
        loads = [4 * int(torch.bincount(chosen.flatten()).max()) / chosen.numel() for [chosen] in layers]
        assert roles.routing.metrics() == {"router/load_max": pytest.approx(max(loads))}
        assert roles.routing.metrics() == {}


@pytest.mark.filterwarnings("ignore")
def test_peft_reads_dense_layers_that_it_takes_for_those_of_experts_elsewhere(roles_on, random_moe, tmp_path) -> None:
    for kind, by_weight in (("qwen3_moe", True), ("deepseek_v3", True), ("qwen2_moe", False)):
        roles = roles_on(kind, noise=0.1, dropout=0.1)
        expected, published = scores(roles.model), roles.publish(1)
        assert bool(published.config["target_parameters"]) == by_weight, kind
        files = AdapterFiles(tmp_path)
        folder = str(files.write(published))
        theirs: Any = PeftModel.from_pretrained(random_moe(kind, FAMILIES[kind][0]), folder).eval()
        torch.testing.assert_close(scores(theirs), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(scores(roles_on(kind, path=folder).model), expected, rtol=0, atol=1e-5)
        files.close()
