"""The driver of sweeps, and runs in this process and concurrently, each a process of its own."""

import errno
import json
import os
import random
import signal
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
import torch
from in_one_test import each
from run_folders import check_same
from run_processes import happens

import rlft
from rlft.commands.sweep import study as studies
from rlft.commands.sweep.checks import check, curve
from rlft.commands.sweep.command import Grid
from rlft.commands.sweep.driver import (
    Driver,
    Ending,
    How,
    InThisProcess,
    JobsFailedError,
    PrunedError,
    Run,
    SideBySide,
    threads_of_a_job,
)
from rlft.config.keys import flatten
from rlft.config.overrides import parse
from rlft.config.schema import ConsoleConfig
from rlft.config.trainer import ClusterConfig
from rlft.logger.console import PRINTED, Console, show_rows
from rlft.logger.interface import RunInfo
from rlft.loop.driver import BrokenRunError
from rlft.loop.parts import Engines
from rlft.runs import run_folder, run_status
from rlft.runs.lines import METRICS, read_lines, silent
from rlft.runs.run_folder import read
from rlft.system.disk import DiskError
from rlft.system.interrupt import EXIT_CODE, Interrupt
from rlft.system.process.launcher import LocalProcesses
from rlft.system.process.worker import WorkerError
from rlft.types import UserError
from tests.commands.sweep.fake_studies import (
    RANK,
    RATE,
    STEPS,
    accuracy,
    by_number,
    keys,
    line,
    make_study,
    states,
    write,
)

INTERRUPTED = Ending(How.interrupted)


class FakePlace:
    """Processes that evaluate once at each look, and end after their last step. fails: {job: its ending}."""

    def __init__(self, study, fails):
        self.study, self.fails = study, fails
        self.running = {}
        self.endings = {}
        self.started = []
        self.stopped = []
        self.most, self.interrupted = 0, False

    def start(self, run, is_pruned):
        self.started.append(run.number)
        self.running[run.number] = (run, 0)
        self.most = max(self.most, len(self.running))

    def ending(self, run):
        return self.endings.get(run.number)

    def stop(self, run):
        if run.number in self.running and run.number not in self.stopped:
            self.stopped.append(run.number)

    def wait(self):
        for number, (run, step) in list(self.running.items()):
            if number in self.stopped:
                self.endings[number] = INTERRUPTED
            elif number in self.fails and step == 3:
                self.endings[number] = self.fails[number]
            else:
                values = [line(s, accuracy(run.trial.params, s, run.seed)) for s in range(1, step + 2)]
                write(run.folder, [line(0, 0.0), *values])
                self.running[number] = (run, step + 1)
                if step + 1 == STEPS:
                    self.endings[number] = Ending(How.finished)
            if number in self.endings:
                del self.running[number]


def concurrently(study, limit=2, fails=None):
    place = FakePlace(study, fails or {})
    return Driver(study, place, limit, lambda: place.interrupted), place


@pytest.fixture(autouse=True)
def possible(monkeypatch):
    monkeypatch.setattr(studies, "check_possible", lambda *_: None)


def test_so_many_trials_run_at_a_time_and_the_seeds_of_one_follow_each_other(tmp_path):
    study = make_study(tmp_path, keys(trials=5, seeds=2), RATE)
    driver, place = concurrently(study)
    driver.run()
    assert place.most == 2
    assert sorted(place.started) == list(range(10))
    assert place.started[:2] == [0, 2], "the first seeds of trials 0 and 1"
    assert states(study) == ["complete"] * 5
    assert all(len(row.values) == 2 for row in study.trials.rows())


def test_a_trial_that_lags_behind_is_stopped_by_a_signal(tmp_path):
    study = make_study(tmp_path, keys(trials=10, pruner="median", startup=2), RATE)
    driver, place = concurrently(study)
    driver.run()
    pruned = {row.number for row in study.trials.rows() if row.state == "pruned"}
    assert len(pruned) >= 2
    assert set(place.stopped) == pruned


REFUSED = Ending(How.refused, "trainer.lr: must be above 0")
FAILURES = {
    "refused": REFUSED,
    "not finite": Ending(How.failed, "loss/total is nan"),
    "out of memory": Ending(How.failed, "CUDA out of memory"),
    "a reward that raises": Ending(How.failed, "ValueError: no number"),
    "killed": Ending(How.failed, "it was killed by SIGKILL"),
    "silent": Ending(How.failed, "its process has not answered for 600 s"),
}
STOPS = {"interrupted": INTERRUPTED, "disk": Ending(How.disk, "the disk is full")}


