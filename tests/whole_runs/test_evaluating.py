"""`rlft eval` of a run says what the run itself said of its last step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import tiny, whole_lines
from run_processes import Nursery


@pytest.mark.slow
def test_a_run_whose_reward_was_trained_in_the_loop_is_evaluated_with_the_trained_one(
    quiet: Nursery, tmp_path: Path
) -> None:
    keys = ("steps=2", "generation.max_tokens=32", "reward=[exact_match,format,learned]")
    keys = (*keys, "reward_model.refresh_every=2", "reward_model.labels=exact_match", "hydra.run.dir=run")
    quiet.run(*tiny(*keys), cwd=tmp_path, ends=0)
    last = json.loads(whole_lines(tmp_path / "run" / "eval.jsonl")[-1])
    assert last["step"] == 2
    assert last["eval/reward/learned"] != 0, "a fresh head scores 0: this one was trained"
    quiet.run("eval", "run=run", cwd=tmp_path, ends=0)
    [file] = (tmp_path / "run" / "evaluations").iterdir()
    again = json.loads(file.read_text().splitlines()[0])
    names = [name for name in last if name.startswith("eval/")]
    assert {name: again[name] for name in names} == {name: last[name] for name in names}
