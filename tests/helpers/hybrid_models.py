"""Tiny random models of the families with recurrent layers, with the vocabulary of the embedded model."""

from typing import Any

import attention_families
from mixtures import MANY
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

VOCABULARY = 272

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "head_dim": 16, "layer_types": LAYERS, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SHORT_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 48}
STATES = {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8, "expand": 2}

HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": MAMBA_2 | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA_2 | {"mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "granitemoehybrid": MAMBA_2
    | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "shared_intermediate_size": 16},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "kimi_linear": {
        "layer_types": LAYERS, "linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "lfm2": SHORT_CONVOLUTIONS,
    "lfm2_moe": SHORT_CONVOLUTIONS | MANY | {"num_dense_layers": 1},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": STATES,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"], "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": DELTA,
    "qwen3_5_moe_text": DELTA | MANY,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | MANY,
    "zaya": {},
}  # fmt: skip
"""{model type: fields of its config}. zamba2 is not here: its decoding in transformers leaves out a limit on steps."""


def known() -> list[str]:
    """Those of these families that this release of transformers has."""
    return [kind for kind in HYBRIDS if kind in CONFIG_MAPPING_NAMES]


def random_model(kind: str, **fields: Any) -> Any:
    """A random model of this type."""
    return attention_families.random_model(kind, SIZES | HYBRIDS.get(kind, {}) | fields, attention=None)