def test_whatever_ends_trials_they_fail_alone_and_the_sweep_comes_to_its_end(tmp_path):
    """Random endings of random trials, one or several at a time, with one or two seeds; then the sweep is repeated."""
    random_numbers = random.Random(7)
    for case in range(40):
        folder, seeds = tmp_path / str(case), random_numbers.choice((1, 2))
        failing = {n: random_numbers.choice(list(FAILURES)) for n in range(5 * seeds) if random_numbers.random() < 0.4}
        study = make_study(folder, keys(trials=5, seeds=seeds, sampler="random"), RATE)
        driver, place = concurrently(study, random_numbers.choice((1, 2, 3)))
        place.fails = {number: FAILURES[name] for number, name in failing.items()}
        driver.run()
        first = {n // seeds: FAILURES[failing[n]].problem for n in sorted(failing, reverse=True)}
        for row in by_number(study):
            assert (row.state, row.why) == (("failed", first[row.number]) if row.number in first else ("complete", ""))
        again = make_study(folder, keys(trials=5, seeds=seeds, sampler="random"), RATE)
        assert (again.is_done(), again.trials.unfinished()) == (True, [])
        if len(first) == 5:
            with pytest.raises(JobsFailedError, match="no trial could be done; trial "):
                again.conclude()
        else:
            again.conclude()


@each("name", STOPS)
def test_only_a_signal_and_a_disk_stop_a_sweep_and_leave_the_trial_to_go_on(name, tmp_path):
    folder = tmp_path / name
    for _ in range(4):  # however often it is resumed: that is no crash of the trial
        study = make_study(folder, keys(trials=4), RATE)
        driver, _ = concurrently(study, 2, {1: STOPS[name]})
        with pytest.raises(KeyboardInterrupt if name == "interrupted" else JobsFailedError):
            driver.run()
        assert 1 in [trial.number for trial in study.trials.unfinished()]
    study = make_study(folder, keys(trials=4), RATE)
    concurrently(study, 2)[0].run()
    assert states(study) == ["complete"] * 4


def test_a_refusal_that_every_trial_would_meet_ends_the_study_and_is_no_trials_failure(tmp_path, monkeypatch):
    gone = UserError("model.path", "does not exist", got="base", remedy="put it back")

    def refuse(*_):
        raise gone

    monkeypatch.setattr(studies, "check_possible", refuse)
    study = make_study(tmp_path, keys(trials=6), RATE)
    driver, place = concurrently(study, fails={1: REFUSED})
    with pytest.raises(UserError) as ended:
        driver.run()
    assert ended.value is gone
    assert place.stopped == [0]
    assert [trial.number for trial in study.trials.unfinished()] == [0, 1]


def test_an_interruption_begins_nothing_more_and_leaves_trials_to_go_on(tmp_path):
    study = make_study(tmp_path, keys(trials=6, seeds=2), RATE, RANK)
    driver, place = concurrently(study)
    wait = place.wait

    def signalled():
        wait()
        if len(place.started) == 2 and place.running.get(0, (None, 0))[1] == 4:
            place.interrupted = True
            place.stopped += [0, 2]

    place.wait = signalled
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    assert place.started == [0, 2]
    assert [trial.number for trial in study.trials.unfinished()] == [0, 1]
    again = make_study(tmp_path, keys(trials=6, seeds=2), RATE, RANK)
    driver, place = concurrently(again)
    driver.run()
    assert place.started[:2] == [0, 2], "the trials that were interrupted come first"
    assert states(again) == ["complete"] * 6


# -- in this process ---------------------------------------------------------------------------------------------------
SMALL = (
    "steps=3", "prompts_per_step=2", "group_size=2", "lora.rank=2", "eval.every=1", "eval.num_prompts=2",
    "eval.num_samples=1", "generation=transformers", "generation.max_tokens=4", "model.device=cpu", "data.size=16",
    "data.held_out_size=4", "scoring.workers=0", "console=null", "seed=7",
)  # fmt: skip


def run_of(folder, rate=1e-3):
    return Run(number=0, name="", words=[*SMALL, f"trainer.lr={rate}"], folder=folder)


def here(engines):
    return InThisProcess("train", None, engines, silent, prunes=True)


def test_a_run_that_is_pruned_ends_at_that_evaluation_and_says_why(tmp_path):
    run = run_of(tmp_path / "run")
    with Engines() as engines, pytest.raises(PrunedError):
        here(engines)._do(run, lambda: 1 in curve(run.folder, "accuracy"))  # not before the first step
    assert read(run.folder)["seed"] == 7
    assert [line["step"] for line in read_lines(run.folder / METRICS)] == [1]
    reason = "pruned by its sweep after step 1: its trial lags behind"
    assert run_status.read(run.folder) == (run_status.Status.stopped, reason)
    assert run_status.error(run.folder) == "PrunedError"


def test_a_run_that_is_refused_says_for_what(tmp_path):
    (tmp_path / "file").write_text("")
    place = here(None)
    for run, key in ((run_of(tmp_path, -1.0), "trainer.lr"), (run_of(tmp_path / "file" / "run"), "hydra.run.dir")):
        place.start(run, lambda: False)
        ending = place.ending(run)
        assert ending.how is How.refused
        assert ending.problem.startswith(f"{key}: ")


class Broken:
    """Raises an error where engines would be started or used."""

    def __init__(self, error):
        self._error, self.closed = error, 0

    def close(self):
        self.closed += 1

    def __getattr__(self, name):
        raise self._error


UNSTARTED = UserError("generation.engine", "vLLM could not start: no memory", got="vllm", remedy="free the GPU")
ERRORS = {  # {what comes up in a run: (the error, how the run ended; None: the sweep ends)}
    "a refusal": (UNSTARTED, Ending(How.refused, str(UNSTARTED))),
    "a broken run": (BrokenRunError("the loss is not finite"), Ending(How.failed, "the loss is not finite")),
    "an exit": (SystemExit(3), Ending(How.failed, "SystemExit: 3")),
    "a full disk": (DiskError(errno.ENOSPC, None), None),
    "a signal": (KeyboardInterrupt(), None),
}


@each("what", ERRORS)
def test_an_error_is_how_a_run_ended_and_only_a_disk_and_a_signal_end_the_sweep(what, tmp_path):
    error, expected = ERRORS[what]
    engines = Broken(error)
    place, run = here(engines), run_of(tmp_path / what)
    if expected is None:
        with pytest.raises(type(error)):
            place.start(run, lambda: False)
    else:
        place.start(run, lambda: False)
        assert place.ending(run) == expected
    assert engines.closed == (what != "a signal")
    if what == "a signal":
        place.start(run, lambda: True)
        assert place.ending(run) == Ending(How.pruned), "for a run that is pruned it comes too late"


def test_jobs_record_the_same_values_whether_they_were_planned_before(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "commit_of", lambda path: "0123abcd")
    checked = check("train", parse(["-m", *SMALL, "trainer.lr=0.001,0.002"]), tmp_path)
    place = here(Broken(BrokenRunError("no engines")))
    configs = []
    for number, resolved in enumerate(checked.configs):
        run = Run(number=number, name="", words=(), folder=tmp_path / str(number), resolved=resolved,
                  plan=checked.plans.get(number))  # fmt: skip
        place.start(run, lambda: False)
        configs.append({key: value for key, value in flatten(read(run.folder)).items() if key != "trainer.lr"})
    assert [*checked.plans] == [0]
    assert configs[0] == configs[1]
    assert configs[0]["model.revision"] == "0123abcd"


def test_the_start_up_table_is_printed_once_in_a_sweep_then_only_rows_that_differ(capsys):
    def printed(rank):
        rows = [("model", "tiny", "on cpu"), ("trainable", str(rank), "LoRA")]
        console = Console(ConsoleConfig(live=False, plain_seconds=0.0))
        show_rows([("data", "mine", "here")], "run in 0")
        console.start(RunInfo(folder=Path("0"), name="run", config={}, step=0, steps=4, sizes=rows))
        return " ".join(capsys.readouterr().out.split())

    whole = "run in 0 data mine here model tiny on cpu trainable 4 LoRA"
    assert [printed(4), printed(4)] == [whole, whole], "of runs that are no sweep's"
    before = PRINTED.set(set())
    assert [printed(4), printed(4), printed(8)] == [whole, "", "trainable 8 LoRA"]
    PRINTED.reset(before)


class FakeWorker:
    """A worker whose job ends with `code` after it was asked so often; `silent` never answers, `stuck` never ends."""

    def __init__(self, spec, folder, code):
        self.name, self.log, self.spec = spec.name, folder / f"{spec.name}.log", spec
        self.code, self.looks, self.is_alive, self.signals = code, 2, True, []

    def call(self, method, *args):
        future = Future()
        self.looks -= 1
        if method == "send":
            self.signals += args
            future.set_result(None)
        elif isinstance(self.code, Exception):
            future.set_exception(self.code)
        elif self.code != "silent":
            future.set_result(self.code if self.looks < 0 and self.code != "stuck" else None)
        return future

    def kill(self):
        self.is_alive = False


class FakeLauncher:
    def __init__(self, folder, *codes):
        self.folder, self.codes = folder, list(codes)
        self.workers = []
        self.most_alive = 0

    def start(self, spec):
        self.workers.append(FakeWorker(spec, self.folder, self.codes.pop(0) if self.codes else 0))
        self.most_alive = max(self.most_alive, sum(worker.is_alive for worker in self.workers))
        return self.workers[-1]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("rlft.commands.sweep.driver.POLL_S", 0.001)


def side_by_side(launcher, **keys):
    """The place, and what it says."""
    said = []
    gpus = keys.pop("gpus", ())
    config = ClusterConfig(**{"jobs": 2, "timeout": 5.0, **keys})
    on_gpus = bool(gpus) or config.address is not None
    place = SideBySide(launcher, words, config, Interrupt(said.append), said.append, on_gpus=on_gpus, gpus=gpus)
    return place, said


def words(run):
    return ["train", *run.words]


class Jobs:
    """So many jobs of a plain sweep, see `command.Grid`."""

    def __init__(self, number, folder):
        self.runs = [
            Run(number=i, name=f"seed={i}", words=[f"seed={i}"], folder=folder / str(i)) for i in range(number)
        ]
        self.grid = Grid.__new__(Grid)
        self.grid._waiting, self.grid._failed = list(self.runs), {}

    def do(self, place):
        Driver(self.grid, place, 2, lambda: place._interrupt.requested).run()
        self.grid.conclude()

    def start(self, place):
        for run in self.runs:
            place.start(run, lambda: False)

    def is_over(self, place, number):
        place.wait()
        return place.ending(self.runs[number]) is not None


def test_so_many_jobs_run_at_a_time_each_with_its_words_on_a_gpu_of_its_own(tmp_path):
    launcher = FakeLauncher(tmp_path)
    place, said = side_by_side(launcher, gpus=("4", "6"))
    Jobs(5, tmp_path).do(place)
    assert launcher.most_alive == 2
    assert [m.spec.arguments["words"] for m in launcher.workers] == [["train", f"seed={i}"] for i in range(5)]
    gpus = [worker.spec.environment["CUDA_VISIBLE_DEVICES"] for worker in launcher.workers]
    assert (gpus[:2], {*gpus}) == (["4", "6"], {"4", "6"})
    assert {worker.spec.gpus for worker in launcher.workers} == {0.0}
    assert not any(worker.is_alive for worker in launcher.workers)
    assert said[0].startswith("job 0: seed=0; its output is in ")
    assert sum("is finished" in line for line in said) == 5


def test_a_disk_that_is_full_begins_no_further_job(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "status.json").write_text(json.dumps({"status": "stopped", "error": "DiskError"}))
    (tmp_path / "job-0.log").write_text("rlft: stopped: the disk is full\n")
    launcher = FakeLauncher(tmp_path, 1, "stuck")
    with pytest.raises(JobsFailedError, match="job 0: the disk is full"):
        Jobs(5, tmp_path).do(side_by_side(launcher, timeout=0.05)[0])
    assert len(launcher.workers) == 2


def test_a_cluster_that_is_joined_gives_each_job_a_gpu(tmp_path):
    launcher = FakeLauncher(tmp_path)
    Jobs(2, tmp_path).do(side_by_side(launcher, kind="ray", address="auto")[0])
    assert [(worker.spec.gpus, dict(worker.spec.environment)) for worker in launcher.workers] == [(1.0, {})] * 2


def test_a_failed_job_does_not_stop_the_others(tmp_path):
    (tmp_path / "job-1.log").write_text("step 1\nrlft: stopped: the disk is full\n")
    jobs = Jobs(4, tmp_path)
    place, said = side_by_side(FakeLauncher(tmp_path, 0, 1, WorkerError("job-2 was killed by SIGKILL"), 0))
    failed = r"2 jobs failed, the first of them job 1: the disk is full; its output is"
    with pytest.raises(JobsFailedError, match=failed):
        jobs.do(place)
    assert place.ending(jobs.runs[2]) == Ending(How.failed, "job-2 was killed by SIGKILL")
    assert [f"job {i} is finished: {tmp_path / str(i)}" in said for i in range(4)] == [True, False, False, True]


@each(("code", "error", "said_last", "how"), [
    (2, None, "trainer.lr: must be above 0", How.refused),
    (1, "DiskError", "the disk is full", How.disk),
    (1, "UnforeseenError", "RuntimeError: planted", How.failed),
    (1, None, "out of memory", How.failed),
    (3, None, None, How.failed),
    (-9, None, None, How.failed),
    (-11, "DiskError", None, How.failed),
])  # fmt: skip
def test_how_a_job_ended_is_read_from_its_code_its_log_and_its_status(code, error, said_last, how, tmp_path):
    jobs, (place, _) = Jobs(1, tmp_path), side_by_side(FakeLauncher(tmp_path, code))
    (tmp_path / "job-0.log").write_text(f"rlft: {said_last}\n" if said_last else "step 1\n")
    (tmp_path / "0").mkdir(exist_ok=True)
    (tmp_path / "0" / "status.json").write_text(json.dumps({"status": "stopped", "error": error} if error else {}))
    jobs.start(place)
    assert happens(lambda: jobs.is_over(place, 0), within_s=20.0)
    by_signal = {-9: "it was killed by SIGKILL", -11: "it was killed by SIGSEGV"}
    why = said_last or by_signal.get(code, f"it ended with exit code {code}")
    assert place.ending(jobs.runs[0]) == Ending(how, f"{why}; its output is in {tmp_path / 'job-0.log'}")


def test_a_job_whose_process_says_nothing_is_given_up(tmp_path):
    launcher = FakeLauncher(tmp_path, "silent", 0)
    with pytest.raises(JobsFailedError, match=r"job 0: its process has not answered for 0\.05 s \(cluster\.timeout\)"):
        Jobs(2, tmp_path).do(side_by_side(launcher, timeout=0.05)[0])
    assert not launcher.workers[0].is_alive


def test_a_job_that_is_stuck_when_it_is_stopped_is_killed_and_is_no_failure(tmp_path):
    launcher = FakeLauncher(tmp_path, "stuck", 0)
    jobs, (place, said) = Jobs(2, tmp_path), side_by_side(launcher, timeout=0.05)
    jobs.start(place)
    place.stop(jobs.runs[0])
    place.stop(jobs.runs[0])
    assert happens(lambda: jobs.is_over(place, 0) and jobs.is_over(place, 1), within_s=60)
    assert launcher.workers[0].signals == [signal.SIGINT], "it is asked once, and its time counts from then"
    assert not launcher.workers[0].is_alive
    late = "has not ended 0.05 s after it was asked to (cluster.timeout): its process is killed"
    assert [line for line in said if "job 0 has" in line] == [f"job 0 {late}, its checkpoints stay in {tmp_path / '0'}"]
    assert [place.ending(run) for run in jobs.runs] == [Ending(How.interrupted), Ending(How.finished)]


@each("stopped_first", [True, False])
def test_an_interruption_signals_each_job_once_since_a_second_signal_would_abandon_its_step(stopped_first, tmp_path):
    launcher = FakeLauncher(tmp_path, "stuck", "stuck")
    jobs, (place, _) = Jobs(2, tmp_path), side_by_side(launcher)
    jobs.start(place)
    if stopped_first:
        place.stop(jobs.runs[0])
    place._interrupt.requested = True
    for _ in range(2):
        place.wait()
        place.stop(jobs.runs[0])
    assert [worker.signals for worker in launcher.workers] == [[signal.SIGINT]] * 2


def test_real_processes_end_as_their_commands_do(tmp_path):
    launcher, said = LocalProcesses(tmp_path), list[str]()
    interrupt = Interrupt(said.append)
    place = SideBySide(launcher, lambda run: run.words, ClusterConfig(jobs=2, timeout=60.0), interrupt, said.append)
    try:
        for number, word in enumerate(("--version", "trian")):
            place.start(Run(number=number, name=word, words=[word], folder=tmp_path / str(number)), lambda: False)
        assert happens(lambda: place.wait() or not place._running, within_s=60.0)
    finally:
        launcher.close()
    problem = "trian: there is no such command; did you mean rlft train?"
    assert any(f"job 1 failed: {problem}" in line for line in said)
    assert problem in (tmp_path / "cluster" / "job-1.log").read_text()
    assert (tmp_path / "cluster" / "job-0.log").read_text() == f"rlft {rlft.__version__}\n"


def test_jobs_share_the_threads_unless_they_are_set(monkeypatch):
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


def steps_of(folder):
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_a_sweep_side_by_side_is_interrupted_killed_and_repeated_and_equals_jobs_one_by_one(forks, tmp_path):
    serial, beside = tmp_path / "serial", tmp_path / "beside"
    serial.mkdir(), beside.mkdir()
    forks.run("train", "-m", *WORDS, cwd=serial, ends=0)

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

    third = forks.run(*side_by_side, cwd=beside, ends=0)
    assert "written to sweep/sweep.csv" in third.out
    for job in "01":
        check_same(beside / "sweep" / job, serial / "sweep" / job)
        status = json.loads((beside / "sweep" / job / "status.json").read_text())
        assert status["status"] == "finished"
