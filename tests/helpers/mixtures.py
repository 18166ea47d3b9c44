"""Mixtures of experts by family: the fields that make one with four experts, of which a token goes to two."""

from typing import Any

MANY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
GATED = {"gate_proj", "up_proj", "down_proj"}
# type: (keys, kinds of layers that all-linear is besides attention, the router and other gates of experts)
FAMILIES: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "mixtral": (LOCAL, set(), {"gate"}),
    "qwen2_moe": (MANY, GATED, {"gate", "shared_expert_gate"}),
    "qwen3_moe": (MANY | {"mlp_only_layers": [1]}, GATED, {"gate"}),
    "qwen3_5_moe_text": (MANY | {"layer_types": ["full_attention"] * 2}, GATED, {"gate", "shared_expert_gate"}),
    "deepseek_v3": (ROUTED | LATENT, GATED, {"gate"}),
    "glm4_moe": (ROUTED, GATED, {"gate"}),
    "olmoe": (MANY, set(), {"gate"}),
    "gpt_oss": (LOCAL, set(), {"router"}),
    "ernie4_5_moe": ({"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}, GATED, {"gate"}),
    "minimax_m2": (LOCAL | {"rotary_dim": 8}, set(), {"gate"}),
    "granitemoe": (LOCAL, set(), {"router"}),
    "hunyuan_v1_moe": ({"num_experts": 4, "moe_topk": 2}, GATED, {"wg"}),
    "afmoe": (MANY | {"num_dense_layers": 1, "num_shared_experts": 1}, GATED, {"gate"}),
    "gemma4_text": (
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
         "hidden_size_per_layer_input": 0, "global_head_dim": 8}, GATED, {"proj"},
    ),
    "jamba": (
        {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 1, "attn_layer_offset": 0,
         "expert_layer_period": 1, "expert_layer_offset": 0}, set(), {"router"},
    ),
}  # fmt: skip
