"""rsLoRA and DoRA in roles: what PEFT computes with the same tensors, in training, in decoding, and once merged."""

import re
from dataclasses import replace
from itertools import product

import half_model
import hybrid_models
import pytest
import torch
from in_one_test import each
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from slow_cases import slow
from transformers import AutoModelForCausalLM

from rlft.config.compose import compose
from rlft.config.model import LoraSettings
from rlft.config.resolved import build
from rlft.model import lora_config as module
from rlft.model.backbone import read_backbone
from rlft.model.kernels import elementwise
from rlft.model.kernels.decoder_layer import FAMILIES
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.model.lora_config import (
    adapted_words,
    exclusion,
    left_out,
    linear_layers,
    lora_config,
    named_inside,
    without_adapter,
)
from rlft.model.roles import POLICY, SAMPLER
from rlft.model.text_model import ModuleNames, causal_class
from rlft.plan.model_rules import check_targets, fresh_shapes, why_not_on_a_gpu
from rlft.plan.sizes import sizes_of
from rlft.types import UserError
from tests.model.family_models import tiny_config

model_config, backbone = half_model.model_config, half_model.backbone

KINDS = [{"use_rslora": True}, {"use_dora": True}, {"use_rslora": True, "use_dora": True}]
DORA = KINDS[1:]
PROMPTS = ([5, 9, 11, 30], [7, 8])
ROWS = [(0, PROMPTS[0], [12, 40, 41]), (0, PROMPTS[0], [13, 50]), (1, PROMPTS[1], [60, 61, 62, 63])]


@pytest.fixture
def double(model_config, half_folder):
    """(rlft's backbone, transformers' own model), of the same weights in float64.

    transformers' norms, and its eager attention, go through float32 whatever the model is.
    """
    ours = read_backbone(model_config())
    ours.model.double()
    theirs = AutoModelForCausalLM.from_pretrained(half_folder, dtype=torch.float64, attn_implementation="sdpa")
    elementwise.install(theirs)
    return ours, theirs


