"""Workers and the life of the job they belong to, signals to it, and workers on a cluster that are lost."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread, Timer

import psutil
import pytest
import yaml
from reward_groups import REPOSITORY, make_group, start_script
from run_processes import happens
from scripted_server import ScriptedServer, scores
from slow_cases import slow

from rlft.reward.workers import pool
from rlft.reward.workers.pool import ClusterPool, RewardError, WorkerPool
from rlft.reward.workers.scorer import Scorer, specs
from rlft.reward.workers.worker import Task
from rlft.system import interrupt
from rlft.system.process.child import Child
from rlft.system.process.launcher import LocalProcesses

CONFIGS = REPOSITORY / "configs" / "reward"
LIMIT_S, WORK_S, PAUSE_S = 2.5, 0.8, 4.0
"""scoring.timeout, what a reward takes, and how long the job is stopped: beyond the pool's own second of grace, too."""

SCRIPT = """
import json, signal, sys, time
from reward_groups import make_group
from rlft.system import interrupt
from rlft.reward.workers.scorer import Scorer
from rlft.reward.workers.reward_spec import specs
from rlft.reward.workers.worker import Task

def score(tasks):
    todo = [
        Task(key=key, group=make_group([text], answer=answer), rewards=(name,))
        for key, (name, text, answer) in enumerate(tasks)
    ]
    given = {}
    while todo:
        given |= {key: outcome for (key, _), outcome in scorer.run(todo, lambda reply: False).items()}
        todo = [task for task in todo if task.key not in given]
    return [v if isinstance(v, list) else str(v) for _, v in sorted(given.items())]

order = json.loads(sys.argv[1])
scorer = Scorer(specs(order["rewards"]), order["workers"], order["limit_s"], 0.0)
"""
"""It has no guard, `if __name__ == "__main__"`: a script needs none."""
AS_A_RUN = """
for number in interrupt.ENDING:
    signal.signal(number, interrupt.note_signal)  # as a run, which finishes its step
print(json.dumps(score(order["tasks"])))
"""
WARM = """
score([["naughty", "fine", ""]] * 8)
print("up", flush=True)
"""


class Job:
    """The script as a process in a session of its own, its workers and whatever they start."""

    def __init__(self, folder, source, order):
        self.process = start_script(folder, source, json.dumps(order))

    def everybody(self):
        """Whoever works for another one comes first, the script itself last."""
        main = psutil.Process(self.process.pid)
        return [*reversed(main.children(recursive=True)), main]

    def send(self, number, *, to_main=True):
        for process in self.everybody()[: None if to_main else -1]:
            with suppress(psutil.NoSuchProcess):  # a program that has just come to its end
                process.send_signal(number)

    def pause(self):
        self.send(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        self.send(signal.SIGCONT)

    def wait_until(self, begun):
        end = time.monotonic() + 60
        while not begun():
            assert time.monotonic() < end
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.02)
        time.sleep(0.1)

    def workers(self):
        return [p for p in self.everybody() if "rlft-reward-worker" in _command(p)]

    def runs_programs(self, number):
        """Whether so many programs are at work in their sandboxes."""
        return sum("script" in _command(p) and "bwrap" not in _command(p) for p in self.everybody()) >= number

    def says(self, words=""):
        """What it says until its end, after these words from its standard input."""
        out, err = self.process.communicate(words, timeout=120)
        assert (self.process.returncode, err) == (0, "")
        return out

    def scores(self):
        return json.loads(self.says())


def _command(process):
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture
def begin(tmp_path):
    """Starts scoring: `begin(rewards, tasks)`; a task is a reward's name, a completion, and the prompt's answer."""
    jobs = []

    def start(rewards, tasks=(), source=SCRIPT + AS_A_RUN, **more):
        order = {"rewards": rewards, "tasks": tasks, "workers": len(tasks), "limit_s": LIMIT_S, **more}
        jobs.append(Job(tmp_path, source, order))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            for process in job.everybody():
                process.kill()
        job.process.communicate()


@pytest.fixture
def parent(begin):
    """Starts the script with two warm workers, and what it does then."""

    def start(body):
        rewards = {"naughty": {"_target_": "naughty.naughty", "weight": 1.0}}
        job = begin(rewards, source=f"{SCRIPT}{WARM}{body}\n", workers=2, limit_s=60.0)
        assert job.process.stdout.readline() == "up\n"
        return job

    return start


def gone(processes):
    return not psutil.wait_procs(processes, timeout=60)[1]


@pytest.mark.parametrize("order", [slow("fine"), slow("sleep"), "hang"], ids=["idle", "sleeping", "ignoring signals"])
def test_workers_die_with_a_parent_that_is_killed(order, parent):
    job = parent("time.sleep(60)" if order == "fine" else f"score([['naughty', '{order}', '']])")
    *children, main = job.everybody()
    assert len(children) >= 2
    time.sleep(0.3)
    main.kill()
    assert gone(children)


