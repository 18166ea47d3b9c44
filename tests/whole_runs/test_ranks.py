"""Whole runs of several ranks: killed, interrupted and resumed with other ranks, they are the run of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import check_same, check_so_far
from run_processes import Nursery, happens, marked

KEYS = (
    "steps=2", "cluster.lanes=4", "checkpoint.every=1", "checkpoint.keep=99", "checkpoint.on_signal=now",
    "dynamic_sampling.max_rounds=1", "minibatches=3", "eval.every=0", "curriculum.running=true",
)  # fmt: skip
UPDATE = "rlft.trainer.optimizer:Optimizer.update"


@pytest.fixture(scope="module")
def keys(tiny: tuple[str, ...]) -> tuple[str, ...]:
    changed = tuple(key.partition("=")[0] + "=" for key in KEYS)
    return (*(key for key in tiny if not key.startswith(changed)), *KEYS)


@pytest.fixture(scope="module")
def one_process(quiet: Nursery, keys: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that does all lanes."""
    place = tmp_path_factory.mktemp("one_process")
    quiet.run("train", *keys, "hydra.run.dir=run", cwd=place, ends=0)
    return place / "run"


@pytest.mark.slow
def test_ranks_that_are_killed_and_resumed_as_others_are_the_same_run(
    rough: Nursery, keys: tuple[str, ...], one_process: Path, tmp_path: Path
) -> None:
    """Three updates a step: SIGKILL in the second step with two ranks; then four to the end."""
    kill = {"at": UPDATE, "call": 5, "do": "kill"}
    started = rough.start("train", *keys, "cluster.ranks=2", "hydra.run.dir=run", cwd=tmp_path, events=[kill])
    assert started.wait().code == -9
    assert happens(lambda: not marked(started.mark), within_s=60)
    check_so_far(tmp_path / "run", one_process)
    done = rough.run("resume", "run", "cluster.ranks=3", cwd=tmp_path)
    assert done.code == 2
    assert "cluster.ranks: does not divide cluster.lanes=4" in done.err
    rough.run("resume", "run", "cluster.ranks=4", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", one_process)
    assert {log.name for log in (tmp_path / "run" / "cluster").iterdir()} == {"rank-1.log", "rank-2.log", "rank-3.log"}


@pytest.mark.slow
def test_ranks_that_train_all_weights_are_killed_and_resumed_as_the_same_run(
    rough: Nursery, quiet: Nursery, keys: tuple[str, ...], tmp_path: Path
) -> None:
    """Two ranks until SIGKILL in the second step; then four to the end."""
    of_all = (*(key for key in keys if not key.startswith("lora.")), "lora=null", "trainer.lr=1e-4")
    quiet.run("train", *of_all, "hydra.run.dir=one_process", cwd=tmp_path, ends=0)
    kill = {"at": UPDATE, "call": 5, "do": "kill"}
    started = rough.start("train", *of_all, "cluster.ranks=2", "hydra.run.dir=run", cwd=tmp_path, events=[kill])
    assert started.wait().code == -9
    assert happens(lambda: not marked(started.mark), within_s=60)
    check_so_far(tmp_path / "run", tmp_path / "one_process")
    rough.run("resume", "run", "cluster.ranks=4", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", tmp_path / "one_process")


@pytest.mark.slow
def test_ranks_that_divide_the_base_are_killed_and_resumed_as_the_same_run(
    rough: Nursery, keys: tuple[str, ...], one_process: Path, tmp_path: Path
) -> None:
    """Two ranks until SIGKILL in the second step; then one, which has all layers in main memory."""
    kill = {"at": UPDATE, "call": 5, "do": "kill"}
    words = ("cluster.ranks=2", "cluster.engines=1", "cluster.shard_base=true", "hydra.run.dir=run")
    started = rough.start("train", *keys, *words, cwd=tmp_path, events=[kill])
    done = started.wait()
    assert done.code == -9, done.err
    assert happens(lambda: not marked(started.mark), within_s=60)
    check_so_far(tmp_path / "run", one_process)
    rough.run("resume", "run", "cluster.ranks=1", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", one_process)


def test_ctrl_c_in_an_update_of_ranks_leaves_no_process_and_loses_no_step(
    rough: Nursery, keys: tuple[str, ...], one_process: Path, tmp_path: Path
) -> None:
    """on_signal=now: the step in progress is abandoned, between the exchanges of two updates."""
    press = {"at": UPDATE, "call": 5, "do": "interrupt"}
    started = rough.start("train", *keys, "cluster.ranks=2", "hydra.run.dir=run", cwd=tmp_path, events=[press])
    done = started.wait()
    assert done.code == 130, done.err
    assert "saving the last finished step" in done.err
    assert happens(lambda: not marked(started.mark), within_s=60)
    rough.run("resume", "run", "cluster.ranks=1", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", one_process)


@pytest.mark.slow
def test_the_lanes_of_a_run_are_its_first_ranks(rough: Nursery, keys: tuple[str, ...], tmp_path: Path) -> None:
    """And `auto` means them in every later resume, whatever the ranks are then."""
    auto = tuple("cluster.lanes=auto" if key == "cluster.lanes=4" else key for key in keys)
    kill = {"at": "rlft.loop.session:Session.begin", "call": 1, "do": "kill"}
    assert rough.run("train", *auto, "cluster.ranks=2", "hydra.run.dir=run", cwd=tmp_path, events=[kill]).code == -9
    assert "lanes: 2" in (tmp_path / "run" / "config.yaml").read_text()
    assert rough.run("resume", "run", "cluster.ranks=4", cwd=tmp_path).code == 2
    rough.run("resume", "run", "cluster.ranks=1", "steps=1", cwd=tmp_path, ends=0)
    assert "lanes: 2" in (tmp_path / "run" / "config.yaml").read_text()
    assert "lanes/balance" in (tmp_path / "run" / "metrics.jsonl").read_text()