def logprobs_of_rows(model):
    """Of every completion token of every row, one row after the other, each by itself."""
    found = []
    for _, prompt, completion in ROWS:
        ids = torch.tensor([[*prompt, *completion]])
        logprobs = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append(logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", [slow({}), slow(KINDS[0]), *DORA], ids=str)
def test_logprobs_and_gradients_and_merged_weights_are_those_of_peft(kind, double, make_roles, make_batch, written):
    backbone, model = double
    roles = make_roles(backbone=backbone, noise=0.05, **kind)
    roles.model.double()
    theirs = PeftModel.from_pretrained(model, str(written(roles.publish(1))), is_trainable=True).eval()
    assert not any(isinstance(module, LoraLinear) for module in theirs.modules())
    theirs.double()  # PEFT reads an adapter in float32
    batch = make_batch(ROWS, dtype=torch.float64)
    with roles.training():  # dropout is 0, so that only the mode differs
        ours = roles.outputs(batch, False).logprobs[batch.loss_mask]
        ours.square().sum().backward()
    roles.check_gradients()
    expected = logprobs_of_rows(theirs)
    expected.square().sum().backward()
    torch.testing.assert_close(ours.detach(), expected.detach(), rtol=0, atol=1e-9)
    gradients = {
        name.replace(".default.", f".{POLICY}."): p.grad for name, p in theirs.named_parameters() if "lora_" in name
    }
    named = dict(roles.named_parameters())
    assert len(named) == (42 if "use_dora" in kind else 28) == len(gradients)  # 14 layers, 2 matrices, 1 magnitude
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-9)
    merged = theirs.merge_and_unload()
    roles.load_sampler(roles.publish(1), weights="merged")
    layers = {name: layer for name, layer in roles.model.named_modules() if isinstance(layer, LoraLinear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        weight = merged.get_submodule(name.removeprefix("base_model.model.")).weight
        torch.testing.assert_close(layer.sums[SAMPLER].values.t(), weight, rtol=1e-12, atol=1e-12, msg=name)


@each("kind", KINDS)
def test_the_sampler_says_what_the_policy_says(kind, make_roles):
    roles, sequence = make_roles(noise=0.05, **kind), [*PROMPTS[0], *ROWS[0][2]]
    layer = next(m for m in roles.model.modules() if isinstance(m, LoraLinear))
    [expected] = roles.score([sequence])
    for weights in ("apart", "merged", "merged_bfloat16", "merged_int8"):
        roles.load_sampler(roles.publish(1), weights=weights)
        with torch.no_grad(), roles.using(SAMPLER):
            [found] = roles.score([sequence])
        # float32 in another order; a bfloat16 keeps 8 bits of each of some hundred terms a token.
        assert found == pytest.approx(expected, abs=0.5 if weights in ("merged_bfloat16", "merged_int8") else 1e-4)
        assert (SAMPLER in layer.sums) == (weights != "apart")


def test_an_adapter_of_the_output_layer_is_known_by_its_name_and_not_given_to_vllm_on_a_gpu():
    config = build(compose([]))
    for targets, adapts in (
        ("all-linear", False),
        (["q_proj"], False),
        (["q_proj", "lm_head"], True),
        (r"model\..*_proj", False),
        (r".*(head|_proj)", True),
    ):
        lora = LoraSettings(rank=4, alpha=8.0, dropout=0.0, target_modules=targets, path=None)
        assert lora.adapts_head is adapts
        reason = why_not_on_a_gpu(config.generation, lora, config.model, is_absent=True)
        assert reason == ("vLLM serves no adapters of lm_head" if adapts else None)


@each("kind", DORA)
def test_a_fresh_dora_policy_is_the_base(kind, make_roles, backbone, make_batch):
    roles, batch = make_roles(**kind), make_batch(ROWS)
    with torch.no_grad():
        found = roles.outputs(batch, False).logprobs
        with roles.using(None):
            base = roles.forward(batch, 1.0).logprobs
    # Each output's magnitude is its weights' length as PEFT computes it, so that their quotient is 1 to the last bit.
    torch.testing.assert_close(found, base, rtol=0, atol=1e-5)


@each(
    ("kind", "targets"),
    [*product([{}, *KINDS], ["all-linear", ["q_proj", "mlp.down_proj"]]), ({}, r".*layers\.0\..*_proj")],
)
def test_parameters_are_counted_exactly(kind, targets, make_roles, model_config):
    lora = LoraSettings(rank=4, alpha=8.0, dropout=0.0, target_modules=targets, path=None, **kind)
    roles = make_roles(target_modules=targets, **kind)
    assert sizes_of(model_config(), lora).lora == sum(p.numel() for _, p in roles.named_parameters())
    number = 14 if targets == "all-linear" else 4 if isinstance(targets, list) else 7
    assert len(roles.named_parameters()) == number * (3 if "use_dora" in kind else 2)


@each("kind", DORA)
def test_a_dora_policy_never_learns_on_lent_sums(kind, make_roles, make_batch):
    roles, batch = make_roles(noise=0.05, **kind), make_batch(ROWS)
    roles.load_sampler(roles.publish(1), weights="merged")
    roles.share_merged_weights()
    assert not any(layer.lent for layer in roles.model.modules() if isinstance(layer, LoraLinear))
    roles.outputs(batch, False).logprobs.sum().backward()
    roles.check_gradients()  # magnitudes included


@each("kind", KINDS)
def test_an_adapter_that_peft_made_elsewhere_is_read_rightly(kind, make_roles, half_folder, make_batch, tmp_path):
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **kind)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(half_folder), config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        expected = logprobs_of_rows(model)
    model.save_pretrained(tmp_path / "elsewhere")
    roles, batch = make_roles(path=str(tmp_path / "elsewhere"), **kind), make_batch(ROWS)
    assert roles.weights(POLICY).keys() == get_peft_model_state_dict(model).keys()
    with torch.no_grad():
        found = roles.outputs(batch, False).logprobs[batch.loss_mask]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_magnitudes_that_are_missing_are_noticed(make_roles, written):
    folder = written(make_roles(noise=0.05).publish(1))
    with pytest.raises(UserError, match=r"^lora\.path: 14 of its tensors do not fit .*lora_magnitude_vector"):
        make_roles(path=str(folder), use_dora=True)


@each("kind", [{}, *DORA])
def test_a_16_bit_base_learns_in_float32(kind, make_roles, model_config, make_batch):
    half = read_backbone(model_config(dtype="bfloat16"))
    roles, batch = make_roles(backbone=half, noise=0.05, **kind), make_batch(ROWS)
    roles.load_sampler(roles.publish(1))
    assert {p.dtype for n, p in roles.model.named_parameters() if "lora" in n} == {torch.float32}
    assert {w.dtype for w in roles.publish(1).weights.values()} == {torch.float32}
    found = roles.outputs(batch, False).logprobs
    assert found.dtype == torch.float32
    found.sum().backward()
    roles.check_gradients()
    assert found[batch.loss_mask].isfinite().all()


def test_linear_layers_that_a_mamba_mixer_reads_past_adapters_are_left_out_of_all_of_them(make_roles, backbone):
    kinds = {"mamba2": {"in_proj"}, "jamba": {"in_proj", "x_proj"}, "qwen3_5_text": {"in_proj_qkv", "out_proj"}}
    for kind, some in kinds.items():
        model = hybrid_models.random_model(kind)
        roles = make_roles(backbone=replace(backbone, model=model), target_modules="all-linear")
        adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in roles.weights(POLICY)}
        assert some <= adapted, kind
        assert kind == "qwen3_5_text" or not {"out_proj", "dt_proj"} & adapted, kind
        assert "lm_head" not in adapted
        empty = hybrid_models.random_model(kind)
        shapes = fresh_shapes(empty, lora_config(replace(LORA, rank=4), empty))
        assert shapes == {name: tuple(tensor.shape) for name, tensor in roles.weights(POLICY).items()}


