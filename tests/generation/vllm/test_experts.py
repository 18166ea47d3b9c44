"""Adapters of stacked experts, one by one: the names of the model's files, and the same products."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlft.generation.vllm.experts import DOWN, PREFIX, UP, one_by_one
from rlft.types import Adapter

RANK, EXPERTS = 3, 4
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": EXPERTS, "pad_token_id": 0,
    "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "layers_block_type": ["moe"], "ssm_state_size": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
# type: (what its experts are called in the files, gate and up together, their module in transformers)
KINDS = {
    "qwen3_moe": ("model.layers.0.mlp.experts", ("gate_proj", "up_proj"), "model.layers.0.mlp.experts"),
    "mixtral": ("model.layers.0.block_sparse_moe.experts", ("w1", "w3"), "model.layers.0.mlp.experts"),
    "nemotron_h": ("backbone.layers.0.mixer.experts", ("up_proj",), "model.layers.0.mixer.experts"),
}


def adapter_of(model, module, others):
    """A random adapter on these stacked experts and linear layers, under PEFT's names."""
    generator = torch.Generator().manual_seed(0)
    experts = model.get_submodule(module)
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    stems = {f"{module}.base_layer": getattr(experts, names[0]), module: experts.down_proj}
    weights = {}
    for stem, matrix in stems.items():
        out, size = matrix.shape[1:] if not experts.is_transposed else matrix.shape[:0:-1]
        weights[PREFIX + stem + DOWN] = torch.randn(RANK * EXPERTS, size, generator=generator)
        weights[PREFIX + stem + UP] = torch.randn(out, RANK * EXPERTS, generator=generator)
    for name in others:
        weights[PREFIX + name + DOWN] = torch.randn(RANK, 16, generator=generator)
        weights[PREFIX + name + UP] = torch.randn(16, RANK, generator=generator)
    config = {"target_parameters": [*(f"{module}.{name}" for name in names), "model.layers.0.mlp.gate.weight"]}
    return Adapter(version=1, weights=weights, config=config)


def products(adapter, stem):
    """B A of each expert `[experts, out, in]`, as PEFT's layer reads the two."""
    down, up = (adapter.weights[PREFIX + stem + ending] for ending in (DOWN, UP))
    return torch.einsum("ore,eri->eoi", up.view(len(up), -1, EXPERTS), down.view(EXPERTS, -1, down.shape[1]))


@pytest.mark.filterwarnings("ignore")
def test_each_expert_has_the_products_that_the_stack_has_for_it(tmp_path):
    for kind, (outside, fused, module) in KINDS.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
        config = model.config
        config.architectures = [type(model).__name__]
        config.save_pretrained(tmp_path / kind)
        others = ("model.layers.0.self_attn.q_proj",) if kind != "nemotron_h" else ()
        adapter = adapter_of(model, module, others)
        found = one_by_one(adapter, str(tmp_path / kind))
        first, last = products(adapter, f"{module}.base_layer"), products(adapter, module)
        down_name = "w2" if kind == "mixtral" else "down_proj"
        assert len(found.weights) == 2 * (EXPERTS * (len(fused) + 1) + len(others)), kind
        for expert in range(EXPERTS):
            expected = dict(zip(fused, first[expert].chunk(len(fused)), strict=True)) | {down_name: last[expert]}
            for name, product in expected.items():
                stem = f"{PREFIX}{outside}.{expert}.{name}"
                torch.testing.assert_close(found.weights[stem + UP] @ found.weights[stem + DOWN], product)
        for name in others:
            assert torch.equal(found.weights[PREFIX + name + DOWN], adapter.weights[PREFIX + name + DOWN])


@pytest.mark.filterwarnings("ignore")
def test_families_whose_files_hold_stacks_keep_pefts_form(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    adapter = adapter_of(model, "model.layers.0.mlp.experts", ())
    assert one_by_one(adapter, str(tmp_path)) is adapter
