"""The door to the kernels: what a model gets and why, and that it computes the same with them and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from slow_cases import slow
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlft.config.model import CriticKind, KernelChoice
from rlft.generation.repeated_cache import RepeatedCache
from rlft.generation.transformers import TransformersGenerator
from rlft.model import forward
from rlft.model.backbone import Backbone, load_backbone
from rlft.model.critic import CRITIC
from rlft.model.forward import choose
from rlft.model.full_weights import WholeModel
from rlft.model.kernels import elementwise, selection
from rlft.model.kernels.attention import NAME
from rlft.model.kernels.decoder_layer import FAMILIES, TESTED
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.model.kernels.selection import decide
from rlft.model.roles import POLICY, Roles
from rlft.types import Batch, Sampling

BOTH = (KernelChoice.auto, KernelChoice.plain)
ONE_LAYER = r".*layers\.1\..*(q_proj|down_proj)"
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama, adapter in one layer": ("llama", {}, {"target_modules": ONE_LAYER}),
    "llama, tied, one key head": ("llama_one_kv_head", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2, tied, queries alone": ("qwen2", {"tie_word_embeddings": True}, {"target_modules": ["q_proj"]}),
    "qwen2, windows": ("qwen2_window", {}, {}),
    "qwen2_5_vl": ("qwen2_5_vl", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3_vl": ("qwen3_vl", {}, {}),
    "qwen3, adapter in one layer, DoRA": ("qwen3", {}, {"target_modules": ONE_LAYER, "use_dora": True}),
    "mistral": ("mistral", {}, {}),
    "mistral, windows": ("mistral_window", {}, {}),
    "gemma": ("gemma", {}, {}),
    "granite": ("granite", {}, {}),
    "smollm3": ("smollm3", {}, {}),
    "gpt2": ("gpt2", {}, {}),
    "phi3": ("phi3", {}, {}),
    "olmo2": ("olmo2", {}, {}),
    "starcoder2": ("starcoder2", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "qwen2_moe": ("qwen2_moe", {}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
}
"""By name: (kind of random model, keys of its config, keys of the adapter)."""
QUICK = (
    "llama, biases", "llama, tied, one key head", "qwen2, tied, queries alone", "qwen2, windows",
    "qwen3, adapter in one layer, DoRA", "gemma", "gpt2", "phi3", "mixtral",
)  # fmt: skip


@pytest.fixture
def build(random_model, backbone) -> Callable[..., Backbone]:
    """A random model as `read_backbone` leaves it, with these kernels."""

    def make(kind: str, choice: KernelChoice, **keys: Any) -> Backbone:
        model: PreTrainedModel = random_model(kind, **keys)
        if model._can_set_attn_implementation():
            model.set_attn_implementation("sdpa")
        kernels = selection.install(model, choice, own_attention=True)
        device = torch.device("cpu")
        return Backbone(model=model, tokenizer=backbone.tokenizer, device=device, path="none", kernels=kernels)

    return make


def forwards_of_rlft(model: nn.Module) -> list[str]:
    """Everything in the model that is not transformers' or PEFT's: forwards that were replaced, and layers of ours."""
    named = list(model.named_modules())
    replaced = [name for name, module in named if "forward" in vars(module)]
    return replaced + [name for name, module in named if type(module).__module__.startswith("rlft.model.kernels")]


def weighted(*values: Tensor) -> Tensor:
    """A loss in which every token has its own weight, so that no error can cancel another."""
    dice = torch.Generator().manual_seed(3)
    return torch.stack([(torch.randn(v.shape, generator=dice) * v).sum() for v in values]).sum()


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Each to this share of the largest number of its kind (what stands before the first slash)."""
    assert found.keys() == expected.keys()
    largest: dict[str, float] = {}
    for name, tensor in expected.items():
        kind = name.partition("/")[0]
        largest[kind] = max(largest.get(kind, 0.0), tensor.abs().max().item())
    for name, tensor in found.items():
        scale = largest[name.partition("/")[0]]
        assert scale > 0, name
        torch.testing.assert_close(tensor / scale, expected[name] / scale, rtol=0, atol=tolerance)


def gradients(roles: Roles, role: str) -> dict[str, Tensor]:
    found = {f"gradient of {role}/{name}": p.grad for name, p in roles.named_parameters(role) if p.grad is not None}
    for _, parameter in roles.named_parameters(role):
        parameter.grad = None
    return found


# -- the same numbers ------------------------------------------------------------------------------------------------
def test_every_model_type_with_kernels_is_among_the_shapes(random_model) -> None:
    assert FAMILIES.keys() <= {random_model(kind, **keys).config.model_type for kind, keys, _ in SHAPES.values()}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("shape", [shape if shape in QUICK else slow(shape) for shape in SHAPES])
