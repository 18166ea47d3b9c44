"""A signal to every process of a job while rewards score: the scores are those of a job that got none."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from reward_groups import REPOSITORY, start_script
from scripted_server import ScriptedServer, scores

from rlft.reward.workers.reward_spec import specs
from rlft.reward.workers.scorer import Scorer
from rlft.system import interrupt

KEYS = REPOSITORY / "configs" / "reward"
LIMIT_S, WORK_S, PAUSE_S = 2.5, 0.8, 4.0
"""scoring.timeout, what a reward takes, and how long the job is stopped: beyond the pool's own second of grace, too."""

SCRIPT = """
import json, signal, sys
from reward_groups import make_group
from rlft.system import interrupt
from rlft.reward.workers.scorer import Scorer
from rlft.reward.workers.reward_spec import specs
from rlft.reward.workers.worker import Task

if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    for number in interrupt.ENDING:
        signal.signal(number, interrupt.note_signal)  # as a run, which finishes its step
    scorer = Scorer(specs(order["rewards"]), order["workers"], order["limit_s"], 0.0)
    todo = [
        Task(key=key, group=make_group([text], answer=answer), rewards=(name,))
        for key, (name, text, answer) in enumerate(order["tasks"])
    ]
    given = {}
    while todo:
        given |= {key: outcome for (key, _), outcome in scorer.run(todo, lambda reply: False).items()}
        todo = [task for task in todo if task.key not in given]
    print(json.dumps([v if isinstance(v, list) else str(v) for _, v in sorted(given.items())]))
"""


