"""Whole runs with agents from outside: killed and resumed, they are one run, whatever the agents look at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from run_folders import check_same
from run_processes import Nursery

pytestmark = pytest.mark.slow

KEYS = (
    "+recipe=grpo_arithmetic", "steps=4", "prompts_per_step=4", "group_size=2", "generation=transformers",
    "generation.max_tokens=24", "model.device=cpu", "lora.rank=2", "data.size=64", "data.held_out_size=8",
    "eval.every=2", "eval.num_prompts=2", "eval.num_samples=1", "scoring.workers=0", "console=null",
    "reward=[exact_match]", "environment=endpoint", "environment.agent=endpoint_agents.by_the_clock",
    "environment.workers=2", "checkpoint.every=2", "checkpoint.keep=99",
)  # fmt: skip
UPDATE = "rlft.trainer.optimizer:Optimizer.update"


def test_a_run_with_an_agent_by_the_clock_is_the_same_killed_and_resumed(forks: Nursery, tmp_path: Path) -> None:
    """Killed in the update of its last step, with a checkpoint of two: the two behind that are repeated as they were.
    Then once more without the last checkpoint."""
    killed = forks.start(
        "train", *KEYS, "hydra.run.dir=run", cwd=tmp_path, events=[{"at": UPDATE, "call": 4, "do": "kill"}]
    )
    ended = killed.wait()
    assert ended.code == -9, ended.err
    run = tmp_path / "run"
    third = (run / "rollouts/step_000003.jsonl").read_bytes()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 < line["reward/turns"] < 1 for line in lines)
    silent = [line for line in map(json.loads, third.decode().splitlines()) if not any(line.get("mask", [1]))]
    assert 0 < len(silent) < 8  # of prompts for which the agent asks nothing: nothing of them is trained
    traces = sorted(file.name for file in (run / "traces").iterdir())
    assert len(traces) == 6  # of four steps and the evaluations before the first and behind the second
    done = forks.run("resume", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (run / "rollouts/step_000003.jsonl").read_bytes() == third
    traces = sorted((run / "traces").iterdir())
    done = forks.run("eval", "run=run", "eval.num_prompts=3", "eval.num_samples=1", cwd=tmp_path)
    assert done.code == 0, done.err
    assert sorted((run / "traces").iterdir()) == traces  # an evaluation by itself is not the run's
    shutil.copytree(run, tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step_000004")
    done = forks.run("resume", "again", cwd=tmp_path)
    assert done.code == 0, done.err
    check_same(tmp_path / "again", run)
    shutil.rmtree(tmp_path / "again/checkpoints/step_000004")
    shutil.rmtree(tmp_path / "again/traces")  # without them it is another run
    assert forks.run("resume", "again", cwd=tmp_path).code == 0
    assert (tmp_path / "again/rollouts/step_000003.jsonl").read_bytes() != third


def test_an_overlapped_run_with_an_agent_by_the_clock_is_the_same_killed_and_resumed(
    forks: Nursery, tmp_path: Path
) -> None:
    """Killed in the update of its last step, while the last checkpoint is of two steps and a third is sampled."""
    overlapped = ("overlap.lag=1", "algorithm.mismatch=token_truncate", "eval.every=0", "hydra.run.dir=run")
    keys = [key for key in KEYS if key != "eval.every=2"]
    killed = forks.start(
        "train", *keys, *overlapped, cwd=tmp_path, events=[{"at": UPDATE, "call": 4, "do": "kill"}]
    ).wait()
    assert killed.code == -9, killed.err
    run = tmp_path / "run"
    traces = {file.name: file.read_bytes() for file in (run / "traces").iterdir()}
    assert sorted(name[:14] for name in traces) == [f"version_{version:06d}" for version in (0, 0, 1, 2)]
    third = (run / "rollouts/step_000003.jsonl").read_bytes()
    done = forks.run("resume", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (run / "rollouts/step_000003.jsonl").read_bytes() == third
    assert {file.name: file.read_bytes() for file in (run / "traces").iterdir()} == traces
    shutil.copytree(run, tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step_000004")
    done = forks.run("resume", "again", cwd=tmp_path)
    assert done.code == 0, done.err
    check_same(tmp_path / "again", run)