def test_a_folders_config_gets_the_names_of_the_trained_model():
    names = ModuleNames({"model": "model.language_model"})
    layer = "model.language_model.layers.0.self_attn.q_proj"
    modules = {"target_modules": r"model\.language_model\..*q_proj", "exclude_modules": r"(?!model\.language_model).*"}
    config = LoraConfig(**modules, rank_pattern={layer: 2}, alpha_pattern={layer: 64})
    named_inside(config, names, [f"base_model.model.{layer}.lora_A.weight"])
    inside = "model.layers.0.self_attn.q_proj"
    assert (config.target_modules, config.exclude_modules) == ([inside], None)
    assert (config.rank_pattern, config.alpha_pattern) == ({inside: 2}, {inside: 64})


def test_a_target_that_peft_refuses_is_refused_in_a_line(model_config, tmp_path):
    model = hybrid_models.random_model("mamba2")
    settings = replace(model_config(), path=str(tmp_path))
    lora = LoraSettings(rank=2, alpha=4.0, dropout=0.0, target_modules=["in_proj", "out_proj"], path=None)
    check_targets(replace(lora, target_modules=["in_proj"]), settings, model.config)
    with pytest.raises(UserError, match=r"^lora\.target_modules: names no layer .*: this type .*, got out_proj"):
        check_targets(lora, settings, model.config)


LORA = LoraSettings(rank=2, alpha=4.0, dropout=0.0, target_modules="all-linear", path=None)
FOUND = {
    "olmo": r"$^",
    "gemma3": r"model\.(vision_tower|multi_modal).*",
    "deepseek_v32": r".*\.indexer\..*",  # which chooses the tokens to attend to
    "jamba": r".*\.(dt|out)_proj",
    "llama4_text": r".*\.router",
    "mamba2": r".*\.out_proj",
}
"""{type: what is left out of all linear layers, as a regular expression over their names}."""


def tiny(model_type, device="cpu", **fields):
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        config = tiny_config(model_type)
        config.update(fields)
        made = causal_class(config)
        return made._from_config(config).requires_grad_(False).eval()


@pytest.mark.filterwarnings("ignore")
def test_every_adapted_layer_gets_a_gradient_and_what_gets_none_is_left_out():
    for model_type, expected in FOUND.items():
        model = tiny(model_type)
        layers = linear_layers(model)
        assert set(left_out(model)) == {name for name in layers if re.fullmatch(expected, name)}, model_type
        assert left_out(tiny(model_type, "meta")) == left_out(model)  # what a plan says is what a run does
        config = lora_config(LORA, model)
        adapted = PeftModel(model, config)
        adapted(input_ids=torch.arange(24).view(2, 12) + 1, use_cache=False).logits.square().sum().backward()
        missing = [name for name, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing, (model_type, missing)
        # Without the exclusion the same layers are those that PEFT cannot adapt, or that get no gradient.
        if left_out(model):
            assert config.exclude_modules is not None


def test_the_families_with_kernels_have_no_layer_that_is_left_out(monkeypatch):
    monkeypatch.setattr(module, "FAMILIES", {})
    for model_type in FAMILIES:
        assert left_out(tiny(model_type, "meta")) == {}, model_type


def test_blocks_of_which_some_lack_a_layer_are_named_one_by_one(monkeypatch):
    model = tiny("olmo", "meta", num_hidden_layers=12)
    names = [f"model.layers.{i}.self_attn.{name}" for i in (1, 11) for name in ("k_proj", "v_proj")]
    names += [f"model.layers.{i}.mlp.gate_proj" for i in range(12)]
    monkeypatch.setattr(module, "left_out", lambda model: dict.fromkeys(names, ""))
    pattern = exclusion(model, LORA)
    assert {name for name in linear_layers(model) if re.fullmatch(pattern, name)} == set(names)
    assert pattern.count("gate_proj") == 1


@pytest.mark.filterwarnings("ignore")
def test_words_name_the_kinds_of_layers_and_whole_parts_without_an_adapter():
    gated = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    for model_type, expected in (
        ("olmo", (gated, "lm_head")),
        ("gemma3", (gated, "model.vision_tower, model.multi_modal_projector, lm_head")),
        ("qwen2_moe", None),
    ):
        model = tiny(model_type, "meta")
        assert adapted_words(model)[0] == ""
        learn = [layer for name, layer in linear_layers(model).items() if name not in without_adapter(model, LORA)]
        number = sum(layer.weight.numel() for layer in learn)
        wrapped = PeftModel(model, lora_config(LORA, model))
        words = adapted_words(wrapped)
        assert words == adapted_words(wrapped.get_base_model())  # a run has the first, a plan the second
        assert words[:2] == expected or expected is None
        assert words[2] == number
    assert "mlp.experts" in words[1]
