"""Arguments of vLLM's engine that are passed through, and those that are refused, by name and without an import."""

import sys
from pathlib import Path

import pytest
from in_one_test import each
from real_engines import vllm_engine

from rlft import cli
from rlft.config.suggest import refused_settings
from rlft.generation.vllm import options
from rlft.generation.vllm.engine import ROUNDING

WORDS = ["train", "+recipe=grpo_arithmetic", "generation=vllm", "model.device=cpu", "hydra.run.dir=run"]
FREE = ("quantization", "kv_cache_dtype", "speculative_config", "max_num_batched_tokens", "attention_backend")


@each(("words", "line"), [
    (".model=x", ".model: is set by rlft, got x; set model.path"),
    (".max_num_seqs=3", ".max_num_seqs: is set by rlft, got 3; set generation.vllm.max_num_seqs"),
    (".tensor_parallel_size=2",
     ".tensor_parallel_size: would start processes that can outlive the run, got 2; leave it out"),
    (".kv_cache_dtpe=fp8",
     ".kv_cache_dtpe: vLLM's engine has no such argument, got fp8; did you mean kv_cache_dtype?"),
    ("=3", ": "),
    ("=null", ": "),
])  # fmt: skip
def test_what_is_no_free_argument_is_refused_by_name(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    assert cli.run([*WORDS, f"{'+' * words.startswith('.')}generation.vllm.options{words}"]) == 2
    assert capsys.readouterr().err.startswith(f"rlft: generation.vllm.options{line}")
    assert not Path("run").exists()


def test_free_arguments_are_taken_and_say_whether_they_round():
    for name in FREE:
        vllm_engine(options={name: "x"}).check(plain_kernels=False)
    assert vllm_engine(options={"kv_cache_dtype": "fp8"}).rounds
    assert not vllm_engine(options={"attention_backend": "FLASH_ATTN"}).rounds


def test_the_list_is_that_of_the_installed_vllm():
    options.arguments.cache_clear()
    before = "vllm" in sys.modules
    assert set(FREE) < set(options.arguments())
    assert ("vllm" in sys.modules) == before, "nothing of it is imported"
    assert {*refused_settings("vllm"), *ROUNDING} <= set(options.arguments())
    assert not set(FREE) & {*refused_settings("vllm")}


def test_without_vllm_only_what_rlft_sets_is_refused(monkeypatch):
    options.arguments.cache_clear()
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    try:
        options.check_options({"who_knows": 1})
        with pytest.raises(options.UserError, match=r"^options\.seed: is set by rlft, got 1; set seed$"):
            options.check_options({"seed": 1})
    finally:
        options.arguments.cache_clear()


def test_modules_whose_adapters_vllm_cannot_merge_are_named():
    attention = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.gate"]
    engine = vllm_engine(weights="copy")
    assert engine.unserved(lambda: attention) is None
    stacked = engine.unserved(lambda: [*attention, "a.mlp.experts"])
    assert "stacked experts are not copied (a.mlp.experts)" in str(stacked)
    assert vllm_engine().unserved(lambda: [*attention, "a.mlp.experts"]) is None
