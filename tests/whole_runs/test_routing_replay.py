"""Runs of a mixture of experts that replay its routing: killed, resumed and divided, they are one and the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_models import model_folder
from run_folders import check_same, check_so_far
from run_processes import Nursery, happens, marked

KEYS = (
    "steps=3", "prompts_per_step=3", "group_size=4", "minibatches=3", "generation=transformers",
    "generation.max_tokens=16", "generation.temperature=1.0", "model.device=cpu", "lora.rank=2", "lora.router=true",
    "trainer.lr=0.03", "data.size=64", "data.held_out_size=8", "eval.every=0", "scoring.workers=0", "logger=[jsonl]",
    "reward=length", "reward.length.mode=target", "reward.length.target=6", "cluster.lanes=2", "checkpoint.every=1",
    "checkpoint.keep=99", "overlap.lag=1", "algorithm.mismatch=token_truncate",
)  # fmt: skip
UPDATE = "rlft.trainer.optimizer:Optimizer.update"


@pytest.mark.slow
def test_a_replay_that_is_killed_and_goes_on_with_two_ranks_is_the_run_of_one_process(
    quiet: Nursery, rough: Nursery, tmp_path: Path
) -> None:
    """With a lag the experts of the step that was sampled ahead are in the checkpoint."""
    model_folder("qwen3_moe", tmp_path / "model")
    for source in ("engine", "old"):
        keys = (*KEYS, f"model.path={tmp_path / 'model'}", f"snapshot.routing={source}")
        serial, folder = tmp_path / f"serial-{source}", tmp_path / f"run-{source}"
        quiet.run("train", *keys, f"hydra.run.dir={serial}", cwd=tmp_path, ends=0)
        lines = [json.loads(line) for line in (serial / "metrics.jsonl").read_text().splitlines()]
        assert any(line["router/replaced"] > 0 for line in lines), lines
        assert all(line["router/replaced"] <= line["router/replaced_tokens"] <= 1 for line in lines)
        kill = {"at": UPDATE, "call": 5, "do": "kill"}
        started = rough.start("train", *keys, f"hydra.run.dir={folder}", cwd=tmp_path, events=[kill])
        done = started.wait()
        assert done.code == -9, done.err
        assert happens(lambda started=started: not marked(started.mark), within_s=60)
        check_so_far(folder, serial)
        rough.run("resume", str(folder), "cluster.ranks=2", cwd=tmp_path, ends=0)
        check_same(folder, serial)
