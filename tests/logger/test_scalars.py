"""What the loggers of trackers share: what is sent, what is not sent twice, and that trouble never stops a run."""

import itertools
import signal
import subprocess
import sys
import time
from asyncio import CancelledError
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from in_one_test import each

from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.logger.scalars import ScalarLogger, last_steps, name_of
from rlft.system import interrupt
from rlft.system.disk import DiskError
from rlft.system.terminal import pip_install
from rlft.types import UserError


@dataclass(kw_only=True)
class Tracker(ScalarLogger):
    """A tracker that keeps what it is sent in `calls`, and fails or hangs in what is named."""

    package = "json"

    remedy = "look into the list"

    before: dict[str, int]
    fails: str = ""
    hangs: str = ""
    error: BaseException | None = None
    before_failing: Any = lambda: None
    seconds: float = 60.0

    def open(self, run):
        self.calls = []
        self._do("open")
        return "run", "in a list"

    def send(self, metrics, step):
        self._do("send")
        self.calls.append((step, metrics))

    def close(self, status):
        self._do("close")
        self.calls.append(status)

    def logged(self):
        self._do("logged")
        return self.before

    def flush(self):
        self._do("flush")
        self.calls.append("flush")

    def renamed(self, metric):
        self._do("renamed")
        return metric.replace("@", "_")

    def _do(self, what):
        if what in (self.hangs, self.fails):
            self.before_failing()
        if what == self.hangs:
            time.sleep(5)
        if what == self.fails:
            raise self.error


@pytest.fixture
def play(make_run, make_step, make_evaluation):
    def play(logger):
        logger.start(make_run())
        for step in (1, 2, 3):
            logger.step(make_step(step))
        logger.evaluation(make_evaluation(3))
        logger.note("a hint")
        logger.stage("update")
        logger.stage("checkpoint")
        logger.finish("finished")
        return logger.calls

    return play


def test_steps_evaluations_and_the_end_are_sent_in_order(play, capsys):
    calls = play(Tracker(before={}))
    evaluated = {"eval/pass_4": 0.75, "eval/exact_match": 0.5, "eval/accuracy": 0.5, "eval/accuracy_se": 0.01}
    steps = [(step, {"reward/mean": 0.5 + step}) for step in (1, 2, 3)]
    assert calls == [*steps, (3, evaluated), "flush", "finished"]
    assert capsys.readouterr() == ("", "json: in a list\n")


def test_what_the_tracker_has_of_a_metric_is_not_sent_again(play):
    before = {"reward/mean": 2, "eval/pass_4": 3, "eval/accuracy": 0}
    calls = play(Tracker(before=before))
    evaluated = {"eval/exact_match": 0.5, "eval/accuracy": 0.5, "eval/accuracy_se": 0.01}
    assert calls == [(3, {"reward/mean": 3.5}), (3, evaluated), "flush", "finished"]


class Unspeakable(Exception):
    """An error that cannot even say what it is."""

    def __str__(self):
        raise RuntimeError("no words")


RAISED = (
    ValueError("broken\n  in two lines"), OSError(113, "No route to host"), TimeoutError(), MemoryError(),
    StopIteration(), ConnectionResetError("gone"), ImportError("no such module"), AssertionError(),
    RecursionError("too deep"), SystemExit(1), SystemExit(), GeneratorExit(), CancelledError(), KeyboardInterrupt(),
    BaseExceptionGroup("two", [ValueError(1), SystemExit(2)]), Unspeakable(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), ValueError("x" * 5000), ValueError("\ud800"),
    DiskError(28, None), UserError("wandb", "is no project", remedy="rename it"),
)  # fmt: skip
"""Errors of every kind, also those that only BaseException catches; no signal has come, so none is the user's."""
STAGES = {
    "open": ("could not start", "going on without it", 0),
    "logged": ("could not start", "going on without it", 0),
    "renamed": ("stopped logging at step 1", "training goes on", 0),
    "send": ("stopped logging at step 1", "training goes on", 0),
    "flush": ("stopped logging", "training goes on", 4),
    "close": ("could not close the run", "the run's own files are complete", 5),
}
"""{where it fails: what is told, how it goes on, how many calls came through}."""


@each(("stage", "error"), itertools.product(STAGES, RAISED))
def test_whatever_a_library_raises_is_told_once_and_stops_nothing(stage, error, play, capsys):
    tracker = Tracker(before={}, fails=stage, error=error)
    assert len(play(tracker)) == STAGES[stage][2]
    assert tracker.run is None
    problem, consequence, _ = STAGES[stage]
    (told,) = capsys.readouterr().err.splitlines()[problem != "could not start" :]
    assert told.startswith(f"json: {problem} ({type(error).__name__}")
    assert told.endswith(f"); {consequence}. What to do: {Tracker.remedy}")
    assert len(told) < 500
    assert error is not RAISED[0] or r"(ValueError: broken\n  in two lines)" in told, "all that it says, in a line"


