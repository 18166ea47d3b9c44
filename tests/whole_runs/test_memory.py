"""A critic costs an adapter, not a network: PPO's peak memory beside GRPO's on the same batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from run_processes import Nursery
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

pytestmark = pytest.mark.slow

LIMIT = 1.15


@pytest.fixture(scope="module")
def larger_model(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, Qwen2-shaped, 13M parameters: activations outweigh what Python and torch take."""
    folder = tmp_path_factory.mktemp("larger")
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=272,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def peak_bytes(forks: Nursery, folder: Path, model: Path, *keys: str) -> int:
    """The most memory of a process that trains a step of 64 completions of 48 tokens in one micro-batch."""
    words = [
        *("train", "+recipe=grpo_arithmetic", f"model.path={model}", "steps=1"),
        *("prompts_per_step=8", "eval.every=0", "checkpoint.every=0", "console=null", "token_budget=16384"),
        *("algorithm.kl_coef=0.01", "snapshot.reference=base", f"hydra.run.dir={folder}", *keys),
    ]
    done = forks.run(*words, cwd=folder.parent)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["tokens/completion"] > 2000, "random weights seldom end a completion"
    return lines[-1]["memory/peak_bytes"]


def test_a_critic_adapter_adds_little_to_the_peak_memory(forks: Nursery, larger_model: Path, tmp_path: Path) -> None:
    grpo = peak_bytes(forks, tmp_path / "grpo", larger_model)
    ppo = peak_bytes(forks, tmp_path / "ppo", larger_model, "algorithm=ppo", "critic.kind=adapter")
    print(f"peak memory: GRPO {grpo / 1e9:.2f} GB, PPO {ppo / 1e9:.2f} GB, ratio {ppo / grpo:.3f}")
    assert grpo > 0.9e9, "more than half of it must be the batch's: a fork has 0.3 GB of its own"
    assert ppo <= LIMIT * grpo
