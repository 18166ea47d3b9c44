"""The main job on local files, through the real vLLM engine: nothing overridden but where model and data lie."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROBLEMS = Path(__file__).parent / "data" / "gsm8k_mini"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlft.cli", "train", "+recipe=grpo_gsm8k", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_the_recipe_runs_on_local_files_with_two_paths_overridden(tmp_path: Path, long_context_path: Path) -> None:
    assert len((PROBLEMS / "train.jsonl").read_text().splitlines()) >= 20
    result = run(tmp_path, f"model.path={long_context_path}", f"data.path={PROBLEMS}", "steps=1")
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


def test_without_network_and_files_it_stops_at_once_and_names_both_paths(tmp_path: Path) -> None:
    start = time.monotonic()
    result = run(tmp_path)
    seconds = time.monotonic() - start
    assert result.returncode == 2
    assert "model.path" in result.stderr
    assert "data.path" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert seconds < 15
    assert not (tmp_path / "runs").exists()
