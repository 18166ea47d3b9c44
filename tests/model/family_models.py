"""Tiny random models of every family of causal language models that transformers has, made by rules on field names."""

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

import rlft

TOKENIZER = Path(rlft.__file__).parent / "assets" / "tiny-arithmetic"
VOCABULARY, WINDOW, MOST_LAYERS = 272, 16, 4

COUNTS = "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks encoder_layers"
"""Fields with the number of layers, of which only one of each kind stays."""

SIZES = (
    ("vocab_size|.*_vocab_size|vocab_size_.*|encoder_hash_byte_group_vocab", VOCABULARY),
    ("max_.*position.*|n_positions|n_ctx|max_seq_len|context_length|model_max_length|rel_extent", 512),
    ("sliding_window|sliding_window_size|attention_chunk_size|window_size|attention_window_size|local_attention",
     WINDOW),
    ("floor_scale", 512),
    ("hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim|lru_width|hidden_size_global"
     "|backbone_hidden_size|mamba_d_ssm|input_embedding_size|output_embedding_size|out_hidden_size", 32),
    ("attention_hidden_size|mamba_d_ssm", 64),
    (".*num_attention_heads|n_heads?|attention_heads|.*_attention_heads|num_heads|num_query_groups|.*_num_value_heads"
     "|linear_num_heads|index_n_heads|.*mamba_heads|mamba_num_heads|mamba_n_heads", 4),
    ("num_key_value_heads|num_kv_heads|kv_n_heads|.*_num_key_heads|swa_num_key_value_heads", 2),
    ("head_dim|.*_head_dim|kv_channels|dim_head|d_head|mamba_d_head|mamba_headdim|attention_head_size|rotary_dim", 8),
    (".*intermediate_size.*|.*ffn_dim|.*ffn_hidden_size|d_inner|dff|dim_ff|feed_forward_size|router_hidden_size"
     "|hidden_size_per_layer_input|ple_embed_dim", 40),
    (".*_lora_rank|.*_rank|time_step_rank|hc_lowrank", 8),
    (".*num_experts|num_local_experts|n_routed_experts|zero_expert_num", 4),
    ("index_topk|indexer_budget|keep_window_size", 64),  # of fewer, several are equally good
    (".*experts_per_tok.*|moe_k|.*top_?k|num_experts_per_token", 2),
    ("n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups|o_groups|first_k_dense_replace"
     "|num_dense_layers", 1),
    (".*d_state|state_size|ssm_state_size|chunk_size|mamba_chunk_size|block_size|.*attn_chunk_length", 8),
    ("attn_layer_period|.*_interval|global_attn_every_n_layers|.*sliding_window_pattern", 2),
    ("attn_layer_offset|expert_layer_offset", 1),
)  # fmt: skip
"""(names, the largest value)."""

NEEDED = "head_dim num_key_value_heads n_routed_experts num_experts_per_tok n_group topk_group first_k_dense_replace"
"""Fields that some types leave open."""

BOTH_KINDS = ("sliding_attention", "full_attention")
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {
        "layer_types": [*BOTH_KINDS], "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]} for kind in BOTH_KINDS
        }, "logit_scale": 0.5,
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": [*BOTH_KINDS * 2], "num_kv_shared_layers": 2,
        "intermediate_size": [40] * 4, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {"per_layer_config": {1: {"head_dim": 16}}},
    "gemma4_unified_text": {"per_layer_config": {1: {"head_dim": 16}}},
    "granitemoehybrid": {"mamba_d_head": 16, "layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "inkling_text": {"logits_mup_width_multiplier": 2.0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [8, 24]},
    "rwkv": {"attention_hidden_size": 32},
    "smollm3": {"no_rope_layers": [1, 0]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "attention_head_dim": 16, "mamba_headdim": 16,
    },
}  # fmt: skip
"""{model type: fields that the rules cannot find}, of any config, also one inside another."""


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def shrink(config: PreTrainedConfig) -> None:
    """Makes this config, and no other inside it, as small as the rules say."""
    fields = dict(vars(config))
    number = next((fields[name] for name in COUNTS.split() if isinstance(fields.get(name), int)), 0)
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == number}
    kinds = [repr([lists[name][layer] for name in sorted(lists)]) for layer in range(number)]
    layers = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())[:MOST_LAYERS]
    layers = [*layers, *range(number)][: max(2, len(layers))]
    for name, value in fields.items():
        most = next((most for names, most in SIZES if re.fullmatch(names, name)), None)
        if name in COUNTS.split():
            setattr(config, name, len(layers))
        elif name in lists:
            setattr(config, name, [value[layer] for layer in layers])
        elif value is None and name in NEEDED.split():
            setattr(config, name, most)
        elif isinstance(value, int) and not isinstance(value, bool) and most is not None:
            setattr(config, name, min(value, most))
        if re.fullmatch(r".*token_(id|index)", name) and isinstance(value, int):
            setattr(config, name, 3 + value % 5)
    for name, value in {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.items():
        if name in fields:
            setattr(config, name, value)
    if fields.get("num_attention_heads") and fields.get("num_key_value_heads") == fields["num_attention_heads"]:
        config.num_key_value_heads = config.num_attention_heads


def tiny_config(kind: str) -> PreTrainedConfig:
    config = AutoConfig.for_model(kind)
    for part in parts_of(config):
        shrink(part)
        for name, value in OWN.get(part.model_type, {}).items():
            setattr(part, name, value)
    return config


def class_of(config: PreTrainedConfig) -> Any:
    """The class of transformers that real folders of this config hold."""
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None) or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def model_folder(kind: str, folder: Path) -> Path:
    """A folder with a random model of this family, no weight of which is at a value that hides it."""
    config = tiny_config(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = class_of(config)._from_config(copy.deepcopy(config))
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, those of convolutions too
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)  # some classes write into theirs
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


def families() -> list[str]:
    """The types of causal language models that this release of transformers has."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