@each("stage", STAGES)
@each("hangs", (False, True))
def test_only_the_users_signal_passes(stage, hangs, play):
    """A Ctrl-C while the library is called, which it may turn into another error or hang in."""
    tracker = Tracker(before={}, fails="" if hangs else stage, hangs=stage if hangs else "", error=ValueError())
    tracker.before_failing = lambda: signal.raise_signal(signal.SIGINT)
    tracker.call = lambda call, *arguments: call(*arguments)  # in this thread, where the signal is delivered
    handler = signal.signal(signal.SIGINT, interrupting)
    try:
        with pytest.raises(KeyboardInterrupt):
            play(tracker)
    finally:
        signal.signal(signal.SIGINT, handler)


class Failing:
    """A library, a client or a run of which whatever is touched raises this."""

    def __init__(self, error):
        self.__dict__["error"] = error

    def __getattr__(self, name):
        raise self.error


TRACKERS = {
    name: partial(instantiate, compose([f"logger={name}"])["logger"][name], f"logger.{name}")
    for name in ("wandb", "mlflow", "tensorboard", "trackio")
}
"""{its name: a function that makes it}, with the values of its YAML."""


@each(("name", "stage", "error"), itertools.product(TRACKERS, ("import", "open", "send", "flush", "close"), RAISED))
def test_no_tracker_stops_a_run_whatever_its_library_raises(
    name, stage, error, make_run, make_step, capsys, monkeypatch
):
    logger = TRACKERS[name]()
    failing = Failing(error)
    if stage in ("import", "open"):
        library = property(lambda self: failing.anything if stage == "import" else failing)
        monkeypatch.setattr(type(logger), "library", library)
        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", lambda *_, **__: failing.anything)
        logger.start(make_run())
    else:
        logger.run = logger.client = failing
    if stage == "send":
        logger.step(make_step(1))
    if stage == "flush":
        logger.stage("checkpoint")
    logger.step(make_step(2))
    logger.finish("finished")
    monkeypatch.undo()
    assert logger.run is None
    told = capsys.readouterr().err.splitlines()
    assert told, "it is told"
    assert told[-1].startswith(f"{name}: ")
    assert told[-1].endswith(f"What to do: {logger.remedy}")
    assert f"leave {name} out of logger" in logger.remedy
    assert sum(type(error).__name__ in line for line in told) == 1


def interrupting(number, frame):
    interrupt.note_signal(number, frame)
    raise KeyboardInterrupt


@pytest.mark.parametrize("hangs", ["open", "send", "close"])
def test_every_wait_has_a_limit(hangs, play, capsys):
    begun = time.monotonic()
    play(Tracker(before={}, hangs=hangs, seconds=0.2))
    assert time.monotonic() - begun < 4  # of the 5 s that it would take
    assert capsys.readouterr().err.count("(TimeoutError: no answer in 0.2 s)") == 1
    assert interrupt._ends_soon, "the process ends even if the library's threads never do"


def test_a_name_is_made_up_once_for_each_run_and_the_last_step_of_each_metric_is_found(make_run, tmp_path):
    name = name_of(make_run(), "mlflow")
    assert name_of(make_run(step=3), "mlflow") == name
    assert name.startswith("tiny-")
    assert len(name) == len("tiny-") + 8
    assert name_of(make_run(folder=tmp_path / "job 1"), "mlflow") != name
    assert last_steps([("a", 3), ("b", 1), ("a", 2)]) == {"a": 3, "b": 1}


@each(("name", "make"), TRACKERS.items())
@each("spec", [None, ModuleSpec("a folder", None)])
def test_a_library_that_is_not_installed_is_refused_with_the_remedy(name, make, spec, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    with pytest.raises(UserError) as refused:
        make()
    monkeypatch.undo()
    remedy = f"{pip_install(f'rlft[{name}]')}, or leave {name} out of logger"
    assert str(refused.value) == f"logger.{name}: the package {name} is not installed; {remedy}"


def test_importing_a_logger_imports_no_library():
    code = "import sys, rlft.logger.tensorboard, rlft.logger.mlflow, rlft.logger.trackio, rlft.logger.wandb;"
    code += "assert not {'tensorboard', 'mlflow', 'trackio', 'wandb', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
