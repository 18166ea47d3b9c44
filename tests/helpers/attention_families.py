"""Tiny random models of the families with softmax attention, whose windows are shorter than the prompts of tests."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
LATENT = EXPERTS | {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
WINDOW = {"sliding_window": 4}
QUICK: dict[str, dict[str, Any]] = {
    "cohere2": WINDOW,  # no positions in full layers, scaled logits, parallel branches
    "deepseek_v3": LATENT,  # narrower heads of values
    "diffllama": {},  # two attentions in a layer
    "exaone4": WINDOW,
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0} | WINDOW,
    "glm4": {},  # partial rotary positions
    "gpt_oss": {"head_dim": 16} | EXPERTS | WINDOW,  # sinks
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.4},
    "olmo3": WINDOW,  # norms of whole queries and keys
}
"""{model type: fields of its config}. Windows are shorter than prompts and than completions."""
ANY: dict[str, Any] = {
    **EXPERTS, **WINDOW, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 8, "no_rope_layers": [1, 0, 1],
    "moe_num_experts": 4, "n_group": 1, "topk_group": 1, "ffn_dim": 40, "word_embed_proj_dim": 32,
    "logits_scaling": 3.0, "attn_logit_softcapping": 0.5,
}  # fmt: skip
"""Fields of the families in OTHERS: a config takes no notice of those that it does not have."""
PLAIN = """
apertus arcee bitnet cohere ernie4_5 gemma4_text glm gpt_neox ministral3 nanochat olmo olmo2 persimmon phi
afmoe cwm ernie4_5_moe gemma3_text glm4_moe granitemoe helium hunyuan_v1_dense hunyuan_v1_moe minimax_m2 mistral
mixtral olmoe opt phi3 phimoe qwen2 seed_oss smollm3 starcoder2 vaultgemma"""
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(PLAIN.split(), ANY),
    **dict.fromkeys(("deepseek_v2", "glm4_moe_lite", "youtu"), ANY | LATENT),
}


def random_model(kind: str, fields: dict[str, Any], attention: str | None = "eager") -> Any:
    """A random model of this type in float32, with no weight at a value that hides it; attention: None: its usual."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SIZES | fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, biases, those of convolutions too, and sinks
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.requires_grad_(False).eval()