class Job:
    """The script as a process, its workers and whatever they start."""

    def __init__(self, folder: Path, order: Mapping[str, Any]) -> None:
        self.process = start_script(folder, SCRIPT, json.dumps(order))

    def everybody(self) -> list[psutil.Process]:
        """Whoever works for another one comes first, the script itself last."""
        main = psutil.Process(self.process.pid)
        return [*reversed(main.children(recursive=True)), main]

    def send(self, number: int, *, to_main: bool = True) -> None:
        for process in self.everybody()[: None if to_main else -1]:
            with suppress(psutil.NoSuchProcess):  # a program that has just come to its end
                process.send_signal(number)

    def pause(self) -> None:
        self.send(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        self.send(signal.SIGCONT)

    def wait_until(self, begun: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not begun():
            assert time.monotonic() < end
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.02)
        time.sleep(0.1)

    def workers(self) -> set[int]:
        return {p.pid for p in self.everybody() if "rlft-reward-worker" in _command(p)}

    def runs_programs(self, number: int) -> bool:
        """Whether so many programs are at work in their sandboxes."""
        return sum("script" in _command(p) and "bwrap" not in _command(p) for p in self.everybody()) >= number

    def scores(self) -> list[Any]:
        out, err = self.process.communicate(timeout=60)
        assert (self.process.returncode, err) == (0, "")
        return json.loads(out)


Begin = Callable[..., Job]


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts scoring: `begin(rewards, tasks)`; a task is a reward's name, a completion, and the prompt's answer."""
    jobs: list[Job] = []

    def start(rewards: Mapping[str, Any], tasks: Sequence[Sequence[str]], **more: Any) -> Job:
        order = {"rewards": rewards, "tasks": tasks, "workers": len(tasks), "limit_s": LIMIT_S, **more}
        jobs.append(Job(tmp_path, order))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            for process in job.everybody():
                process.kill()
        job.process.communicate()


def noted(kind: str, diary: Path) -> dict[str, Any]:
    return {"_target_": f"naughty.{kind}", "weight": 1.0, "path": str(diary), "seconds": WORK_S}


def calls(diary: Path) -> int:
    return diary.read_text().count("called") if diary.exists() else 0


CODE = yaml.safe_load((KEYS / "code.yaml").read_text())["code"]
CODE |= {"program_in": "text", "group_timeout": LIMIT_S, "seconds": 1.4}
PAIRS = json.dumps([{"input": "2", "output": "4"}])
ASSERTS = json.dumps(["assert double(2) == 4"])
PRINTS = f"import time\ntime.sleep({WORK_S})\nprint(4)"
ANSWERS = f"import time\ntime.sleep({WORK_S})\ndef double(n): return 2 * n"


def test_workers_outlive_every_signal_to_the_job_and_what_it_disturbed_is_scored_again(
    begin: Begin, tmp_path: Path
) -> None:
    diary = tmp_path / "diary"
    job = begin({"dawdle": noted("dawdle", diary) | {"seconds": 60.0}}, [["dawdle", "18", ""]], limit_s=120.0)
    job.wait_until(lambda: bool(job.workers()))
    for number in interrupt.ENDING:  # while the worker starts
        job.send(number)
    job.wait_until(lambda: calls(diary) == 1)
    workers = job.workers()
    for done, number in enumerate(interrupt.JOB_WIDE, start=2):
        job.send(number, to_main=number is not signal.SIGQUIT)
        (tmp_path / f"diary.{done - 1}").touch()  # the call that the signal came to may end
        job.wait_until(lambda done=done: calls(diary) == done)
    assert job.workers() == workers
    (tmp_path / f"diary.{calls(diary)}").touch()
    assert job.scores() == [[2.0]]
    assert calls(diary) == 1 + len(interrupt.JOB_WIDE)


@pytest.mark.slow
def test_a_program_that_a_signal_to_the_job_has_ended_is_run_again(begin: Begin, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    rewards = {"program": noted("runs_a_program", diary), "code": CODE}
    job = begin(rewards, [["program", "", ""], ["code", PRINTS, PAIRS], ["code", ANSWERS, ASSERTS]])
    job.wait_until(lambda: calls(diary) == 1 and job.runs_programs(3))
    job.send(signal.SIGTERM)
    assert job.scores() == [[1.0], [1.0], [1.0]]
    assert calls(diary) == 2


@pytest.mark.slow
def test_a_job_that_is_stopped_for_longer_than_every_limit_scores_as_if_it_had_not_been(
    begin: Begin, tmp_path: Path
) -> None:
    kinds = ("dawdle", "spins", "runs_a_program")
    with ScriptedServer() as server:
        server.answer = lambda body: scores(0.25, delay_s=WORK_S)
        http = yaml.safe_load((KEYS / "http.yaml").read_text())["http"]
        http |= {"url": server.address, "group_timeout": LIMIT_S, "timeout": 2.0, "retries": 0}
        rewards = {kind: noted(kind, tmp_path / kind) for kind in kinds} | {"code": CODE, "http": http}
        tasks = [*([kind, "18", ""] for kind in kinds), ["code", PRINTS, PAIRS], ["code", ANSWERS, ASSERTS]]
        # A worker each, but one for the first two: all are at work at the same time.
        job = begin(rewards, [*tasks, ["http", "18", ""]])
        job.wait_until(lambda: bool(server.bodies) or job.runs_programs(3))
        job.pause()
        job.wait_until(lambda: all(calls(tmp_path / kind) for kind in kinds))
        job.pause()
        assert job.scores() == [[2.0], [2.0], [1.0], [1.0], [1.0], [0.25]]
    assert [calls(tmp_path / kind) for kind in kinds] == [1, 1, 1]


@pytest.mark.slow
def test_a_part_of_the_job_that_is_stopped_alone_uses_up_no_limit(begin: Begin, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    job = begin({"dawdle": noted("dawdle", diary)}, [["dawdle", "18", ""]] * 2, workers=1)
    for done, stopped in enumerate((slice(-1), slice(-1, None)), start=1):
        job.wait_until(lambda done=done: calls(diary) == done)
        processes = job.everybody()[stopped]
        for process in processes:
            process.suspend()
        time.sleep(PAUSE_S)
        for process in processes:
            process.resume()
    assert job.scores() == [[2.0], [2.0]]


@pytest.mark.slow
def test_without_workers_a_pause_and_a_signal_change_no_score_either(begin: Begin, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    job = begin({"program": noted("runs_a_program", diary)}, [["program", "", ""]], workers=0)
    job.wait_until(lambda: calls(diary) == 1)
    job.send(signal.SIGTERM)
    job.wait_until(lambda: calls(diary) == 2)
    job.pause()
    assert job.scores() == [[1.0]]
    assert calls(diary) == 2


def test_a_reward_can_end_the_processes_that_it_starts(begin: Begin) -> None:
    job = begin({"ends": {"_target_": "naughty.ends_its_children", "weight": 1.0}}, [["ends", "", ""]], limit_s=30.0)
    assert job.scores() == [[1.0]]


class Interrupted:
    """A signal comes to the job while it scores for the first time."""

    calls = 0

    def __call__(self, group: Any) -> list[float]:
        type(self).calls += 1
        if type(self).calls == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("a program of mine has died")
        return [0.5 for _ in group.rollouts]


@pytest.mark.parametrize("on_error", ["stop", 0.0])
def test_the_scorer_asks_a_disturbed_reward_again_whatever_a_failure_means(
    group: Callable[..., Any], on_error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interrupted, "calls", 0)
    before = signal.signal(signal.SIGTERM, interrupt.note_signal)
    try:
        rewards = specs({"disturbed": {"_target_": f"{__name__}.Interrupted", "weight": 1.0}})
        scorer = Scorer(rewards, 0, 10.0, on_error)
        assert scorer([group(["1", "2"])]).total.tolist() == [[0.5, 0.5]]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (Interrupted.calls, scorer.num_failures) == (2, 0)
