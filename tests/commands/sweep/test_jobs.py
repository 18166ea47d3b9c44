"""Jobs of a sweep side by side: how many run at a time, failures, silence, interruptions, GPUs; and whole sweeps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from run_folders import check_same
from run_processes import Nursery, happens

import rlft
from rlft.commands.sweep import jobs as sweep_jobs
from rlft.commands.sweep import plain as sweep
from rlft.commands.sweep.jobs import JobsFailedError, SideBySide, cluster_of, gpus_of, threads_of_a_job
from rlft.config.cluster import ClusterConfig
from rlft.config.compose import compose
from rlft.config.overrides import parse
from rlft.runs import run_folder
from rlft.system.interrupt import EXIT_CODE, Interrupt
from rlft.system.process.launcher import LocalProcesses
from rlft.system.process.member import MemberError, MemberSpec
from rlft.types import UserError


class FakeMember:
    """A member whose job ends with `code` after it was asked so often; `silent` never answers, `stuck` never ends."""

    def __init__(self, spec: MemberSpec, folder: Path, code: Any, looks: int) -> None:
        self.name, self.log, self.spec = spec.name, folder / f"{spec.name}.log", spec
        self.code, self.looks, self.is_alive, self.signals = code, looks, True, []

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if method == "send":
            self.signals += args
            if self.code != "stuck":
                self.code, self.looks = EXIT_CODE, 0
            future.set_result(None)
            return future
        self.looks -= 1
        if isinstance(self.code, Exception):
            future.set_exception(self.code)
        elif self.code != "silent":
            future.set_result(self.code if self.looks < 0 and self.code != "stuck" else None)
        return future

    def kill(self) -> None:
        self.is_alive = False


class FakeLauncher:
    def __init__(self, folder: Path, codes: Sequence[Any] = (), looks: int = 2) -> None:
        self.folder, self.codes, self.looks = folder, list(codes), looks
        self.members: list[FakeMember] = []
        self.most_alive = 0

    def start(self, spec: MemberSpec) -> FakeMember:
        code = self.codes.pop(0) if self.codes else 0
        self.members.append(FakeMember(spec, self.folder, code, self.looks))
        self.most_alive = max(self.most_alive, sum(member.is_alive for member in self.members))
        return self.members[-1]

    def share(self, value: Any) -> Any: ...

    def close(self) -> None: ...


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_jobs, "POLL_S", 0.001)


def side_by_side(launcher: Any, said: list[str], **keys: Any) -> SideBySide:
    gpus = keys.pop("gpus", ())
    config = ClusterConfig(**{"jobs": 2, "timeout": 5.0, **keys})
    return SideBySide(launcher, config, Interrupt(said.append), said.append, on_gpus=bool(gpus), gpus=gpus)


def start_all(jobs: SideBySide, number: int, folder: Path) -> None:
    for i in range(number):
        jobs.start(i, f"seed={i}", ["train", f"seed={i}"], folder / str(i))


def test_so_many_jobs_run_at_a_time_and_each_has_its_words(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path)
    jobs = side_by_side(launcher, said)
    start_all(jobs, 5, tmp_path)
    jobs.finish()
    assert launcher.most_alive == 2
    assert [m.spec.arguments["words"] for m in launcher.members] == [["train", f"seed={i}"] for i in range(5)]
    assert not any(member.is_alive for member in launcher.members)
    assert said[0].startswith("job 0: seed=0; its output is in ")
    assert sum("is finished" in line for line in said) == 5


def test_each_running_job_has_a_gpu_of_its_own(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path)
    jobs = side_by_side(launcher, said, gpus=("4", "6"))
    start_all(jobs, 4, tmp_path)
    jobs.finish()
    gpus = [member.spec.environment["CUDA_VISIBLE_DEVICES"] for member in launcher.members]
    assert gpus[:2] == ["4", "6"]
    assert sorted(gpus) == ["4", "4", "6", "6"]
    assert {member.spec.gpus for member in launcher.members} == {0.0}


def test_a_cluster_that_is_joined_gives_each_job_a_gpu(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path)
    config = ClusterConfig(kind="ray", address="auto", jobs=2)
    jobs = SideBySide(launcher, config, Interrupt(said.append), said.append, on_gpus=True)
    start_all(jobs, 2, tmp_path)
    jobs.finish()
    assert [(member.spec.gpus, dict(member.spec.environment)) for member in launcher.members] == [(1.0, {})] * 2


def test_a_failed_job_does_not_stop_the_others(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path, [0, 1, MemberError("job-2 was killed by SIGKILL"), 0])
    (tmp_path / "job-1.log").write_text("step 1\nrlft: stopped: the disk is full\n")
    jobs = side_by_side(launcher, said)
    start_all(jobs, 4, tmp_path)
    with pytest.raises(
        JobsFailedError, match=r"2 jobs failed, the first of them job 1: the disk is full; its output is"
    ):
        jobs.finish()
    assert jobs.failed[2] == "job-2 was killed by SIGKILL"
    assert [f"job {i} is finished: {tmp_path / str(i)}" in said for i in range(4)] == [True, False, False, True]


def test_a_job_whose_process_says_nothing_is_given_up(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path, ["silent", 0])
    jobs = side_by_side(launcher, said, timeout=0.05)
    start_all(jobs, 2, tmp_path)
    with pytest.raises(JobsFailedError, match=r"job 0: its process has not answered for 0\.05 s \(cluster\.timeout\)"):
        jobs.finish()
    assert not launcher.members[0].is_alive


def test_a_job_that_is_stuck_when_it_is_stopped_is_killed_and_is_no_failure(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path, ["stuck", 0])
    jobs = side_by_side(launcher, said, timeout=0.05)
    start_all(jobs, 2, tmp_path)
    jobs.stop(0)
    jobs.stop(0)
    assert happens(lambda: jobs.poll() or not jobs.is_running(0), within_s=20.0)
    assert launcher.members[0].signals == [signal.SIGINT], "it is asked once, and its time counts from then"
    assert not launcher.members[0].is_alive
    late = "has not ended 0.05 s after it was asked to (cluster.timeout): its process is killed"
    assert [line for line in said if "job 0 has" in line] == [f"job 0 {late}, its checkpoints stay in {tmp_path / '0'}"]
    jobs.finish()
    assert (jobs.failed, jobs.codes) == ({}, {1: 0})


def test_an_interruption_reaches_every_job_and_starts_no_other(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path, looks=10**9)
    jobs = side_by_side(launcher, said)
    start_all(jobs, 2, tmp_path)
    jobs._interrupt.requested = True
    start_all(jobs, 4, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        jobs.finish()
    assert len(launcher.members) == 2
    assert [member.signals for member in launcher.members] == [[signal.SIGINT]] * 2
    assert jobs.failed == {}


@pytest.mark.parametrize("stopped_first", [True, False])
def test_a_job_is_signalled_once_since_a_second_signal_would_abandon_its_step(
    stopped_first: bool, tmp_path: Path, said: list[str]
) -> None:
    launcher = FakeLauncher(tmp_path, ["stuck", "stuck"])
    jobs = side_by_side(launcher, said)
    start_all(jobs, 2, tmp_path)
    if stopped_first:
        jobs.stop(0)
    jobs._interrupt.requested = True
    jobs.poll()
    jobs.stop(0)
    jobs.poll()
    assert [member.signals for member in launcher.members] == [[signal.SIGINT]] * 2


def test_a_job_that_is_refused_does_not_end_those_that_run(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = FakeLauncher(tmp_path)
    failures: list[Exception] = []

    def hydra(verb: str, parsed: Any, job: Any) -> None:
        for number in range(3):
            try:
                job(number)
            except UserError as error:
                failures.append(error)
        raise failures[0]

    def is_finished(plain: Any, folder: Path) -> bool:
        if folder.name == "1":
            raise UserError("steps", "is fewer than the run has", got=10, remedy="raise it")
        return False

    numbers = iter(range(3))
    monkeypatch.setattr(sweep, "_hydra", hydra)
    monkeypatch.setattr(sweep, "_composed_job", lambda number: ({}, tmp_path / str(number)))
    monkeypatch.setattr(sweep, "_is_finished", is_finished)
    monkeypatch.setattr(sweep, "opened_for", lambda *_, **__: contextlib.nullcontext(launcher))
    monkeypatch.setattr(sweep, "say", said.append)
    config, jobs = ClusterConfig(jobs=2), [["seed=0"], ["seed=1"], ["seed=2"]]
    words = parse(["-m", "seed=0,1,2"])
    with pytest.raises(UserError, match=r"^steps: is fewer"):
        sweep._side_by_side("train", words, jobs, ["a", "b", "c"], lambda: next(numbers), config, on_gpus=False)
    assert [line for line in said if "job 1" in line] == [
        "job 1 failed: steps: is fewer than the run has, got 10; raise it"
    ]
    assert [f"job {i} is finished: {tmp_path / str(i)}" in said for i in (0, 2)] == [True, True]


def test_a_repeated_sweep_with_another_config_is_refused_also_in_a_quoted_folder(tmp_path: Path) -> None:
    plain = compose(["steps=4"])
    folder = tmp_path / "my sweep"
    (folder / "0").mkdir(parents=True)
    run_folder.write_config(folder / "0", plain, {})
    for changed, words in (({**plain, "seed": 1}, [f"hydra.sweep.dir='{folder}'"]), (plain, [])):
        if words:
            with pytest.raises(UserError, match="seed: 0 -> 1"):
                sweep._check_repeated(0, words, changed)
        else:
            sweep._check_repeated(0, [f"hydra.sweep.dir='{folder}'"], changed)


def test_real_processes_end_as_their_commands_do(tmp_path: Path, said: list[str]) -> None:
    launcher = LocalProcesses(tmp_path)
    jobs = side_by_side(launcher, said, timeout=60.0)
    try:
        jobs.start(0, "a version", ["--version"], tmp_path / "0")
        jobs.start(1, "a mistake", ["trian"], tmp_path / "1")
        with pytest.raises(JobsFailedError, match=r"job 1: trian: there is no such verb; did you mean rlft train\?"):
            jobs.finish()
    finally:
        launcher.close()
    assert (tmp_path / "cluster" / "job-0.log").read_text() == f"rlft {rlft.__version__}\n"


def plain(**cluster: Any) -> dict[str, Any]:
    from rlft.config.compose import compose

    return compose([f"cluster.{key}={value}" for key, value in cluster.items()])


def test_what_cannot_differ_between_jobs_is_refused() -> None:
    assert cluster_of([plain(jobs=3), plain(jobs=3)]) == ClusterConfig(**plain(jobs=3)["cluster"])
    assert cluster_of([{"verb": "sft"}]) is None
    with pytest.raises(UserError, match=r"cluster\.jobs: is one for all jobs of a sweep, got 1, 2"):
        cluster_of([plain(jobs=1), plain(jobs=2)])
    with pytest.raises(UserError, match=r"cluster\.ranks: a job that runs beside others \(cluster\.jobs=2\).* got 4"):
        cluster_of([plain(jobs=2, ranks=4, lanes=4)])


def test_jobs_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of(ClusterConfig(jobs=2)) == ["0", "1"]
    with pytest.raises(UserError, match=r"cluster\.jobs: .* there are 2 here, got 3; use cluster\.jobs=2"):
        gpus_of(ClusterConfig(jobs=3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert gpus_of(ClusterConfig(jobs=3)) == ["3", "5", "7"]
    assert gpus_of(ClusterConfig(jobs=9, kind="ray", address="auto")) == []


def test_jobs_share_the_threads_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert [threads_of_a_job(jobs) for jobs in (2, 4, 8)] == [3, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_of_a_job(4) == 5


# -- a whole sweep -----------------------------------------------------------------------------------------------------
WORDS = (
    "steps=30", "prompts_per_step=2", "group_size=2", "generation=transformers", "generation.max_tokens=12",
    "data.size=32", "eval.every=0", "scoring.workers=0", "lora.rank=2", "lora.alpha=4", "model.device=cpu",
    "checkpoint.every=1", "logger=[jsonl]", "seed=0,1", "hydra.sweep.dir=sweep",
)  # fmt: skip


def steps_of(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_a_sweep_side_by_side_is_interrupted_killed_and_repeated_and_equals_jobs_one_by_one(
    forks: Nursery, tmp_path: Path
) -> None:
    serial, beside = tmp_path / "serial", tmp_path / "beside"
    serial.mkdir(), beside.mkdir()
    done = forks.run("train", "-m", *WORDS, cwd=serial)
    assert done.code == 0, done.err

    side_by_side = ("train", "-m", *WORDS, "cluster.jobs=2")
    first = forks.start(*side_by_side, cwd=beside)
    assert happens(lambda: all(steps_of(beside / "sweep" / job) for job in "01"), within_s=120)
    os.kill(first.pid, signal.SIGINT)
    ended = first.wait()
    assert ended.code == EXIT_CODE, ended.err
    assert "interrupted: finishing this step, then saving" in ended.err
    saved = [steps_of(beside / "sweep" / job) for job in "01"]
    assert all(0 < steps < 30 for steps in saved)
    for job, steps in zip("01", saved, strict=True):
        assert (beside / "sweep" / job / "checkpoints" / f"step_{steps:06d}").exists(), "the step it was in is saved"

    second = forks.start(*side_by_side, cwd=beside)
    assert happens(
        lambda: any(steps_of(beside / "sweep" / j) > s for j, s in zip("01", saved, strict=True)), within_s=120
    )
    family = psutil.Process(second.pid).children(recursive=True)
    assert len(family) >= 4, "a member and a job for each"
    second.kill()
    assert second.wait().code == -signal.SIGKILL
    assert happens(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), within_s=20)

    third = forks.run(*side_by_side, cwd=beside)
    assert third.code == 0, third.err
    assert "written to sweep/sweep.csv" in third.out
    for job in "01":
        check_same(beside / "sweep" / job, serial / "sweep" / job)
        status = json.loads((beside / "sweep" / job / "status.json").read_text())
        assert status["status"] == "finished"
