"""Reward workers in members give the scores, and the failures, of reward workers beside the run's own process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_processes import happens
from slow_cases import slow

from rlft.reward.workers import pool
from rlft.reward.workers.pool import RewardError, RewardMembers
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.reward.workers.scorer import Scorer, specs
from rlft.system.process.launcher import LocalProcesses, ProcessMember
from rlft.types import Group, Scores

TIMEOUT_S = 0.4
GroupOf = Callable[..., Group]


def rewards(*names: str, **keys: Any) -> dict[str, RewardSpec]:
    return specs({name: {"_target_": f"naughty.{name}", "weight": 1.0, **keys} for name in names})


class Recorded(LocalProcesses):
    """Remembers all that were started."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.started: list[ProcessMember] = []

    def start(self, spec: Any) -> ProcessMember:
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
def make(launcher: Recorded, notes: list[str]) -> Iterator[Callable[..., Scorer]]:
    """Makes a scorer whose workers are members."""
    made: list[Scorer] = []

    def make(
        used: dict[str, RewardSpec], workers: int = 1, on_error: Any = -1.0, timeout_s: float = TIMEOUT_S,
        answer_s: float = 60.0,
    ) -> Scorer:  # fmt: skip
        def opened(pooled: Any) -> RewardMembers:
            return RewardMembers(launcher, pooled, workers, timeout_s=timeout_s, answer_s=answer_s, note=notes.append)

        made.append(Scorer(used, workers, timeout_s, on_error, open_pool=opened))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()
        scorer.close()


def told(scorer: Scorer, scores: Scores) -> Any:
    by_reward = {name: values.tolist() for name, values in scores.by_reward.items()}
    return by_reward, scores.total.tolist(), scorer.num_failures, scorer.last_failure


def test_scores_failures_and_their_limits_are_those_of_workers_here(
    make: Callable[..., Scorer], group: GroupOf
) -> None:
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


def test_a_failure_stops_the_run_with_reward_prompt_and_completion(make: Callable[..., Scorer], group: GroupOf) -> None:
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
def test_a_member_that_is_lost_is_replaced_and_no_reward_is_to_blame(
    number: signal.Signals,
    told: str,
    make: Callable[..., Scorer],
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
    member = launcher.started[-1]
    children = psutil.Process(member.pid).children()
    [worker] = [child.pid for child in children if "rlft-reward-worker" in child.cmdline()]
    diary.unlink()

    def disturb() -> None:
        happens(diary.exists, within_s=60)
        os.kill(member.pid, number)

    from threading import Thread

    thread = Thread(target=disturb)
    thread.start()
    assert scorer([group(["abcd"])]).total.tolist() == [[4.0]]
    thread.join()
    assert [note[: len(told)] for note in notes] == [told]
    assert launcher.started[-1] is not member
    assert happens(lambda: not psutil.pid_exists(worker), within_s=60)


def test_members_that_are_lost_again_and_again_stop_the_run(
    make: Callable[..., Scorer], launcher: Recorded, group: GroupOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = make(rewards("length"))
    original = launcher.start
    monkeypatch.setattr(launcher, "start", lambda spec: killed(original(spec)))
    killed(launcher.started[-1])
    with pytest.raises(
        RewardError, match=r"^reward workers were lost 3 times in a row; the last time scorer-0 was kil"
    ):
        scorer([group(["abc"])])


def killed(member: ProcessMember) -> ProcessMember:
    member.kill()
    return member


def test_a_scorer_that_is_stopped_raises_soon(make: Callable[..., Scorer], group: GroupOf) -> None:
    from threading import Timer

    scorer = make(rewards("naughty"), timeout_s=60.0)
    begun = time.monotonic()
    Timer(1.0, scorer.stop).start()
    with pytest.raises(RewardError, match="scoring was stopped: the run is ending"):
        scorer([group(["sleep"])])
    assert time.monotonic() - begun < 50
