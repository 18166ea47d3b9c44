"""A run on a Ray cluster, with engines and scorers on another machine: stopped, it goes on anywhere as the same run.

It samples conversations: each engine has the workers of its own environment beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from disturbed_runs import END_S, UPDATE
from ray_cluster import TOKEN, two_machines
from run_folders import CONVERSATIONS, check_same, checkpoints, metrics
from run_processes import Nursery, happens, marked


def actors() -> list[str]:
    """The actors of the cluster that this process has started."""
    titles = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            titles.append(process.cmdline()[:1])
    return [title for [title] in filter(None, titles) if title.startswith("ray::Host")]


@pytest.mark.slow
def test_a_run_on_ray_that_is_stopped_goes_on_anywhere_and_leaves_no_process(
    forks: Nursery, undisturbed_of: Callable[..., Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    by_one_process, other_machine = undisturbed_of(*CONVERSATIONS), tmp_path_factory.mktemp("other machine")
    assert any(line["turns/mean"] > 1 for line in metrics(by_one_process)), "some conversations have two turns"

    def stop(call: int, do: str, *words: str) -> None:
        event = {"at": UPDATE, "call": call, "do": do}
        started = forks.start(*words, cwd=tmp_path, variables=TOKEN, events=[event])
        done = started.wait()
        assert done.code == 130, done.err
        assert happens(lambda: not marked(started.mark) and not actors(), END_S), (marked(started.mark), actors())

    with two_machines(other_machine) as cluster:
        on_ray: Any = ("cluster=ray", f"cluster.address={cluster.address}", "cluster.scoring=true", "cluster.engines=2")
        kept = ("checkpoint.every=1", "checkpoint.keep=9", "hydra.run.dir=run")
        words = [word for word in CONVERSATIONS if word != "scoring.workers=0"]
        stop(1, "terminate", *words, *on_ray, "scoring.workers=1", *kept)
        assert [folder.name for folder in checkpoints(tmp_path / "run")] == ["step_000001"]
        wrote = {file.name.rpartition("-")[0] for file in other_machine.rglob("*.log")}
        assert {"engine-0", "engine-1", "scorer-0"} <= wrote
        stop(2, "interrupt", "resume", "run")
    forks.run("resume", "run", "cluster=local", "cluster.engines=0", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", by_one_process)
