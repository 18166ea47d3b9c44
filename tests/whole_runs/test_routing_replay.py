"""Runs whose updates replay the experts that the engine or the old policy chose: interrupted = uninterrupted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mixtures import MANY
from run_folders import check_same, learned, metrics
from transformers import AutoTokenizer, OlmoeConfig, OlmoeForCausalLM

from rlft import cli

KEYS = (
    "prompts_per_step=2", "group_size=4", "minibatches=2", "generation=transformers", "generation.max_tokens=10",
    "lora.rank=2", "data.size=16", "data.held_out_size=4", "eval.every=1", "eval.num_prompts=2", "model.device=cpu",
    "scoring.workers=0", "console=null", "trainer.lr=0.1", "reward=[varied]", "checkpoint.every=1",
    "checkpoint.keep=9",
)  # fmt: skip


@pytest.fixture
def train(tmp_path: Path, tiny_path: Path, varied_reward: Path) -> Callable[..., Path]:
    """Runs `rlft train` on a random mixture of four experts, with a reward that varies; returns the run's folder."""
    model = tmp_path / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vocabulary = len(AutoTokenizer.from_pretrained(tiny_path))
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = OlmoeConfig(
            vocab_size=vocabulary, intermediate_size=16, initializer_range=0.2, max_position_embeddings=512,
            pad_token_id=None, bos_token_id=None, eos_token_id=None, **sizes, **MANY,
        )  # fmt: skip
        OlmoeForCausalLM(config).save_pretrained(model)
    for file in (*tiny_path.glob("*token*"), *tiny_path.glob("*.jinja")):
        shutil.copy(file, model)

    def run(name: str, *words: str) -> Path:
        places = [f"model.path={model}", f"hydra.run.dir={tmp_path / name}"]
        assert cli.run(["train", "--config-dir", str(varied_reward), *KEYS, *words, *places]) == 0
        return tmp_path / name

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("snapshot.routing=engine",),
        ("snapshot.routing=old",),
        ("snapshot.routing=old", "snapshot.old=copy"),
    ],
    ids=" ".join,
)
def test_resumed_it_is_the_same_run(train: Callable[..., Path], words: tuple[str, ...]) -> None:
    undisturbed = train("undisturbed", *words, "steps=2")
    halted = train("halted", *words, "steps=1")
    assert cli.run(["resume", str(halted), "steps=2"]) == 0
    check_same(halted, undisturbed)
    assert learned(undisturbed)
    replaced = [line["router/replaced_tokens"] for line in metrics(undisturbed)]
    assert max(replaced) > 0, "the policy moved within a step, so that it would have chosen other experts"


@pytest.mark.slow
def test_two_ranks_replay_the_same_experts(train: Callable[..., Path]) -> None:
    alone = train("alone", "snapshot.routing=engine", "steps=2", "cluster.lanes=2")
    both = train("both", "snapshot.routing=engine", "steps=2", "cluster.ranks=2")
    check_same(both, alone)
