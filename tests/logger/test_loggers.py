import pytest

from rlft.logger.loggers import Loggers


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
    loggers = Loggers([Diary("a", calls), Diary("b", calls)])
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
    loggers = Loggers([Diary("a", calls, fails_in=["finish"]), Diary("b", calls)])
    loggers.start("run")
    with pytest.raises(RuntimeError, match="a fails"):
        loggers.finish("finished")
    assert ("b", "finish", "finished") in calls


def test_after_a_failed_start_only_what_was_begun_is_closed():
    calls = []
    loggers = Loggers([Diary(name, calls, fails_in=["start"] if name == "b" else ()) for name in "abc"])
    with pytest.raises(RuntimeError, match="b fails"):
        loggers.start("run")
    loggers.finish("stopped")
    assert [call for call in calls if call[1] == "finish"] == [("a", "finish", "stopped"), ("b", "finish", "stopped")]


def test_finish_reaches_each_logger_once():
    calls = []
    loggers = Loggers([Diary("a", calls)])
    loggers.start("run")
    loggers.finish("finished")
    loggers.finish("finished")
    assert len(calls) == 2
