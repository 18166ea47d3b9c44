"""Workers as processes of this machine."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import cluster_workers
import pytest
from cluster_workers import ANSWER_S, SPEC, check_answers, check_death, check_what_cannot_be_made
from run_processes import happens, is_alive

from rlft.config.trainer import ClusterConfig
from rlft.system.process.launcher import LocalProcesses, open_launcher
from rlft.system.process.worker import WorkerError


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = LocalProcesses(tmp_path_factory.mktemp("run"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def worker(launcher):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # the variable that a worker must get from rlft
        return launcher.start(replace(SPEC, arguments={"start": 10}, threads=3, environment={"EXTRA": "yes"}))


def test_calls_are_answered_in_order_and_errors_come_back(worker, launcher):
    check_answers(worker, launcher)


def test_a_worker_has_the_threads_and_the_environment_of_its_spec_and_a_log(worker):
    facts = worker.call("facts").result(ANSWER_S)
    assert facts.pop("gpus") == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert facts == {"pid": worker.pid, "group": worker.pid, "threads": "3", "extra": "yes"}
    assert worker.log.parent.name == "cluster"
    assert happens(lambda: "a calculator is made" in worker.log.read_text(), within_s=60)


def test_a_busy_worker_or_a_cancelled_call_does_not_hold_up_others(worker, tmp_path):
    cancelled, busy = worker.call("sleep", 0.1), worker.call("wait_for", tmp_path / "goes_on")
    assert cancelled.cancel()
    futures = [worker.call("length", b"x" * 10_000_000) for _ in range(3)]
    assert not busy.done()
    (tmp_path / "goes_on").touch()
    assert [future.result(ANSWER_S) for future in futures] == [10_000_000] * 3
    assert busy.result(ANSWER_S) is None


def test_a_worker_survives_signals_to_the_whole_job(worker):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(worker.pid, number)
        assert worker.call("length", "abc").result(ANSWER_S) == 3


def test_what_cannot_be_made_fails_every_call_and_a_dead_worker_says_how_it_ended(launcher):
    check_what_cannot_be_made(launcher)
    check_death(launcher, "was killed by SIGKILL")


def test_a_stopped_worker_is_ended_by_a_kill_with_its_children(launcher):
    worker = launcher.start(replace(SPEC, name="calculator-3"))
    child = worker.call("start_a_child").result(ANSWER_S)
    os.kill(worker.pid, signal.SIGSTOP)
    future = worker.call("add", 1)
    with pytest.raises(TimeoutError):
        future.result(0.3)
    worker.kill()
    worker.kill()
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        future.result(ANSWER_S)
    assert happens(lambda: not is_alive(child), within_s=60)


def test_a_call_of_a_dead_worker_ends_though_its_child_holds_the_connection(launcher):
    worker = launcher.start(replace(SPEC, name="calculator-5"))
    child = worker.call("fork").result(ANSWER_S)
    os.kill(worker.pid, signal.SIGKILL)
    try:
        future = worker.call("length", b"x" * 5_000_000)  # more than the connection's buffer holds
        with pytest.raises(WorkerError, match="calculator-5 was killed by SIGKILL"):
            future.result(ANSWER_S)
        assert happens(lambda: not any("calculator-5" in thread.name for thread in threading.enumerate()), within_s=60)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_worker_outlives_the_thread_that_asked_for_it(launcher):
    made = []
    thread = threading.Thread(target=lambda: made.append(launcher.start(replace(SPEC, name="calculator-4"))))
    thread.start()
    thread.join()
    assert made[0].call("add", 1).result(ANSWER_S) == 1
    assert made[0].call("add", 1).result(ANSWER_S) == 2


def test_closing_ends_all_workers(tmp_path):
    launcher = LocalProcesses(tmp_path)
    worker = launcher.start(SPEC)
    future = worker.call("sleep", 600)
    launcher.close()
    launcher.close()
    assert not is_alive(worker.pid)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        future.result(ANSWER_S)
    with pytest.raises(RuntimeError):
        launcher.start(SPEC)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(number, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, cluster_workers.__file__, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as driver:
        worker = int(driver.stdout.readline())
        assert is_alive(worker)
        os.kill(driver.pid, number)
    assert happens(lambda: not is_alive(worker), within_s=60)


def test_ray_without_an_address_is_this_machine(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # which need not even be installed
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with open_launcher(ClusterConfig(kind="ray"), tmp_path) as launcher:
        assert isinstance(launcher, LocalProcesses)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ClusterConfig(kind="ray").joined_address == "10.0.0.1:6379"
    assert ClusterConfig(kind="ray", address="auto").joined_address == "auto"
    assert not ClusterConfig().is_joined