def test_log_probs_and_gradients_are_the_same_with_kernels_and_without(
    shape, build, make_roles, awkward_batch: Batch
) -> None:
    kind, keys, adapter = SHAPES[shape]
    found = []
    for choice in BOTH:
        roles: Roles = make_roles(noise=0.05, backbone=build(kind, choice, **keys), token_budget=28, **adapter)
        with roles.training():
            outputs = roles.outputs(awkward_batch, entropy=True)
            assert outputs.entropy is not None
            weighted(outputs.logprobs, outputs.entropy).backward()
        roles.check_gradients()
        found.append({"log-probs": outputs.logprobs.detach(), "entropy": outputs.entropy.detach()})
        found[-1] |= gradients(roles, POLICY) | {"base": roles.logprobs(awkward_batch, None)}
        assert roles.backbone.kernels.decision.choice is choice, "the comparison at the start has not removed them"
        assert bool(forwards_of_rlft(roles.model)) == (choice is KernelChoice.auto) or kind == "gpt2"
        assert not (roles.forward.packed and choice is KernelChoice.plain)
    close(*found)


@pytest.mark.parametrize("kind", [CriticKind.adapter, CriticKind.shared])
@pytest.mark.parametrize("family", ["llama", slow("qwen2"), "qwen3", slow("mistral"), slow("gemma")])
def test_values_and_their_gradients_are_the_same(family, kind, build, make_roles, awkward_batch: Batch) -> None:
    found = []
    for choice in BOTH:
        roles: Roles = make_roles(noise=0.05, backbone=build(family, choice), kind=kind)
        dice = torch.Generator().manual_seed(2)
        for _, parameter in roles.named_parameters(CRITIC):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=dice)
        if kind is CriticKind.adapter:
            with roles.learning(CRITIC):
                values = roles.values(awkward_batch)
                weighted(values).backward()
        else:
            values = roles.outputs(awkward_batch, entropy=False).values
            assert values is not None
            weighted(values).backward()
        learned = gradients(roles, CRITIC) | gradients(roles, POLICY)
        annotated = roles.annotate(awkward_batch, torch.zeros(6, dtype=torch.bool), needs_old=True)
        assert annotated.old_values is not None
        assert annotated.old_logprobs is not None
        made = {"values": values.detach(), "old values": annotated.old_values, "old": annotated.old_logprobs}
        found.append(learned | made)
    close(*found)


@pytest.mark.parametrize("kind", ["llama_one_kv_head", "qwen2", "qwen3", "gemma"])
def test_gradients_of_the_models_own_weights_are_the_same(kind, build, awkward_batch: Batch) -> None:
    found = []
    for choice in BOTH:
        whole = WholeModel(build(kind, choice))
        with whole.training():
            logprobs = whole.forward(awkward_batch, 1.0).logprobs
            weighted(logprobs).backward()
        whole.check_gradients()
        learned = {f"gradient/{name}": p.grad for name, p in whole.named_parameters() if p.grad is not None}
        found.append(learned | {"log-probs": logprobs.detach()})
    close(*found)


@pytest.mark.parametrize("kind", ["qwen3", "mistral_window", "gemma"])
def test_completions_are_the_same_and_so_are_their_log_probs(kind, build, make_roles, make_prompt) -> None:
    prompts = [replace(make_prompt("p", "0"), token_ids=(3, 17, 5)), replace(make_prompt("q", "0"), token_ids=(11, 4))]
    found, tokens = [], []
    for choice in BOTH:
        backbone = build(kind, choice)
        roles: Roles = make_roles(noise=0.05, backbone=backbone)
        generator = TransformersGenerator(roles, backbone.tokenizer, backbone.device, 8)
        generator.load(roles.publish(0))
        groups = generator.sample(prompts, 3, [1, 10], Sampling(max_tokens=8, temperature=1.0))
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        tokens.append([completion.token_ids for completion in completions])
        found.append({"log-probs": torch.tensor([p for completion in completions for p in completion.logprobs])})
        if choice is KernelChoice.plain:
            with torch.no_grad(), generator._active() as model:
                assert type(generator._decoder(model, [(1, 2)], 4)) is RepeatedCache
    assert tokens[0] == tokens[1]
    close(*found)


# -- what a model gets, and why --------------------------------------------------------------------------------------
def test_the_embedded_model_has_kernels_and_says_for_what(backbone) -> None:
    decision = backbone.kernels.decision
    assert (decision.choice, decision.requested) == (KernelChoice.auto, True)
    assert decision.reason == f"qwen2 with transformers {selection.transformers.__version__}"


