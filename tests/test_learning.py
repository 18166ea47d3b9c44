"""The demo's promise, as the demo runs it: the recipe, nothing overridden. benchmarks/results.md has more seeds."""

import json
from pathlib import Path

import psutil
import pytest

import rlft

pytestmark = pytest.mark.slow


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def evaluated(forks, folder, *words):
    """The metrics of this evaluation."""
    forks.run("eval", *words, cwd=folder, ends=0)
    (file,) = (folder / "runs" / "eval").rglob("*.jsonl")
    return lines(file)[0]


def test_the_demo_learns_in_two_minutes(forks, tmp_path):
    nursery = psutil.Process(forks.process.pid)
    before = nursery.cpu_times()
    forks.run("train", "+recipe=grpo_arithmetic", "hydra.run.dir=run", cwd=tmp_path, ends=0)
    # About 45 s. By the clock it depends on what else the machine does.
    after = nursery.cpu_times()
    assert after.children_user + after.children_system - before.children_user - before.children_system <= 120
    evaluations, steps = lines(tmp_path / "run" / "eval.jsonl"), lines(tmp_path / "run" / "metrics.jsonl")
    assert evaluations[0]["eval/exact_match"] <= 0.55
    assert evaluations[-1]["eval/exact_match"] >= 0.90
    assert not [line for line in (*evaluations, *steps) if any(key.startswith("alarm/") for key in line)], (
        "a healthy run raises no alarm"
    )


def test_the_base_has_something_to_learn_in_answers_and_in_format(forks, tmp_path):
    settings = ["generation.max_tokens=48", "prompts.max_tokens=64", "eval.num_prompts=256", "eval.num_samples=8"]
    metrics = evaluated(forks, tmp_path, "model.path=embedded:tiny-arithmetic", *settings)
    assert 0.30 <= metrics["eval/exact_match"] <= 0.55
    assert metrics["eval/pass@8"] >= 0.95
    assert 0.60 <= metrics["eval/reward/format"] <= 0.90


def test_chains_are_solved_seldom_in_one_attempt_and_mostly_in_sixteen(forks, tmp_path):
    folder = Path(rlft.__file__).parent / "assets" / "tiny-chains"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000
    metrics = evaluated(forks, tmp_path, "+recipe=grpo_chains", "eval.num_prompts=256", "eval.num_samples=16")
    assert 0.10 <= metrics["eval/exact_match"] <= 0.20
    # Who draws 16 answers of 0 to 20 at random has the right one among them with 1 - (20 / 21) ** 16 = 0.54.
    assert metrics["eval/pass@16"] >= 0.70
    assert 0.55 <= metrics["eval/reward/format"] <= 0.80
