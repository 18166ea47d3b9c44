"""Signals that are held back while code runs whose state an exception would break."""

import os
import signal
import threading

import pytest

from rlft.system.interrupt import Deferred


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
