import signal
from types import SimpleNamespace

import pytest
from in_one_test import each

from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.logger.loggers import Jsonl, Loggers, Tracker, loggers_of, own_loggers
from rlft.types import UserError


class Diary:
    """Writes down its calls in a list shared by all."""

    def __init__(self, name, calls, fails_in=()):
        self.name, self.calls, self.fails_in = name, calls, fails_in

    def __getattr__(self, method):
        def call(*arguments):
            self.calls.append((self.name, method, *arguments))
            if method in self.fails_in:
                raise RuntimeError(f"{self.name} fails")

        return call


def test_calls_reach_every_logger_in_order():
    calls = []
    loggers = Loggers([Diary("a", calls), Diary("b", calls)], print)
    loggers.start("run")
    loggers.stage("sample")
    loggers.step("record")
    loggers.evaluation("evaluation")
    loggers.note("text")
    loggers.finish("finished")
    methods = [("start", "run"), ("stage", "sample"), ("step", "record"), ("evaluation", "evaluation")]
    methods += [("note", "text"), ("finish", "finished")]
    assert calls == [(name, *call) for call in methods for name in "ab"]


def test_all_are_closed_even_if_one_raises():
    calls = []
    loggers = Loggers([Diary("a", calls, fails_in=["finish"]), Diary("b", calls)], print)
    loggers.start("run")
    with pytest.raises(RuntimeError, match="a fails"):
        loggers.finish("finished")
    assert ("b", "finish", "finished") in calls


def test_after_a_failed_start_only_what_was_begun_is_closed():
    calls = []
    loggers = Loggers([Diary(name, calls, fails_in=["start"] if name == "b" else ()) for name in "abc"], print)
    with pytest.raises(RuntimeError, match="b fails"):
        loggers.start("run")
    loggers.finish("stopped")
    assert [call for call in calls if call[1] == "finish"] == [("a", "finish", "stopped"), ("b", "finish", "stopped")]


def test_finish_reaches_each_logger_once():
    calls = []
    loggers = Loggers([Diary("a", calls)], print)
    loggers.start("run")
    loggers.finish("finished")
    loggers.finish("finished")
    assert len(calls) == 2


def test_a_note_before_the_start_is_said():
    calls, said = [], []
    loggers = Loggers([Diary("a", calls)], said.append)
    loggers.note("early")
    assert (said, calls) == (["early"], [])


# -- a run's own loggers, and its trackers ----------------------------------------------------------------------------
def test_every_run_writes_its_files_and_only_the_console_can_be_left_out():
    names = [
        [type(logger).__name__ for logger in own_loggers(build(compose(words)))] for words in ([], ["console=null"])
    ]
    assert names == [["Rollouts", "Jsonl", "Console"], ["Rollouts", "Jsonl"]]
    assert [type(logger) for logger in own_loggers(SimpleNamespace())] == [Jsonl], "of a command without these sections"


def test_sections_that_are_equal_are_one_tracker_whatever_they_are_called():
    sections = {name: {"_target_": f"{__name__}.Diary", "name": "a", "calls": calls} for name, calls in NAMED.items()}
    assert [made.logger.calls for made in loggers_of(sections)] == [[1], [2]]


NAMED = {"mine": [1], "other": [2], "again": [1]}


@each("fails_in", ["start", "stage", "step", "evaluation", "note", "finish"])
def test_a_tracker_that_fails_is_told_of_once_closed_and_stops_nothing(fails_in, capsys):
    calls = []
    tracker = Tracker("logger.mine", Diary("a", calls, fails_in=(fails_in, "finish")))
    for method in ("start", "stage", "step", "evaluation", "note", "stage", "step", "evaluation", "note", "finish"):
        getattr(tracker, method)("x")
    said = f"logger.mine: {fails_in} failed (RuntimeError: a fails); the run continues without it\n"
    assert capsys.readouterr().err == said
    methods = [method for _, method, _ in calls]
    assert (methods.count(fails_in), methods[-2:]) == (1, [fails_in, "finish"]) or fails_in == "finish"


def test_what_is_no_error_of_a_tracker_ends_the_run():
    tracker = Tracker("logger.mine", Diary("a", []))
    tracker.logger.step = lambda record: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        tracker.step("record")


@each("name", ["rlft.logger.loggers:Jsonl", "rlft.logger.loggers:Rollouts", "rlft.logger.console:Console"])
def test_a_runs_own_logger_is_no_tracker_by_whatever_name_it_is_imported(tmp_path, name):
    module, _, own = name.partition(":")
    file = tmp_path / f"{own}.py"
    file.write_text(f"from {module} import {own} as Mine\nclass Derived(Mine): ...\n")
    with pytest.raises(UserError, match=r"^logger\.mine\._target_: every run has it already"):
        loggers_of({"mine": {"_target_": f"{file}:Mine"}})
    if own == "Jsonl":
        assert len(loggers_of({"mine": {"_target_": f"{file}:Derived"}})) == 1
