"""Workers and the life of the process they belong to; workers on a cluster that are lost."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import psutil
import pytest
from reward_groups import make_group, start_script
from run_processes import happens
from slow_cases import slow

from rlft.reward.workers import pool
from rlft.reward.workers.pool import ClusterPool, RewardError, WorkerPool
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.reward.workers.scorer import Scorer, specs
from rlft.reward.workers.worker import Task
from rlft.system.process.child import Child
from rlft.system.process.launcher import LocalProcesses, ProcessWorker
from rlft.types import Group, Scores

SCRIPT = """
import sys
from reward_groups import make_group
from rlft.reward.workers.pool import WorkerPool
from rlft.reward.workers.reward_spec import specs
from rlft.reward.workers.worker import Task

def score(*texts):
    tasks = [Task(key=i, group=make_group([text]), rewards=("naughty",)) for i, text in enumerate(texts)]
    return [reply["naughty"] for _, reply in pool.run(tasks, lambda reply: False)]

if __name__ == "__main__":
    rewards = {"naughty": {"_target_": "naughty.naughty", "weight": 1.0}}
    pool = WorkerPool(list(specs(rewards).values()), num_workers=2, timeout_s=60.0)
    score(*["fine"] * 8)
    print("up", flush=True)
    BODY
"""


@pytest.fixture
def parent(tmp_path):
    """Starts a script with warm workers in a session of its own: `parent(body)` is it and its children."""
    started = []

    def start(body):
        process = start_script(tmp_path, SCRIPT.replace("BODY", body))
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        return process, children

    yield start
    for process in started:
        process.kill()
        process.communicate()


def gone(processes, within_s):
    return not psutil.wait_procs(processes, timeout=within_s)[1]


@pytest.mark.parametrize("order", [slow("fine"), slow("sleep"), "hang"], ids=["idle", "sleeping", "ignoring signals"])
def test_workers_die_with_a_parent_that_is_killed(parent, order):
    process, children = parent("__import__('time').sleep(60)" if order == "fine" else f"score('{order}')")
    time.sleep(0.3)
    process.kill()
    assert gone(children, within_s=60)


def test_workers_end_with_a_parent_that_forgets_to_close(parent):
    process, children = parent("sys.stdin.readline()")
    out, err = process.communicate("that will do\n", timeout=120)
    assert (process.returncode, out, err) == (0, "", "")
    assert gone(children, within_s=60)


def test_workers_say_nothing_at_ctrl_c_and_go_on(parent):
    body = """
    import signal, time
    signal.signal(signal.SIGINT, lambda *_: print("heard", flush=True))
    signal.pause()
    print(score("abc"), flush=True)
    """
    process, children = parent(textwrap.dedent(body).strip().replace("\n", "\n    "))
    time.sleep(0.3)
    for child in children:  # as if it reached them in spite of their process group
        child.send_signal(signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    out, err = process.communicate(timeout=120)
    assert out == "heard\n[[3.0]]\n"
    assert err == ""


def test_an_idle_worker_that_is_killed_is_replaced_without_blame(parent):
    body = """
    import psutil, time
    for child in psutil.Process().children():
        if "rlft-reward-worker" in " ".join(child.cmdline()):
            child.kill()
    time.sleep(0.2)
    print(score("abc"), flush=True)
    """
    process, _ = parent(textwrap.dedent(body).strip().replace("\n", "\n    "))
    out, err = process.communicate(timeout=120)
    assert out == "[[3.0]]\n", err


def test_a_script_needs_no_main_guard(tmp_path):
    unguarded = SCRIPT.replace('if __name__ == "__main__":', "if True:").replace("BODY", "print(score('abc'))")
    run = start_script(tmp_path, unguarded)
    try:
        out, err = run.communicate(timeout=30)
    finally:
        run.kill()
    assert (run.returncode, out, err) == (0, "up\n[[3.0]]\n", "")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="it has memory that processes share by a descriptor")
def test_workers_need_no_disk(monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    WorkerPool([], 1, 1.0).close()


def test_workers_that_cannot_start_end_the_run(monkeypatch):
    monkeypatch.setattr(pool, "RewardWorker", lambda specs, timeout_s: Child("no worker", "sys:exit", ()))
    unable = WorkerPool([], 2, 1.0)
    task = Task(key=0, group=make_group(["abc"]), rewards=())
    with pytest.raises(RewardError, match=r"^3 reward workers in a row ended with exit code 1 before"):
        list(unable.run([task], lambda reply: False))
    unable.close()


# -- workers of the cluster --------------------------------------------------------------------------------------------
TIMEOUT_S = 0.4
Make = Callable[..., Scorer]
GroupOf = Callable[..., Group]


def rewards(*names: str, **keys: Any) -> dict[str, RewardSpec]:
    return specs({name: {"_target_": f"naughty.{name}", "weight": 1.0, **keys} for name in names})


class Recorded(LocalProcesses):
    """Remembers all that were started."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.started: list[ProcessWorker] = []

    def start(self, spec: Any) -> ProcessWorker:
        self.started.append(super().start(spec))
        return self.started[-1]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    launcher = Recorded(tmp_path_factory.mktemp("run"))
    yield launcher
    launcher.close()


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def make(launcher: Recorded, notes: list[str]) -> Iterator[Make]:
    """Makes a scorer whose workers are on a cluster."""
    made: list[Scorer] = []

    def make(
        used: dict[str, RewardSpec], workers: int = 1, on_error: Any = -1.0, timeout_s: float = TIMEOUT_S,
        answer_s: float = 60.0,
    ) -> Scorer:  # fmt: skip
        def opened(pooled: Any) -> ClusterPool:
            return ClusterPool(launcher, pooled, workers, timeout_s=timeout_s, answer_s=answer_s, note=notes.append)

        made.append(Scorer(used, workers, timeout_s, on_error, open_pool=opened))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()
        scorer.close()


