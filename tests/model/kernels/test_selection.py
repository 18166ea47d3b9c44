"""The door to the kernels: what a model gets and why, and that it computes the same with them and without."""

import itertools
from dataclasses import replace

import flash_stand_in
import peft
import pytest
import torch
from slow_cases import slow, slow_but

from rlft.config.model import CriticKind, KernelChoice
from rlft.generation.repeated_cache import RepeatedCache
from rlft.generation.transformers import TransformersGenerator
from rlft.model import forward
from rlft.model.backbone import load_backbone
from rlft.model.critic import CRITIC
from rlft.model.forward import choose
from rlft.model.full_weights import WholeModel
from rlft.model.kernels import elementwise, selection
from rlft.model.kernels.attention import NAME
from rlft.model.kernels.decoder_layer import FAMILIES, TESTED
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.model.kernels.selection import decide
from rlft.model.roles import POLICY
from rlft.types import Sampling

BOTH = (KernelChoice.auto, KernelChoice.plain)
ONE_LAYER = r".*layers\.1\..*(q_proj|down_proj)"
SHAPES = {
    **{kind: (kind, {}, {}) for kind in (
        "llama", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl", "mistral", "gemma", "granite", "smollm3", "gpt2", "phi3",
        "olmo2", "starcoder2", "mixtral", "qwen2_moe", "qwen3_moe",
    )},
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama, adapter in one layer": ("llama", {}, {"target_modules": ONE_LAYER}),
    "llama, tied, one key head": ("llama_one_kv_head", {}, {}),
    "qwen2, tied, queries alone": ("qwen2", {"tie_word_embeddings": True}, {"target_modules": ["q_proj"]}),
    "qwen2, windows": ("qwen2_window", {}, {}),
    "qwen3, adapter in one layer, DoRA": ("qwen3", {}, {"target_modules": ONE_LAYER, "use_dora": True}),
    "mistral, windows": ("mistral_window", {}, {}),
    **{f"{family}, values, {kind} critic": (family, {}, {"kind": kind})
       for family in ("llama", "qwen2", "qwen3", "mistral", "gemma")
       for kind in (CriticKind.shared, CriticKind.adapter)},
}  # fmt: skip
"""By name: (kind of random model, keys of its config, keys of the adapter)."""
QUICK = (
    "llama, biases", "llama, tied, one key head", "qwen2, tied, queries alone", "qwen2, windows",
    "qwen3, adapter in one layer, DoRA", "qwen3, values, shared critic",
    "qwen3, values, adapter critic", "gemma", "gpt2", "phi3", "mixtral",
)  # fmt: skip


@pytest.fixture
def build(random_model, on_base):
    """A random model as `read_backbone` leaves it, with these kernels; exact: of the same weights in float64."""

    def make(kind, choice, *, exact=False, **keys):
        model = random_model(kind, **keys)
        if model._can_set_attn_implementation():
            model.set_attn_implementation("sdpa")
        return on_base(model.double() if exact else model, choice)

    return make


def forwards_of_rlft(model):
    """Everything in the model that is not transformers' or PEFT's: forwards that were replaced, and layers of ours."""
    named = list(model.named_modules())
    replaced = [name for name, module in named if "forward" in vars(module)]
    return replaced + [name for name, module in named if type(module).__module__.startswith("rlft.model.kernels")]


def close(found, expected, tolerance=1e-5):
    """Each to this share of the largest number of its kind (what stands before the first slash)."""
    assert found.keys() == expected.keys()
    largest = {}
    for name, tensor in expected.items():
        kind = name.partition("/")[0]
        largest[kind] = max(largest.get(kind, 0.0), tensor.abs().max().item())
    for name, tensor in found.items():
        scale = largest[name.partition("/")[0]]
        assert scale > 0, name
        torch.testing.assert_close(tensor / scale, expected[name] / scale, rtol=0, atol=tolerance)


def gradients(roles, role):
    found = {f"gradient of {role}/{name}": p.grad for name, p in roles.named_parameters(role) if p.grad is not None}
    for _, parameter in roles.named_parameters(role):
        parameter.grad = None
    return found


@pytest.fixture
def learned(make_roles, weighted, awkward_batch):
    """Log-probs, entropy and gradients of a policy on this base, and the log-probs of the base."""

    def compute(base, seed=0, **adapter):
        roles = make_roles(backbone=base, token_budget=28, **adapter)
        dice = torch.Generator().manual_seed(seed)  # float32 noise is the same for a base of any dtype
        for _, parameter in itertools.chain(*map(roles.named_parameters, roles.learning_roles)):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=dice))
        with roles.training():
            outputs = roles.outputs(awkward_batch, entropy=True)
            values = [] if outputs.values is None else [outputs.values]
            weighted(outputs.logprobs, outputs.entropy, *values).backward()
            if adapter.get("kind") is CriticKind.adapter:
                with roles.learning(CRITIC):
                    values = [roles.values(awkward_batch)]
                    weighted(*values).backward()
        roles.check_gradients()
        choice = base.kernels.decision.choice
        assert bool(forwards_of_rlft(roles.model)) == (choice is KernelChoice.auto) or "gpt2" in str(base.model.config)
        assert not (roles.forward.packed and choice is KernelChoice.plain)
        found = {"log-probs": outputs.logprobs.detach(), "entropy": outputs.entropy.detach()}
        if values:
            annotated = roles.annotate(awkward_batch, torch.zeros(6, dtype=torch.bool), needs_old=True)
            found |= {"old values": annotated.old_values, "old": annotated.old_logprobs}
            found |= gradients(roles, CRITIC) | {"values": values[0].detach()}
        return found | gradients(roles, POLICY) | {"base": roles.logprobs(awkward_batch, None)}

    return compute


