"""Workers as actors of Ray, on a cluster of two "machines"."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import cluster_workers
import psutil
import pytest
from cluster_workers import ANSWER_S, SPEC, check_answers, check_death, check_what_cannot_be_made
from ray_cluster import two_machines
from run_processes import happens, is_alive

from rlft.system.process import ray_actors
from rlft.system.process.ray_actors import RayActors
from rlft.system.process.worker import WorkerError
from rlft.types import UserError


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with two_machines(tmp_path_factory.mktemp("other machine")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def launcher(cluster, tmp_path_factory):
    launcher = RayActors(tmp_path_factory.mktemp("run"), cluster.address)
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def worker(launcher):
    return launcher.start(replace(SPEC, arguments={"start": 10}, threads=3, environment={"EXTRA": "yes"}))


def test_calls_are_answered_in_order_on_another_machine(worker, launcher):
    check_answers(worker, launcher)
    facts = worker.call("facts").result(ANSWER_S)
    assert (facts["threads"], facts["extra"]) == ("3", "yes")
    assert worker.place.node != launcher.node


@pytest.mark.slow
def test_a_log_comes_over_and_an_object_that_cannot_be_made_fails_every_call(worker, launcher):
    worker.call("add", 0).result(ANSWER_S)
    assert "other machine" in worker.place.log
    assert happens(lambda: "a calculator is made" in worker.log.read_text(), within_s=60)
    assert "other machine" not in str(worker.log)
    check_what_cannot_be_made(launcher)


def test_a_dead_worker_says_what_it_said_last(launcher):
    check_death(launcher, "has died")


@pytest.mark.slow
def test_a_stopped_worker_on_another_machine_is_ended_by_a_kill(launcher):
    worker = launcher.start(replace(SPEC, name="calculator-3"))
    pid = worker.call("facts").result(ANSWER_S)["pid"]
    os.kill(pid, signal.SIGSTOP)
    future = worker.call("add", 1)
    worker.kill()
    worker.kill()
    with pytest.raises(WorkerError, match="calculator-3 was killed"):
        future.result(ANSWER_S)
    assert happens(lambda: not is_alive(pid), within_s=60)  # Ray gives it five seconds to answer


@pytest.mark.slow
def test_a_worker_that_finds_no_room_says_what_it_waits_for(launcher):
    worker = launcher.start(replace(SPEC, name="calculator-4", threads=1000))
    with pytest.raises(TimeoutError):
        worker.call("add", 1).result(0.5)
    assert "Ray is asked for a process with 0 GPUs and 1000 cores" in worker.log.read_text()
    worker.kill()


@pytest.mark.slow
def test_a_cluster_of_another_ray_or_with_another_token_is_refused(cluster, launcher, monkeypatch):
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    key, space = b"CLUSTER_METADATA", b"cluster"
    before = _internal_kv_get(key, namespace=space)
    other, no_cluster = (
        {**json.loads(before), "ray_version": "2.1.0"},
        r"cluster\.address: Ray cannot join a cluster there",
    )
    try:
        _internal_kv_put(key, json.dumps(other), True, namespace=space)
        with pytest.raises(UserError, match=rf"{no_cluster} \(RuntimeError: .*Ray: 2\.1\.0") as caught:
            ray_actors.check_joinable(cluster.address)
    finally:
        _internal_kv_put(key, before, True, namespace=space)
    assert caught.value.got == cluster.address
    assert "with the Ray and Python of this process" in caught.value.remedy
    monkeypatch.setenv("RAY_AUTH_TOKEN", "9876543210" * 4)
    with pytest.raises(UserError, match=rf"{no_cluster} \(.*token") as caught:
        ray_actors.check_joinable(cluster.address)
    assert "RAY_AUTH_TOKEN" in caught.value.remedy


@pytest.mark.slow
def test_the_gpu_of_the_runs_own_process_is_given_to_nobody_else(launcher, worker):
    """Of the two GPUs of a machine, as Ray sees it, the run computes on the second."""
    assert ray_actors.reserve("0", launcher.node) is None, "a machine without GPUs for the cluster keeps its own"
    worker.call("facts").result(ANSWER_S)
    node = worker.place.node
    holders = [ray_actors.reserve("1", node)]
    assert holders[0] is not None
    other = launcher.start(replace(SPEC, name="calculator-5", gpus=1.0))
    assert other.call("facts").result(ANSWER_S)["gpus"] == "0"
    with pytest.raises(UserError, match=r"^cluster\.address: GPU 0 .* is not free: in 2 s Ray has given out no GPU"):
        ray_actors.reserve("0", node, 2.0)
    other.kill()
    # What was started for nothing has ended: the other GPU is free again.
    with pytest.raises(UserError, match=r"GPU GPU-8a .* is not free: in 12 s Ray has given out only 0 here"):
        ray_actors.reserve("GPU-8a", node, 12.0)
    holders.append(ray_actors.reserve("0", node))
    assert holders[1] is not None


def test_the_entrypoint_of_a_job_has_its_gpu_already():
    job = {ray_actors.JOB: "{}", "CUDA_VISIBLE_DEVICES": "0"}
    assert ray_actors.is_of_a_job(job)
    assert not ray_actors.is_of_a_job({**job, ray_actors.SEES_ALL: "1"})
    assert not ray_actors.is_of_a_job({"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.slow
def test_a_joined_cluster_stays_up_and_the_runs_actors_end(cluster, launcher, worker):
    pid = worker.call("facts").result(ANSWER_S)["pid"]
    future = worker.call("sleep", 600)
    launcher.close()
    launcher.close()
    with pytest.raises(WorkerError, match="calculator-0 was killed"):
        future.result(ANSWER_S)
    worker._ended = None  # as of one whose call is being answered
    assert worker.log.exists()
    assert not sys.modules["ray"].is_initialized(), "the end of a call has joined no cluster"
    assert happens(lambda: not is_alive(pid), within_s=60)
    ray_actors.check_joinable(cluster.address)
    with pytest.raises(WorkerError, match="the run is ending"):
        launcher.start(SPEC)


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_was_killed(cluster, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, cluster_workers.__file__, str(tmp_path), cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as driver:
        actor = int(driver.stdout.readline())
        processes = [psutil.Process(actor), *psutil.Process(driver.pid).children(recursive=True)]
        os.kill(actor, signal.SIGSTOP)
        driver.kill()
    assert happens(lambda: not any(is_alive(p.pid) for p in processes), within_s=60)
    ray_actors.check_joinable(cluster.address)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("somewhere", "is no address"),
        ("10.0.0.1:port", "is no address"),
        ("ray://10.0.0.1:10001", "is one of Ray Client"),
        ("127.0.0.1:1", "no Ray answers there (Connection refused)"),
    ],
)
def test_an_address_without_a_cluster_is_refused(address, problem):
    with pytest.raises(UserError) as caught:
        ray_actors.check_joinable(address)
    assert (caught.value.key, caught.value.got) == ("cluster.address", address)
    assert caught.value.problem.startswith(problem)


def test_an_address_that_never_answers_is_refused(monkeypatch):
    monkeypatch.setattr(ray_actors, "ANSWER_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=r"cluster\.address: no Ray has answered there in 2 s") as caught:
            ray_actors.check_joinable(address)
    assert caught.value.got == address


def test_without_ray_its_cluster_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"cluster\.kind: Ray is not installed.*pip install .*'rlft\[ray\]'"):
        ray_actors.check_installed()