def test_plain_is_transformers_and_peft_as_they_come(model_config, make_roles) -> None:
    loaded = load_backbone.__wrapped__(model_config(kernels=KernelChoice.plain))
    assert not forwards_of_rlft(loaded.model)
    assert loaded.model.config._attn_implementation == "sdpa"
    roles: Roles = make_roles(backbone=loaded)
    assert not forwards_of_rlft(roles.model)
    layers = [m for m in roles.model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert {type(layer) for layer in layers} == {peft.tuners.lora.Linear}
    assert roles.forward.reason == "padded rows: kernels are plain (transformers and PEFT as they come)"
    roles.load_sampler(roles.publish(0), weights="merged")
    roles.share_merged_weights()
    assert roles.prefix_cache([(1, 2)], 4) is None


@pytest.mark.parametrize("version", ["5.16.4", "5.25.0", "6.0.0", "5.25.0.dev0", "nightly"])
def test_an_untested_release_of_transformers_falls_back_by_name(version, build, make_roles, monkeypatch) -> None:
    monkeypatch.setattr(selection.transformers, "__version__", version)
    loaded = build("qwen2", KernelChoice.auto)
    decision = loaded.kernels.decision
    assert (decision.choice, decision.requested) == (KernelChoice.plain, False)
    assert decision.reason == f"transformers {version} is not among the tested releases (5.17 to 5.24)"
    roles: Roles = make_roles(backbone=loaded)
    assert not forwards_of_rlft(roles.model)
    assert not roles.forward.packed


def test_the_newest_and_the_oldest_tested_release_are_in(monkeypatch) -> None:
    for version in (f"{TESTED[0]}.0", f"{TESTED[1]}.9"):
        monkeypatch.setattr(selection.transformers, "__version__", version)
        assert decide(KernelChoice.auto, "qwen2").choice is KernelChoice.auto


def test_a_known_architecture_that_computes_otherwise_is_found_out_by_its_numbers(
    build, make_roles, awkward_batch, monkeypatch
) -> None:
    """A release whose attention has changed: ours is not what the model's own modules give."""
    own = build("llama", KernelChoice.plain)
    expected = choose(own.model, own.kernels)(awkward_batch, 1.0).logprobs
    rotate = elementwise.rotated
    monkeypatch.setattr(elementwise, "rotated", lambda q, k, cos, sin: rotate(q, k, cos, -sin))
    monkeypatch.setattr(selection.decoder_layer, "install", lambda model: None)
    changed = build("llama", KernelChoice.auto)
    assert changed.kernels.replaced
    roles: Roles = make_roles(backbone=changed)
    decision = changed.kernels.decision
    assert (decision.choice, decision.requested) == (KernelChoice.plain, False)
    assert decision.reason.startswith("log-probs differ by ")
    assert decision.reason.endswith(" from those of transformers' modules for LlamaForCausalLM")
    assert not forwards_of_rlft(roles.model)
    assert not any(isinstance(module, LoraLinear) for module in roles.model.modules())
    torch.testing.assert_close(roles.logprobs(awkward_batch, None), expected, rtol=1e-5, atol=1e-5)


def test_switched_off_the_modules_are_transformers_own_and_afterwards_ours(build) -> None:
    loaded = build("qwen3", KernelChoice.auto)
    ours = forwards_of_rlft(loaded.model)
    assert ours
    with loaded.kernels.switched_off():
        assert not forwards_of_rlft(loaded.model)
    assert forwards_of_rlft(loaded.model) == ours


def test_another_attention_that_was_asked_for_is_kept_with_the_other_kernels(random_model) -> None:
    model = random_model("llama")
    model.set_attn_implementation("sdpa")
    kernels = selection.install(model, KernelChoice.auto, own_attention=False)
    assert model.config._attn_implementation == "sdpa" != NAME
    assert choose(model, kernels).reason == "padded rows: model.attn_implementation is sdpa"
    assert forwards_of_rlft(model)
    assert kernels.decision.choice is KernelChoice.auto


def test_the_comparison_is_with_the_models_own_modules(build, monkeypatch) -> None:
    """Not with those that were replaced, whose error both sides would share."""
    loaded, seen, plain = build("qwen2", KernelChoice.auto), [], forward.padded_forward
    monkeypatch.setattr(
        forward, "padded_forward", lambda *args: seen.append(forwards_of_rlft(loaded.model)) or plain(*args)
    )
    assert choose(loaded.model, loaded.kernels).packed
    assert seen == [[]]
