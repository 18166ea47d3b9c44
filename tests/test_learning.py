"""The demo's promise, as the demo runs it: three seeds of the recipe, nothing overridden."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demo_learns_with_three_seeds_in_two_minutes_each(tmp_path: Path) -> None:
    arguments = ["train", "-m", "+recipe=grpo_arithmetic", "seed=0,1,2", f"hydra.sweep.dir={tmp_path}"]
    result = subprocess.run(
        [sys.executable, "-m", "rlft.cli", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    with (tmp_path / "sweep.csv").open() as stream:
        jobs = list(csv.DictReader(stream))
    assert sorted(job["seed"] for job in jobs) == ["0", "1", "2"]
    for job in jobs:
        assert float(job["accuracy_before"]) <= 0.55
        assert float(job["accuracy"]) >= 0.90
        # time/step of all steps: sampling, scoring and training, evaluations aside. About 20 s on two quiet cores.
        assert float(job["seconds"]) <= 120
    assert {float(job["accuracy_before"]) for job in jobs} != {float(jobs[0]["accuracy_before"])}, "seeds do something"
    files = [*tmp_path.rglob("metrics.jsonl"), *tmp_path.rglob("eval.jsonl")]
    assert len(files) == 6
    assert not [file for file in files if "alarm/" in file.read_text()], "a healthy run raises no alarm"


@pytest.mark.slow
def test_the_base_has_something_to_learn_in_answers_and_in_format(tmp_path: Path) -> None:
    arguments = [
        "eval",
        "model.path=embedded:tiny-arithmetic",
        "generation.max_tokens=48",
        "prompts.max_tokens=64",
        "eval.num_prompts=256",
        "eval.num_samples=8",
    ]
    result = subprocess.run(
        [sys.executable, "-m", "rlft.cli", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (file,) = (tmp_path / "runs" / "eval").rglob("*.jsonl")
    metrics = json.loads(file.read_text().splitlines()[0])
    assert 0.30 <= metrics["eval/exact_match"] <= 0.55
    assert metrics["eval/pass@8"] >= 0.95
    assert 0.60 <= metrics["eval/reward/format"] <= 0.90
