"""The main job on local files, through the real vLLM engine: nothing overridden but where model and data lie."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

PROBLEMS = Path(__file__).parent / "data" / "gsm8k_mini"


def run(folder, *arguments):
    command = [sys.executable, "-m", "rlft.cli", "train", "+recipe=grpo_gsm8k", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def brief_path(long_context_path, tmp_path):
    """The same model, more likely to end at every token: the recipe's 768 tokens a completion take minutes on a CPU."""
    folder = tmp_path / "brief"
    shutil.copytree(long_context_path, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids = tokenizer((PROBLEMS / "train.jsonl").read_text()[:1000], return_tensors="pt").input_ids
    with torch.no_grad():
        mean = model.model(token_ids).last_hidden_state[0].mean(0)
        # Input and output embeddings are one matrix: the logit of the end rises by 6 where the state is the mean one.
        model.get_input_embeddings().weight[tokenizer.eos_token_id] += 6 * mean / mean.norm() ** 2
    model.save_pretrained(folder)
    return folder


def test_the_recipe_runs_on_local_files_with_two_paths_overridden(tmp_path, brief_path):
    assert len((PROBLEMS / "train.jsonl").read_text().splitlines()) >= 20
    result = run(tmp_path, f"model.path={brief_path}", f"data.path={PROBLEMS}", "steps=1")
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs" / "grpo_gsm8k").iterdir()
    metrics = json.loads((folder / "metrics.jsonl").read_text())
    assert metrics["step"] == 1
    # The recipe's two rewards were scored, and every completion of 32 x 8 was sampled by version 0 through vLLM.
    assert {"reward/math", "reward/format"} <= metrics.keys()
    rollouts = [json.loads(line) for line in (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(rollouts) == 32 * 8
    assert {r["policy_version"] for r in rollouts} == {0}
    assert (folder / "checkpoints" / "step_000001" / "policy" / "adapter_model.safetensors").is_file()


def test_without_network_and_files_it_stops_at_once_and_names_both_paths(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run(tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 2
    assert "model.path" in result.stderr
    assert "data.path" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert after.ru_utime - before.ru_utime < 15, "seconds of processor time"
    assert not (tmp_path / "runs").exists()