def test_workers_end_with_a_parent_that_forgets_to_close(parent):
    job = parent("sys.stdin.readline()")
    *children, _ = job.everybody()
    assert job.says("that will do\n") == ""
    assert gone(children)


def test_an_idle_worker_that_is_killed_is_replaced_without_blame(parent):
    job = parent("sys.stdin.readline()\nprint(score([['naughty', 'abc', '']]))")
    for worker in (workers := job.workers()):
        worker.kill()
    assert len(workers) == 2
    time.sleep(0.2)
    assert job.says("go on\n") == "[[3.0]]\n"


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


# -- signals to every process of the job -------------------------------------------------------------------------------
def noted(kind, diary):
    return {"_target_": f"naughty.{kind}", "weight": 1.0, "path": str(diary), "seconds": WORK_S}


def calls(diary):
    return diary.read_text().count("called") if diary.exists() else 0


CODE = yaml.safe_load((CONFIGS / "code.yaml").read_text())["code"]
CODE |= {"program_in": "text", "group_timeout": LIMIT_S, "seconds": 1.4}
PAIRS = json.dumps([{"input": "2", "output": "4"}])
ASSERTS = json.dumps(["assert double(2) == 4"])
PRINTS = f"import time\ntime.sleep({WORK_S})\nprint(4)"
ANSWERS = f"import time\ntime.sleep({WORK_S})\ndef double(n): return 2 * n"


def test_workers_outlive_every_signal_to_the_job_and_what_it_disturbed_is_scored_again(begin, tmp_path):
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
def test_a_program_that_a_signal_to_the_job_has_ended_is_run_again(begin, tmp_path):
    diary = tmp_path / "diary"
    rewards = {"program": noted("runs_a_program", diary), "code": CODE}
    job = begin(rewards, [["program", "", ""], ["code", PRINTS, PAIRS], ["code", ANSWERS, ASSERTS]])
    job.wait_until(lambda: calls(diary) == 1 and job.runs_programs(3))
    job.send(signal.SIGTERM)
    assert job.scores() == [[1.0], [1.0], [1.0]]
    assert calls(diary) == 2


@pytest.mark.slow
def test_a_job_that_is_stopped_for_longer_than_every_limit_scores_as_if_it_had_not_been(begin, tmp_path):
    kinds = ("dawdle", "spins", "runs_a_program")
    with ScriptedServer() as server:
        server.answer = lambda body: scores(0.25, delay_s=WORK_S)
        http = yaml.safe_load((CONFIGS / "http.yaml").read_text())["http"]
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
def test_a_part_of_the_job_that_is_stopped_alone_uses_up_no_limit(begin, tmp_path):
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
def test_without_workers_a_pause_and_a_signal_change_no_score_either(begin, tmp_path):
    diary = tmp_path / "diary"
    job = begin({"program": noted("runs_a_program", diary)}, [["program", "", ""]], workers=0)
    job.wait_until(lambda: calls(diary) == 1)
    job.send(signal.SIGTERM)
    job.wait_until(lambda: calls(diary) == 2)
    job.pause()
    assert job.scores() == [[1.0]]
    assert calls(diary) == 2


def test_a_reward_can_end_the_processes_that_it_starts(begin):
    job = begin({"ends": {"_target_": "naughty.ends_its_children", "weight": 1.0}}, [["ends", "", ""]], limit_s=30.0)
    assert job.scores() == [[1.0]]


class Interrupted:
    """A signal comes to the job while it scores for the first time."""

    calls = 0

    def __call__(self, group):
        type(self).calls += 1
        if type(self).calls == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("a program of mine has died")
        return [0.5 for _ in group.rollouts]


@pytest.mark.parametrize("on_error", ["stop", 0.0])
def test_the_scorer_asks_a_disturbed_reward_again_whatever_a_failure_means(group, on_error, monkeypatch):
    monkeypatch.setattr(Interrupted, "calls", 0)
    before = signal.signal(signal.SIGTERM, interrupt.note_signal)
    try:
        rewards = specs({"disturbed": {"_target_": f"{__name__}.Interrupted", "weight": 1.0}})
        scorer = Scorer(rewards, 0, 10.0, on_error)
        assert scorer([group(["1", "2"])]).total.tolist() == [[0.5, 0.5]]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (Interrupted.calls, scorer.num_failures) == (2, 0)


# -- workers of the cluster --------------------------------------------------------------------------------------------
TIMEOUT_S = 0.4


def rewards(*names, **keys):
    return specs({name: {"_target_": f"naughty.{name}", "weight": 1.0, **keys} for name in names})


