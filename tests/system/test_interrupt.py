"""Signals that are held back while code runs whose state an exception would break."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable

import pytest
from in_one_test import each

from rlft.system import interrupt
from rlft.system.interrupt import Deferred, Interrupt, OnSignal, Order, StepAbandoned


@pytest.fixture(autouse=True)
def _ctrl_c_raises():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(places: list[str], deliver: bool) -> None:
    """Code that a signal interrupts inside a context, with a delivery before its end or without; notes its progress."""
    with Deferred() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        places.append("after the signal")
        if deliver:
            signals.deliver()
        places.append("the end")
    places.append("after the end")


@pytest.mark.parametrize(("deliver", "places"), [(True, []), (False, ["the end"])])
def test_a_signal_waits_until_it_is_delivered_and_until_the_end_at_the_latest(deliver: bool, places: list[str]) -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(reached, deliver)
    assert reached == ["after the signal", *places]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_signal_nothing_is_raised_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Deferred() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            signals.deliver()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_leave_the_handlers_alone() -> None:
    handlers = []

    def work() -> None:
        with Deferred() as signals:
            handlers.append(signal.getsignal(signal.SIGINT))
            signals.deliver()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert handlers == [signal.default_int_handler]


def test_the_signals_of_a_run_are_those_that_schedulers_send() -> None:
    names = {number.name for number in interrupt.ENDING}
    assert names == {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"}, "of which another platform may lack some"


@each(
    ("first", "second", "later", "on_signal"),
    itertools.product(interrupt.ENDING, interrupt.ENDING, (False, True), ("step", "now")),
)
def test_every_first_signal_is_a_request_and_a_second_one_an_order(
    first: signal.Signals, second: signal.Signals, later: bool, on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """later: the second one comes after the time in which it would repeat the first."""
    for name in ("SAME_S", "SAME_CTRL_C_S"):
        monkeypatch.setattr(Order, name, 0.0 if later else 1000.0)
    monkeypatch.setattr(interrupt, "_end_later", lambda seconds: None)
    said: list[str] = []
    before, ended = interrupt.signals_received(), ""
    with Interrupt(said.append, on_signal) as pressed:
        pressed.in_step = True
        try:
            os.kill(os.getpid(), first)
            assert pressed.requested
        except StepAbandoned:
            ended = "abandoned"
        assert ended == ("abandoned" if on_signal == "now" else "")
        assert len(said) == 1
        try:
            os.kill(os.getpid(), second)
        except KeyboardInterrupt as error:
            ended = type(error).__name__
    assert ended == ("KeyboardInterrupt" if later else "abandoned" if on_signal == "now" else "")
    assert (len(said), interrupt.signals_received()) == (1, before + 2)


def test_each_press_of_ctrl_c_counts_once_however_often_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    order, counted = Order(), []
    for now[0] in (5.0, 5.1, 5.2, 9.0, 9.1, 9.29, 9.31, 20.0):
        if not order.is_repeated(signal.SIGINT):
            counted.append(now[0])
    assert counted == [5.0, 9.0, 9.31, 20.0]


# -- signals to a whole job --------------------------------------------------------------------------------------------
def disturb() -> None:
    interrupt.note_signal(signal.SIGTERM, None)


def disturb_soon() -> None:
    """The signal reaches this process after the program."""
    threading.Timer(interrupt.SKEW_S / 5, disturb).start()


@pytest.mark.parametrize("signal_comes", [disturb, disturb_soon])
@pytest.mark.parametrize("raises", [False, True])
def test_a_trial_is_repeated_until_no_signal_has_come_beside_it(signal_comes: Callable[[], None], raises: bool) -> None:
    calls = []

    @interrupt.undisturbed
    def trial() -> int:
        calls.append(len(calls))
        if len(calls) < 3:
            signal_comes()
            if raises:
                raise OSError("the program was ended")
        return calls[-1]

    assert trial() == 2


def test_without_a_signal_a_trial_fails_once() -> None:
    calls = []

    @interrupt.undisturbed
    def trial() -> None:
        calls.append("called")
        raise OSError("there is no such program")

    with pytest.raises(OSError, match="no such program"):
        trial()
    assert calls == ["called"]