def told(scorer: Scorer, scores: Scores) -> Any:
    by_reward = {name: values.tolist() for name, values in scores.by_reward.items()}
    return by_reward, scores.total.tolist(), scorer.num_failures, scorer.last_failure


def test_scores_failures_and_their_limits_are_those_of_workers_here(make: Make, group: GroupOf) -> None:
    orders = ("raise", "sleep", "hang", "die", "nan", "fine")
    groups = [group(["ab", order, "abcd"], id=f"p{i}") for i, order in enumerate(orders)]
    used = rewards("length", "naughty")
    here = Scorer(used, 2, TIMEOUT_S, -1.0)
    try:
        there = make(used, workers=2)
        for one in groups:  # so that the last failure of each is compared
            expected = told(here, here([one]))
            assert told(there, there([one])) == expected
        assert told(there, there(groups)) == told(here, here(groups))
    finally:
        here.close()


def test_a_failure_stops_the_run_with_reward_prompt_and_completion(make: Make, group: GroupOf) -> None:
    scorer = make(rewards("naughty"), on_error="stop")
    with pytest.raises(
        RewardError, match=r"^reward\.naughty: raised ValueError.* on prompt 'p0', completion 2 of 2: 'rai"
    ):
        scorer([group(["fine", "raise"], id="p0")])
    scorer = make(rewards("StartsBadly"))
    with pytest.raises(RewardError, match="could not be started in its worker: OSError: the sandbox is not there"):
        scorer([group(["a"])])


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "scorer-0 is replaced: scorer-0 was killed by SIGKILL"),
        slow(signal.SIGSTOP, "scorer-0 is replaced: scorer-0 has not answered for 5 s (cluster.timeout); its log is "),
    ],
)
def test_a_worker_that_is_lost_is_replaced_and_no_reward_is_to_blame(
    number: signal.Signals,
    told: str,
    make: Make,
    launcher: Recorded,
    group: GroupOf,
    notes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "GRACE_S", 2.0)
    diary = tmp_path / "diary"
    used = rewards("dawdle", path=str(diary), seconds=0.5)
    scorer = make(used, on_error="stop", timeout_s=2.0, answer_s=1.0)
    assert scorer([group(["abc"])]).total.tolist() == [[3.0]]
    worker = launcher.started[-1]
    children = psutil.Process(worker.pid).children()
    [scoring] = [child.pid for child in children if "rlft-reward-worker" in child.cmdline()]
    diary.unlink()

    def disturb() -> None:
        happens(diary.exists, within_s=60)
        os.kill(worker.pid, number)

    thread = Thread(target=disturb)
    thread.start()
    assert scorer([group(["abcd"])]).total.tolist() == [[4.0]]
    thread.join()
    assert [note[: len(told)] for note in notes] == [told]
    assert launcher.started[-1] is not worker
    assert happens(lambda: not psutil.pid_exists(scoring), within_s=60)


def test_workers_that_are_lost_again_and_again_stop_the_run(
    make: Make, launcher: Recorded, group: GroupOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = make(rewards("length"))
    original = launcher.start
    monkeypatch.setattr(launcher, "start", lambda spec: killed(original(spec)))
    killed(launcher.started[-1])
    with pytest.raises(
        RewardError, match=r"^reward workers were lost 3 times in a row; the last time scorer-0 was kil"
    ):
        scorer([group(["abc"])])


def killed(worker: ProcessWorker) -> ProcessWorker:
    worker.kill()
    return worker


def test_a_scorer_that_is_stopped_raises_soon(make: Make, group: GroupOf) -> None:
    scorer = make(rewards("naughty"), timeout_s=60.0)
    begun = time.monotonic()
    Timer(1.0, scorer.stop).start()
    with pytest.raises(RewardError, match="scoring was stopped: the run is ending"):
        scorer([group(["sleep"])])
    assert time.monotonic() - begun < 50
