"""Whole runs of several ranks: interrupted and resumed with one, they are the run of one process (see test_kills)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import RANKS, check_same
from run_processes import Nursery, happens, marked

UPDATE = "rlft.trainer.optimizer:Optimizer.update"
EVERY = ("checkpoint.every=1", "checkpoint.keep=99", "hydra.run.dir=run")


def test_ctrl_c_in_an_update_of_ranks_leaves_no_process_and_loses_no_step(
    rough: Nursery, undisturbed_of: Callable[..., Path], tmp_path: Path
) -> None:
    """on_signal=now: the step in progress is abandoned, between the exchanges of two updates."""
    press = {"at": UPDATE, "call": 5, "do": "interrupt"}
    started = rough.start(*RANKS, *EVERY, "cluster.ranks=2", cwd=tmp_path, events=[press])
    done = started.wait()
    assert done.code == 130, done.err
    assert "saving the last finished step" in done.err
    assert happens(lambda: not marked(started.mark), within_s=60)
    rough.run("resume", "run", "cluster.ranks=1", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", undisturbed_of(*RANKS))
    assert [log.name for log in (tmp_path / "run" / "cluster").iterdir()] == ["rank-1.log"]


@pytest.mark.slow
def test_the_lanes_of_a_run_are_its_first_ranks(rough: Nursery, tmp_path: Path) -> None:
    """And `auto` means them in every later resume, whatever the ranks are then."""
    auto = tuple("cluster.lanes=auto" if key == "cluster.lanes=4" else key for key in RANKS)
    kill = {"at": "rlft.loop.session:Session.begin", "call": 1, "do": "kill"}
    assert rough.run(*auto, *EVERY, "cluster.ranks=2", cwd=tmp_path, events=[kill]).code == -9
    assert "lanes: 2" in (tmp_path / "run" / "config.yaml").read_text()
    assert rough.run("resume", "run", "cluster.ranks=4", cwd=tmp_path).code == 2
    rough.run("resume", "run", "cluster.ranks=1", "steps=1", cwd=tmp_path, ends=0)
    assert "lanes: 2" in (tmp_path / "run" / "config.yaml").read_text()
    assert "lanes/balance" in (tmp_path / "run" / "metrics.jsonl").read_text()
