"""The workers of environments: what an interrupted call leaves, and those that cannot start or are killed idle."""

import os
import signal
from contextlib import closing
from dataclasses import replace

import psutil
import pytest
from conversation_tools import CannotStart
from run_processes import happens, is_alive

from rlft.environment.pool import EnvironmentPool, EnvironmentWorker, Job, Order
from rlft.environment.protocol import Cause
from rlft.environment.tools import Tools
from rlft.types import EnvironmentFailure
from tests.environment.test_conversations import LIMITS

TOOLS = Tools(**LIMITS, tools=("conversation_tools.say", "conversation_tools.misbehave", "conversation_tools.hashed"))


def job(key, text, tool="say", left_s=60.0):
    values = {"how" if tool == "misbehave" else "text": text}
    return Job(key=key, orders=[Order(kind="call", seed=0, name=tool, values=values)], left_s=left_s)


@pytest.fixture(scope="module")
def pool():
    with closing(EnvironmentPool(replace(TOOLS, workers=2))) as opened:
        yield opened


def test_replies_come_in_the_order_of_jobs(pool):
    assert [reply.text for [reply] in pool.run([job(k, str(k)) for k in range(20)])] == [str(k) for k in range(20)]
    assert pool.run([]) == []


def test_what_an_interruption_left_is_not_taken_for_an_answer(pool, monkeypatch):
    pool.run([job(0, "up"), job(1, "up")])
    receive = EnvironmentWorker.receive

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(EnvironmentWorker, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.run([job(0, "old"), job(1, "old")])
    monkeypatch.setattr(EnvironmentWorker, "receive", receive)
    assert [reply.text for [reply] in pool.run([job(2, "new"), job(3, "newer")])] == ["new", "newer"]


def test_a_worker_that_is_killed_while_idle_is_replaced(pool):
    pool.run([job(0, "up"), job(1, "up")])
    for child in psutil.Process().children():
        if child.pid in {worker.pid for worker in pool._workers.all}:
            os.kill(child.pid, signal.SIGKILL)
            child.wait(120)
    replies = [reply for [reply] in pool.run([job(2, "a"), job(3, "b")])]
    # Its death is noticed when the order is sent, or just after: then it is told as the order's end.
    assert all(reply.text in ("a", "b") or reply.cause is Cause.died for reply in replies)
    assert [reply.text for [reply] in pool.run([job(4, "a"), job(5, "b")])] == ["a", "b"]


def test_orders_beyond_a_conversations_time_are_not_made(pool):
    [[late]] = pool.run([job(0, "x", left_s=0.0)])
    assert (late.cause, late.text) == (Cause.time, "Error: the time for all calls is used up")


def test_closing_leaves_no_process_of_a_tool():
    pool = EnvironmentPool(TOOLS)
    pool.run([job(0, "fork", "misbehave")])
    workers = [worker.pid for worker in pool._workers.all]
    started = [child.pid for pid in workers if pid for child in psutil.Process(pid).children(recursive=True)]
    pool.close()
    pool.close()
    assert happens(lambda: not any(map(is_alive, started)), within_s=10.0), "a killed process takes a moment to end"
    assert not any(psutil.pid_exists(pid) for pid in workers if pid)


def test_an_environment_that_cannot_start_says_why():
    problem = r"cannot be started in its workers \(RuntimeError: no server"
    with (
        closing(EnvironmentPool(CannotStart(**LIMITS, tools=TOOLS.tools))) as pool,
        pytest.raises(EnvironmentFailure, match=problem),
    ):
        pool.run([job(0, "x")])


def test_every_worker_hashes_texts_alike_and_as_the_user_has_set_it(monkeypatch):
    """A tool that walks a set of texts answers a resumed run as it has answered the interrupted one."""

    def found():
        order = Order(kind="call", seed=0, name="hashed", values={})
        with closing(EnvironmentPool(TOOLS)) as pool:
            [[reply]] = pool.run([Job(key=0, orders=[order], left_s=60.0)])
        return reply.text

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first = found()
    assert first == found()
    assert "PYTHONHASHSEED" not in os.environ
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert found() != first
    assert os.environ["PYTHONHASHSEED"] == "5"
