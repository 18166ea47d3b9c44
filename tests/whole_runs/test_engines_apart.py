"""Runs whose engines are workers of a cluster: the numbers of a run by one process, and no process left behind.

They sample conversations: each engine has the workers of its own environment beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import TOKEN, two_machines
from run_folders import checkpoints, files_of, metrics, rollouts, tiny
from run_processes import Nursery, Started, happens, marked

pytestmark = pytest.mark.slow

END_S = 60.0
UPDATE = "rlft.trainer.optimizer:Optimizer.update"
CONVERSATIONS = (
    "environment=game", "environment.factory=conversation_tools.Letters", "environment.workers=1",
    "environment.turn_tokens=8",
)  # fmt: skip


ENGINES = ("cluster.engines=2", "scoring.workers=1")
RUN = tiny("generation.transformers.batch_size=4", *CONVERSATIONS)
APART = (
    *tiny("generation.transformers.batch_size=4", *CONVERSATIONS, *ENGINES),
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "hydra.run.dir=run",
)


@pytest.fixture(scope="module")
def by_one_process(undisturbed_of: Callable[..., Path]) -> Path:
    folder = undisturbed_of(*RUN)
    assert any(line["turns/mean"] > 1 for line in metrics(folder)), "some conversations have two turns"
    return folder


def check_same(run: Path, expected: Path) -> None:
    assert metrics(run) == metrics(expected)
    assert rollouts(run) == rollouts(expected)
    assert (run / "eval.jsonl").read_bytes() == (expected / "eval.jsonl").read_bytes()
    assert [files_of(folder) for folder in checkpoints(run)] == [files_of(folder) for folder in checkpoints(expected)]


@pytest.fixture
def other_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("other machine")


@pytest.fixture
def cluster(other_machine: Path) -> Iterator[Any]:
    with two_machines(other_machine) as cluster:
        yield cluster


def actors() -> list[str]:
    """The actors of the cluster that this process has started."""
    titles = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            titles.append(process.cmdline()[:1])
    return [title for [title] in filter(None, titles) if title.startswith("ray::Host")]


def check_nothing_lives(started: Started) -> None:
    assert happens(lambda: not marked(started.mark), within_s=END_S), marked(started.mark)
    assert happens(lambda: not actors(), within_s=END_S), actors()


def test_engines_in_processes_of_their_own_change_no_bit(rough: Nursery, by_one_process: Path, tmp_path: Path) -> None:
    started = rough.start(*APART, cwd=tmp_path)
    done = started.wait()
    assert done.code == 0, done.err
    check_nothing_lives(started)
    check_same(tmp_path / "run", by_one_process)
    assert sorted(file.name for file in (tmp_path / "run" / "cluster").iterdir()) == ["engine-0.log", "engine-1.log"]


def test_a_run_on_ray_that_is_stopped_goes_on_anywhere_and_leaves_no_process(
    rough: Nursery, by_one_process: Path, cluster: Any, other_machine: Path, tmp_path: Path
) -> None:
    stop = {"at": UPDATE, "call": 1, "do": "terminate"}
    words = ("cluster=ray", f"cluster.address={cluster.address}", "cluster.scoring=true")
    started = rough.start(*APART, *words, cwd=tmp_path, variables=TOKEN, events=[stop])
    done = started.wait()
    assert done.code == 130, done.err
    check_nothing_lives(started)
    assert [folder.name for folder in checkpoints(tmp_path / "run")] == ["step_000001"]
    wrote = {file.name.rpartition("-")[0] for file in other_machine.rglob("*.log")}
    assert {"engine-0", "engine-1", "scorer-0"} <= wrote
    stop |= {"call": 2, "do": "interrupt"}
    again = rough.start("resume", "run", cwd=tmp_path, variables=TOKEN, events=[stop])
    done = again.wait()
    assert done.code == 130, done.err
    check_nothing_lives(again)
    rough.run("resume", "run", "cluster=local", "cluster.engines=0", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", by_one_process)
