"""Whole runs of families with recurrent layers: what is sampled is what transformers computes of whole rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import hybrid_models
import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft import cli

pytestmark = pytest.mark.slow

KEYS = (
    "steps=2", "prompts_per_step=2", "group_size=3", "generation=transformers", "generation.max_tokens=10",
    "lora.rank=2", "data.size=16", "data.held_out_size=4", "eval.every=0", "model.device=cpu", "scoring.workers=0",
    "console=null", "trainer.lr=0.03", "reward=[varied]", "checkpoint.every=1", "checkpoint.keep=9",
)  # fmt: skip


@pytest.fixture
def train(tmp_path: Path, tiny_path: Path, varied_reward: Path) -> Callable[..., Path]:
    """Runs `rlft train` on a random model of this type, with a reward that varies; returns the run's folder."""

    def run(kind: str, code: int = 0) -> Path:
        folder = tmp_path / kind
        hybrid_models.random_model(kind).save_pretrained(folder / "model")
        for file in tiny_path.glob("*token*"):
            shutil.copy(file, folder / "model")
        for file in tiny_path.glob("*.jinja"):
            shutil.copy(file, folder / "model")
        words = [f"model.path={folder / 'model'}", f"hydra.run.dir={folder / 'run'}"]
        assert cli.run(["train", "--config-dir", str(varied_reward), *KEYS, *words]) == code, kind
        return folder

    return run


def test_every_family_with_recurrent_layers_trains_and_agrees_with_transformers(train) -> None:
    kinds = hybrid_models.known()
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert release < (5, 19) or kinds == list(hybrid_models.HYBRIDS), "a release that has all of them"
    for kind in kinds:
        folder = train(kind)
        metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        # The trainer's log-probs, of right-padded rows, against the engine's, of left-padded prompts and a cache.
        assert all(step["sampler/logprob_gap_max"] < 1e-4 for step in metrics), (kind, metrics)
        assert all(step["policy/grad_norm"] > 0 for step in metrics), kind
        base = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").eval()
        [adapter] = (folder / "run" / "checkpoints").glob("*1/policy")
        model = PeftModel.from_pretrained(base, str(adapter)).eval()
        [rollouts] = (folder / "run" / "rollouts").glob("*2.jsonl")
        moved = 0.0
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        for line in map(json.loads, rollouts.read_text().splitlines()):
            prompt = tokenizer.apply_chat_template(line["prompt"], add_generation_prompt=True, return_dict=False)
            row = torch.tensor([[*prompt, *line["token_ids"]]])
            with torch.no_grad():
                expected = of_row(model, row)[-len(line["token_ids"]) :]
                with model.disable_adapter():
                    moved = max(moved, (of_row(model, row)[-len(expected) :] - expected).abs().max().item())
            torch.testing.assert_close(torch.tensor(line["logprobs"]), expected, rtol=0, atol=1e-4, msg=kind)
        assert moved > 1e-2, f"the adapter of {kind} has an effect"


def of_row(model: PeftModel, row: torch.Tensor) -> torch.Tensor:
    """Log-probs of every token of a single row but the first."""
    logprobs = model(input_ids=row, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, row[0, 1:, None])[:, 0]


def test_a_model_without_a_cache_of_transformers_is_refused_before_weights_are_loaded(train, capsys) -> None:
    train("rwkv", code=2)
    said = capsys.readouterr().err
    problem = "decoding in the transformers engine needs a cache of transformers, which its class lacks"
    assert f"model.path: with a rwkv, {problem}" in said
