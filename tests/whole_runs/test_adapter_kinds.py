"""Runs of DoRA adapters with rsLoRA's scale, by Muon and in this process: resumed, exported, begun from each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_folders import check_same, learned
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft import cli
from rlft.batch import score_sequences
from rlft.config.instantiate import from_mapping
from rlft.config.schema import RunConfig
from rlft.model.backbone import load_backbone
from rlft.model.roles import policy_alone
from rlft.runs import checkpoint, run_folder

BOTH = ("lora.use_dora=true", "lora.use_rslora=true", "lora.rank=4", "lora.alpha=8", "model.device=cpu")
WORDS = (
    "train", "+recipe=ppo_arithmetic", *BOTH, "critic.kind=adapter", "snapshot.reference=ema",
    "snapshot.ema_decay=0.9", "trainer.optimizer=muon",
    "algorithm.kl_coef=0.02", "trainer.lr=0.02", "critic.lr=0.01", "prompts_per_step=2",
    "group_size=4", "generation=transformers", "generation.max_tokens=12", "eval.every=2", "eval.num_prompts=2",
    "eval.num_samples=2", "scoring.workers=0", "console=null",
    "generation.stop=['=']", "checkpoint.every=1", "checkpoint.keep=99",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps without an interruption; the freshness check has passed after each."""
    folder = tmp_path_factory.mktemp("kinds") / "run"
    assert cli.run([*WORDS, "steps=4", f"hydra.run.dir={folder}"]) == 0
    assert learned(folder)
    return folder


@pytest.mark.slow
def test_resumed_it_is_the_same_run(run: Path, tmp_path: Path) -> None:
    halted = tmp_path / "halted"
    assert cli.run([*WORDS, "steps=2", f"hydra.run.dir={halted}"]) == 0
    assert cli.run(["resume", str(halted), "steps=4"]) == 0
    check_same(halted, run)


@pytest.mark.slow
def test_merged_it_says_what_the_trainer_says(run: Path, tmp_path: Path) -> None:
    assert cli.run(["export", f"run={run}", f"out={tmp_path / 'merged'}"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ids = tokenizer("What is 47 + 85? <think>47 + 85 = 132</think><answer>132</answer>")["input_ids"]
    plain = run_folder.read(run)
    plain.pop(run_folder.ORIGIN)
    config: RunConfig = from_mapping(RunConfig, {**plain, "token_budget": 4096}, "")
    saved = checkpoint.load_newest(run_folder.checkpoints(run), print)
    assert saved is not None
    roles = policy_alone(load_backbone(config.model), config.lora, token_budget=4096, seed=0)
    [base] = roles.score([ids])
    roles.restore({"policy": saved.adapters["policy"]})
    [expected] = roles.score([ids])
    roles.close()
    with torch.no_grad():
        found = score_sequences(merged, [ids], torch.device("cpu"))[0]
    assert max(abs(a - b) for a, b in zip(expected, base, strict=True)) > 0.1, "there is something to lose"
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_it_samples_and_is_evaluated_as_itself(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["generation.max_tokens=24", "scoring.workers=0"]
    assert cli.run(["eval", f"run={run}", "eval.num_prompts=3", "eval.num_samples=2", *few]) == 0
    sampled = tmp_path / "sampled"
    # The policy is published to the engine and must prove that it arrived (`freshness`).
    assert cli.run(["sample", f"run={run}", "num_prompts=3", "n=2", *few, f"hydra.run.dir={sampled}"]) == 0
    assert len((sampled / "samples.jsonl").read_text().splitlines()) > 0


@pytest.mark.parametrize("command", ["sft", slow("rm")])
def test_supervised_commands_learn_such_adapters(command: str, tmp_path: Path) -> None:
    words = [f"+recipe={command}_arithmetic", *BOTH, "steps=2", "console=null", "eval.every=0", "checkpoint.every=0"]
    assert cli.run([command, *words, f"hydra.run.dir={tmp_path / command}"]) == 0
    saved = checkpoint.load_newest(run_folder.checkpoints(tmp_path / command), print)
    assert saved is not None
    [weights] = saved.adapters.values()
    magnitudes = [weight for name, weight in weights.items() if "magnitude" in name]
    assert len(magnitudes) == 28
