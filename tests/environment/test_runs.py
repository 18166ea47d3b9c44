"""Whole runs of conversations: killed, resumed and sampled by an engine of a process of its own, they are one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import check_same
from run_processes import Nursery

KEYS = (
    "+recipe=grpo_arithmetic", "steps=3", "prompts_per_step=2", "group_size=3", "generation=transformers",
    "generation.max_tokens=40", "model.device=cpu", "lora.rank=2", "data.size=64", "data.held_out_size=8",
    "eval.every=3", "eval.num_prompts=2", "eval.num_samples=1", "scoring.workers=0", "logger=[jsonl]",
    "reward=[exact_match]", "environment=game", "environment.factory=conversation_tools.Guessing",
    "environment.workers=1", "environment.turn_tokens=16", "checkpoint.every=1", "checkpoint.keep=99",
)  # fmt: skip
UPDATE = "rlft.trainer.optimizer:Optimizer.update"


@pytest.mark.slow
def test_a_run_of_conversations_is_the_same_killed_and_resumed_with_an_engine_apart(
    forks: Nursery, tmp_path: Path
) -> None:
    done = forks.run("train", *KEYS, "hydra.run.dir=whole", cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "whole/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert any(len(line["turns"]) == 2 and 0 in line["mask"] for line in lines), "some conversations have two turns"
    metrics = json.loads((tmp_path / "whole/metrics.jsonl").read_text().splitlines()[0])
    assert metrics["reward/turns"] > 0
    assert metrics["tokens/environment"] > 0
    killed = forks.start(
        "train", *KEYS, "hydra.run.dir=apart", cwd=tmp_path, events=[{"at": UPDATE, "call": 2, "do": "kill"}]
    )
    assert killed.wait().code == -9
    done = forks.run("resume", "apart", "cluster.engines=1", cwd=tmp_path)
    assert done.code == 0, done.err
    check_same(tmp_path / "apart", tmp_path / "whole")
