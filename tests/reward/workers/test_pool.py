"""Workers and the life of the process they belong to."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from reward_groups import make_group
from slow_cases import slow

from rlft.reward.workers import pool
from rlft.reward.workers.pool import RewardError, WorkerPool
from rlft.reward.workers.worker import Task
from rlft.system.process.child import Child

REPOSITORY = Path(__file__).parents[3]

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
        script = tmp_path / "score.py"
        script.write_text(textwrap.dedent(SCRIPT).replace("BODY", body))
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")])
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
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
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(SCRIPT).replace('if __name__ == "__main__":', "if True:").replace("BODY", "print(score('abc'))")
    )
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")])
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "up\n[[3.0]]\n", "")


def test_workers_that_cannot_start_end_the_run(monkeypatch):
    monkeypatch.setattr(pool, "RewardWorker", lambda specs, timeout_s: Child("no worker", "sys:exit", ()))
    unable = WorkerPool([], 2, 1.0)
    task = Task(key=0, group=make_group(["abc"]), rewards=())
    with pytest.raises(RewardError, match=r"^3 reward workers in a row ended with exit code 1 before"):
        list(unable.run([task], lambda reply: False))
    unable.close()
