"""What the loggers of trackers share: what is sent, what is not sent twice, and that trouble never stops a run."""

import subprocess
import sys
import time
from dataclasses import dataclass, fields
from importlib.machinery import ModuleSpec

import pytest

from rlft.logger.scalars import ScalarLogger, last_steps, name_of
from rlft.system.terminal import pip_install
from rlft.types import UserError


@dataclass(kw_only=True)
class Tracker(ScalarLogger):
    """A tracker that keeps what it is sent in `calls`, and fails or hangs in what is named."""

    package = "json"

    before: dict[str, int]
    fails: str = ""
    hangs: str = ""
    seconds: float | None = None

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
        return self.before

    def flush(self):
        self._do("flush")
        self.calls.append("flush")

    def renamed(self, metric):
        return metric.replace("@", "_")

    def _do(self, what):
        if what == self.hangs:
            time.sleep(5)
        if what == self.fails:
            raise ValueError("broken\nin two lines")


def play(logger, make_run, make_step, make_evaluation):
    logger.start(make_run())
    for step in (1, 2, 3):
        logger.step(make_step(step))
    logger.evaluation(make_evaluation(3))
    logger.note("a hint")
    logger.stage("update")
    logger.stage("checkpoint")
    logger.finish("finished")
    return logger.calls


def test_steps_evaluations_and_the_end_are_sent_in_order(make_run, make_step, make_evaluation, capsys):
    calls = play(Tracker(before={}), make_run, make_step, make_evaluation)
    evaluated = {"eval/pass_4": 0.75, "eval/exact_match": 0.5, "eval/accuracy": 0.5, "eval/accuracy_se": 0.01}
    steps = [(step, {"reward/mean": 0.5 + step}) for step in (1, 2, 3)]
    assert calls == [*steps, (3, evaluated), "flush", "finished"]
    assert capsys.readouterr() == ("", "json: in a list\n")


def test_what_the_tracker_has_of_a_metric_is_not_sent_again(make_run, make_step, make_evaluation):
    before = {"reward/mean": 2, "eval/pass_4": 3, "eval/accuracy": 0}
    calls = play(Tracker(before=before), make_run, make_step, make_evaluation)
    evaluated = {"eval/exact_match": 0.5, "eval/accuracy": 0.5, "eval/accuracy_se": 0.01}
    assert calls == [(3, {"reward/mean": 3.5}), (3, evaluated), "flush", "finished"]


@pytest.mark.parametrize(
    ("fails", "told", "sent"),
    [
        ("open", "could not start (ValueError: broken); going on without it", 0),
        ("send", "stopped logging at step 1 (ValueError: broken); training goes on", 0),
        ("flush", "stopped logging (ValueError: broken); training goes on", 4),
        ("close", "could not close the run (ValueError: broken); the run's own files are complete", 5),
    ],
)
def test_a_failure_is_told_once_and_stops_nothing(fails, told, sent, make_run, make_step, make_evaluation, capsys):
    calls = play(Tracker(before={}, fails=fails), make_run, make_step, make_evaluation)
    assert len(calls) == sent
    assert capsys.readouterr().err.splitlines()[fails != "open" :] == [f"json: {told}"]


@pytest.mark.parametrize("hangs", ["open", "send", "close"])
def test_every_wait_has_a_limit(hangs, make_run, make_step, make_evaluation, capsys):
    begun = time.monotonic()
    play(Tracker(before={}, hangs=hangs, seconds=0.2), make_run, make_step, make_evaluation)
    assert time.monotonic() - begun < 4  # of the 5 s that it would take
    assert capsys.readouterr().err.count("(TimeoutError: no answer in 0.2 s)") == 1


def test_a_name_is_made_up_once_for_each_run(make_run, tmp_path):
    name = name_of(make_run(), "mlflow")
    assert name_of(make_run(step=3), "mlflow") == name
    assert name.startswith("tiny-")
    assert len(name) == len("tiny-") + 8
    assert name_of(make_run(folder=tmp_path / "job 1"), "mlflow") != name


def test_the_last_step_of_each_metric_is_found_in_any_order():
    assert last_steps([("a", 3), ("b", 1), ("a", 2)]) == {"a": 3, "b": 1}


@pytest.mark.parametrize("package", ["tensorboard", "mlflow", "trackio", "wandb"])
@pytest.mark.parametrize("spec", ["nothing", "a folder"])
def test_a_library_that_is_not_installed_is_refused_with_the_remedy(package, spec, monkeypatch):
    import importlib

    module = importlib.import_module(f"rlft.logger.{package}")
    found = None if spec == "nothing" else ModuleSpec(package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    cls = getattr(module, package.capitalize())
    keys = dict.fromkeys(field.name for field in fields(cls))
    with pytest.raises(UserError) as refused:
        cls(**keys)
    remedy = f"{pip_install(f'rlft[{package}]')}, or leave {package} out of logger=[...]"
    assert str(refused.value) == f"logger.{package}: the package {package} is not installed; {remedy}"


def test_importing_a_logger_imports_no_library():
    code = "import sys, rlft.logger.tensorboard, rlft.logger.mlflow, rlft.logger.trackio, rlft.logger.wandb;"
    code += "assert not {'tensorboard', 'mlflow', 'trackio', 'wandb', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
