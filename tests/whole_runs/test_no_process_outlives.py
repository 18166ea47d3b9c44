"""Whatever ends a run, the processes that it has started end with it, within seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import tiny
from run_processes import Nursery, happens, is_alive, marked
from slow_cases import slow_but

END_S = 60.0
UPDATE = "rlft.trainer.optimizer:Optimizer.update"
ENDS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "by itself": ([], 0),
    "an exception": ([{"at": UPDATE, "call": 1, "do": "fail"}], 1),
    "a reward that fails": ([{"at": "rlft.reward.workers.pool:WorkerPool.run", "call": 2, "do": "fail"}], 1),
    "Ctrl-C": ([{"at": UPDATE, "call": 1, "do": "interrupt"}], 130),
    "Ctrl-C twice": ([{"at": UPDATE, "call": n, "do": "interrupt"} for n in (1, 2)], 130),
    "SIGTERM": ([{"at": UPDATE, "call": 1, "do": "terminate"}], 130),
    "kill -9": ([{"at": UPDATE, "call": 1, "do": "kill"}], -9),
}


@pytest.mark.parametrize("end", slow_but("kill -9", ENDS))
def test_no_process_outlives_a_run_that_ends_by(end: str, rough: Nursery, tmp_path: Path) -> None:
    events, code = ENDS[end]
    words = tiny("steps=2", "minibatches=3", "scoring.workers=2", "eval.every=0")
    seen = tmp_path / "seen"
    look = {"at": "rlft.loop.session:Session.score", "do": "note", "when": "after", "to": str(seen)}
    started = rough.start(*words, "hydra.run.dir=run", cwd=tmp_path, events=[look, *events])
    done = started.wait()
    assert done.code == code, done.err
    [first, *_] = [json.loads(line) for line in seen.read_text().splitlines()]
    assert first["pid"] == started.pid
    assert len(first["children"]) >= 2, "two workers at the least were there"
    # Both: a process on its way out has no environment any more, and one that came later was not seen.
    assert happens(lambda: not marked(started.mark) and not any(map(is_alive, first["children"])), within_s=END_S)
