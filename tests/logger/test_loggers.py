from types import SimpleNamespace

import pytest
from in_one_test import each

from rlft.config.compose import compose
from rlft.logger.console import Console
from rlft.logger.jsonl import Jsonl
from rlft.logger.loggers import Loggers, declares, is_declared, loggers_of
from rlft.plan.run_plan import Plan
from rlft.types import UserError

JSONL = {"_target_": "rlft.logger.jsonl.Jsonl"}
LIVE = {"_target_": "rlft.logger.console.Console", "live": True, "plain_seconds": 5.0}


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


# -- names decide nothing ----------------------------------------------------------------------------------------------
def test_what_a_logger_does_is_declared_by_its_class():
    made = loggers_of(compose(["logger=[console,jsonl,wandb]"])["logger"])
    assert [declares(logger, "writes_metrics") for logger in made] == [False, True, False]
    assert [declares(logger, "has_page") for logger in made] == [True, False, False]


def test_sections_that_are_equal_are_one_logger_whatever_they_are_called():
    made = loggers_of({"files": JSONL, "screen": LIVE, "jsonl": JSONL, "again": LIVE})
    assert [type(logger) for logger in made] == [Jsonl, Console]


def test_two_loggers_that_do_what_only_one_can_are_refused():
    with pytest.raises(UserError, match=r"^logger\.plain: draws on the terminal, as logger\.screen does; choose one"):
        loggers_of({"screen": LIVE, "plain": LIVE | {"live": False}})


def test_a_saved_config_tells_whether_metrics_are_written_by_what_its_loggers_are():
    outside = {"_target_": "gone.Logger"}
    assert is_declared({"other": outside, "files": JSONL}, "writes_metrics")
    assert not is_declared({"jsonl": LIVE}, "writes_metrics")
    with pytest.raises(UserError, match=r"logger\.other\._target_: cannot be imported"):
        is_declared({"jsonl": LIVE, "other": outside}, "writes_metrics")


class AnyPlan(Plan):
    num_steps = 1


@each(
    ("sections", "page", "metrics"),
    [({"screen": LIVE}, True, False), ({"console": JSONL}, False, True), ({}, False, False), (None, True, False)],
)
def test_a_plan_asks_its_loggers_what_they_do(sections, page, metrics):
    config = SimpleNamespace() if sections is None else SimpleNamespace(logger=sections)  # a command without loggers
    plan = AnyPlan(config=config, plain={}, fingerprints={}, engine=None, loggers=loggers_of(sections or {}))
    assert (plan.has_page, plan.writes_metrics) == (page, metrics)
