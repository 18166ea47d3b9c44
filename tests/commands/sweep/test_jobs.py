"""Jobs of a sweep side by side: how many run at a time, failures, silence, interruptions, GPUs; and whole sweeps."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from run_folders import check_same
from run_processes import Nursery, happens

import rlft
from rlft.commands.sweep.checks import cluster_of, gpus_of, is_finished
from rlft.commands.sweep.command import Grid
from rlft.commands.sweep.driver import Driver, Ending, How, JobsFailedError, Run, SideBySide, threads_of_a_job
from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.config.trainer import ClusterConfig
from rlft.runs import run_folder, run_status
from rlft.system.interrupt import EXIT_CODE, Interrupt
from rlft.system.process.launcher import LocalProcesses
from rlft.system.process.worker import WorkerError, WorkerSpec
from rlft.types import UserError


class FakeWorker:
    """A worker whose job ends with `code` after it was asked so often; `silent` never answers, `stuck` never ends."""

    def __init__(self, spec: WorkerSpec, folder: Path, code: Any, looks: int) -> None:
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
        self.workers: list[FakeWorker] = []
        self.most_alive = 0

    def start(self, spec: WorkerSpec) -> FakeWorker:
        code = self.codes.pop(0) if self.codes else 0
        self.workers.append(FakeWorker(spec, self.folder, code, self.looks))
        self.most_alive = max(self.most_alive, sum(worker.is_alive for worker in self.workers))
        return self.workers[-1]

    def share(self, value: Any) -> Any: ...

    def close(self) -> None: ...


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlft.commands.sweep.driver.POLL_S", 0.001)


def side_by_side(launcher: Any, said: list[str], **keys: Any) -> SideBySide:
    gpus = keys.pop("gpus", ())
    config = ClusterConfig(**{"jobs": 2, "timeout": 5.0, **keys})
    interrupt = Interrupt(said.append)
    return SideBySide(launcher, words, config, interrupt, said.append, on_gpus=bool(gpus), gpus=gpus)


def words(run: Run) -> list[str]:
    return ["train", *run.words]


class Jobs:
    """So many jobs of a plain sweep, see `command.Grid`."""

    def __init__(self, number: int, folder: Path) -> None:
        self.runs = [
            Run(number=i, name=f"seed={i}", words=[f"seed={i}"], folder=folder / str(i)) for i in range(number)
        ]
        self.grid = Grid.__new__(Grid)
        self.grid._waiting, self.grid._failed = list(self.runs), {}

    def do(self, place: SideBySide) -> None:
        Driver(self.grid, place, 2, lambda: place._interrupt.requested).run()
        self.grid.conclude()

    def start(self, place: SideBySide) -> None:
        for run in self.runs:
            place.start(run, lambda: False)

    def is_over(self, place: SideBySide, number: int) -> bool:
        place.wait()
        return place.ending(self.runs[number]) is not None


def test_so_many_jobs_run_at_a_time_and_each_has_its_words(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path)
    Jobs(5, tmp_path).do(side_by_side(launcher, said))
    assert launcher.most_alive == 2
    assert [m.spec.arguments["words"] for m in launcher.workers] == [["train", f"seed={i}"] for i in range(5)]
    assert not any(worker.is_alive for worker in launcher.workers)
    assert said[0].startswith("job 0: seed=0; its output is in ")
    assert sum("is finished" in line for line in said) == 5


def test_each_running_job_has_a_gpu_of_its_own(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path)
    Jobs(4, tmp_path).do(side_by_side(launcher, said, gpus=("4", "6")))
    gpus = [worker.spec.environment["CUDA_VISIBLE_DEVICES"] for worker in launcher.workers]
    assert gpus[:2] == ["4", "6"]
    assert sorted(gpus) == ["4", "4", "6", "6"]
    assert {worker.spec.gpus for worker in launcher.workers} == {0.0}


def test_a_disk_that_is_full_begins_no_further_job(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "status.json").write_text(json.dumps({"status": "stopped", "error": "DiskError"}))
    (tmp_path / "job-0.log").write_text("rlft: stopped: the disk is full\n")
    launcher = FakeLauncher(tmp_path, [1, "stuck"])
    with pytest.raises(JobsFailedError, match="job 0: the disk is full"):
        Jobs(5, tmp_path).do(side_by_side(launcher, said, timeout=0.05))
    assert len(launcher.workers) == 2


def test_a_cluster_that_is_joined_gives_each_job_a_gpu(tmp_path: Path, said: list[str]) -> None:
    launcher: Any = FakeLauncher(tmp_path)
    config = ClusterConfig(kind="ray", address="auto", jobs=2)
    Jobs(2, tmp_path).do(SideBySide(launcher, words, config, Interrupt(said.append), said.append, on_gpus=True))
    assert [(worker.spec.gpus, dict(worker.spec.environment)) for worker in launcher.workers] == [(1.0, {})] * 2


def test_a_failed_job_does_not_stop_the_others(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path, [0, 1, WorkerError("job-2 was killed by SIGKILL"), 0])
    (tmp_path / "job-1.log").write_text("step 1\nrlft: stopped: the disk is full\n")
    jobs, place = Jobs(4, tmp_path), side_by_side(launcher, said)
    with pytest.raises(
        JobsFailedError, match=r"2 jobs failed, the first of them job 1: the disk is full; its output is"
    ):
        jobs.do(place)
    assert place.ending(jobs.runs[2]) == Ending(How.failed, "job-2 was killed by SIGKILL")
    assert [f"job {i} is finished: {tmp_path / str(i)}" in said for i in range(4)] == [True, False, False, True]


@pytest.mark.parametrize(
    ("code", "error", "said_last", "how"),
    [
        (2, None, "trainer.lr: must be above 0", How.refused),
        (1, "DiskError", "the disk is full", How.disk),
        (1, "UnforeseenError", "RuntimeError: planted", How.failed),
        (1, None, "out of memory", How.failed),
        (3, None, None, How.failed),
        (-9, None, None, How.failed),
        (-11, "DiskError", None, How.failed),
    ],
)
def test_how_a_job_ended_is_read_from_its_code_its_log_and_its_status(
    code: int, error: str | None, said_last: str | None, how: How, tmp_path: Path, said: list[str]
) -> None:
    jobs, place = Jobs(1, tmp_path), side_by_side(FakeLauncher(tmp_path, [code]), said)
    (tmp_path / "job-0.log").write_text(f"rlft: {said_last}\n" if said_last else "step 1\n")
    (tmp_path / "0").mkdir()
    if error is not None:
        (tmp_path / "0" / "status.json").write_text(json.dumps({"status": "stopped", "error": error}))
    jobs.start(place)
    assert happens(lambda: jobs.is_over(place, 0), within_s=20.0)
    by_signal = {-9: "it was killed by SIGKILL", -11: "it was killed by SIGSEGV"}
    why = said_last or by_signal.get(code, f"it ended with exit code {code}")
    expected = Ending(how, f"{why}; its output is in {tmp_path / 'job-0.log'}")
    assert place.ending(jobs.runs[0]) == expected


def test_a_job_whose_process_says_nothing_is_given_up(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path, ["silent", 0])
    with pytest.raises(JobsFailedError, match=r"job 0: its process has not answered for 0\.05 s \(cluster\.timeout\)"):
        Jobs(2, tmp_path).do(side_by_side(launcher, said, timeout=0.05))
    assert not launcher.workers[0].is_alive


def test_a_job_that_is_stuck_when_it_is_stopped_is_killed_and_is_no_failure(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path, ["stuck", 0])
    jobs, place = Jobs(2, tmp_path), side_by_side(launcher, said, timeout=0.05)
    jobs.start(place)
    place.stop(jobs.runs[0])
    place.stop(jobs.runs[0])
    assert happens(lambda: jobs.is_over(place, 0), within_s=60)
    assert launcher.workers[0].signals == [signal.SIGINT], "it is asked once, and its time counts from then"
    assert not launcher.workers[0].is_alive
    late = "has not ended 0.05 s after it was asked to (cluster.timeout): its process is killed"
    assert [line for line in said if "job 0 has" in line] == [f"job 0 {late}, its checkpoints stay in {tmp_path / '0'}"]
    assert happens(lambda: jobs.is_over(place, 1), within_s=20.0)
    endings = [place.ending(run) for run in jobs.runs]
    assert endings == [Ending(How.interrupted), Ending(How.finished)]


def test_an_interruption_reaches_every_job_and_starts_no_other(tmp_path: Path, said: list[str]) -> None:
    launcher = FakeLauncher(tmp_path, looks=10**9)
    place = side_by_side(launcher, said)
    wait = place.wait

    def interrupted() -> None:
        place._interrupt.requested = len(launcher.workers) == 2
        wait()

    place.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        Jobs(4, tmp_path).do(place)
    assert len(launcher.workers) == 2
    assert [worker.signals for worker in launcher.workers] == [[signal.SIGINT]] * 2


@pytest.mark.parametrize("stopped_first", [True, False])
def test_a_job_is_signalled_once_since_a_second_signal_would_abandon_its_step(
    stopped_first: bool, tmp_path: Path, said: list[str]
) -> None:
    launcher = FakeLauncher(tmp_path, ["stuck", "stuck"])
    jobs, place = Jobs(2, tmp_path), side_by_side(launcher, said)
    jobs.start(place)
    if stopped_first:
        place.stop(jobs.runs[0])
    place._interrupt.requested = True
    place.wait()
    place.stop(jobs.runs[0])
    place.wait()
    assert [worker.signals for worker in launcher.workers] == [[signal.SIGINT]] * 2


def test_a_repeated_sweep_with_another_config_is_refused_also_in_a_quoted_folder(tmp_path: Path) -> None:
    plain = compose(["steps=4", "model.date=2026-11-25"])
    folder = tmp_path / "my sweep" / "0"
    folder.mkdir(parents=True)
    run_folder.write_config(folder, plain, {})
    run_status.write(folder, 4, run_status.Status.interrupted)
    assert not is_finished(plain, folder)
    with pytest.raises(UserError, match="seed: 0 -> 1"):
        is_finished({**plain, "seed": 1}, folder)
    with run_status.recording_status(folder, 4):
        pass
    assert is_finished(plain, folder)
    assert not is_finished({**plain, "name": "other"}, folder), "its plan says what it lacks"


def test_real_processes_end_as_their_commands_do(tmp_path: Path, said: list[str]) -> None:
    launcher = LocalProcesses(tmp_path)
    config, interrupt = ClusterConfig(jobs=2, timeout=60.0), Interrupt(said.append)
    place = SideBySide(launcher, lambda run: run.words, config, interrupt, said.append)
    try:
        for number, word in enumerate(("--version", "trian")):
            run = Run(number=number, name=word, words=[word], folder=tmp_path / str(number))
            place.start(run, lambda: False)
        assert happens(lambda: place.wait() or not place._running, within_s=60.0)
    finally:
        launcher.close()
    assert any("job 1 failed: trian: there is no such command; did you mean rlft train?" in line for line in said)
    assert (tmp_path / "cluster" / "job-0.log").read_text() == f"rlft {rlft.__version__}\n"


def job(**cluster: Any) -> Any:
    plain = compose([f"cluster.{key}={value}" for key, value in cluster.items()])
    return SimpleNamespace(plain=plain, config=build(plain))


def test_what_cannot_differ_between_jobs_is_refused() -> None:
    assert cluster_of([job(jobs=3), job(jobs=3)]) == job(jobs=3).config.cluster
    without: Any = SimpleNamespace(plain={"command": "sft"}, config=None)
    assert cluster_of([without]) is None
    with pytest.raises(UserError, match=r"cluster\.jobs: is one for all jobs of a sweep, got 1, 2"):
        cluster_of([job(jobs=1), job(jobs=2)])
    with pytest.raises(UserError, match=r"cluster\.ranks: a job that runs concurrently .*cluster\.jobs=2.* got 4"):
        cluster_of([job(jobs=2, ranks=4, lanes=4)])


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
    "checkpoint.every=1", "console=null", "seed=0,1", "hydra.sweep.dir=sweep",
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
    assert len(family) >= 4, "a worker and a job for each"
    second.kill()
    assert second.wait().code == -signal.SIGKILL
    assert happens(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), within_s=60)

    third = forks.run(*side_by_side, cwd=beside)
    assert third.code == 0, third.err
    assert "written to sweep/sweep.csv" in third.out
    for job in "01":
        check_same(beside / "sweep" / job, serial / "sweep" / job)
        status = json.loads((beside / "sweep" / job / "status.json").read_text())
        assert status["status"] == "finished"