class Recorded(LocalProcesses):
    """Remembers all that were started."""

    def __init__(self, folder):
        super().__init__(folder)
        self.started = []

    def start(self, spec):
        self.started.append(super().start(spec))
        return self.started[-1]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Recorded(tmp_path_factory.mktemp("run"))
    yield launcher
    launcher.close()


@pytest.fixture
def notes():
    return []


@pytest.fixture
def make(launcher, notes):
    """Makes a scorer whose workers are on a cluster."""
    made = []

    def make(used, workers=1, on_error=-1.0, timeout_s=TIMEOUT_S, answer_s=60.0):
        def opened(pooled):
            return ClusterPool(launcher, pooled, workers, timeout_s=timeout_s, answer_s=answer_s, note=notes.append)

        made.append(Scorer(used, workers, timeout_s, on_error, open_pool=opened))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()
        scorer.close()


def told(scorer, groups):
    scores = scorer(groups)
    by_reward = {name: values.tolist() for name, values in scores.by_reward.items()}
    return by_reward, scores.total.tolist(), scorer.num_failures, scorer.last_failure


def test_scores_failures_and_their_limits_are_those_of_workers_here(make, group):
    orders = ("raise", "sleep", "hang", "die", "nan", "fine")
    groups = [group(["ab", order, "abcd"], id=f"p{i}") for i, order in enumerate(orders)]
    used = rewards("length", "naughty")
    there = make(used, workers=2)
    # Both score at once, each in the thread that has made it: each waits for the same limits.
    with ThreadPoolExecutor(1) as thread:
        here = thread.submit(Scorer, used, 2, TIMEOUT_S, -1.0).result()
        try:
            for some in (*([one] for one in groups), groups):  # so that the last failure of each is compared
                expected = thread.submit(told, here, some)
                assert told(there, some) == expected.result()
        finally:
            thread.submit(here.close).result()


def test_a_failure_stops_the_run_with_reward_prompt_and_completion(make, group):
    scorer = make(rewards("naughty"), on_error="stop")
    told = r"^reward\.naughty: raised ValueError.* on prompt 'p0', completion 2 of 2: 'rai"
    with pytest.raises(RewardError, match=told):
        scorer([group(["fine", "raise"], id="p0")])
    scorer = make(rewards("StartsBadly"))
    with pytest.raises(RewardError, match="could not be started in its worker: OSError: the sandbox is not there"):
        scorer([group(["a"])])


@pytest.mark.parametrize(("number", "told"), [
    (signal.SIGKILL, "scorer-0 is replaced: scorer-0 was killed by SIGKILL"),
    slow(signal.SIGSTOP, "scorer-0 is replaced: scorer-0 has not answered for 5 s (cluster.timeout); its log is "),
])  # fmt: skip
def test_a_worker_that_is_lost_is_replaced_and_no_reward_is_to_blame(
    number, told, make, launcher, group, notes, tmp_path, monkeypatch
):
    monkeypatch.setattr(pool, "GRACE_S", 2.0)
    diary = tmp_path / "diary"
    used = rewards("dawdle", path=str(diary), seconds=0.5)
    scorer = make(used, on_error="stop", timeout_s=2.0, answer_s=1.0)
    assert scorer([group(["abc"])]).total.tolist() == [[3.0]]
    worker = launcher.started[-1]
    children = psutil.Process(worker.pid).children()
    [scoring] = [child.pid for child in children if "rlft-reward-worker" in child.cmdline()]
    diary.unlink()

    def disturb():
        happens(diary.exists, within_s=60)
        os.kill(worker.pid, number)

    thread = Thread(target=disturb)
    thread.start()
    assert scorer([group(["abcd"])]).total.tolist() == [[4.0]]
    thread.join()
    assert [note[: len(told)] for note in notes] == [told]
    assert launcher.started[-1] is not worker
    assert happens(lambda: not psutil.pid_exists(scoring), within_s=60)


def test_workers_that_are_lost_again_and_again_stop_the_run(make, launcher, group, monkeypatch):
    scorer = make(rewards("length"))
    original = launcher.start
    monkeypatch.setattr(launcher, "start", lambda spec: killed(original(spec)))
    killed(launcher.started[-1])
    told = r"^reward workers were lost 3 times in a row; the last time scorer-0 was kil"
    with pytest.raises(RewardError, match=told):
        scorer([group(["abc"])])


def killed(worker):
    worker.kill()
    return worker


def test_a_scorer_that_is_stopped_raises_soon(make, group):
    scorer = make(rewards("naughty"), timeout_s=60.0)
    begun = time.monotonic()
    Timer(0.3, scorer.stop).start()
    with pytest.raises(RewardError, match="scoring was stopped: the run is ending"):
        scorer([group(["sleep"])])
    assert time.monotonic() - begun < 50
