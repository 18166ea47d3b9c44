"""Runs that sample beside the update: killed while they do, and resumed, they are the run that never overlaps."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import check_same, check_so_far
from run_processes import Nursery, happens, marked

pytestmark = pytest.mark.slow

KEYS = ("overlap.lag=1", "algorithm.mismatch=token_truncate", "steps=4", "eval.every=0")
WAIT = "rlft.loop.next_samples:NextSamples.wait"
UPDATE = "rlft.trainer.optimizer:Optimizer.update"
ENGINE = "cluster.engines=1"


def test_killed_beside_an_update_and_resumed_it_is_the_run_that_samples_afterwards(
    quiet: Nursery,
    rough: Nursery,
    tiny: tuple[str, ...],
    all_checkpoints: tuple[str, ...],
    tmp_path: Path,
) -> None:
    given = tuple(key.partition("=")[0] + "=" for key in KEYS)
    keys = [*(key for key in tiny if not key.startswith(given)), *KEYS, *all_checkpoints]
    quiet.run("train", *keys, "hydra.run.dir=serial", cwd=tmp_path, ends=0)
    serial, folder = tmp_path / "serial", tmp_path / "run"
    # While an engine of its own samples step 3; in the update beside it; then in the process that does both in turn.
    words = ["train", *keys, ENGINE, "hydra.run.dir=run"]
    for place, call in ((WAIT, 2), (UPDATE, 2)):
        started = rough.start(*words, cwd=tmp_path, events=[{"at": place, "call": call, "do": "kill"}])
        done = started.wait()
        assert done.code == -9, done.err
        assert happens(lambda started=started: not marked(started.mark), within_s=60)
        check_so_far(folder, serial)
        words = ["resume", "run"]
    kill = {"at": UPDATE, "call": 1, "do": "kill"}
    assert rough.run("resume", "run", "cluster.engines=0", cwd=tmp_path, events=[kill]).code == -9
    rough.run("resume", "run", ENGINE, cwd=tmp_path, ends=0)
    check_same(folder, serial)
