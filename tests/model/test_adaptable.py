"""`all-linear` adapts the layers that a gradient reaches from a text, and no others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlft.config.model import LoraSettings
from rlft.model import adaptable
from rlft.model.adaptable import adapted_words, exclusion, left_out, linear_layers
from rlft.model.kernels.families import FAMILIES
from rlft.model.lora_config import lora_config

LORA = LoraSettings(rank=2, alpha=4.0, dropout=0.0, target_modules="all-linear", path=None)
SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE = {  # DeepSeek V3.2's: an indexer that chooses the tokens to attend to
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 2,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}
STATES = {"mamba_d_state": 8, "mamba_dt_rank": 8, "mamba_expand": 2}
# (type, keys, left out of all linear layers), where the last is a regular expression over their names
FOUND: list[tuple[str, dict[str, Any], str]] = [
    ("olmo", SIZES, r"$^"),
    (
        "gemma3",
        {"text_config": SIZES | {"head_dim": 8}, "vision_config": VISION},
        r"model\.(vision_tower|multi_modal).*",
    ),
    ("deepseek_v32", SIZES | SPARSE, r".*\.indexer\..*"),
    (
        "jamba",
        SIZES | STATES | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1},
        r".*\.(dt|out)_proj",
    ),
    ("llama4_text", SIZES | EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 24}, r".*\.router"),
]


def tiny(model_type: str, keys: dict[str, Any], device: str = "cpu") -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **keys)).requires_grad_(False).eval()


@pytest.mark.filterwarnings("ignore")
def test_every_adapted_layer_gets_a_gradient_and_what_gets_none_is_left_out() -> None:
    for model_type, keys, expected in FOUND:
        model = tiny(model_type, keys)
        layers = linear_layers(model)
        assert set(left_out(model)) == {name for name in layers if re.fullmatch(expected, name)}, model_type
        assert left_out(tiny(model_type, keys, "meta")) == left_out(model)  # what a plan says is what a run does
        config = lora_config(LORA, model)
        adapted = PeftModel(model, config)
        adapted(input_ids=torch.arange(24).view(2, 12) + 1, use_cache=False).logits.square().sum().backward()
        missing = [name for name, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing, (model_type, missing)
        # Without the exclusion the same layers are those that PEFT cannot adapt, or that get no gradient.
        if left_out(model):
            assert config.exclude_modules is not None


@pytest.mark.filterwarnings("ignore")
def test_layers_that_peft_refuses_are_left_out() -> None:
    model = tiny("mamba2", {"vocab_size": 90, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "num_hidden_layers": 2})
    assert set(left_out(model)) == {f"backbone.layers.{i}.mixer.out_proj" for i in range(2)}
    PeftModel(model, lora_config(LORA, model))


def test_the_families_with_kernels_have_no_layer_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptable, "FAMILIES", {})
    for model_type in FAMILIES:
        assert left_out(tiny(model_type, {**SIZES, "n_layer": 2, "n_embd": 32, "n_head": 4}, "meta")) == {}, model_type


def test_blocks_of_which_some_lack_a_layer_are_named_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("olmo", SIZES | {"num_hidden_layers": 12}, "meta")
    names = [f"model.layers.{i}.self_attn.{name}" for i in (1, 11) for name in ("k_proj", "v_proj")]
    names += [f"model.layers.{i}.mlp.gate_proj" for i in range(12)]
    monkeypatch.setattr(adaptable, "left_out", lambda model: dict.fromkeys(names, ""))
    pattern = exclusion(model)
    assert pattern is not None
    assert {name for name in linear_layers(model) if re.fullmatch(pattern, name)} == set(names)
    assert pattern.count("gate_proj") == 1


def test_one_expert_stands_for_those_of_its_block_and_for_no_other_block() -> None:
    assert adaptable._block("model.layers.3.mlp.experts.0.w1") == adaptable._block("model.layers.3.mlp.experts.17.w1")
    assert adaptable._block("model.layers.3.self_attn.k_proj") != adaptable._block("model.layers.4.self_attn.k_proj")


@pytest.mark.filterwarnings("ignore")
def test_words_name_the_kinds_of_layers_and_whole_parts_without_an_adapter() -> None:
    gated = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    for model_type, keys, expected in (
        ("olmo", SIZES, (gated, "lm_head")),
        (FOUND[1][0], FOUND[1][1], (gated, "model.vision_tower, model.multi_modal_projector, lm_head")),
        ("qwen2_moe", SIZES | {"num_experts": 2}, None),
    ):
        model = tiny(model_type, keys, "meta")
        assert adapted_words(model)[0] == ""
        wrapped = PeftModel(model, lora_config(LORA, model))
        words = adapted_words(wrapped)
        assert words == adapted_words(wrapped.get_base_model())  # a run has the first, a plan the second
        assert words == expected or expected is None
    assert "mlp.experts" in words[1]