# -- the same numbers ------------------------------------------------------------------------------------------------
def test_every_model_type_with_kernels_is_among_the_shapes(random_model):
    assert FAMILIES.keys() <= {random_model(kind, **keys).config.model_type for kind, keys, _ in SHAPES.values()}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("shape", [shape if shape in QUICK else slow(shape) for shape in SHAPES])
def test_log_probs_and_gradients_are_the_same_with_kernels_and_without(shape, build, learned):
    kind, keys, adapter = SHAPES[shape]
    bases = [build(kind, choice, **keys) for choice in BOTH]
    found = [learned(base, **adapter) for base in bases]
    kept = tuple(base.kernels.decision.choice for base in bases)
    assert kept == BOTH, "the comparison at the start has not removed them"
    close(*found)


@pytest.mark.parametrize(
    "family",
    ["llama_one_kv_head", "qwen3", "gemma", *map(slow, ("llama", "qwen2", "qwen2_5_vl", "qwen3_vl", "mistral"))],
)
def test_on_a_gpu_they_are_those_of_a_cpu(family, build, learned, request):
    """Whole branches, and flash attention by stand-ins for its operators, in float64; those of a CPU are held to their
    formulas to 1e-11, while transformers' own norms are made in float32 even then."""
    theirs = learned(build(family, KernelChoice.auto, dtype=torch.float64))
    gpu = request.getfixturevalue("gpu")
    ours = learned(build(family, KernelChoice.auto, dtype=torch.float64))
    assert flash_stand_in.CALLS.count("backward") > 0
    assert gpu["attention"] > 0
    assert gpu["mlp"] == (0 if family == "gemma" else gpu["attention"]), "Gemma's gate is a GELU"
    for name, tensor in theirs.items():
        # Gradients are rounded to float32, as the adapter is.
        tolerance = 1e-11 if tensor.dtype == torch.float64 else 2**-23
        assert (ours[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name


@pytest.mark.parametrize("family", slow_but("qwen3", ["llama", "qwen2", "qwen3", "gemma"]))
def test_on_a_gpu_in_bfloat16_they_are_as_near_to_the_truth_as_the_models_own_modules(family, build, learned, gpu):
    """The truth is the same weights in float64. Both round some 14 times a layer, each by up to 2^-8 of the number and
    by 0.82 x 2^-9 in the mean; which of the two is nearer is chance, 0.9 to 1.2 over eight adapters."""
    squares = {}
    for seed in range(4):
        exact = learned(build(family, KernelChoice.plain, dtype=torch.bfloat16, exact=True), seed)
        both = (learned(build(family, choice, dtype=torch.bfloat16), seed) for choice in BOTH)
        ours, theirs = (error_of_each_kind(found, exact) for found in both)
        for kind in ours:
            squares.setdefault(kind, []).append(torch.stack([ours[kind], theirs[kind]]).square())
    roundings = 3 * 14 + 4
    for kind, values in squares.items():
        mine, its = torch.stack(values).mean(0).sqrt().tolist()
        assert mine <= 1.4 * its, kind
        if kind in ("log-probs", "entropy"):
            assert mine <= 0.82 * 2**-9 * roundings**0.5, kind


def error_of_each_kind(found, exact):
    """Of log-probs, entropy, and gradients of A and B: the norm of the error, in units of the exact numbers'."""
    result = {}
    for kind in ("log-probs", "entropy", "lora_A", "lora_B"):
        names = [name for name in exact if kind in name]
        gap = torch.cat([(found[name].double() - exact[name].double()).flatten() for name in names])
        result[kind] = gap.norm() / torch.cat([exact[name].double().flatten() for name in names]).norm()
    return result


@pytest.mark.parametrize("kind", slow_but("llama_one_kv_head", ["llama_one_kv_head", "qwen2", "qwen3", "gemma"]))
def test_gradients_of_the_models_own_weights_are_the_same(kind, build, weighted, awkward_batch):
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


@pytest.mark.parametrize("kind", slow_but("mistral_window", ["qwen3", "mistral_window", "gemma"]))
def test_completions_are_the_same_and_so_are_their_log_probs(kind, build, make_roles, make_prompt):
    prompts = [replace(make_prompt("p", "0"), token_ids=(3, 17, 5)), replace(make_prompt("q", "0"), token_ids=(11, 4))]
    found, tokens = [], []
    for choice in BOTH:
        backbone = build(kind, choice)
        roles = make_roles(noise=0.05, backbone=backbone)
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
def test_the_embedded_model_has_kernels_and_says_for_what(backbone):
    decision = backbone.kernels.decision
    assert (decision.choice, decision.requested) == (KernelChoice.auto, True)
    assert decision.reason == f"qwen2 with transformers {selection.transformers.__version__}"


def test_plain_is_transformers_and_peft_as_they_come(model_config, make_roles):
    loaded = load_backbone.__wrapped__(model_config(kernels=KernelChoice.plain))
    assert not forwards_of_rlft(loaded.model)
    assert loaded.model.config._attn_implementation == "sdpa"
    roles = make_roles(backbone=loaded)
    assert not forwards_of_rlft(roles.model)
    layers = [m for m in roles.model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert {type(layer) for layer in layers} == {peft.tuners.lora.Linear}
    assert roles.forward.reason == "padded rows: kernels are plain (transformers and PEFT as they come)"
    roles.load_sampler(roles.publish(0), weights="merged")
    roles.share_merged_weights()
    assert roles.prefix_cache([(1, 2)], 4) is None


@pytest.mark.parametrize("version", ["5.16.4", "5.25.0", "6.0.0", "5.25.0.dev0", "nightly"])
def test_an_untested_release_of_transformers_falls_back_by_name(version, build, make_roles, monkeypatch):
    monkeypatch.setattr(selection.transformers, "__version__", version)
    loaded = build("qwen2", KernelChoice.auto)
    decision = loaded.kernels.decision
    assert (decision.choice, decision.requested) == (KernelChoice.plain, False)
    assert decision.reason == f"transformers {version} is not among the tested releases (5.17 to 5.24)"
    roles = make_roles(backbone=loaded)
    assert not forwards_of_rlft(roles.model)
    assert not roles.forward.packed
    for version in (f"{TESTED[0]}.0", f"{TESTED[1]}.9"):
        monkeypatch.setattr(selection.transformers, "__version__", version)
        assert decide(KernelChoice.auto, "qwen2").choice is KernelChoice.auto


def test_a_known_architecture_that_computes_otherwise_is_found_out_by_its_numbers(
    build, make_roles, awkward_batch, monkeypatch
):
    """A release whose attention has changed: ours is not what the model's own modules give."""
    own = build("llama", KernelChoice.plain)
    expected = choose(own.model, own.kernels)(awkward_batch, 1.0).logprobs
    rotate = elementwise.rotated
    monkeypatch.setattr(elementwise, "rotated", lambda q, k, cos, sin: rotate(q, k, cos, -sin))
    monkeypatch.setattr(selection.decoder_layer, "install", lambda model: None)
    changed = build("llama", KernelChoice.auto)
    assert changed.kernels.replaced
    roles = make_roles(backbone=changed)
    decision = changed.kernels.decision
    assert (decision.choice, decision.requested) == (KernelChoice.plain, False)
    assert decision.reason.startswith("log-probs differ by ")
    assert decision.reason.endswith(" from those of transformers' modules for LlamaForCausalLM")
    assert not forwards_of_rlft(roles.model)
    assert not any(isinstance(module, LoraLinear) for module in roles.model.modules())
    torch.testing.assert_close(roles.logprobs(awkward_batch, None), expected, rtol=1e-5, atol=1e-5)


def test_switched_off_the_modules_are_transformers_own_and_afterwards_ours(build):
    loaded = build("qwen3", KernelChoice.auto)
    ours = forwards_of_rlft(loaded.model)
    assert ours
    with loaded.kernels.switched_off():
        assert not forwards_of_rlft(loaded.model)
    assert forwards_of_rlft(loaded.model) == ours


def test_another_attention_that_was_asked_for_is_kept_with_the_other_kernels(random_model):
    model = random_model("llama")
    model.set_attn_implementation("sdpa")
    kernels = selection.install(model, KernelChoice.auto, own_attention=False)
    assert model.config._attn_implementation == "sdpa" != NAME
    assert choose(model, kernels).reason == "padded rows: model.attn_implementation is sdpa"
    assert forwards_of_rlft(model)
    assert kernels.decision.choice is KernelChoice.auto


def test_the_comparison_is_with_the_models_own_modules(build, monkeypatch):
    """Not with those that were replaced, whose error both sides would share."""
    loaded, seen, plain = build("qwen2", KernelChoice.auto), [], forward.padded_forward

    def noted(*args):
        seen.append(forwards_of_rlft(loaded.model))
        return plain(*args)

    monkeypatch.setattr(forward, "padded_forward", noted)
    assert choose(loaded.model, loaded.kernels).packed
    assert seen == [[]]
