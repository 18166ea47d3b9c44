"""What the machine, the engine and the model's own config settle: `algorithm.mismatch: auto`, and shared tokens."""

import re
from contextlib import nullcontext

import pytest
from attention_families import EXPERTS, LATENT, SIZES
from in_one_test import each
from transformers import AutoConfig

from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.config.resolved import build, resolve, with_token_budget
from rlft.plan.model_rules import check_shared_tokens, resolve_mismatch
from rlft.types import UserError

CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
TRUNCATED_BY_TOKEN = ["grpo", "dapo", "cispo", "sapo", "rloo", "reinforce", "ppo", "a2c", "opd"]
OF_COMPLETIONS = {"gspo": "sequence_truncate", "gmpo": "sequence_truncate", "kimi": "off"}


def mode_of(words, engine, itemsize=2):
    config = build(with_token_budget(compose(words), gpu=False))
    algorithm = instantiate(config.algorithm, "algorithm")
    assert not algorithm.corrects_mismatch or "algorithm.mismatch=" in " ".join(words)
    return resolve_mismatch(config, algorithm, engine, itemsize=itemsize).mismatch


def test_each_algorithm_corrects_what_vllm_rounds_in_16_bits_by_token_where_it_can():
    for name in TRUNCATED_BY_TOKEN:
        assert mode_of([f"algorithm={name}"], "vllm") == "token_truncate", name
    for name, mode in OF_COMPLETIONS.items():
        assert mode_of([f"algorithm={name}"], "vllm") == mode, name


@each(
    ("words", "engine", "itemsize", "mode"),
    [
        ([], "vllm", 4, "off"),  # float32 on both sides
        ([], "vllm", 8, "off"),
        (["+generation.vllm.options.kv_cache_dtype=fp8"], "vllm", 4, "token_truncate"),
        ([], "transformers", 2, "off"),  # the trainer's own base
        (["generation.transformers.weights=merged"], "transformers", 4, "off"),
        (["generation.transformers.weights=merged_bfloat16"], "transformers", 4, "token_truncate"),
        (["generation.transformers.weights=merged_int8"], "transformers", 4, "token_truncate"),
        (["generation.transformers.weights=adapted_bfloat16"], "transformers", 4, "off"),  # as in older runs
        ([], "scripted", 2, "off"),  # canned log-probs
        (["generation.top_p=0.9"], "vllm", 2, "off"),  # a correction needs undistorted sampling
        (["generation.top_k=50"], "vllm", 2, "off"),
        (["snapshot.old=sampled"], "vllm", 2, "off"),  # the engine's log-probs are taken for the trainer's
        (["algorithm.mismatch=off"], "vllm", 2, "off"),
        (["algorithm.mismatch=sequence_mask"], "vllm", 2, "sequence_mask"),
        (["algorithm.mismatch=sequence_mask"], "transformers", 4, "sequence_mask"),
    ],
)
def test_auto_depends_on_engine_dtype_and_sampling(words, engine, itemsize, mode):
    assert mode_of(words, engine, itemsize) == mode


def test_the_plan_of_a_16_bit_run_has_the_row_and_that_of_a_float32_run_has_none(monkeypatch):
    monkeypatch.setattr("rlft.plan.model_rules.choose_engine", lambda *_, **__: ("vllm", "as asked"))
    words = ["generation=vllm", "model.device=cpu", "data.size=16", "data.held_out_size=8"]
    why = "engine and trainer compute log-probs in 16 bits or fewer, each with its own roundings"
    for dtype, rows in (("float32", []), ("bfloat16", [("mismatch", "token_truncate", why)])):
        plan = resolve(compose([*words, f"model.dtype={dtype}"])).plan(runs_here=False)
        assert plan._mismatch_rows() == rows
        assert plan.algorithm.corrects_mismatch == bool(rows)


@each(
    ("kind", "fields", "problem"),
    [
        ("lfm2", {**CONVOLUTIONS, "hidden_size": 36, "num_attention_heads": 6},
         "of a lfm2 (6 heads, 2 of keys and 36 channels), got 4; use one of 1, 2, 6"),
        ("lfm2", CONVOLUTIONS, None),
        ("mamba2", {"num_heads": 8, "head_dim": 8}, "a mamba2 has recurrent layers whose heads ranks cannot divide"),
        ("bloom", {"n_head": 4}, "divides packed rows, and BloomForCausalLM has an attention of its own"),
        ("qwen2", {"num_attention_heads": 6, "hidden_size": 36},
         "of a qwen2 (6 heads, 2 of keys), got 4; use one of 1, 2, 6"),
        ("deepseek_v3", LATENT, None),
        ("gemma2", {}, None),
        ("gpt_oss", EXPERTS, None),
    ],
)  # fmt: skip
def test_tokens_are_shared_where_layers_need_nothing_else_of_each_other(kind, fields, problem):
    config = resolve(compose(["+recipe=grpo_arithmetic", "cluster.ranks=4", "cluster.sequence_ranks=4"])).config
    model = AutoConfig.for_model(kind, **SIZES | fields)
    with nullcontext() if problem is None else pytest.raises(UserError, match=re.escape(problem)):
        check_shared_tokens(config, model)
