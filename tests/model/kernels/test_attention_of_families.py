"""Softmax attention of any kind in packed rows and in decoding: tiny random models against their own eager rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slow_cases import slow
from transformers import AutoConfig, AutoModelForCausalLM

from rlft.config.model import KernelChoice
from rlft.model.forward import choose
from rlft.model.kernels import selection
from rlft.model.kernels.prefix_cache import open_prefix_cache

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = EXPERTS | {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
WINDOW = {"sliding_window": 4}
CAPPED = {"head_dim": 16, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}

QUICK: dict[str, dict[str, Any]] = {
    "cohere2": WINDOW,  # no positions in full layers, scaled logits, parallel branches
    "deepseek_v3": LATENT,  # narrower heads of values
    "diffllama": {},  # two attentions in a layer
    "exaone4": WINDOW,
    "gemma2": CAPPED | WINDOW,
    "glm4": {},  # partial rotary positions
    "gpt_oss": {"head_dim": 16} | EXPERTS | WINDOW,  # sinks
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.4},
    "olmo3": WINDOW,  # norms of whole queries and keys
}
OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": {"head_dim": 8} | WINDOW,
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cwm": WINDOW,
    "deepseek_v2": LATENT,
    "ernie4_5": {},
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4},
    "gemma3_text": {"head_dim": 16} | WINDOW,
    "gemma4_text": {},
    "glm": {},
    "glm4_moe": EXPERTS | {"n_group": 1, "topk_group": 1, "head_dim": 8},
    "glm4_moe_lite": LATENT,
    "gpt_neox": {},
    "granitemoe": EXPERTS | {"logits_scaling": 3.0},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": EXPERTS | {"head_dim": 8},
    "minimax_m2": EXPERTS | {"head_dim": 8},
    "ministral3": {},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1} | WINDOW,
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 5},
    "phimoe": {"num_local_experts": 2} | WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1} | WINDOW,
    "seed_oss": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": {"sliding_window": 5},
    "vaultgemma": {"head_dim": 16, "attn_logit_softcapping": 0.5} | WINDOW,
    "youtu": LATENT,
}
"""{model type: fields of its config}. Windows are shorter than prompts and than completions."""

PROMPTS = [[3, 17, 5, 99, 42, 8, 23], [11, 4, 9]]
COMPLETIONS = [[[9, 30, 31, 2, 55, 7], [70, 71, 72, 73, 74, 75]], [[61, 80, 81, 82, 83, 84], [12, 13, 14, 15, 16, 17]]]


def random_model(kind: str, fields: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SIZES | fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, biases and sinks
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.requires_grad_(False).eval()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [*QUICK.items(), *(slow(kind, fields) for kind, fields in OTHERS.items())],
    ids=[*QUICK, *OTHERS],
)
def test_packed_rows_and_decoding_are_the_models_own_eager_rows(kind, fields, make_batch, plain) -> None:
    model = random_model(kind, fields)
    batch = make_batch(
        [(u, prompt, own) for u, prompt in enumerate(PROMPTS) for own in [*COMPLETIONS[u], COMPLETIONS[u][0][:1]]]
    )
    weights = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(1))
    embedding = model.get_input_embeddings().weight.requires_grad_()
    expected, _ = plain(model, batch)
    [slope] = torch.autograd.grad((weights * expected).sum(), embedding)

    kernels = selection.install(model, KernelChoice.auto, own_attention=True)
    forward = choose(model, kernels)
    assert forward.packed, forward.reason
    found = forward(batch, 1.0).logprobs
    [own_slope] = torch.autograd.grad((weights * found).sum(), embedding)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(own_slope / slope.abs().max(), slope / slope.abs().max(), rtol=0, atol=1e-3)

    rows = torch.tensor([own for group in COMPLETIONS for own in group])
    with torch.no_grad():
        cache = open_prefix_cache(forward, PROMPTS, rows.shape[1])
        assert cache is not None
        logits = [cache.prefill(2), *(cache.step(tokens) for tokens in rows.t()[:-1])]
    decoded = torch.stack(logits, 1).log_softmax(-1).gather(-1, rows[..., None])[..., 0]
    sampled = expected[[0, 1, 3, 4]]
    torch.testing.assert_close(decoded, sampled[sampled != 0].view_as(decoded), rtol=0, atol=1e-4)
